"""Filter: the GPU probes of all hosts side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DOCUMENTATION = r"""
name: gb10_gpu_table
short_description: Lay the GPU probes of all hosts side by side
description:
  - One line a host. The bars are its GEMV rate second by second, on one clock for all hosts and against the best second
    of the fleet, so that a slow spell of one host stands out beside the others.
options:
  _input:
    description: What M(gb10_gpu_verify) returned, by host.
    type: dict
    required: true
author: gb10-fleet
"""
EXAMPLES = r"""
lines: "{{ dict(ansible_play_hosts_all | zip(results)) | gb10_gpu_table }}"
"""
RETURN = r"""
_value:
  description: Lines for the operator.
  type: list
  elements: str
"""

BARS = "▁▂▃▄▅▆▇█"
NO_SAMPLE = "·"
COLUMNS = "{:{width}}  {:9}  {:7}  {:>8}  {:>5}  {:>5}  {:>9}  {:>9}  {}"
TITLES = ("host", "GPU", "memory", "TFLOPS", "MHz", "W", "GEMV GB/s", "copy GB/s", "GEMV by second")


def _cell(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def gb10_gpu_table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Verdict, figures and timeline of every host; a host without figures has dashes."""
    rates = {host: {int(t): float(rate) for t, rate in one.get("timeline", [])} for host, one in results.items()}
    seconds = [second for timeline in rates.values() for second in timeline]
    best = max((rate for timeline in rates.values() for rate in timeline.values()), default=1.0)
    width = max([len(host) for host in results] + [len(TITLES[0])])
    lines = [COLUMNS.format(*TITLES, width=width)]
    for host, one in results.items():
        figures = one.get("figures") or {}
        tflops = figures.get("tflops")
        bars = (
            "".join(
                BARS[min(7, int(8 * rates[host][second] / best))] if second in rates[host] else NO_SAMPLE
                for second in range(min(seconds), max(seconds) + 1)
            )
            if seconds
            else ""
        )
        cells = (
            one.get("state", "unknown"),
            one.get("memory", "unknown"),
            _cell(tflops, 1 if (tflops or 1) >= 1 else 4),
            _cell(figures.get("sm_mhz")),
            _cell(figures.get("watts")),
            _cell(figures.get("gemv_gb_s"), 1),
            _cell(figures.get("copy_gb_s"), 1),
        )
        lines.append(COLUMNS.format(host, *cells, bars, width=width).rstrip())
    return lines


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Any]:
        return {"gb10_gpu_table": gb10_gpu_table}
