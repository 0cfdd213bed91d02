"""The load probe without a GPU: samples, rates, refusals. What needs torch runs on the fleet and on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import gpu_probe
from ansible.module_utils.gb10.gpu_probe import ClockSampler, parse_clock_line, rate, scaled

from embedded.doubles.gb10_doubles import install

PROJECT = Path(__file__).resolve().parents[3]

LINES = [
    ("2177, 81.27, 68, 0x0000000000000000", (2177.0, 81.27, 68.0, 0)),
    ("728, 14.20, 45, 0x0000000000000020\n", (728.0, 14.2, 45.0, 32)),
    ("2177, [N/A], 68, [N/A]", (2177.0, None, 68.0, None)),
    ("[N/A], 4.52, 36, 0x0", None),
    ("Unable to determine the device handle for GPU0: 000F:01:00.0: Unknown Error", None),
    ("", None),
]


@pytest.mark.parametrize(("line", "values"), LINES)
def test_clock_line(line: str, values: tuple[float, ...] | None) -> None:
    sample = parse_clock_line(line, 100.0)
    assert (tuple(sample.values())[1:] if sample else None) == values


class FakeTime:
    """A clock that only work and sleep move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    perf_counter = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeLoad(gpu_probe.Load):
    """A device on which every call takes a millisecond."""

    def __init__(self, clock: FakeTime) -> None:
        self.cuda, self.clock = False, clock

    def operation(self) -> None:
        self.clock.sleep(0.001)


def test_rate_is_work_over_the_time_of_the_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr(gpu_probe, "time", clock)
    load = FakeLoad(clock)
    result = rate(load, load.operation, work=1000, seconds=0.95, pause_s=0.030)
    # 70 calls a burst, every 100 ms; the pauses do not count.
    assert [round(t - result["start"], 3) for t, _ in result["timeline"]] == [round(0.1 * n, 3) for n in range(10)]
    for key in ("mean", "p10", "p50", "max"):
        assert result[key] == pytest.approx(1_000_000)


def test_scaled_keeps_the_timeline_and_rounds() -> None:
    result = {
        "start": 1.0,
        "end": 3.0,
        "mean": 2e12,
        "p10": 1e12,
        "p50": 2e12,
        "max": 3e12,
        "timeline": [[1.5, 2.34567e12]],
    }
    assert scaled(result, 1e12, 2) == {
        "start": 1.0,
        "seconds": 2.0,
        "mean": 2.0,
        "p10": 1.0,
        "p50": 2.0,
        "max": 3.0,
        "timeline": [[1.5, 2.35]],
    }


@pytest.fixture
def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path)
    monkeypatch.setenv("GB10_DOUBLES_STATE", str(tmp_path / "etc/gb10-doubles.json"))
    monkeypatch.setenv("PATH", f"{tmp_path}/usr/local/bin:{os.environ['PATH']}")
    return tmp_path


def test_the_sampler_reads_the_drivers_stream_until_it_is_stopped(doubles: Path) -> None:
    subprocess.run(["gb10-doubles", "set", "gpu.mode", "latched"], check=True)
    subprocess.run(["gb10-doubles", "set", "gpu.busy", "true"], check=True)
    begun = time.time()
    sampler = ClockSampler("nvidia-smi", 20)
    while len(sampler.samples) < 3 and time.time() - begun < 5:
        time.sleep(0.02)
    sampler.stop()
    samples = sampler.between(begun, time.time() + 1)
    assert len(samples) >= 3
    assert samples[0]["sm_mhz"] == 728.0
    assert sampler.between(0.0, begun) == []


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object]]:
    status = gpu_probe.main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_python_without_torch_says_so(
    doubles: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    status, answer = run([], capsys)
    assert status == 1
    assert "has no torch" in str(answer["error"])


def test_a_wedged_driver_is_an_error_not_a_hang(
    doubles: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["gb10-doubles", "set", "gpu.mode", "wedged"], check=True)
    bounded = gpu_probe.gpu_processes
    monkeypatch.setattr(gpu_probe, "gpu_processes", lambda smi: bounded(smi, 0.3))
    status, answer = run([], capsys)
    assert status == 1
    assert str(answer["error"]).endswith("gave no answer in 0.3 s")
