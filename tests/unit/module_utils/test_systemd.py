"""Time spans and the rule over unit files: what systemd accepts and does not do."""

from __future__ import annotations

import math

import pytest
from ansible.module_utils.gb10 import systemd

LOAD = 1080.0  # the slowest load that was seen, 18 minutes


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
    ],
)
def test_limits_and_time_outs(text, wanted):
    faults = systemd.unit_file_faults(text, LOAD)
    assert len(faults) == len(wanted)
    for fault, part in zip(faults, wanted, strict=True):
        assert part in fault


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
