"""The order of starts, who decides that a launch serves or is lost and how soon, and what an operator sees of it."""

from __future__ import annotations

import configparser
import importlib.util
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

# library/ holds a module of the same name for the documentation, so the action is loaded by its path.
_PATH = Path(__file__).resolve().parents[3] / "action_plugins" / "gb10_rank_launch.py"
_SPEC = importlib.util.spec_from_file_location("gb10_rank_launch_action", _PATH)
action = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(action)

LOADING = {"phase": "loading 50 %", "text": ""}


GONE = {"fault": "it ended", "lost_at": 1.0}


@pytest.mark.parametrize(
    ("notes", "wanted"),
    [
        ({}, None),
        ({"a": LOADING, "b": LOADING}, None),
        ({"a": {"phase": "serving", "text": "abc"}, "b": LOADING}, True),
        ({"b": LOADING, "c": GONE}, False),
        ({"a": {"phase": "serving", "text": "abc"}, "c": GONE}, False),
    ],
)
def test_verdict(notes, wanted):
    assert action.verdict("a", notes) is wanted


def test_host_that_failed_first_is_to_blame_not_the_first_by_name():
    assert action.first_lost({"b": GONE | {"lost_at": 9.0}, "c": GONE | {"lost_at": 2.0}, "d": LOADING}) == "c"


def test_first_fault_of_a_host_outlives_what_is_seen_of_it_later(monkeypatch, tmp_path):
    monkeypatch.setattr(action.constants, "DEFAULT_LOCAL_TMP", str(tmp_path))
    board = action.Board("l1")
    board.post("a", LOADING | GONE)
    board.post("a", LOADING | {"phase": "stopping"})
    board.post("a", action.lost("it ended because it was stopped"))
    note = board.read()["a"]
    assert (note["fault"], note["lost_at"]) == ("it ended", 1.0)


ORDER = ["d", "c", "b", "a"]


@pytest.mark.parametrize(
    ("host", "notes", "wanted"),
    [
        ("d", {}, True),
        ("c", {}, False),
        ("c", {"d": {"phase": "starting"}}, False),
        ("c", {"d": {"started": True}}, True),
        ("a", {"d": {"started": True}, "b": {"started": True}}, False),
        ("a", {host: {"started": True} for host in "dcb"}, True),
        ("c", {"d": {"fault": "refusing to start"}}, None),
        ("a", {"d": {"started": True}, "c": {"fault": "x"}}, None),
    ],
)
def test_turn(host, notes, wanted):
    assert action.turn(host, ORDER, notes) is wanted


TYPICAL = {"loading": 40.0, "loaded": 80.0, "ready": 100.0}
HALF = LOADING | {"typical": TYPICAL, "phase_name": "loading", "percent": 50, "spent": 10.0, "at": 1000.0}


def test_progress_names_every_host():
    line = action.progress_line(["a", "b"], {"a": LOADING}, 12.4, 1000.0)
    assert line == "    12 s  a loading 50 % | b no word yet"


def test_progress_shows_percentage_and_time_left_of_the_slowest():
    late = HALF | {"percent": 25}
    line = action.progress_line(["a", "b"], {"a": HALF, "b": late}, 50, 1000.0)
    assert line == "    50 s  50 %, about 50 s left  a loading 50 % | b loading 50 %"


def test_estimate_moves_on_between_two_looks():
    waiting = HALF | {"phase_name": "loaded", "percent": 0, "spent": 5.0}
    assert action.estimate_text({"a": waiting}, 1000.0) == "85 %, about 15 s left"
    assert action.estimate_text({"a": waiting}, 1010.0) == "95 %, about 5 s left"
    assert action.estimate_text({"a": waiting}, 1100.0) == "any moment"


def test_lost_launch_has_no_time_left():
    assert action.estimate_text({"a": HALF, "b": GONE}, 1000.0) == ""


def test_time_in_a_phase_counts_from_when_it_was_first_seen():
    note = action.note_of(rank_state(age=230.0), {"text": "", "fault": ""}, "l1", since=220.0)
    assert note["spent"] == 10.0


# ------------------------------------------------------------------------------------------------ a whole launch

STOP = (
    "systemctl kill --signal=STOP vllm-rank.service >/dev/null 2>&1; "
    "PYTHONPATH='/lib y' /usr/bin/python3 -B -m gb10.evidence"
)
COMPLETION = {"base_url": "http://x", "model": "m", "prompt": "p", "timeout": 5, "warm_up": [1, 8]}


def rank_state(**changes):
    return {
        "rank": 2,
        "active": True,
        "unit": "active",
        "unit_result": "success",
        "exit_status": 0,
        "launch_id": "l1",
        "phase": "loading",
        "phase_order": 2,
        "phase_name": "loading",
        "phase_percent": 0,
        "age": 1.0,
        "typical": {},
        "cause": "",
        "last_lines": [],
    } | changes


DEAD = rank_state(
    active=False,
    unit="failed",
    unit_result="signal",
    exit_status=9,
    cause="somebody killed the rank",
    last_lines=["one", "the last"],
)


class Fleet:
    """Hosts on which a launch runs: MODULES answers a module on a host; all share one board, as processes do."""

    def __init__(self, monkeypatch, tmp_path, modules, timeout=20.0):
        monkeypatch.setattr(action.constants, "DEFAULT_LOCAL_TMP", str(tmp_path))
        monkeypatch.setattr(action.display, "display", lambda *_, **__: None)
        self.modules, self.timeout, self.calls, self.results = modules, timeout, [], {}

    def launch(self, hosts="abcd"):
        self.began = time.monotonic()
        threads = [threading.Thread(target=self._run, args=(host,)) for host in hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return self.results

    def stop(self, host, command, order):
        assert command == STOP
        self.calls.append((host, "stop", order))
        outcome = self.modules(host, "stop", order)
        return {"rc": 0, "stdout": json.dumps(outcome), "stderr": ""} if isinstance(outcome, dict) else outcome[0]

    def _run(self, host):
        arguments = {
            "fleet": list("abcd"),
            "order": ORDER,
            "head": "a",
            "launch": {"launch_id": "l1", "master_port": 21000},
            "completion": COMPLETION,
            "start_timeout": 5,
            "timeout": self.timeout,
            "poll": 5,
            "user": "vllm",
            "library": "/lib y",
        }

        def execute(module_name, module_args, task_vars):
            self.calls.append((host, module_name, module_args))
            return self.modules(host, module_name, module_args)

        one = action.ActionModule.__new__(action.ActionModule)
        one._task = SimpleNamespace(args=arguments, check_mode=False)
        one._execute_module = execute
        one._low_level_execute_command = lambda command, in_data: self.stop(host, command, json.loads(in_data))
        # What ActionBase.run does with a connection is not this test's matter.
        result = one._follow(arguments, host, action.Board("l1"), {"inventory_hostname": host})
        self.results[host] = result | {"after": time.monotonic() - self.began}


def started_or_stopped(host, module):
    return {"evidence": f"/evidence/{host}", "stay": ""} if module == "stop" else {"launch": {}}


def nothing_happens(host, module, options, seconds=15.0):
    """A rank that loads for long."""
    if module in ("gb10_rank", "stop"):
        return started_or_stopped(host, module)
    time.sleep(seconds)
    return {"rank": rank_state(), "completion": {"text": "", "fault": ""}}


def answers(host, module, options):
    """A fleet on which all goes well."""
    if module in ("gb10_rank", "stop"):
        return started_or_stopped(host, module)
    if "completion" in options:
        return {"rank": rank_state(phase="serving"), "completion": {"text": "abc", "fault": ""}}
    if host == "a":
        return {"rank": rank_state(phase="serving"), "completion": {"text": "", "fault": ""}}
    time.sleep(1)
    return {"rank": rank_state(), "completion": {"text": "", "fault": ""}}


def test_ranks_start_from_the_highest_down_and_the_head_is_asked_last(monkeypatch, tmp_path):
    fleet = Fleet(monkeypatch, tmp_path, answers)
    results = fleet.launch()
    assert [host for host, _, options in fleet.calls if options.get("state") == "started"] == ORDER
    assert {result["text"] for result in results.values()} == {"abc"}
    asked = [(host, options) for host, _, options in fleet.calls if "completion" in options]
    assert asked == [("a", {"completion": COMPLETION})]


def stops(fleet):
    return {host: order for host, deed, order in fleet.calls if deed == "stop"}


def test_end_of_one_rank_stops_all_hosts_at_once_and_is_told_by_one(monkeypatch, tmp_path):
    def modules(host, module, options):
        if host == "c" and module == "gb10_rank_info":
            time.sleep(1)
            return {"rank": DEAD, "completion": {"text": "", "fault": ""}}
        if host == "b" and module == "stop":
            time.sleep(2)  # the host at fault waits for the slowest
        return nothing_happens(host, module, options)

    fleet = Fleet(monkeypatch, tmp_path, modules)
    results = fleet.launch()
    assert max(result["after"] for result in results.values()) < 6
    assert {host for host, result in results.items() if result.get("failed")} == {"c"}
    assert results["c"]["msg"] == "the launch is lost because of c: rank 2 ended (signal, exit status 9)"
    assert results["c"]["report"].splitlines() == [
        "host          c",
        "when          1 s after the start, starting",
        "what          rank 2 ended (signal, exit status 9)",
        "likely cause  somebody killed the rank",
        "last lines    one",
        "              the last",
        "stopped       all ranks",
        *(f"{label:<13} {host} /evidence/{host}" for label, host in zip(["evidence", "", "", ""], "abcd", strict=True)),
        "next          mend the cause, then run playbooks/serve.yml: it starts the whole group",
    ]
    whys = stops(fleet)
    assert {order["user"] for order in whys.values()} == {"vllm"}
    assert whys["c"]["evidence"].startswith("rank 2 ended")
    assert whys["c"]["evidence"].endswith("one\nthe last")
    assert whys["a"]["evidence"].startswith("given up because of c\nrank 2 ended")


def test_rank_that_ends_because_of_another_is_told_after_it(monkeypatch, tmp_path):
    def modules(host, module, options):
        if host in "cd" and module == "gb10_rank_info":
            time.sleep(0.7 if host == "d" else 0.75)
            return {"rank": DEAD | {"rank": "abcd".index(host)}, "completion": {"text": "", "fault": ""}}
        return nothing_happens(host, module, options)

    results = Fleet(monkeypatch, tmp_path, modules).launch()
    told = [result["report"] for result in results.values() if "report" in result]
    assert len(told) == 1
    assert "what          rank 3 ended" in told[0]
    assert "then          c: rank 2 ended" in told[0]


def test_rank_that_cannot_be_stopped_fails_its_host_and_is_in_the_report(monkeypatch, tmp_path):
    def modules(host, module, options):
        if host == "c" and module == "gb10_rank_info":
            return {"rank": DEAD, "completion": {"text": "", "fault": ""}}
        if host == "b" and module == "stop":
            return {"stay": "pid 7 stays: it hangs in the kernel", "evidence": "/evidence/b"}
        if host == "d" and module == "stop":
            return [{"rc": 1, "stdout": "", "stderr": "No module named gb10"}]
        return nothing_happens(host, module, options)

    results = Fleet(monkeypatch, tmp_path, modules).launch()
    assert results["b"]["msg"] == "given up because of c, and pid 7 stays: it hangs in the kernel"
    lines = results["c"]["report"].splitlines()
    assert "stopped       not b: pid 7 stays: it hangs in the kernel" in lines
    assert "              not d: its stop failed with 1: No module named gb10" in lines
    assert "next          playbooks/stop.yml as soon as b, d can be stopped" in lines
    assert "              b /evidence/b" in lines


def test_refused_start_keeps_the_ranks_after_it_from_starting(monkeypatch, tmp_path):
    def modules(host, module, options):
        if options.get("state") == "started" and host == "c":
            return {"failed": True, "msg": "refused to start: memlock\nrefused to start: pid 7 is in the way"}
        return answers(host, module, options)

    fleet = Fleet(monkeypatch, tmp_path, modules)
    results = fleet.launch()
    assert [host for host, _, options in fleet.calls if options.get("state") == "started"] == ["d", "c"]
    assert results["c"]["msg"] == "the launch is lost because of c: refused to start: memlock"
    assert "\nwhat          refused to start: memlock\n              refused to start: pid 7" in results["c"]["report"]
    assert not results["a"].get("failed")
    assert set(stops(fleet)) == set("abcd")


def test_host_that_is_away_is_named_and_not_asked_to_stop(monkeypatch, tmp_path):
    def modules(host, module, options):
        if host == "d" and module == "gb10_rank_info":
            raise action.AnsibleConnectionFailure("timed out")
        return nothing_happens(host, module, options, 10)

    fleet = Fleet(monkeypatch, tmp_path, modules)
    results = fleet.launch()
    assert results["d"]["msg"] == "the launch is lost because of d: does not answer any more: timed out"
    assert "stopped       not d: it cannot be reached" in results["d"]["report"]
    assert set(stops(fleet)) == set("abc")


def test_ansible_gives_up_a_host_without_power_in_time_and_keeps_its_connections():
    settings = configparser.ConfigParser()
    settings.read(_PATH.parents[1] / "ansible.cfg")
    given = dict(word.split("=") for word in settings["ssh_connection"]["ssh_args"].split() if "=" in word)
    # ssh asks once more than it counts (ServerAliveCountMax in ssh_config(5)).
    silence = int(given["ServerAliveInterval"]) * (int(given["ServerAliveCountMax"]) + 1)
    assert 15 < silence <= 30
    tries = int(settings["ssh_connection"]["retries"])
    assert silence + tries * int(settings["defaults"]["timeout"]) <= 45
    assert (given["ControlMaster"], given["ControlPersist"]) == ("auto", "60s")


def test_host_that_keeps_silent_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(action, "PATIENCE_S", -4)  # a look of 5 s may take 1 s

    def modules(host, module, options):
        return nothing_happens(host, module, options, 8 if host == "b" else 0.5)

    results = Fleet(monkeypatch, tmp_path, modules).launch()
    assert "gives no answer any more" in results["b"]["msg"]
    assert "report" in results["b"]


def test_start_without_a_token_ends_in_time_and_shows_how_far_each_rank_came(monkeypatch, tmp_path):
    def modules(host, module, options):
        return nothing_happens(host, module, options, 0.5)

    results = Fleet(monkeypatch, tmp_path, modules, timeout=2).launch()
    assert [host for host, result in results.items() if result.get("failed")] == ["a"]
    assert "no token 2 s after the start, wanted one in 2 s" in results["a"]["msg"]
    assert "a loading | b loading | c loading | d loading" in results["a"]["report"]


@pytest.mark.parametrize(
    ("state", "completion", "fault"),
    [
        (rank_state(launch_id="l0"), {"text": "", "fault": ""}, "the rank runs in launch l0, wanted l1"),
        (rank_state(), {"text": "", "fault": "401"}, "the first completion failed: 401"),
        (rank_state(active=False, unit="inactive"), {"text": "", "fault": ""}, "rank 2 ended (success, exit status 0)"),
    ],
)
def test_note_of_a_lost_rank(state, completion, fault):
    assert fault in action.note_of(state, completion, "l1")["fault"]
