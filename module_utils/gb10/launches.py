"""How long the phases of earlier launches took on this host, and what that says of one under way."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import read_json, write_json

HISTORY = Path("/var/lib/gb10/launches.json")
KEPT = 5
READY = "ready"


def phase_times(journal: str, began: float, phase_name: Callable[[str], str]) -> dict[str, float]:
    """Phase to the seconds from BEGAN (epoch) to its first line in JOURNAL (`journalctl -o short-unix`).

    PHASE_NAME gives the phase that one message shows, empty text for none.
    """
    times: dict[str, float] = {}
    for line in journal.splitlines():
        match = re.match(r"(\d+\.\d+) \S+ [^:]+: (.*)", line)
        name = phase_name(match.group(2)) if match else ""
        if match and name and name not in times:
            times[name] = round(max(0.0, float(match.group(1)) - began), 1)
    return times


def history() -> list[dict[str, Any]]:
    """Earlier launches of this host, oldest first; a damaged file counts as none, since it only serves an estimate."""
    try:
        document = read_json(HISTORY)
    except ValueError:
        return []
    return document if isinstance(document, list) else []


def ready_launch(launch_id: str) -> dict[str, Any]:
    """The record of LAUNCH_ID, empty when it never was ready."""
    return next((one for one in history() if one.get("launch_id") == launch_id), {})


def record(
    profile: str, launch_id: str, phases: Mapping[str, float], ready: float, log_missing: Sequence[str] = ()
) -> bool:
    """Remember a launch that became ready; the last KEPT of each profile stay. Returns whether it is new.

    LOG_MISSING are lines that the profile wants in the journal and that were not there.
    """
    if ready_launch(launch_id):
        return False
    entry = {
        "profile": profile,
        "launch_id": launch_id,
        "ready_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "phases": dict(phases) | {READY: round(ready, 1)},
        "log_missing": list(log_missing),
    }
    entries = [*history(), entry]
    same = [one for one in entries if one.get("profile") == profile][:-KEPT]
    HISTORY.parent.mkdir(parents=True, exist_ok=True)
    write_json(HISTORY, [one for one in entries if one not in same])
    return True


def typical(entries: Sequence[Mapping[str, Any]], profile: str) -> dict[str, float]:
    """Phase to the median of its seconds over the launches of PROFILE."""
    seen: dict[str, list[float]] = {}
    for entry in entries:
        if entry.get("profile") == profile:
            for name, seconds in entry["phases"].items():
                seen.setdefault(name, []).append(float(seconds))
    return {name: statistics.median(values) for name, values in seen.items()}


def estimate(times: Mapping[str, float], phase: str, percent: int, spent: float) -> tuple[int, float] | None:
    """Percentage done and seconds left of a launch, None without an earlier one.

    TIMES are those of `typical`; PERCENT is that of the phase where one is known, SPENT the seconds in it so far.
    The place in the launch is the phase's: time that a slow phase takes beyond its usual one is no progress.
    """
    ready = times.get(READY, 0.0)
    if ready <= 0:
        return None
    begin = min(times.get(phase, 0.0), ready)
    end = min((seconds for seconds in times.values() if seconds > begin), default=ready)
    place = begin + (end - begin) * percent / 100 if percent else min(begin + spent, end)
    return min(99, int(100 * place / ready)), ready - place
