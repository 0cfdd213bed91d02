"""Who decides that a launch serves or is lost."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

# library/ holds a module of the same name for the documentation, so the action is loaded by its path.
_PATH = Path(__file__).resolve().parents[3] / "action_plugins" / "gb10_rank_wait.py"
_SPEC = importlib.util.spec_from_file_location("gb10_rank_wait_action", _PATH)
action = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(action)
verdict, progress_line = action.verdict, action.progress_line

LOADING = {"phase": "loading 50 %", "text": ""}


@pytest.mark.parametrize(
    ("host", "notes", "wanted"),
    [
        ("b", {}, None),
        ("b", {"a": LOADING, "b": LOADING}, None),
        ("b", {"a": {"phase": "serving", "text": "abc"}, "b": LOADING}, ""),
        ("a", {"a": {"phase": "serving", "text": "abc"}}, ""),
        ("b", {"b": {"fault": "the rank ended\nlast line"}}, "the rank ended\nlast line"),
        ("b", {"b": LOADING, "c": {"fault": "the rank ended\nlast line"}}, "given up because of c: the rank ended"),
        ("a", {"a": {"phase": "serving", "text": "abc"}, "c": {"fault": "gone"}}, "given up because of c: gone"),
    ],
)
def test_verdict(host, notes, wanted):
    assert verdict(host, "a", notes) == wanted


def test_progress_names_every_host():
    line = progress_line(["a", "b"], {"a": LOADING}, 12.4)
    assert line == "    12 s  a loading 50 % | b no word yet"
