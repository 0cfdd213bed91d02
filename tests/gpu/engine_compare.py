#!/usr/bin/env python3
"""Compare storage=memory with storage=disk in the whole engine, on one NVIDIA GPU.

    engine_compare.py WORK [SECONDS]

Needs the patched vllm 0.33.0 importable. Runs tiny_v41.py once a case, several at a time,
and prints a table; exits 1 when a case differs from the in-memory engine or is not refused.
After SECONDS (default 1800) what still runs is ended and counts as failed.
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
        request = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})  # noqa: S310 - http
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - http
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


def main() -> int:
    fleet = Fleet(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 1800)
    fleet.work.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(HERE / "tiny_v41.py"), "make", str(fleet.model)], check=True)
    pack = str(fleet.model / "pack")
    memory, disk = {"storage": "memory"}, {"storage": "disk", "pack": pack}
    stats = fleet.work / "stats"
    stats.mkdir()
    cases: dict[str, dict[str, Any]] = {"memory-eager": memory | {"mode": "eager"}}
    for mode in ("full", "piecewise", "eager"):
        cases[f"memory-{mode}"] = memory | {"mode": mode}
        cases[f"disk-{mode}"] = disk | {"mode": mode}
    for mode in ("full", "piecewise", "eager"):
        cases[f"checked-{mode}"] = disk | {"mode": mode, "check": True}
    cases["memory-full-again"] = memory | {"mode": "full"}
    cases["shards-full"] = {"storage": "disk", "mode": "full"}
    cases["prefetch-full"] = disk | {"mode": "full", "prefetch": 1024}
    cases["checked-prefetch"] = disk | {"mode": "full", "prefetch": 4096, "check": True}
    cases["memory-dspark"] = memory | {"mode": "full", "dspark": True}
    cases["disk-dspark"] = disk | {"mode": "full", "dspark": True}
    cases["checked-dspark"] = cases["disk-dspark"] | {"check": True}
    flipped = fleet.pack("flipped")
    flip_row(flipped, int((fleet.model / "looked_up_row").read_text()))
    cases["flipped-full"] = {"storage": "disk", "mode": "full", "pack": str(flipped)}
    cases["checked-flipped"] = cases["flipped-full"] | {"check": True}
    refused = {}
    short = fleet.pack("truncated")
    with (short / "layer-3.rows").open("r+b") as f:
        f.truncate(f.seek(0, 2) - BLOCK)
    refused["truncated"] = str(short)
    for name, change in (
        ("other-rank", {"rank": 1}),
        ("other-tp", {"tp": 2}),
        ("other-revision", {"revision": "0" * 40}),
    ):
        refused[name] = str(fleet.pack(name))
        edit_manifest(Path(refused[name]), **change)
    results: dict[str, Any] = {"memory-eager": fleet.run("memory-eager", cases.pop("memory-eager"))}  # fills the caches
    with ThreadPoolExecutor(PARALLEL) as threads:
        served = threads.submit(serve_metrics, fleet, stats)
        running = {name: threads.submit(fleet.run, name, case) for name, case in cases.items()}
        running |= {
            name: threads.submit(fleet.run, name, {"storage": "disk", "mode": "eager", "pack": path})
            for name, path in refused.items()
        }
        results |= {name: future.result() for name, future in running.items()}
        metrics = served.result()
    good = True
    pairs = [(f"memory-{m}", f"disk-{m}") for m in ("eager", "piecewise", "full", "dspark")]
    pairs += [("memory-full", name) for name in ("memory-full-again", "shards-full", "prefetch-full", "flipped-full")]
    pairs += [("disk-full", "checked-full")]
    for a, b in pairs:
        sentence, exact = compare(results[a], results[b])
        good &= exact == (b != "flipped-full")
        print(f"{a:14} {b:20} {sentence}")
        for name in (a, b):
            if isinstance(results[name], str):
                print(f"--- {name}\n{results[name][-1500:]}")
    for name in cases:
        if not name.startswith("checked"):
            continue
        checked = results[name]["checked"] if not isinstance(results[name], str) else None
        wanted = checked is not None and checked[0] > 0 and (checked[1] > 0) == ("flipped" in name)
        good &= wanted
        print(f"{name}: rows looked up and elements that differ from the tables: {checked}")
        if checked is None:
            print(results[name][-1500:])
    for name in refused:
        text = results[name]
        said = isinstance(text, str) and "does not hold layer" in text
        good &= said
        line = next((x for x in str(text).splitlines() if "does not hold layer" in x), str(text)[-300:])
        print(f"{name:14} {'refused' if said else 'NOT REFUSED'}: {line.strip()[-420:]}")
    if not isinstance(results["disk-full"], str):
        cached = {phase: [x["cached"] for x in answers] for phase, answers in results["disk-full"]["answers"].items()}
        print("cached prompt tokens", cached)
    print(metrics)
    return 0 if good and "vllm:engram_disk_rows_total" in metrics else 1


if __name__ == "__main__":
    sys.exit(main())
