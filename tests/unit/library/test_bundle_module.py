"""The module refuses unit files that systemd would pass over in silence, before it writes anything."""

from __future__ import annotations

import getpass
import grp
import json
import os

import gb10_bundle
import pytest
from ansible.module_utils.gb10 import bundle
from ansible.module_utils.testing import patch_module_args

OWNER = {"owner": getpass.getuser(), "group": grp.getgrgid(os.getgid()).gr_name}
GOOD = "[Unit]\nStartLimitBurst=3\n[Service]\nExecStart=/bin/false\nRestart=always\nRestartSec=1\n"
IGNORED = "[Unit]\nDescription=x\n[Service]\nExecStart=/bin/false\nStartLimitIntervalSec=0\n"
ENDLESS = "[Unit]\nStartLimitIntervalSec=60\n[Service]\nExecStart=/bin/false\nRestart=always\nRestartSec=30\n"
EARLY = "[Service]\nType=notify\nExecStart=/bin/false\n"


@pytest.fixture
def host(monkeypatch, tmp_path, capsys):
    """Runs the module with texts for names below the units' directory; returns its answer, systemctl's calls, and what
    was written."""
    calls: list[str] = []
    monkeypatch.setattr(bundle, "UNIT_DIRECTORY", f"{tmp_path}/")
    monkeypatch.setattr(bundle, "systemctl", lambda *words: calls.append(" ".join(words)))

    def run(texts: dict[str, str], check=False):
        files = [{"path": str(tmp_path / name), "content": text, **OWNER} for name, text in texts.items()]
        with patch_module_args({"files": files, "_ansible_check_mode": check}), pytest.raises(SystemExit):
            gb10_bundle.main()
        return json.loads(capsys.readouterr().out), calls, {path.name for path in tmp_path.rglob("*.*")}

    return run


def test_a_good_unit_is_written_and_costs_nothing_the_second_time(host):
    for _ in range(2):
        answer, calls, written = host({"a.service": GOOD})
    assert not answer["changed"]
    assert calls == ["daemon-reload"]
    assert written == {"a.service"}


@pytest.mark.parametrize("check", [False, True])
def test_every_fault_is_told_and_nothing_is_written(host, tmp_path, check):
    texts = {
        "good.service": GOOD,
        "a.service": IGNORED,
        "b.service": ENDLESS,
        "vllm-rank.service": EARLY,
        "c.service.d/limits.conf": IGNORED,
    }
    answer, calls, written = host(texts, check=check)
    assert answer["failed"]
    assert (calls, written) == ([], set())
    assert answer["msg"].splitlines() == [
        f"{tmp_path}/a.service: StartLimitIntervalSec=0 stands in [Service], wanted in [Unit],"
        " its place since systemd 230; move it",
        f"{tmp_path}/b.service: 5 starts 30 s apart (RestartSec, StartLimitBurst) never fall within"
        " StartLimitIntervalSec 60 s: it restarts for ever; wanted above 120 s",
        f"{tmp_path}/vllm-rank.service: start time-out 90 s < load time 1080 s; raise TimeoutStartSec",
        f"{tmp_path}/c.service.d/limits.conf: StartLimitIntervalSec=0 stands in [Service], wanted in [Unit],"
        " its place since systemd 230; move it",
        "nothing was written: mend the role's template or its variables",
    ]
