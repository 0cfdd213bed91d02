"""Copying and verifying Engram rows and checkpoints, against dd and sha256sum on the same files and disk.

    python3 bench/engram_copy.py DIRECTORY [--source DIRECTORY] [--gigabytes 2] [--repeat 3] [--workers 6]

DIRECTORY takes the copies, --source is a checkpoint with Engram tables, on an NFS mount for instance; without it one of
--gigabytes is made in DIRECTORY. On a host of the fleet, where there is no project, the file alone does:

    PYTHONPATH=/usr/local/lib/gb10-fleet python3 engram_copy.py DIRECTORY --source /srv/models/MODEL

Every measurement alternates with its yardstick, begins with the files out of this host's page cache unless it says
cached, and ends with the data on the disk. Prints medians of source bytes a second, of processor seconds a GB, which
other load does not change, and, of the pairs, the median ratio.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "module_utils")]

from gb10 import checkpoint, engram_rows  # noqa: E402
from gb10.engram_layout import rank_rows  # noqa: E402

BLOCK = "bs=8M"


def drop(*directories: Path) -> None:
    """Take every file out of the page cache."""
    os.sync()
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cpu_seconds() -> float:
    """Of this process and of its children that ended, user and system."""
    return sum(os.times()[:4])


def dd(source: Path, target: Path | str, *flags: str) -> None:
    subprocess.run(["dd", f"if={source}", f"of={target}", BLOCK, "status=none", *flags], check=True)


def hash_memory(size: int) -> None:
    """SHA-256 of as many bytes of memory on all cores: no verification can be faster."""
    block = bytes(8 << 20)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda _: hashlib.sha256(block).digest(), range(size // len(block))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="part of the names to measure")
    parser.add_argument("--workers", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as scratch:
        source = args.source
        if not source:
            from embedded.checkpoints.engram import make_checkpoint

            source = Path(scratch, "source")
            make_checkpoint(source, vocab_size=int(args.gigabytes * 1e9 / 13_000))
        target = Path(scratch, "target")
        target.mkdir()
        measure(source, target, args)
    return 0


def measure(source: Path, scratch: Path, args: argparse.Namespace) -> None:
    shards = sorted(source.glob("*.safetensors"), key=lambda path: path.stat().st_size)[1:]
    files = [path.name for path in shards]
    size = sum(path.stat().st_size for path in shards)
    copy = scratch / "copy"
    options = engram_rows.Options(workers=args.workers, margin_bytes=0)
    identity = engram_rows.Identity("bench", "bench", 1, 0)
    rows = rank_rows(source, 1, 0)
    ranges = {r.table.layer: (r.start, r.end) for r in rows}
    packs = [f"layer-{r.table.layer}.rows" for r in rows]

    def make_copy() -> None:
        engram_rows.make_present(copy, source, identity, rows, engram_rows.Plan("copy", []), options)

    def dd_copy(*flags: str) -> None:
        for path in shards:
            dd(path, scratch / path.name, *flags)

    def whole() -> None:
        faults = engram_rows.verify(copy, 0, 1, "bench", ranges, "whole", options)
        assert not faults, faults  # noqa: S101 a bench of wrong bytes is none

    def parallel_sha256sum(directory: Path, names: list[str]) -> None:
        processes = [
            subprocess.Popen(["sha256sum", str(directory / name)], stdout=subprocess.DEVNULL) for name in names
        ]
        for process in processes:
            process.wait()

    def hash_checkpoint() -> None:
        checkpoint.hash_files(source, files, args.workers)

    def clear() -> None:
        shutil.rmtree(copy, ignore_errors=True)
        for path in shards:
            (scratch / path.name).unlink(missing_ok=True)
        drop(source)

    def cold() -> None:
        if not copy.exists():
            make_copy()
        drop(source, scratch)

    def cached() -> None:
        for path in shards:
            dd(path, "/dev/null")

    def read_all(directory: Path, names: list[str], *flags: str) -> None:
        processes = [
            subprocess.Popen(["dd", f"if={directory / name}", "of=/dev/null", BLOCK, "status=none", *flags])
            for name in names
        ]
        for process in processes:
            process.wait()

    table: list[tuple[str, Callable[[], None], Callable[[], None], str, Callable[[], None]]] = [
        ("copy, verified", clear, make_copy, "dd conv=fdatasync", lambda: dd_copy("conv=fdatasync")),
        ("copy, verified", clear, make_copy, "dd oflag=direct", lambda: dd_copy("oflag=direct", "conv=fdatasync")),
        ("verify copy whole", cold, whole, "hashlib on memory", lambda: hash_memory(size)),
        (
            "verify copy whole",
            cold,
            whole,
            "dd iflag=direct, both files",
            lambda: read_all(copy, packs, "iflag=direct"),
        ),
        ("verify copy whole", cold, whole, "sha256sum, both", lambda: parallel_sha256sum(copy, packs)),
        ("verify checkpoint", cold, hash_checkpoint, "dd, both files", lambda: read_all(source, files)),
        ("verify checkpoint", cold, hash_checkpoint, "hashlib on memory", lambda: hash_memory(size)),
        ("verify checkpoint", cold, hash_checkpoint, "sha256sum, both", lambda: parallel_sha256sum(source, files)),
        # A cached page may hide what the disk holds, so verification passes the cache by and the disk is its limit.
        (
            "verify checkpoint, cached",
            cached,
            hash_checkpoint,
            "dd iflag=direct, both files",
            lambda: read_all(source, files, "iflag=direct"),
        ),
    ]
    if shutil.which("b3sum"):
        b3sum = ["b3sum", *(str(path) for path in shards)]
        run_b3sum = lambda: subprocess.run(b3sum, check=True, stdout=subprocess.DEVNULL)  # noqa: E731 as the others are
        table.append(("verify checkpoint", cold, hash_checkpoint, "b3sum, both files", run_b3sum))
    print(f"{size / 1e9:.2f} GB in {len(shards)} shards, {args.workers} threads, median of {args.repeat}")
    for ours, prepare, mine, theirs, yardstick in table:
        if args.only not in ours:
            continue
        rates: list[list[float]] = [[], []]
        cores: list[list[float]] = [[], []]
        for _ in range(args.repeat):
            for which, work in enumerate((mine, yardstick)):
                prepare()
                begun, used = time.perf_counter(), cpu_seconds()
                work()
                rates[which].append(size / 1e6 / (time.perf_counter() - begun))
                cores[which].append((cpu_seconds() - used) / (size / 1e9))
        a, b = map(statistics.median, rates)
        mine_cpu, other_cpu = map(statistics.median, cores)
        ratio = statistics.median(mine / other for mine, other in zip(*rates, strict=True))
        print(
            f"{ours:26} {a:6.0f} MB/s {mine_cpu:5.2f} s/GB   {theirs:28} {b:6.0f} MB/s {other_cpu:5.2f} s/GB"
            f"   ratio {ratio:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
