"""Judge what :mod:`gpu_probe` measured and what the driver says of the clock lock. Pure.

A GB10 is healthy at 75-90 TFLOPS (fp16), 2.1-2.4 GHz and 80 W or more. A latched one stays at 630-950 MHz below
20 W with no reason bit set and survives a reboot so; the driver calls it healthy. A slow one has full clocks and
reads memory at a third of its rate for seconds at a time. All three were published by fleets that lost days to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from .gpu_smi import OK, GpuAnswer, reason_names

HEALTHY, LATCHED, THROTTLED, WEAK, SLOW, MIXED, UNKNOWN = (
    "healthy",
    "latched",
    "throttled",
    "weak",
    "slow",
    "mixed",
    "unknown",
)
FAST = "fast"
LOCK_SLACK_MHZ = 15.0
"""The driver snaps a clock to its next step; captures lie 7-36 MHz below the cap, none above."""


@dataclass(frozen=True)
class Floors:
    """Below these a GPU is not fit to serve; TFLOPS, MHz and GB/s. The defaults are a GB10's."""

    tflops: float = 50.0
    sm_mhz: float = 1500.0
    gemv_fast: float = 150.0
    gemv_slow: float = 110.0


@dataclass(frozen=True)
class Verdict:
    """``state`` of the GPU under load and of its memory (fast, mixed, slow); faults stop the play, notes are shown."""

    state: str
    memory: str
    figures: dict[str, Any]
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timeline: list[tuple[int, float]] = field(default_factory=list)
    """Unix second and GB/s of the GEMV in it: hosts probed together can be laid side by side."""


def lock_limits(lock: str) -> tuple[int, int] | None:
    """Lowest and highest MHz of ``MIN,MAX``; None for an empty lock, the driver's default. Raises ValueError."""
    if not lock:
        return None
    low, _, high = lock.partition(",")
    limits = int(low), int(high)
    if not 0 <= limits[0] <= limits[1]:
        raise ValueError(f"clock lock {lock}: want MIN,MAX in MHz with MIN <= MAX")
    return limits


def check_lock(answer: GpuAnswer, lock: str) -> list[str]:
    """Faults that the driver shows without load.

    It does not tell the lock itself. What it tells can only contradict: persistence mode off (a driver that unloads
    forgets the lock), or a clock above the cap.
    """
    limits = lock_limits(lock)
    if answer.status != OK:
        return [f"GPU {answer.status}, want ok; nvidia-smi said: {answer.text or 'nothing'}"]
    if limits is None:
        return []
    faults = []
    mode, clock = answer.values.get("persistence_mode"), answer.values.get("clocks.sm")
    if mode != "Enabled":
        remedy = "run systemctl restart gb10-gpu-clock.service"
        faults.append(f"persistence mode {mode}, want Enabled; {remedy}")
    if clock is not None and float(clock) > limits[1] + LOCK_SLACK_MHZ:
        faults.append(lock_lost(float(clock), limits[1]))
    return faults


def lock_lost(clock: float, cap: int) -> str:
    """The fault of a clock above the cap."""
    return (
        f"SM clock {clock:.0f} MHz, want at most {cap}: the lock is not in force, somebody reset it;"
        " run systemctl restart gb10-gpu-clock.service"
    )


def middle(samples: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Median of a value over the samples that have it."""
    values = [sample[key] for sample in samples if sample.get(key) is not None]
    return median(values) if values else None


def active_reasons(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Throttling reasons active in at least a quarter of the samples: one bit at the start of a load is usual."""
    counted = [name for sample in samples for name in reason_names(sample.get("reasons") or 0)]
    return [name for name in dict.fromkeys(counted) if counted.count(name) * 4 >= len(samples)]


def seconds_of(timeline: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
    """Median rate of every Unix second."""
    by_second: dict[int, list[float]] = {}
    for t, rate in timeline:
        by_second.setdefault(int(t), []).append(rate)
    return [(second, round(median(rates), 1)) for second, rates in sorted(by_second.items())]


def judge(probe: Mapping[str, Any], floors: Floors, lock: str = "") -> Verdict:
    """The verdict on one host's measurement, the object that gpu_probe prints."""
    if "refused" in probe:
        holders = "; ".join(probe.get("processes", [])) or "unknown"
        fault = f"GPU held by {holders}, want nobody; {probe['refused']}"
        return Verdict(UNKNOWN, UNKNOWN, {}, [fault])
    if "error" in probe:
        return Verdict(UNKNOWN, UNKNOWN, {}, [f"GPU probe failed, want a measurement: {probe['error']}"])
    clocks = probe["burn_clocks"]
    tflops, gemv = probe["burn_tflops"]["mean"], probe["gemv_gb_s"]["p50"]
    clock, watts = middle(clocks, "sm_mhz"), middle(clocks, "watts")
    timeline = seconds_of(probe["gemv_gb_s"]["timeline"])
    figures = {
        "tflops": tflops,
        "sm_mhz": clock,
        "watts": watts,
        "celsius": middle(clocks, "celsius"),
        "reasons": active_reasons(clocks),
        "gemv_gb_s": gemv,
        "copy_gb_s": probe["copy_gb_s"]["p50"],
        "device": probe["name"],
    }
    limits = lock_limits(lock)
    # A cap below the floor is the operator's wish, not a fault of the GPU.
    sm_floor = min(floors.sm_mhz, 0.8 * limits[1]) if limits else floors.sm_mhz
    state, faults = _under_load(figures, floors.tflops, sm_floor)
    notes = [f"throttle reasons seen at full rate: {', '.join(figures['reasons'])}"] if figures["reasons"] else []
    if not clocks:
        notes = ["no clock sample: judged by the rates alone"]
    if limits and clock is not None and clock > limits[1] + LOCK_SLACK_MHZ:
        faults.append(lock_lost(clock, limits[1]))
    memory = FAST if gemv >= floors.gemv_fast else SLOW if gemv <= floors.gemv_slow else MIXED
    slow_seconds = sum(rate <= floors.gemv_slow for _, rate in timeline)
    spell = f"GEMV {gemv:g} GB/s, {slow_seconds} of {len(timeline)} s slow (at most {floors.gemv_slow:g})"
    if memory == SLOW and state == HEALTHY:
        faults.append(
            f"GPU slow: {spell}, want {floors.gemv_fast:g} at full clock; probe again, it passes within a minute;"
            " if it returns, bring firmware and driver to the newest level of the fleet and lock the clocks"
        )
    elif memory == MIXED or slow_seconds:
        notes.append(f"GPU in and out of its slow state: {spell}; decode will be uneven")
    return Verdict(state, memory, figures, faults, notes if state == HEALTHY else [], timeline)


def _under_load(figures: Mapping[str, Any], tflops_floor: float, sm_floor: float) -> tuple[str, list[str]]:
    """State and faults of the burn: the clock decides first, as it tells the cause."""
    tflops, clock, watts, reasons = (figures[key] for key in ("tflops", "sm_mhz", "watts", "reasons"))
    low_clock = clock is not None and clock < sm_floor
    if tflops >= tflops_floor and not low_clock:
        return HEALTHY, []
    seen = f"{tflops:g} TFLOPS (floor {tflops_floor:g})"
    if clock is not None:
        seen = f"SM clock {clock:.0f} MHz (floor {sm_floor:.0f}), {watts or 0:.0f} W, {seen}"
    if reasons:
        remedy = "cool the host, clear its air inlets, use the original power adapter; then probe again"
        return THROTTLED, [f"GPU throttled by {', '.join(reasons)}: {seen} under load; {remedy}"]
    if low_clock:
        remedy = "shut the host down and unplug its power adapter for 30-60 s; a reboot does not clear it"
        return LATCHED, [f"GPU latched: {seen} under load without a throttle reason; {remedy}"]
    remedy = "look for another load on the host, then compare driver and firmware with the other hosts"
    return WEAK, [f"GPU weak: {seen} under load, want the floor at this clock; {remedy}"]
