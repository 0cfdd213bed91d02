"""What is remembered of launches, and the estimate that it gives."""

from __future__ import annotations

import pytest
from ansible.module_utils.gb10 import launches


@pytest.fixture(autouse=True)
def history(tmp_path, monkeypatch):
    monkeypatch.setattr(launches, "HISTORY", tmp_path / "deep" / "launches.json")
    return launches.HISTORY


def test_last_five_of_each_profile_are_kept():
    for number in range(8):
        launches.record("a", f"a{number}", {"loading": 10.0 + number}, 100.0)
    launches.record("b", "b0", {}, 50.0)
    assert [entry["launch_id"] for entry in launches.history()] == ["a3", "a4", "a5", "a6", "a7", "b0"]
    assert launches.typical(launches.history(), "a") == {"loading": 15.0, "ready": 100.0}
    assert launches.typical(launches.history(), "c") == {}


def test_one_launch_is_recorded_once():
    assert launches.record("a", "x", {}, 1.0)
    assert not launches.record("a", "x", {}, 2.0)
    assert launches.ready_launch("x")["phases"]["ready"] == 1.0
    assert launches.ready_launch("y") == {}


def test_damaged_history_costs_the_estimate_and_nothing_else(history):
    history.parent.mkdir()
    history.write_text("{")
    assert launches.history() == []
    assert launches.record("a", "x", {}, 1.0)


TIMES = {"joined": 20.0, "loading": 40.0, "loaded": 80.0, "ready": 100.0}


@pytest.mark.parametrize(
    ("phase", "percent", "spent", "wanted"),
    [
        ("starting", 0, 5, (5, 95.0)),
        ("starting", 0, 500, (20, 80.0)),  # stuck before the first phase: time alone is no progress
        ("loading", 50, 1, (60, 40.0)),
        ("loading", 0, 20, (60, 40.0)),
        ("loaded", 0, 10, (90, 10.0)),
        ("loaded", 0, 999, (99, 0.0)),
        ("unheard of", 0, 10, (10, 90.0)),
    ],
)
def test_estimate(phase, percent, spent, wanted):
    assert launches.estimate(TIMES, phase, percent, spent) == wanted


def test_first_launch_has_no_estimate():
    assert launches.estimate({}, "loading", 50, 10) is None


def test_phase_times_take_the_first_line_of_each():
    text = "1000.5 h p[1]: a\n1010.0 h p[1]: b: x\n1020.0 h p[1]: b: y\nno time\n"
    assert launches.phase_times(text, 1000.0, lambda line: line[0]) == {"a": 0.5, "b": 10.0}
