#!/usr/bin/env python3
"""Compare storage=memory with storage=disk in the whole engine, on one NVIDIA GPU.

    engine_compare.py WORK [SECONDS [CASE,CASE...]]

Needs the patched vllm 0.33.0 importable. Runs tiny_v41.py once a case, several at a time,
prints a table and writes it with the figures to WORK/result.json; exits 1 when a case differs
from the in-memory engine or is not refused. The first run on a machine compiles kernels for
minutes. After SECONDS (default 1800) what still runs is ended and counts as failed.

The engine itself rounds batches and long prompts differently from run to run, lone short
prompts it does not. So those are compared to the bit, as far as several runs of the in-memory
engine agree to the bit; for the others a difference counts only where it exceeds twice what
those runs show: a token may differ only where the two candidates are closer than that.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from engram_files import BLOCK, PER_BLOCK, REVISION, ROW_BYTES, sign  # noqa: E402

PARALLEL = 12


class Fleet:
    def __init__(self, work: Path, seconds: float) -> None:
        self.work, self.model = work, work / "model"
        self.deadline = time.monotonic() + seconds
        self.times: dict[str, float] = {}  # seconds a case took

    def run(self, name: str, case: dict[str, Any]) -> dict[str, Any] | str:
        """The case's answers, or the last lines of a run that failed."""
        out, log = self.work / f"{name}.json", self.work / f"{name}.log"
        start = time.monotonic()
        command = [sys.executable, str(HERE / "tiny_v41.py"), "run", str(self.model), str(out), json.dumps(case)]
        with log.open("w") as f:
            try:
                rc = subprocess.run(
                    command, stdout=f, stderr=subprocess.STDOUT, timeout=max(1, self.deadline - start)
                ).returncode
            except subprocess.TimeoutExpired:
                rc = -1
        self.times[name] = round(time.monotonic() - start, 1)
        print(f"  {name}: {self.times[name]} s, rc {rc}", flush=True)
        if rc == 0 and out.exists():
            return json.loads(out.read_text()) | {"sync": sync_points(log.read_text())}  # type: ignore[no-any-return]
        return log.read_text()[-6000:]

    def pack(self, name: str) -> Path:
        target = self.work / name
        shutil.copytree(self.model / "pack", target)
        return target


def flip_row(pack: Path, row: int) -> None:
    """Negate every weight of one row of layer 1."""
    offset = row // PER_BLOCK * BLOCK + row % PER_BLOCK * ROW_BYTES
    with (pack / "layer-1.rows").open("r+b") as f:
        f.seek(offset)
        weight = bytes(b ^ 0x80 for b in f.read(256))
        f.seek(offset)
        f.write(weight)


def edit_manifest(pack: Path, **change: Any) -> None:
    path = pack / "manifest.json"
    path.write_text(json.dumps(sign(json.loads(path.read_text()) | change)))


@dataclass
class Difference:
    """Two runs' answers. Log probabilities count up to the first different token of a sequence."""

    sequences: int = 0
    same: int = 0  # sequences whose tokens are all equal
    lone: set[str] = field(default_factory=set)  # lone short prompts
    exact: set[str] = field(default_factory=set)  # those of them whose log probabilities are equal to the bit
    worst: float = 0.0  # largest difference of one token's log probability
    gap: float = 0.0  # largest distance of the two candidates where tokens first differ

    def __str__(self) -> str:
        lone = f"{len(self.exact)}/{len(self.lone)} lone short prompts equal to the bit"
        tie = f", else at a distance of {self.gap:.3g}" if self.same < self.sequences else ""
        return f"tokens of {self.same}/{self.sequences} sequences the same{tie}; {lone}; worst logprob {self.worst:.3g}"


def compare(a: dict[str, Any], b: dict[str, Any]) -> Difference:
    d = Difference()
    for phase, answers in a["answers"].items():
        for x, y in zip(answers, b["answers"][phase], strict=True):
            d.sequences += 1
            d.same += x["tokens"] == y["tokens"]
            if phase.startswith("lone"):
                d.lone.add(phase)
                d.exact |= {phase} if x == y else set()
            for p, q, s, t in zip(x["tokens"], y["tokens"], x["logprobs"], y["logprobs"], strict=True):
                first, second = dict(map(tuple, s)), dict(map(tuple, t))
                d.worst = max([d.worst, *(abs(first[i] - second[i]) for i in first.keys() & second.keys())])
                if p != q:
                    d.gap = max(d.gap, first[p] - first.get(q, float("-inf")))
                    break
    return d


def sync_points(log: str) -> list[str]:
    """Where the host waited for the GPU in a step, as vLLM's own check saw it."""
    found = re.findall(r"(\S+:\d+): UserWarning: (?:called a synchronizing|Implicit GPU)", log)
    return sorted({place.split("site-packages/")[-1] for place in found})


def serve_metrics(fleet: Fleet, stats: Path) -> str:
    """The real API server: a completion, then the Engram lines of its /metrics."""
    engram = {"storage": "disk", "disk_path": str(fleet.model / "pack"), "disk_stats_dir": str(stats)}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(fleet.model), "--load-format", "dummy"]
    command += ["--revision", REVISION, "--engram-config", json.dumps(engram), "--port", "8077", "--host", "127.0.0.1"]
    command += ["--max-model-len", "8192", "--max-num-seqs", "8", "--max-num-batched-tokens", "2048", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(2 << 30), "--gpu-memory-utilization", "0.1", "--language-model-only"]
    log = fleet.work / "serve.log"
    with log.open("w") as f:
        server = subprocess.Popen(command, stdout=f, stderr=subprocess.STDOUT)
    url = "http://127.0.0.1:8077"

    def ask(path: str, body: bytes | None = None) -> str:
        request = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(answer.read().decode())

    try:
        while True:
            time.sleep(1)
            if time.monotonic() > fleet.deadline:
                return "server not up in time: " + log.read_text()[-1500:]
            if server.poll() is not None:
                return "server ended: " + log.read_text()[-3000:]
            try:
                ask("/health")
                break
            except OSError:
                continue
        body = json.dumps({"model": str(fleet.model), "prompt": [5, 9, 33, 77], "max_tokens": 8}).encode()
        ask("/v1/completions", body)
        time.sleep(65)  # the log line comes once a minute
        lines = [line for line in ask("/metrics").splitlines() if line.startswith("vllm:engram")]
        lines += [line for line in log.read_text().splitlines() if "Engram layer" in line]
        return "\n".join(lines)
    finally:
        server.terminate()
        server.wait(60)


def comparisons(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """Every run that must answer, by name; `checked-*` also compare each lookup with a table on the GPU."""
    memory, disk = {"storage": "memory"}, {"storage": "disk", "pack": str(fleet.model / "pack")}
    cases: dict[str, dict[str, Any]] = {}
    for mode in ("full", "piecewise", "eager"):
        cases[f"memory-{mode}"] = memory | {"mode": mode}
        cases[f"disk-{mode}"] = disk | {"mode": mode}
        cases[f"checked-{mode}"] = disk | {"mode": mode, "check": True}
    flipped = fleet.pack("flipped")
    flip_row(flipped, int((fleet.model / "looked_up_row").read_text()))
    cases["flipped-full"] = {"storage": "disk", "mode": "full", "pack": str(flipped)}
    cases["checked-flipped"] = cases["flipped-full"] | {"check": True}
    cases["memory-full-again"] = cases["memory-full"]
    cases["shards-full"] = {"storage": "disk", "mode": "full"}
    cases["prefetch-full"] = cases["disk-full"] | {"prefetch": 4096}
    cases["checked-prefetch"] = cases["prefetch-full"] | {"check": True}
    for name in ("memory", "disk", "checked"):
        cases[f"{name}-dspark"] = cases[f"{name}-full"] | {"dspark": True}
    cases["memory-dspark-again"] = cases["memory-dspark"]
    for name in ("memory", "disk"):
        cases[f"{name}-sync"] = cases[f"{name}-full"] | {"sync": True}
    # The longest first: several run at a time.
    return dict(sorted(cases.items(), key=lambda item: not item[1].get("dspark")))


def wrong_packs(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """Every run that must be refused at load."""
    packs = {name: fleet.pack(name) for name in ("truncated", "other-rank", "other-tp", "other-revision")}
    with (packs["truncated"] / "layer-3.rows").open("r+b") as f:
        f.truncate(f.seek(0, 2) - BLOCK)
    edit_manifest(packs["other-rank"], rank=1)
    edit_manifest(packs["other-tp"], tp=2)
    edit_manifest(packs["other-revision"], revision="0" * 40)
    return {name: {"storage": "disk", "mode": "eager", "pack": str(path)} for name, path in packs.items()}


MODES = ("full", "piecewise", "eager", "dspark")
AGAIN = [("memory-full", "memory-full-again"), ("memory-full", "memory-piecewise"), ("memory-full", "memory-eager")]
DSPARK_AGAIN = [("memory-dspark", "memory-dspark-again")]
PAIRS = [(f"memory-{mode}", f"disk-{mode}") for mode in MODES]
PAIRS += [("memory-full", "shards-full"), ("memory-full", "prefetch-full")]


class Verdict:
    """Collects one line a finding, and whether all are as they must be."""

    def __init__(self) -> None:
        self.good, self.lines = True, {}

    def add(self, name: str, good: bool, sentence: str) -> None:
        self.good &= good
        self.lines[name] = sentence
        print(f"{'ok  ' if good else 'BAD '} {name:32} {sentence}", flush=True)


def judge_pairs(results: dict[str, Any], verdict: Verdict) -> None:
    """The disk engine against the in-memory one, within what the latter shows against itself."""
    ran = {name for name, result in results.items() if not isinstance(result, str)}
    for dspark, again in ((False, AGAIN), (True, DSPARK_AGAIN)):
        noise, exact = 0.0, {"lone 8"}
        for pair in (p for p in again if ran.issuperset(p)):
            d = compare(results[pair[0]], results[pair[1]])
            noise = max(noise, d.worst, d.gap)
            exact = d.exact if pair is again[0] else exact & d.exact
            verdict.add(" ".join(pair), "lone 8" in d.exact, f"{d} (in memory both)")
        for a, b in (p for p in PAIRS if ran.issuperset(p) and ("dspark" in p[0]) == dspark):
            d = compare(results[a], results[b])
            good = exact <= d.exact and max(d.worst, d.gap) <= 2 * noise
            verdict.add(f"{a} {b}", good, f"{d} (limit {2 * noise:.3g})")
    if ran.issuperset(("memory-full", "flipped-full")):
        d = compare(results["memory-full"], results["flipped-full"])
        verdict.add("memory-full flipped-full", "lone 8" not in d.exact, f"{d} (one row negated: must differ)")
    if ran.issuperset(("memory-sync", "disk-sync")):
        stock, disk = (set(results[name]["sync"]) for name in ("memory-sync", "disk-sync"))
        places = f"in memory {len(stock)} places, from disk {sorted(disk - stock) or 'no other'}"
        verdict.add("memory-sync disk-sync", disk <= stock, f"where the host waits for the GPU in a step: {places}")


def judge(results: dict[str, Any], refused: set[str], verdict: Verdict) -> None:
    for name, result in results.items():
        if name in refused:
            line = next((x.strip() for x in str(result).splitlines() if "does not hold layer" in x), "")
            verdict.add(name, bool(line), line or "NOT REFUSED")
        elif isinstance(result, str):
            verdict.add(name, False, "FAILED\n" + result[-1500:])
        else:
            cached = sum(answer["cached"] for answer in result["answers"]["prefix hit"])
            said = f"{cached} tokens of the prefix came from the cache"
            rows, different = result["checked"] or (0, 0)
            if result["checked"]:
                said += f"; {rows} rows looked up, {different} elements not those of the tables"
            as_it_must = result["checked"] is None or (rows > 0 and (different > 0) == ("flipped" in name))
            verdict.add(name, cached > 0 and as_it_must, said)
    judge_pairs(results, verdict)


def main() -> int:
    work, *rest = sys.argv[1:]
    fleet = Fleet(Path(work), float(rest[0]) if rest else 1800)
    only = set(rest[1].split(",")) if len(rest) > 1 else None
    fleet.work.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(HERE / "tiny_v41.py"), "make", str(fleet.model)], check=True)
    refused = wrong_packs(fleet)
    cases = {name: case for name, case in (comparisons(fleet) | refused).items() if not only or name in only}
    stats = fleet.work / "stats"
    stats.mkdir()
    verdict = Verdict()
    with ThreadPoolExecutor(PARALLEL) as threads:
        served = threads.submit(serve_metrics, fleet, stats) if not only or "serve" in only else None
        running = {name: threads.submit(fleet.run, name, case) for name, case in cases.items()}
        judge({name: future.result() for name, future in running.items()}, set(refused), verdict)
        if served is not None:
            verdict.add("serve", "vllm:engram_disk_rows_total" in served.result(), served.result())
    result = {"good": verdict.good, "cases": fleet.times, "findings": verdict.lines}
    (fleet.work / "result.json").write_text(json.dumps(result, indent=1))
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main())
