from __future__ import annotations

import json

import gb10_firewall
import pytest
from ansible.module_utils.gb10 import bundle, firewall
from ansible.module_utils.gb10.firewall import State
from ansible.module_utils.testing import patch_module_args


@pytest.fixture
def host(monkeypatch, tmp_path, capsys):
    """Runs the module on a host whose ufw is a State, and returns its answer and the commands that it gave."""

    def run(found: State, here=("192.0.2.9", 22), check=False, **params):
        commands: list[str] = []
        monkeypatch.setattr(firewall, "RECORD", tmp_path / "record.json")
        monkeypatch.setattr(firewall, "TRANSIENT", tmp_path / "transient")
        monkeypatch.setattr(firewall, "read_state", lambda: found)
        monkeypatch.setattr(firewall, "connection", lambda: here)
        monkeypatch.setattr(firewall, "ssh_ports", lambda here: [22])
        monkeypatch.setattr(firewall, "_run", lambda command: commands.append(" ".join(command)) or "")
        monkeypatch.setattr(bundle, "missing_packages", lambda wanted: [])
        arguments = {"fabric": ["198.18.1.0/24"], "api_ports": [8443], "api_clients": ["192.0.2.0/24"], **params}
        with patch_module_args(arguments | {"_ansible_check_mode": check}), pytest.raises(SystemExit):
            gb10_firewall.main()
        return json.loads(capsys.readouterr().out), commands

    return run


def test_check_mode_shows_the_commands_and_gives_none(host):
    answer, commands = host(State(input_policy="deny"), check=True)
    assert answer["changed"]
    assert answer["steps"][0] == "ufw prepend allow 22/tcp comment 'gb10: ssh'"
    assert answer["steps"][-1] == "ufw --force enable"
    assert "+allow 22/tcp" not in answer["diff"]["before"]
    assert "allow from 192.0.2.0/24 to any port 8443 proto tcp" in answer["diff"]["after"]
    assert commands == []


def test_what_was_before_is_recorded_and_given_back(host, tmp_path):
    before = State(input_policy="allow", others=["allow 9100/tcp"])
    answer, commands = host(before)
    assert commands == [" ".join(step) for step in firewall.plan(before, firewall.wanted_rules(
        ["198.18.1.0/24"], [22], ["any"], [8443], ["192.0.2.0/24"]), 90)]  # fmt: skip
    assert answer["others"] == ["allow 9100/tcp"]
    record = json.loads((tmp_path / "record.json").read_text())
    assert record == {"active": False, "input_policy": "allow"}
    answer, commands = host(State(True, "deny", True, ["allow 22/tcp"], [], record), state="absent")
    assert commands == ["ufw --force disable", "ufw default allow incoming", "ufw delete allow 22/tcp"]
    assert not (tmp_path / "record.json").exists()


def test_an_armed_way_back_is_told_also_by_a_run_that_changes_nothing(host, tmp_path):
    rules = firewall.wanted_rules(["198.18.1.0/24"], [22], ["any"], [8443], ["192.0.2.0/24"])
    state = State(True, "deny", True, [rule.words for rule in rules])
    answer, _ = host(state)
    assert (answer["changed"], answer["rollback"]) == (False, False)
    (tmp_path / "transient").mkdir()
    (tmp_path / "transient" / "gb10-firewall-rollback.timer").touch()
    answer, _ = host(state)
    assert (answer["changed"], answer["rollback"]) == (False, True)
    _, commands = host(state, state="confirmed")
    assert commands == ["systemctl stop gb10-firewall-rollback.timer"]


def test_a_lockout_is_refused_before_anything_is_done(host):
    answer, commands = host(State(input_policy="deny"), ssh_from=["10.0.0.0/8"])
    assert answer["failed"]
    assert "this run came over ssh from 192.0.2.9" in answer["msg"]
    assert commands == []
