"""What an operator sees while an image is pulled."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

_PATH = Path(__file__).resolve().parents[3] / "action_plugins" / "gb10_container_image.py"
_SPEC = importlib.util.spec_from_file_location("gb10_container_image_action", _PATH)
action = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(action)

MIB = 2**20


@pytest.mark.parametrize(
    ("done", "total", "before", "line"),
    [
        (5 * MIB, 0, 0, "  a  5 MiB"),
        (3 * 2**30, 12 * 2**30, 2 * 2**30, "  a  3.0 GiB of 12.0 GiB, 25 %, about 72 s left"),
        (5 * MIB, 20 * MIB, 5 * MIB, "  a  5 MiB of 20 MiB, 25 %"),
        (20 * MIB, 20 * MIB, 15 * MIB, "  a  20 MiB of 20 MiB, 99 %, unpacking"),
    ],
)
def test_line_says_bytes_percentage_and_time_left(done, total, before, line):
    state = {"done_bytes": done, "total_bytes": total}
    assert action.progress_line("a", state, {"done_bytes": before}, 8) == line


def pulled(monkeypatch, answers, module=lambda: time.sleep(0.5)):
    shown = []
    monkeypatch.setattr(action, "LOOK_S", 0.1)
    monkeypatch.setattr(action.display, "display", lambda text, **_: shown.append(text))
    monkeypatch.setattr(action.ActionBase, "run", lambda *_: None)
    one = action.ActionModule.__new__(action.ActionModule)
    one._task = SimpleNamespace(args={"progress": "/run/x y.json"})
    asked = []

    def command(text):
        asked.append(text)
        return {"stdout": answers.pop(0) if answers else ""}

    one._low_level_execute_command = command
    one._execute_module = lambda **_: module() or {"changed": True, "image_id": "x"}
    return one.run(None, {"inventory_hostname": "a"}), shown, asked


def test_lines_come_while_the_module_runs_and_its_result_stays(monkeypatch):
    states = [json.dumps({"done_bytes": size * MIB, "total_bytes": 10 * MIB}) for size in (1, 2)]
    result, shown, asked = pulled(monkeypatch, ["", *states, "{broken"])
    assert result == {"changed": True, "image_id": "x"}
    assert shown[0].startswith("  a  1 MiB of 10 MiB, 10 %")
    assert shown[1].startswith("  a  2 MiB of 10 MiB, 20 %")
    assert len(shown) == 2
    assert asked[0] == "cat '/run/x y.json' 2>/dev/null"


def test_module_that_fails_ends_the_watch(monkeypatch):
    def fail():
        raise action.AnsibleError("gone")

    with pytest.raises(action.AnsibleError):
        pulled(monkeypatch, [], fail)
