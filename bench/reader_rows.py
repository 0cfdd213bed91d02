#!/usr/bin/env python3
"""Time the Engram reader alone on this machine, without a GPU.

    bench/reader_rows.py [--dir DIR] [--gib 2] [--threads 32]

Builds the reader out of the patch series, makes a row pack of random bytes in DIR and
prints, for several batch sizes, the time of one lookup of random rows that are in the page
cache, and of rows that are not; then fio's random 4 KiB reads of the same file at the same
depth. The page cache is emptied of that one file only (POSIX_FADV_DONTNEED).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from reader_lib import BLOCK, PER_BLOCK, Reader, build

ROUNDS = 5
SIZES = (36, 72, 432, 2304, 24576)


def make_pack(path: Path, blocks: int) -> int:
    """A file of `blocks` random blocks; returns its rows."""
    with path.open("wb") as f:
        for start in range(0, blocks, 4096):
            f.write(os.urandom(min(4096, blocks - start) * BLOCK))
        f.flush()
        os.fsync(f.fileno())
    return blocks * PER_BLOCK


def evict(path: Path) -> None:
    with path.open("rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(path: Path) -> None:
    with path.open("rb", buffering=1 << 24) as f:
        while f.read(1 << 24):
            pass


def quantiles(times: list[float]) -> str:
    times = sorted(times)
    return f"p50 {statistics.median(times) * 1e6:9.0f} us   p99 {times[int(len(times) * 0.99)] * 1e6:9.0f} us"


def timed(reader: Reader, rows: int, size: int, repeats: int, rng: random.Random) -> list[float]:
    times = []
    for _ in range(repeats):
        ids = (ctypes.c_int32 * size)(*(rng.randrange(rows) for _ in range(size)))
        start = time.perf_counter()
        reader.lookup(ids)
        times.append(time.perf_counter() - start)
    return times


def spread(values: list[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"


def uncached_iops(reader: Reader, pack: Path, rows: int, seconds: float, rng: random.Random) -> float:
    """Reads that missed the page cache, a second of the lookups that made them."""
    reads, spent, stop = 0, 0.0, time.monotonic() + seconds
    while time.monotonic() < stop:
        evict(pack)
        before = reader.stats()["read"]
        # At most a tenth of the blocks: more lookups would find the ones that these brought in.
        for _ in range(max(1, rows // PER_BLOCK // 10 // max(SIZES))):
            spent += sum(timed(reader, rows, max(SIZES), 1, rng))
        reads += reader.stats()["read"] - before
    return reads / spent


def fio_iops(path: Path, depth: int, seconds: int) -> float:
    """fio's threads with one synchronous direct read each: what the reader's threads do."""
    command = ["fio", "--name=rows", f"--filename={path}", "--readonly", "--rw=randread", "--bs=4k", "--direct=1"]
    command += ["--ioengine=psync", "--thread", f"--numjobs={depth}", "--group_reporting", "--norandommap"]
    command += ["--time_based", f"--runtime={seconds}", "--output-format=json"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(out)["jobs"][0]["read"]["iops"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None, help="where to put the pack (default: a temporary directory)")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--seconds", type=int, default=20)
    args = parser.parse_args()
    rng = random.Random(1)  # noqa: S311 - any spread will do
    with tempfile.TemporaryDirectory(dir=args.dir) as work:
        pack = Path(work) / "layer-1.rows"
        rows = make_pack(pack, int(args.gib * 2**30) // BLOCK)
        with Reader(build(Path(work)), pack, rows, max(SIZES), args.threads) as reader:
            read_all(pack)
            for size in SIZES:
                times = timed(reader, rows, size, max(20, 20000 // size), rng)
                print(f"cached   {size:6} rows  {quantiles(times)}", flush=True)
            ours, theirs = [], []
            for _ in range(ROUNDS):  # in turns, so that whatever else the machine does meets both
                ours.append(uncached_iops(reader, pack, rows, args.seconds / ROUNDS, rng))
                if shutil.which("fio"):
                    evict(pack)
                    theirs.append(fio_iops(pack, args.threads, max(1, args.seconds // ROUNDS)))
            print(f"uncached {statistics.median(ours):.0f} reads a second, {args.threads} threads ({spread(ours)})")
            if theirs:
                print(f"fio psync direct, {args.threads} jobs: {statistics.median(theirs):.0f} ({spread(theirs)})")
                print(f"ratio of the medians {statistics.median(ours) / statistics.median(theirs):.2f}")


if __name__ == "__main__":
    main()
