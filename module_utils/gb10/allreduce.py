"""Judge an all-reduce run: which transport NCCL says it used, how long it took, whether the sums were right.

The measuring half is allreduce_probe.py, which needs the engine's Python. Sources: NCCL's own INFO lines
(src/transport/*.cc, recorded in tests/fixtures/rdma), one decode step of DeepSeek-V4.1-Flash: 88 all-reduces
of 6 tokens x 5120 x 2 bytes = 60 KiB.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KIB = 1024
STEP_BYTES = 60 * KIB
STEP_OPERATIONS = 88
SIZES = tuple(n * KIB for n in (8, 16, 32, 60, 64, 128, 256, 512, 1024))
SLOW_FACTOR = 1.25

CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : \d+\[[^\]]*\] -> \d+\[[^\]]*\] (?:\[(?:send|receive)\] )?via (\S+)")
IB_DEVICE = re.compile(r"\[\d+\]([^\s:;]+):(\d+)/(RoCE|IB)\b")
SOCKET_DEVICE = re.compile(r"\[\d+\]([^\s:;]+):[^\s;]*<\d+>")


class AllreduceError(Exception):
    """The probe could not measure: what was found and the next step."""


@dataclass(frozen=True)
class Transport:
    """What one rank's NCCL log says: networks found, HCAs or interfaces of each, transports of its channels."""

    networks: tuple[str, ...]
    devices: tuple[str, ...]
    channels: dict[str, int]
    warnings: tuple[str, ...]

    @property
    def used(self) -> tuple[str, ...]:
        """Transport names of the channels: ``NET/IB``, ``NET/Socket``, ``P2P``, ``SHM``."""
        return tuple(sorted({_kind(name) for name in self.channels}))


def _kind(channel: str) -> str:
    parts = channel.split("/")
    return "/".join(parts[:2]) if parts[0] == "NET" else parts[0]


def parse_nccl_log(text: str) -> Transport:
    """Transport facts from a rank's log with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS containing INIT,NET,P2P,SHM."""
    networks: list[str] = []
    devices: list[str] = []
    channels: Counter[str] = Counter()
    warnings = []
    for line in text.splitlines():
        if match := CHANNEL.search(line):
            channels[match[1]] += 1
        elif "NET/IB : Using" in line:
            # NCCL prints this line without any device just before it gives IB up.
            found = [f"{name}:{port}" for name, port, _ in IB_DEVICE.findall(line)]
            networks += ["IB"] if found else []
            devices += found
        elif "NET/Socket : Using" in line:
            networks.append("Socket")
            devices += SOCKET_DEVICE.findall(line)
        elif "NCCL WARN" in line:
            warnings.append(line.partition("NCCL WARN")[2].strip())
    return Transport(
        networks=tuple(dict.fromkeys(networks)),
        devices=tuple(dict.fromkeys(devices)),
        channels=dict(channels),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def percentile(samples: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of a non-empty sample; share in (0, 1]."""
    return sorted(samples)[math.ceil(len(samples) * share) - 1]


def summarise(samples: Sequence[float], digits: int = 1) -> dict[str, float]:
    """p10, p50, p90 in the samples' unit, and the share of operations slower than 1.25 x p10."""
    p10 = percentile(samples, 0.10)
    return {
        "p10": round(p10, digits),
        "p50": round(percentile(samples, 0.50), digits),
        "p90": round(percentile(samples, 0.90), digits),
        "slow": round(sum(s > SLOW_FACTOR * p10 for s in samples) / len(samples), 3),
    }


def judge(
    results: Mapping[str, Mapping[str, Any]],
    hosts: Sequence[str],
    *,
    require_rdma: bool,
    hcas: Mapping[str, str],
    thresholds: Mapping[str, float],
) -> dict[str, list[str]]:
    """Faults and notes over all ranks.

    results: host -> what the probe wrote (keys of ``allreduce_probe.measure`` and ``transport``), or ``error``, or
    ``skipped`` where there is no engine to measure with; that is a note only when it is so on every host.
    hosts: every host that must have answered. hcas: host -> wanted ``hca:port``.
    thresholds: ``p50_us`` at 60 KiB, ``step_ms`` for 88 operations of 60 KiB, ``slow`` share; each may be absent.
    """
    faults: list[str] = []
    notes: list[str] = []
    skipped = {host: results[host]["skipped"] for host in hosts if "skipped" in results.get(host, {})}
    if len(skipped) == len(hosts):
        return {"faults": [], "notes": [f"{host}: all-reduces not measured: {why}" for host, why in skipped.items()]}
    for host in hosts:
        result = results.get(host)
        if not result or result.get("error") or host in skipped:
            why = skipped.get(host) or (result or {}).get("error", "no result")
            faults.append(f"{host}: the all-reduce did not run: {why}; wanted a result from every rank")
            continue
        if result["wrong_sums"]:
            sizes = ", ".join(map(str, result["wrong_sums"]))
            faults.append(f"{host}: wrong all-reduce sums at {sizes} bytes; wanted exact sums. Do not serve")
        if result["backend"] != "nccl":
            notes.append(f"{host}: measured over {result['backend']} (no GPU): says nothing about RDMA or speed")
            continue
        if require_rdma:
            faults += _transport_faults(host, result["transport"], hcas.get(host, ""))
        faults += _time_faults(host, result, thresholds)
    return {"faults": faults, "notes": notes}


def _transport_faults(host: str, transport: Mapping[str, Any], hca: str) -> list[str]:
    used, devices = list(transport["used"]), list(transport["devices"])
    wanted = f"wanted NET/IB with {hca or 'the RoCE device'}"
    if not used:
        return [f"{host}: NCCL's log names no channel; {wanted}. Next: NCCL_DEBUG=INFO must reach the ranks"]
    if used != ["NET/IB"]:
        over = f" over {', '.join(devices)}" if devices else ""
        why = "ranks of one machine did not cross the fabric" if set(used) <= {"P2P", "SHM"} else "this is not RDMA"
        return [f"{host}: NCCL used {', '.join(used)}{over}: {why}; {wanted}"]
    if hca and devices != [hca]:
        return [f"{host}: NCCL used NET/IB with {', '.join(devices) or 'an unnamed device'}; {wanted}"]
    return []


def _time_faults(host: str, result: Mapping[str, Any], thresholds: Mapping[str, float]) -> list[str]:
    at_step = result["sizes"][str(STEP_BYTES)]
    step = result["step_ms"]["p50"]
    measured = (
        ("p50_us", at_step["p50"], f"p50 at 60 KiB {at_step['p50']} us"),
        ("slow", at_step["slow"], f"{at_step['slow']:.0%} of the 60 KiB operations slower than 1.25 x p10"),
        ("step_ms", step, f"{STEP_OPERATIONS} all-reduces of 60 KiB took {step} ms"),
    )
    units = {"p50_us": " us", "step_ms": " ms"}
    return [
        f"{host}: {text}; wanted at most {thresholds[key]:g}{units.get(key, '')}"
        for key, value, text in measured
        if key in thresholds and value > thresholds[key]
    ]


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """p50/p90 with their unit, a line for each size in bytes, a column for each host."""
    measured = {host: r for host, r in results.items() if "sizes" in r}
    if not measured:
        return ""
    lines = ["p50/p90 of one all-reduce", "bytes".rjust(8) + "".join(host.rjust(20) for host in measured)]
    for size in SIZES:
        cells = (r["sizes"][str(size)] for r in measured.values())
        lines.append(f"{size:8d}" + "".join(f"{c['p50']:.1f}/{c['p90']:.1f} us".rjust(20) for c in cells))
    steps = (r["step_ms"] for r in measured.values())
    lines.append(f"{STEP_OPERATIONS}x60KiB" + "".join(f"{s['p50']:.2f}/{s['p90']:.2f} ms".rjust(20) for s in steps))
    return "\n".join(lines)


def run_probe(
    python: str,
    *,
    rank: int,
    world: int,
    master: tuple[str, int],
    iterations: int,
    timeout_s: float,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Run allreduce_probe.py with the engine's Python and return what it measured; AllreduceError otherwise."""
    with tempfile.TemporaryDirectory(prefix="gb10-allreduce-") as scratch:
        log = Path(scratch) / "nccl.log"
        command = [python, "-m", "gb10.allreduce_probe", "--rank", str(rank), "--world", str(world)]
        command += ["--master-address", master[0], "--master-port", str(master[1])]
        command += ["--iterations", str(iterations), "--timeout", str(timeout_s / 2), "--nccl-log", str(log)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
                env=os.environ | dict(environment),
                cwd=scratch,
            )
        except subprocess.TimeoutExpired as error:
            raise AllreduceError(f"no end within {timeout_s:g} s; {_log_reason(log)}") from error
        except OSError as error:
            raise AllreduceError(f"{python}: {error.strerror}; is the engine installed?") from error
        try:
            return dict(json.loads(done.stdout.splitlines()[-1]))
        except (ValueError, IndexError) as error:
            tail = done.stderr.strip().splitlines()[-1:] or ["no output"]
            raise AllreduceError(f"exit {done.returncode}: {tail[0]}; {_log_reason(log)}") from error


def _log_reason(log: Path) -> str:
    """NCCL's own warnings, or which networks it had found before it stopped."""
    if not log.exists():
        return "NCCL was not reached: are all ranks running the probe?"
    transport = parse_nccl_log(log.read_text(encoding="utf-8", errors="replace"))
    return "NCCL: " + ("; ".join(transport.warnings) or f"networks {', '.join(transport.networks) or 'none'}")
