"""The Engram reader of the patch series, built and called without vLLM or a GPU."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import yaml

SERIES = Path(__file__).resolve().parent.parent / "files" / "patches" / "vllm-0.33.0"
COMMON = Path("vllm/models/deepseek_v41/common")
WEIGHT_BYTES, SCALE_BYTES = 256, 8
ROW_BYTES, BLOCK, PER_BLOCK = 264, 4096, 15

COUNTERS = ("lookups", "rows", "unique", "cached", "read", "bytes", "retries", "out_of_range", "busy_ns")
COUNTERS += ("prefetch_rows", "prefetch_read")
HIST_BUCKETS = 512


class Part(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("base", "per_block", "block", "stride"))


class Job(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
    )


class Stats(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_uint64) for name in COUNTERS), ("hist", ctypes.c_uint64 * HIST_BUCKETS))


def new_files(target: Path) -> Path:
    """Write the files that patch 0001 adds under target; returns target."""
    text = (SERIES / "0001-engram-on-disk.patch").read_text()
    added = ["diff --git" + part for part in text.split("diff --git")[1:] if "\nnew file mode" in part]
    subprocess.run(["patch", "-s", "-p1", "-d", str(target)], input="".join(added), text=True, check=True)
    return target


def build(target: Path, *flags: str) -> Path:
    """Compile the reader by series.yml's own command, plus warnings and flags; returns the library."""
    (step,) = yaml.safe_load((SERIES / "series.yml").read_text())["build"]
    strict = ["-Wall", "-Wextra", "-Wconversion", "-Werror"]
    subprocess.run([*step["command"], *strict, *flags], cwd=new_files(target), check=True)
    return target / str(step["output"])


def pack_parts() -> tuple[Part, Part]:
    """Weight and scale of a row pack (docs/engram.md)."""
    return Part(0, PER_BLOCK, BLOCK, ROW_BYTES), Part(WEIGHT_BYTES, PER_BLOCK, BLOCK, ROW_BYTES)


class Reader:
    """One table of one rank: lookup() as the CUDA host function does it."""

    def __init__(
        self,
        library: Path,
        weight: Path,
        rows: int,
        max_rows: int,
        threads: int,
        *,
        scale: Path | None = None,
        parts: tuple[Part, Part] | None = None,
        prefetch_threads: int = 0,
    ) -> None:
        self.lib = ctypes.CDLL(str(library))
        self.lib.engram_pool_new.restype = ctypes.c_void_p
        self.lib.engram_open.restype = ctypes.c_void_p
        self.pool = self.lib.engram_pool_new(threads)
        self.prefetch_pool = self.lib.engram_pool_new(prefetch_threads) if prefetch_threads else None
        weight_part, scale_part = parts or pack_parts()
        error = ctypes.create_string_buffer(1024)
        self.table = self.lib.engram_open(
            str(weight).encode(),
            str(scale or weight).encode(),
            ctypes.byref(weight_part),
            ctypes.byref(scale_part),
            ctypes.c_int64(rows),
            ctypes.c_int32(max_rows),
            ctypes.c_void_p(self.pool),
            ctypes.c_void_p(self.prefetch_pool),
            ctypes.c_int32(8192 if prefetch_threads else 0),
            error,
            ctypes.c_size_t(len(error)),
        )
        if not self.table:
            self._free_pools()
            raise OSError(error.value.decode())
        self.slots = (ctypes.c_int32 * max_rows)()
        self.weight = (ctypes.c_uint8 * (max_rows * WEIGHT_BYTES))()
        self.scale = (ctypes.c_uint8 * (max_rows * SCALE_BYTES))()

    def lookup(self, ids: ctypes.Array[ctypes.c_int32] | Sequence[int]) -> None:
        """Fill slots, weight and scale for these rows."""
        if not isinstance(ids, ctypes.Array):
            ids = (ctypes.c_int32 * len(ids))(*ids)
        address = ctypes.addressof
        job = Job(self.table, len(ids), address(ids), address(self.slots), address(self.weight), address(self.scale))
        self.lib.engram_host_lookup(ctypes.byref(job))

    def row(self, i: int) -> bytes | None:
        """The 264 bytes that the i-th id of the last lookup got, None for a row of another rank."""
        slot = self.slots[i]
        if slot < 0:
            return None
        weight = bytes(self.weight[slot * WEIGHT_BYTES : (slot + 1) * WEIGHT_BYTES])
        return weight + bytes(self.scale[slot * SCALE_BYTES : (slot + 1) * SCALE_BYTES])

    def prefetch(self, ids: Sequence[int]) -> None:
        array = (ctypes.c_int32 * len(ids))(*ids)
        self.lib.engram_prefetch(ctypes.c_void_p(self.table), array, ctypes.c_int64(len(ids)))

    def stats(self) -> dict[str, int]:
        stats = Stats()
        self.lib.engram_get_stats(ctypes.c_void_p(self.table), ctypes.byref(stats))
        return {name: int(getattr(stats, name)) for name in COUNTERS} | {"timed": sum(stats.hist)}

    def _free_pools(self) -> None:
        for pool in (self.pool, self.prefetch_pool):
            if pool:
                self.lib.engram_pool_free(ctypes.c_void_p(pool))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.lib.engram_close(ctypes.c_void_p(self.table))
        self._free_pools()
