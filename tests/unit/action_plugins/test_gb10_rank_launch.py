"""The order of starts, who decides that a launch serves or is lost and how soon, and what an operator sees of it."""

from __future__ import annotations

import importlib.util
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


@pytest.mark.parametrize(
    ("host", "notes", "wanted"),
    [
        ("b", {}, None),
        ("b", {"a": LOADING, "b": LOADING}, None),
        ("b", {"a": {"phase": "serving", "text": "abc"}, "b": LOADING}, ""),
        ("a", {"a": {"phase": "serving", "text": "abc"}}, ""),
        ("b", {"b": {"at": 1, "fault": "the rank ended\nlast line"}}, "the rank ended\nlast line"),
        ("b", {"b": LOADING, "c": {"at": 1, "fault": "it ended\nlast"}}, "given up because of c: it ended"),
        (
            "a",
            {"a": {"phase": "serving", "text": "abc"}, "c": {"at": 1, "fault": "gone"}},
            "given up because of c: gone",
        ),
        # The one that failed first is named, not the first by name.
        ("d", {"b": {"at": 9, "fault": "echo"}, "c": {"at": 2, "fault": "killed"}}, "given up because of c: killed"),
    ],
)
def test_verdict(host, notes, wanted):
    assert action.verdict(host, "a", notes) == wanted


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


def test_time_in_a_phase_counts_from_when_it_was_first_seen():
    note = action.note_of(rank_state(age=230.0), {"text": "", "fault": ""}, "l1", since=220.0)
    assert note["spent"] == 10.0


# ------------------------------------------------------------------------------------------------ a whole launch

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
        }

        def execute(module_name, module_args, task_vars):
            self.calls.append((host, module_name, module_args))
            return self.modules(host, module_name, module_args)

        one = action.ActionModule.__new__(action.ActionModule)
        one._task = SimpleNamespace(args=arguments, check_mode=False)
        one._execute_module = execute
        # What ActionBase.run does with a connection is not this test's matter.
        result = one._follow(arguments, host, action.Board("l1"), {"inventory_hostname": host})
        self.results[host] = result | {"after": time.monotonic() - self.began}


def answers(host, module, options):
    """A fleet on which all goes well."""
    if module == "gb10_rank":
        return {"launch": options["launch"]}
    if "completion" in options:
        return {"rank": rank_state(phase="serving"), "completion": {"text": "abc", "fault": ""}}
    if host == "a":
        return {"rank": rank_state(phase="serving"), "completion": {"text": "", "fault": ""}}
    time.sleep(1)
    return {"rank": rank_state(), "completion": {"text": "", "fault": ""}}


def test_ranks_start_from_the_highest_down_and_the_head_is_asked_last(monkeypatch, tmp_path):
    fleet = Fleet(monkeypatch, tmp_path, answers)
    results = fleet.launch()
    assert [host for host, module, _ in fleet.calls if module == "gb10_rank"] == ORDER
    assert {result["text"] for result in results.values()} == {"abc"}
    asked = [(host, options) for host, _, options in fleet.calls if "completion" in options]
    assert asked == [("a", {"completion": COMPLETION})]


def test_end_of_one_rank_ends_the_start_on_all_hosts_at_once(monkeypatch, tmp_path):
    def modules(host, module, options):
        if module == "gb10_rank":
            return {"launch": options["launch"]}
        if host == "c":
            time.sleep(1)
            return {"rank": DEAD, "completion": {"text": "", "fault": ""}}
        time.sleep(15)  # nothing happens on the others
        return {"rank": rank_state(), "completion": {"text": "", "fault": ""}}

    results = Fleet(monkeypatch, tmp_path, modules).launch()
    assert all(result["failed"] for result in results.values())
    assert max(result["after"] for result in results.values()) < 5
    assert results["c"]["msg"] == (
        "rank 2 ended (failed, signal, exit status 9); likely cause: somebody killed the rank\n"
        "its last lines:\none\nthe last"
    )
    assert results["a"]["msg"].startswith("given up because of c: rank 2 ended")


def test_refused_start_keeps_the_ranks_after_it_from_starting(monkeypatch, tmp_path):
    def modules(host, module, options):
        if module == "gb10_rank" and host == "c":
            return {"failed": True, "msg": "refusing to start rank 2: memlock"}
        return answers(host, module, options)

    fleet = Fleet(monkeypatch, tmp_path, modules)
    results = fleet.launch()
    assert [host for host, module, _ in fleet.calls if module == "gb10_rank"] == ["d", "c"]
    assert results["c"]["msg"] == "refusing to start rank 2: memlock"
    assert results["a"]["msg"] == "given up because of c: refusing to start rank 2: memlock"


def test_host_that_is_away_is_named(monkeypatch, tmp_path):
    def modules(host, module, options):
        if host == "d" and module == "gb10_rank_info":
            raise action.AnsibleConnectionFailure("timed out")
        return answers(host, module, options) if host != "a" or module == "gb10_rank" else rank_wait()

    def rank_wait():
        time.sleep(10)
        return {"rank": rank_state(), "completion": {"text": "", "fault": ""}}

    results = Fleet(monkeypatch, tmp_path, modules).launch()
    assert results["a"]["msg"].startswith("given up because of d: does not answer any more: timed out")


def test_host_that_keeps_silent_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(action, "PATIENCE_S", -4)  # a look of 5 s may take 1 s

    def modules(host, module, options):
        if module == "gb10_rank":
            return {"launch": options["launch"]}
        time.sleep(8 if host == "b" else 0.5)
        return {"rank": rank_state(), "completion": {"text": "", "fault": ""}}

    results = Fleet(monkeypatch, tmp_path, modules).launch()
    assert "gives no answer any more" in results["b"]["msg"]
    assert results["a"]["msg"].startswith("given up because of b: gives no answer any more")


def test_start_without_a_token_ends_in_time(monkeypatch, tmp_path):
    def modules(host, module, options):
        if module == "gb10_rank":
            return {"launch": options["launch"]}
        time.sleep(0.5)
        return {"rank": rank_state(), "completion": {"text": "", "fault": ""}}

    results = Fleet(monkeypatch, tmp_path, modules, timeout=2).launch()
    assert all("no token" in result["msg"] or "given up" in result["msg"] for result in results.values())


@pytest.mark.parametrize(
    ("state", "completion", "fault"),
    [
        (rank_state(launch_id="l0"), {"text": "", "fault": ""}, "the rank runs in launch l0, wanted l1"),
        (rank_state(), {"text": "", "fault": "401"}, "the first completion failed: 401"),
        (rank_state(active=False, unit="inactive"), {"text": "", "fault": ""}, "likely cause: none that is known"),
    ],
)
def test_note_of_a_lost_rank(state, completion, fault):
    assert fault in action.note_of(state, completion, "l1")["fault"]
