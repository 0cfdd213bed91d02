"""Verdicts on measurements of a burn, clocks and a GEMV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.gb10 import gpu_verdict
from ansible.module_utils.gb10.gpu_smi import GpuAnswer
from ansible.module_utils.gb10.gpu_verdict import Floors, check_lock, judge, lock_limits


def probe(
    tflops: float,
    sm: float | None = None,
    watts: float = 81.0,
    reasons: int | list[int] = 0,
    gemv: float | list[float] = 228.0,
) -> dict[str, Any]:
    """A measurement of ten clock samples, and of one GEMV rate a second."""
    codes = reasons if isinstance(reasons, list) else [reasons] * 10
    rates = gemv if isinstance(gemv, list) else [gemv] * 20
    clocks = [
        {"t": float(i), "sm_mhz": sm, "watts": watts, "celsius": 60.0, "reasons": code} for i, code in enumerate(codes)
    ]
    return {
        "name": "NVIDIA GB10",
        "burn_tflops": {"mean": tflops},
        "burn_clocks": clocks if sm else [],
        "gemv_gb_s": {
            "p50": sorted(rates)[len(rates) // 2],
            "timeline": [[100.0 + i, rate] for i, rate in enumerate(rates)],
        },
        "copy_gb_s": {"p50": 241.0},
    }


# The figures are those that fleets published for each state.
STATES = [
    ("healthy, locked", probe(88.6, 2177), "healthy", "fast", ""),
    ("healthy, no driver to ask", probe(75.0), "healthy", "fast", ""),
    ("power bit at full rate", probe(76.6, 2150, reasons=0x4), "healthy", "fast", ""),
    ("latched", probe(24.0, 728, 14.2), "latched", "fast", "SM clock 728 MHz (floor 1500), 14 W, 24 TFLOPS (floor 50)"),
    (
        "latched, seen by its clock alone",
        probe(60.0, 950, 19.0),
        "latched",
        "fast",
        "unplug its power adapter for 30-60 s",
    ),
    ("throttled by heat", probe(41.0, 1180, 38.0, 0x20), "throttled", "fast", "throttled by SW thermal slowdown"),
    ("throttled at a high clock", probe(41.0, 2100, 38.0, 0x4), "throttled", "fast", "SW power cap"),
    (
        "one bit at the start is no throttling",
        probe(41.0, 2177, reasons=[0x4] + [0] * 9),
        "weak",
        "fast",
        "look for another load",
    ),
    ("weak at full clock", probe(41.0, 2177), "weak", "fast", "GPU weak"),
    ("slow", probe(84.0, 2177, gemv=72.0), "healthy", "slow", "20 of 20 s slow (at most 110), want 150 at full clock"),
    ("between", probe(84.0, 2177, gemv=130.0), "healthy", "mixed", ""),
    ("latched and slow is one fault", probe(24.0, 728, gemv=72.0), "latched", "slow", "GPU latched"),
    (
        "lock lost",
        probe(89.0, 2444),
        "healthy",
        "fast",
        "SM clock 2444 MHz, want at most 2200: the lock is not in force",
    ),
]


@pytest.mark.parametrize(
    ("measured", "state", "memory", "fault"), [case[1:] for case in STATES], ids=[c[0] for c in STATES]
)
def test_states(measured: dict[str, Any], state: str, memory: str, fault: str) -> None:
    verdict = judge(measured, Floors(), "0,2200")
    assert (verdict.state, verdict.memory) == (state, memory)
    if fault:
        assert len(verdict.faults) == 1
        assert fault in verdict.faults[0]
    else:
        assert verdict.faults == []


def test_a_cap_below_the_floor_is_no_latch() -> None:
    assert judge(probe(52.0, 1385), Floors(), "0,1400").state == "healthy"
    assert judge(probe(52.0, 1385), Floors()).state == "latched"


def test_a_spell_of_the_slow_state_is_noted_with_its_length() -> None:
    verdict = judge(probe(84.0, 2177, gemv=[228.0] * 13 + [70.0] * 7), Floors())
    assert (verdict.memory, verdict.faults) == ("fast", [])
    assert "7 of 20 s slow" in verdict.notes[0]
    assert verdict.timeline[12:14] == [(112, 228.0), (113, 70.0)]


def test_floors_of_the_inventory_decide() -> None:
    cpu = Floors(tflops=0.01, gemv_fast=1.0, gemv_slow=0.5)
    assert judge(probe(0.12, gemv=9.0), cpu).faults == []
    assert judge(probe(0.005, gemv=9.0), cpu).state == "weak"


def test_a_real_card_at_its_power_cap() -> None:
    """An H200 measured on 2026-11-29: 633 TFLOPS at 690 W and 1.4 GHz, the power cap's bit set all along."""
    measured = json.loads((Path(__file__).resolve().parents[2] / "fixtures/nvidia_smi/probe_h200.json").read_text())
    verdict = judge(measured, Floors(tflops=500, sm_mhz=1000, gemv_fast=3000, gemv_slow=2000))
    assert (verdict.state, verdict.memory, verdict.faults) == ("healthy", "fast", [])
    assert verdict.notes == ["throttle reasons seen at full rate: SW power cap"]
    assert verdict.figures["gemv_gb_s"] > 0.8 * verdict.figures["copy_gb_s"]
    assert [second for second, _ in verdict.timeline] == list(range(1795973753, 1795973764))
    assert judge(measured, Floors(tflops=500, sm_mhz=1800, gemv_fast=3000)).state == "throttled"


NOT_MEASURED = [
    (
        {"refused": "stop the engine first", "processes": ["4711, VLLM::Worker, 104277"]},
        "GPU held by 4711, VLLM::Worker, 104277",
    ),
    ({"error": "/opt/x has no torch"}, "GPU probe failed, want a measurement: /opt/x has no torch"),
]


@pytest.mark.parametrize(("measured", "fault"), NOT_MEASURED)
def test_what_was_not_measured_is_unknown_and_a_fault(measured: dict[str, Any], fault: str) -> None:
    verdict = judge(measured, Floors())
    assert (verdict.state, verdict.memory) == (gpu_verdict.UNKNOWN, gpu_verdict.UNKNOWN)
    assert verdict.faults[0].startswith(fault)


def ok(persistence: str, clock: str | None) -> GpuAnswer:
    return GpuAnswer("ok", {"persistence_mode": persistence, "clocks.sm": clock})


LOCKS = [
    (ok("Enabled", "2190"), "0,2200", []),
    (ok("Enabled", "2208"), "0,2200", []),
    (ok("Enabled", None), "0,2200", []),
    (ok("Enabled", "2398"), "0,2200", ["SM clock 2398 MHz, want at most 2200"]),
    (ok("Disabled", "208"), "0,2200", ["persistence mode Disabled, want Enabled"]),
    (ok("Disabled", "2398"), "0,2200", ["persistence mode Disabled", "SM clock 2398 MHz"]),
    (ok("Disabled", "2398"), "", []),
    (GpuAnswer("no answer", text="nvidia-smi gave no answer in 10 s"), "", ["GPU no answer, want ok; nvidia-smi said"]),
]


@pytest.mark.parametrize(("answer", "lock", "faults"), LOCKS)
def test_what_contradicts_a_lock(answer: GpuAnswer, lock: str, faults: list[str]) -> None:
    found = check_lock(answer, lock)
    assert len(found) == len(faults)
    for text, start in zip(found, faults, strict=True):
        assert text.startswith(start)


@pytest.mark.parametrize("lock", ["2200", "a,b", "2200,0", "-1,5"])
def test_a_lock_that_is_none(lock: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - int's own texts differ
        lock_limits(lock)
