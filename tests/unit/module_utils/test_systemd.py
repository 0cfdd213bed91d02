"""Time spans and the rule over unit files: what systemd accepts and does not do."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import systemd

RANK = Path("/etc/systemd/system/vllm-rank.service")  # known to take 1080 s to load


def unit(service="", section="", kind="exec"):
    return f"[Unit]\n{section}\n[Service]\n# TimeoutStartSec=1\nType={kind}\nExecStart=/bin/x\n{service}\n"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (unit("Restart=no\nTimeoutStartSec=180"), []),
        (unit("StartLimitIntervalSec=0\nStartLimitBurst=3\nRestart=always\nRestartSec=1"), ["[Service]", "[Service]"]),
        (unit("Restart=always\nRestartSec=30", "StartLimitIntervalSec=60\nStartLimitBurst=5"), ["restarts for ever"]),
        (unit("Restart=always\nRestartSec=30", "StartLimitIntervalSec=10min\nStartLimitBurst=5"), []),
        (unit("Restart=on-failure\nRestartSec=5", ""), ["restarts for ever"]),  # by systemd's own 5 in 10 s
        (unit("Restart=on-failure", "StartLimitIntervalSec=0"), []),  # no limit, and said so
        (unit("", kind="notify"), ["start time-out 90 s < load time 1080 s"]),
        (unit("ExecStartPost=/bin/wait"), ["start time-out 90 s < load time 1080 s"]),
        (unit("TimeoutStartSec=20min", kind="notify"), []),
        (unit("TimeoutStartSec=infinity", kind="notify"), []),
        (unit("TimeoutStartSec=0", kind="notify"), []),
        (unit("Restart=always\nRestartSec=soon"), ["'soon' is no time span; wanted as in systemd.time(7)"]),
        (unit("Restart=always", "StartLimitBurst=many"), ["'many'"]),
        (
            unit("[Sevice]\nUser=nobody"),
            ["User=nobody stands in [Sevice], where systemd ignores it; move it to [Unit]"],
        ),
        (unit("[X-Ours]\nUser=nobody\n[Install]\nWantedBy=multi-user.target"), []),
        ("Description=x\n" + unit(), ["Description=x stands above every section"]),
    ],
)
def test_limits_and_time_outs(text, wanted):
    faults = systemd.unit_file_faults(RANK, text)
    assert len(faults) == len(wanted)
    for fault, part in zip(faults, wanted, strict=True):
        assert part in fault


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("a.service", unit("", kind="notify"), 0),  # nothing is known of its load
        ("a.timer", "[Timer]\nOnBootSec=1\n[Service]\nUser=x\n", 1),
        ("a.mount", "[Unit]\nStartLimitIntervalSec=0\n[Mount]\nWhat=x\n", 0),
        ("vllm-rank.service.d/x.conf", "[Service]\nRestart=always\nRestartSec=30\n", 0),  # the unit may set the rest
        ("vllm-rank.service.d/x.conf", "[Service]\nStartLimitIntervalSec=0\n[Mount]\nWhat=x\n", 2),
        ("vllm-rank.service.d/README", "a=b\n", 0),
        ("default.target", "a=b\n", 0),
    ],
)
def test_each_file_is_judged_by_its_name(name, text, wanted):
    assert len(systemd.unit_file_faults(Path("/etc/systemd/system", name), text)) == wanted


@pytest.mark.parametrize(
    ("span", "seconds"),
    [("90", 90), ("90s", 90), ("1min 30s", 90), ("500ms", 0.5), ("2h", 7200), ("infinity", math.inf), ("1.5min", 90)],
)
def test_time_span(span, seconds):
    assert systemd.seconds(span) == seconds


@pytest.mark.parametrize("span", ["", "soon", "3 fortnights"])
def test_no_time_span(span):
    with pytest.raises(systemd.SystemdError, match="is no time span"):
        systemd.seconds(span)
