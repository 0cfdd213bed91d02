"""The suite's own runner: a part that tested nothing has failed."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import time
from pathlib import Path

import pytest

_LOADER = importlib.machinery.SourceFileLoader("suite_runner", str(Path(__file__).resolve().parents[2] / "run"))
_SPEC = importlib.util.spec_from_loader("suite_runner", _LOADER)
runner = importlib.util.module_from_spec(_SPEC)
sys.modules["suite_runner"] = runner  # dataclasses look their module up
_LOADER.exec_module(runner)

RAN = "\x1b[34mINFO\x1b[0m     [default > idempotence] \x1b[32mExecuted: Successful\x1b[0m\n"
REPORT = '<testsuites><testsuite tests="{tests}" failures="{failures}" errors="0" skipped="{skipped}"/></testsuites>'


def part_of(tmp_path, tests=0, failures=0, skipped=0, report=True, code=0, output=RAN, idempotence=True):
    path = tmp_path / "report.xml"
    if report:
        path.write_text(REPORT.format(tests=tests, failures=failures, skipped=skipped))
    part = runner.Part("default")
    runner.count(path, part)
    runner.judge(part, code, output, idempotence)
    return part


ENOUGH = runner.MINIMUM["default"]


def test_enough_tests_pass(tmp_path):
    part = part_of(tmp_path, tests=ENOUGH + 2, skipped=2)
    assert (part.passed, part.failed, part.skipped, part.note) == (ENOUGH, 0, 2, "")


@pytest.mark.parametrize(
    ("case", "note"),
    [
        ({"report": False}, "ran 0 tests, recorded minimum"),
        ({"tests": 0}, "ran 0 tests, recorded minimum"),
        ({"tests": ENOUGH - 1}, f"ran {ENOUGH - 1} tests, recorded minimum {ENOUGH}"),
        ({"tests": ENOUGH + 5, "skipped": 6}, "recorded minimum"),
        ({"tests": ENOUGH, "code": 1}, "ended with exit code 1"),
        ({"tests": ENOUGH, "output": "Test matrix: idempotence"}, "its idempotence step did not run"),
    ],
)
def test_anything_less_fails(tmp_path, case, note):
    part = part_of(tmp_path, **case)
    assert part.failed == 1
    assert note in part.note


def test_failures_are_counted(tmp_path):
    part = part_of(tmp_path, tests=ENOUGH, failures=3, code=1)
    assert (part.passed, part.failed) == (ENOUGH - 3, 3)


@pytest.mark.parametrize(("code", "failed"), [("print('made')", 0), ("print('made'); raise SystemExit(3)", 1)])
def test_what_runs_meanwhile_is_shown_and_a_failure_counts(tmp_path, capsys, code, failed):
    with runner.meanwhile("images", [sys.executable, "-c", code], tmp_path / "log") as images:
        part = images()
    assert (part.name, part.failed, part.note) == ("images", failed, "ended with exit code 3" if failed else "")
    assert "made" in capsys.readouterr().out


def test_what_runs_meanwhile_is_given_up_with_the_run(tmp_path):
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), runner.meanwhile("sleep", ["sleep", "60"], tmp_path / "log"):
        raise KeyboardInterrupt
    assert time.monotonic() - began < 30
