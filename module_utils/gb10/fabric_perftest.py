"""Bandwidth and latency of RDMA between every two hosts, with perftest, against what the link itself promises.

Hosts meet in the rounds of a round-robin tournament, so that no two tests share a link and no controller has to
keep step: in each round a host waits for its partner. Source of the output's form: perftest's own tables.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PORT = 47630


class PerftestError(Exception):
    """A test did not run: what was found and the next step."""


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Pairs of every round (circle method): each pair meets once, each host at most once a round."""
    ring: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    schedule = []
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        schedule.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return schedule


def parse_table(text: str) -> dict[str, float]:
    """The last row of perftest's result table by column name, as ``BW average[Gb/sec]`` or ``t_typical[usec]``."""
    columns: list[str] = []
    row: list[float] = []
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("#bytes"):
            columns = re.findall(r"#?\w+ \w+\[[^\]]+\]|#?[\w%.]+ ?percentile\[[^\]]+\]|\S+\[[^\]]+\]|#\S+", line)
        # A deviation over one outlier can be -nan.
        elif columns and re.fullmatch(r"\d+(\s+-?(nan|inf|[\d.]+))+", line):
            row = [float(word) for word in line.split()]
    if not row or len(row) != len(columns):
        raise PerftestError(f"perftest printed no result table: {text.strip()[-300:]}")
    return dict(zip(columns, row, strict=True))


def bound_gbps(rate_gbps: float, pcie_speed: str, pcie_width: str) -> tuple[float, str]:
    """What the slower of link and PCIe slot carries, and its name. A GB10's port hangs on PCIe 5.0 x4: 126 Gb/s."""
    speed = re.match(r"([\d.]+) GT/s", pcie_speed)
    slot = float(speed[1]) * int(pcie_width) * 128 / 130 if speed and pcie_width.isdigit() else 0.0
    if slot and slot < rate_gbps:
        return slot, f"PCIe {speed[1]} GT/s x{pcie_width}" if speed else ""
    return rate_gbps, "the link's rate"


def read_bound(hca: str, rate_gbps: float, sysfs: Path = Path("/sys")) -> tuple[float, str]:
    device = sysfs / "class/infiniband" / hca / "device"
    texts = [
        (device / name).read_text(encoding="ascii").strip() if (device / name).exists() else ""
        for name in ("current_link_speed", "current_link_width")
    ]
    return bound_gbps(rate_gbps, *texts)


def _attempt(command: Sequence[str], deadline: float, client: bool) -> str:
    """Run one side; a client starts again while its server is not there yet."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise PerftestError(f"{' '.join(command)}: the other side did not answer in time. Next: is it in this run?")
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left)
        except subprocess.TimeoutExpired:
            continue
        except FileNotFoundError as error:
            raise PerftestError(f"{command[0]} is not installed. Next: apt-get install perftest") from error
        if done.returncode == 0:
            return done.stdout
        output = done.stdout + done.stderr
        if not client or "Couldn't connect" not in output:
            raise PerftestError(f"{' '.join(command)} failed: {output.strip()[-300:]}")
        time.sleep(0.5)


def measure(
    host: str,
    addresses: Mapping[str, str],
    rdma: Mapping[str, Any],
    *,
    seconds: int,
    wait_s: float,
    run: Callable[[Sequence[str], float, bool], str] = _attempt,
) -> list[dict[str, Any]]:
    """This host's part of the tournament: what it measured as the writing side.

    addresses: host -> fabric address of all hosts, in the same order on every one of them.
    rdma: this host's hca, port and gid_index. Results: ``to``, ``gbps``, ``latency_us`` (half a round trip).
    """
    common = ["-d", str(rdma["hca"]), "-i", str(rdma["port"]), "-x", str(rdma["gid_index"]), "-F", "-p"]
    results = []
    for pairs in rounds(list(addresses)):
        for pair in (p for p in pairs if host in p):
            partner = pair[1] if pair[0] == host else pair[0]
            result: dict[str, Any] = {"to": partner}
            # Each of the two writes in turn; ports differ, so that a late server is never taken for the next test's.
            for turn, server in enumerate(pair):
                ports = [PORT + 2 * turn, PORT + 2 * turn + 1]
                peer = [] if server == host else [addresses[partner]]
                band = ["ib_write_bw", *common, str(ports[0]), "--report_gbits", "-D", str(seconds), *peer]
                late = ["ib_write_lat", *common, str(ports[1]), "-n", "200", *peer]
                bandwidth = run(band, time.monotonic() + wait_s, bool(peer))
                latency = run(late, time.monotonic() + wait_s, bool(peer))
                if peer:
                    result["gbps"] = parse_table(bandwidth)["BW average[Gb/sec]"]
                    result["latency_us"] = parse_table(latency)["t_typical[usec]"]
            results.append(result)
    return results


def judge(
    measured: Mapping[str, Sequence[Mapping[str, Any]]],
    bounds: Mapping[str, tuple[float, str]],
    *,
    share: float,
    latency_us: float,
) -> list[str]:
    """Directions slower than ``share`` of what the slower end carries, or above ``latency_us`` (0: not judged)."""
    faults = []
    for host, results in measured.items():
        for result in results:
            to = result["to"]
            bound, name = min(bounds[host], bounds[to])
            wanted = share * bound
            if not result["gbps"] >= wanted:  # nan, too
                faults.append(
                    f"{host} -> {to}: RDMA writes at {result['gbps']:g} Gb/s; "
                    f"wanted {wanted:.3g} Gb/s, {share:g} of {name} ({bound:.3g} Gb/s)"
                )
            if latency_us and result["latency_us"] > latency_us:
                faults.append(f"{host} -> {to}: latency {result['latency_us']:g} us; wanted {latency_us:g} us")
    return faults
