#!/usr/bin/env python3
"""Compare storage=memory with storage=disk in the whole engine, on one NVIDIA GPU.

    engine_compare.py WORK [SECONDS [CASE,CASE...]]

Needs the patched vllm 0.33.0 importable. Runs tiny_v41.py once a case, several at a time,
and prints a table; exits 1 when a case differs from the in-memory engine or is not refused.
The first run on a machine compiles kernels for minutes. After SECONDS (default 1800) what
still runs is ended and counts as failed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
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
        print(f"  {name}: {time.monotonic() - start:.0f} s, rc {rc}", flush=True)
        if rc == 0 and out.exists():
            return json.loads(out.read_text())  # type: ignore[no-any-return]
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


def compare(a: Any, b: Any) -> tuple[str, bool]:
    """A sentence, and whether a lone short prompt's logprobs are equal to the bit.

    The engine itself rounds batches and long prompts differently from run to run (the
    in-memory engine against itself is in the table); a lone short prompt it does not.
    """
    if isinstance(a, str) or isinstance(b, str):
        return "FAILED", False
    a, b = a["answers"], b["answers"]
    worst, tokens, exact = 0.0, True, True
    for phase in a:
        for x, y in zip(a[phase], b[phase], strict=True):
            tokens &= x["tokens"] == y["tokens"]
            if phase.startswith("short"):
                exact &= x["logprobs"] == y["logprobs"]
            for s, t in zip(x["logprobs"], y["logprobs"], strict=True):
                other = dict(map(tuple, t))
                worst = max([worst, *(abs(p - other[i]) for i, p in s if i in other)])
    short = "equal to the bit" if exact else "DIFFERENT"
    sentence = f"tokens {'same' if tokens else 'differ'}, lone short prompt {short}, worst logprob {worst:.3g}"
    return sentence, exact


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
    return cases


def wrong_packs(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """Every run that must be refused at load."""
    packs = {name: fleet.pack(name) for name in ("truncated", "other-rank", "other-tp", "other-revision")}
    with (packs["truncated"] / "layer-3.rows").open("r+b") as f:
        f.truncate(f.seek(0, 2) - BLOCK)
    edit_manifest(packs["other-rank"], rank=1)
    edit_manifest(packs["other-tp"], tp=2)
    edit_manifest(packs["other-revision"], revision="0" * 40)
    return {name: {"storage": "disk", "mode": "eager", "pack": str(path)} for name, path in packs.items()}


PAIRS = [(f"memory-{mode}", f"disk-{mode}") for mode in ("full", "piecewise", "eager", "dspark")]
PAIRS += [("memory-full", name) for name in ("memory-full-again", "shards-full", "prefetch-full", "flipped-full")]


def judge(results: dict[str, Any], refused: set[str]) -> bool:
    """Print one line a finding; whether all are as they must be."""
    good = True
    for a, b in PAIRS:
        if a in results and b in results:
            sentence, exact = compare(results[a], results[b])
            good &= exact == (b != "flipped-full")
            print(f"{a:16} {b:18} {sentence}")
    for name, result in results.items():
        failed = isinstance(result, str)
        if name in refused:
            line = next((x.strip() for x in str(result).splitlines() if "does not hold layer" in x), "")
            good &= bool(line)
            print(f"{name:16} {line or 'NOT REFUSED'}")
        elif failed:
            good = False
            print(f"{name:16} FAILED\n{result[-1500:]}")
        elif result["checked"]:
            rows, different = result["checked"]
            good &= rows > 0 and (different > 0) == ("flipped" in name)
            print(f"{name:16} {rows} rows looked up, {different} elements not those of the tables")
    return good


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
    with ThreadPoolExecutor(PARALLEL) as threads:
        served = threads.submit(serve_metrics, fleet, stats) if not only or "serve" in only else None
        running = {name: threads.submit(fleet.run, name, case) for name, case in cases.items()}
        good = judge({name: future.result() for name, future in running.items()}, set(refused))
        if served is not None:
            print(served.result())
            good &= "vllm:engram_disk_rows_total" in served.result()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
