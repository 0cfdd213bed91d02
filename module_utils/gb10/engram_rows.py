"""One rank's Engram rows on the host's own disk: checked, copied, resumed and repaired.

The format, and what each file in the directory means, is docs/engram.md. The rules that keep a wrong row out:

- The manifest is the copy. It is written last, after every byte was read back from the disk and compared with what was
  read from the source, and it is removed before anything it describes is touched again.
- A digest, once recorded in the manifest or in a journal, binds: a source that now gives other bytes is refused.
- What a journal says is believed only after the bytes on disk were hashed again.

``python3 -m gb10.engram_rows verify|copy --help`` does the same by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import functools
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .disk_io import open_uncached, patiently
from .engram_layout import EngramLayoutError, RankRows, rank_ranges, rank_rows, read_config
from .engram_pack import (
    BLOCK_BYTES,
    ROW_BYTES,
    ROWS_PER_BLOCK,
    SCALE_BYTES,
    SEGMENT_BYTES,
    SEGMENT_ROWS,
    WEIGHT_BYTES,
    Buffer,
    Packer,
    ShortReadError,
    digest_of,
    pack_bytes,
    row_offset,
    same,
    segment_count,
    segment_span,
    write,
    write_changed_blocks,
)
from .files import sha256_document, write_atomic
from .meter import Meter
from .nfs import MOUNTS, network_mount, parse_mounts, shared_path_faults

MANIFEST = "manifest.json"
CONSTANTS = {
    "format": "gb10-engram-rows",
    "version": 1,
    "row_bytes": ROW_BYTES,
    "weight_row_bytes": WEIGHT_BYTES,
    "scale_row_bytes": SCALE_BYTES,
    "block_bytes": BLOCK_BYTES,
    "rows_per_block": ROWS_PER_BLOCK,
    "segment_bytes": SEGMENT_BYTES,
    "complete": True,
}
JOURNAL_LINE = re.compile(r"Engram layer (\d+) (rows \[\d+, \d+\) read from .+?) \([^()]*\)$", re.MULTILINE)
LEVELS = ("manifest", "sampled", "whole")
SAMPLED_SEGMENTS = 64
SAMPLED_ROWS = 256

Ranges = Mapping[int, tuple[int, int]]


class EngramRowsError(Exception):
    """The copy cannot be made, or the directory cannot be worked on; the message ends with the next step."""


@dataclass(frozen=True)
class Identity:
    """Whose rows these are."""

    model: str
    revision: str
    tp: int
    rank: int


@dataclass(frozen=True)
class Options:
    """``workers`` threads of 17 MiB each; ``bytes_per_s`` of source or copy read, 0 for as fast as it goes.

    A server of the source that goes away in the middle is awaited for ``patience_s`` seconds.
    """

    workers: int = 6
    bytes_per_s: int = 0
    margin_bytes: int = 1 << 30
    patience_s: float = 120
    progress: Path | None = None


@dataclass(frozen=True)
class Plan:
    """What a run would do: keep, copy, resume, replace (other rows lie there) or repair, and why."""

    action: str
    reasons: list[str]


@dataclass
class Outcome:
    """What a run did, in bytes of the row packs and blocks of 4 KiB."""

    copied_bytes: int = 0
    kept_bytes: int = 0
    repaired_blocks: int = 0


# Checking


def check_copy(directory: Path, rank: int, tp: int, revision: str, ranges: Ranges) -> list[str]:
    """Every reason why the copy in ``directory`` may not be served by this rank; an empty list when it may.

    ``ranges`` are the rows the rank must have, as engram_layout.rank_ranges gives them. Reads the manifest and the
    files' sizes and extents, not their rows: milliseconds, at every start.
    """
    try:
        manifest = read_manifest(directory)
    except EngramRowsError as error:
        return [str(error)]
    faults = [
        f"{directory / MANIFEST}: {key} is {manifest.get(key)!r}, wanted {wanted!r}"
        for key, wanted in {"tp": tp, "rank": rank, "revision": revision}.items()
        if manifest.get(key) != wanted
    ]
    layers = {entry["layer"]: entry for entry in manifest["layers"]}
    for layer in sorted(ranges.keys() | layers.keys()):
        entry, wanted_range = layers.get(layer), ranges.get(layer)
        if entry is None or (entry["start"], entry["end"]) != wanted_range:
            found = "absent" if entry is None else f"[{entry['start']}, {entry['end']})"
            wanted = "no such layer" if wanted_range is None else "[{}, {})".format(*wanted_range)
            faults.append(f"{directory / MANIFEST}: layer {layer} rows are {found}, wanted {wanted}")
        else:
            faults += _check_file(directory / entry["file"], entry["bytes"])
    return faults


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, proven to be whole and of this format; raises EngramRowsError."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        stated = manifest.pop("sha256")
    except OSError as error:
        raise EngramRowsError(f"{path}: cannot be read: {error.strerror}; run playbooks/engram.yml") from error
    except (ValueError, KeyError, AttributeError) as error:
        raise EngramRowsError(f"{path}: is no manifest; run playbooks/engram.yml") from error
    if stated != sha256_document(manifest):
        raise EngramRowsError(f"{path}: its own sha256 is {sha256_document(manifest)}, it states {stated}")
    for key, wanted in CONSTANTS.items():
        if manifest.get(key) != wanted:
            raise EngramRowsError(f"{path}: {key} is {manifest.get(key)!r}, wanted {wanted!r}")
    return dict(manifest)


def damaged_segments(directory: Path, level: str, options: Options) -> dict[int, list[int]]:
    """Layer to the segments whose bytes are not what the manifest says; ``level`` is sampled or whole."""
    damaged: dict[int, list[int]] = {}
    jobs = []
    manifest = read_manifest(directory)
    for entry in manifest["layers"]:
        indices = range(len(entry["segments"]))
        if level == "sampled" and len(indices) > SAMPLED_SEGMENTS:
            jobs += [(entry, index) for index in (0, indices[-1], *random.sample(indices[1:-1], SAMPLED_SEGMENTS - 2))]
        else:
            jobs += [(entry, index) for index in indices]
    pace = _Pace(options, sum(_length(entry, index) for entry, index in jobs))
    with contextlib.ExitStack() as stack:
        files = {entry["layer"]: stack.enter_context(_file(directory / entry["file"])) for entry in manifest["layers"]}

        def judge(buffer: Buffer, job: tuple[dict[str, Any], int]) -> None:
            entry, index = job
            pace.wait(_length(entry, index))
            with contextlib.suppress(ShortReadError):
                data = buffer.read(files[entry["layer"]], segment_span(entry["bytes"], index))
                if digest_of(data) == entry["segments"][index]:
                    pace.done(len(data))
                    return
            damaged.setdefault(entry["layer"], []).append(index)

        _for_each(options.workers, Buffer, judge, jobs)
    return {layer: sorted(indices) for layer, indices in sorted(damaged.items())}


def verify(
    directory: Path, rank: int, tp: int, revision: str, ranges: Ranges, level: str, options: Options
) -> list[str]:
    """check_copy and, at the levels sampled and whole, the bytes of some or all segments."""
    faults = check_copy(directory, rank, tp, revision, ranges)
    if not faults and level != "manifest":
        faults = _describe(directory, damaged_segments(directory, level, options))
    return faults


def check_journal(text: str, directory: Path, ranges: Ranges) -> list[str]:
    """Whether a started rank says that it reads exactly these rows from this copy, and nothing else.

    ``text`` is its journal since the start; the patched vLLM writes one line a layer.
    """
    wanted = {
        layer: f"rows [{start}, {end}) read from {directory / _names(layer)[0]}"
        for layer, (start, end) in ranges.items()
    }
    faults = []
    said = [(int(layer), what) for layer, what in JOURNAL_LINE.findall(text)]
    for layer, what in said:
        if what != wanted.get(layer):
            faults.append(f"journal: layer {layer} {what}, wanted {wanted.get(layer, 'no such layer')}")
    for layer in wanted.keys() - {layer for layer, _ in said}:
        faults.append(f"journal: no line on layer {layer}, wanted {wanted[layer]}; is the engine patched?")
    return faults


# Making


def plan(directory: Path, identity: Identity, rows: Sequence[RankRows], faults: Sequence[str]) -> Plan:
    """What make_present has to do about the ``faults`` that verify found. Changes nothing."""
    try:
        manifest = read_manifest(directory)
    except EngramRowsError as error:
        partial = any((directory / _names(r.table.layer)[2]).exists() for r in rows)
        return Plan("resume" if partial else "copy", [str(error)])
    wanted = {**vars(identity), "layers": [_entry(r) for r in rows]}
    found = {key: manifest.get(key) for key in wanted}
    found["layers"] = [{k: v for k, v in entry.items() if k != "segments"} for entry in manifest["layers"]]
    if found != wanted:
        return Plan(
            "replace",
            [f"{key} is {found[key]!r}, wanted {wanted[key]!r}" for key in wanted if found[key] != wanted[key]],
        )
    return Plan("repair" if faults else "keep", list(faults))


def make_present(
    directory: Path, source: Path, identity: Identity, rows: Sequence[RankRows], todo: Plan, options: Options
) -> Outcome:
    """Carry out ``todo`` until ``directory`` holds a copy whose every byte was compared with ``source``.

    Raises EngramRowsError and then leaves no manifest; the next run takes up what was finished. Rows that a live engine
    reads stay readable: a file keeps its inode while it is repaired, and right bytes are never rewritten.
    """
    if todo.action == "keep":
        return Outcome()
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    with _locked(directory), _explained(directory):
        if todo.action == "replace":
            remove(directory)
        elif todo.action == "repair":
            _demote(directory, identity, rows, source)
        return _copy(directory, source, identity, rows, options)


def present(directory: Path) -> list[Path]:
    """The files of a copy, or of an unfinished one, manifest first."""
    return [path for path in (directory / MANIFEST, *sorted(directory.glob("layer-*.rows*"))) if path.exists()]


def remove(directory: Path) -> bool:
    """Remove a copy, manifest first, and whatever an unfinished one left; returns whether there was anything."""
    found = present(directory)
    for path in found:
        path.unlink()
    if found:
        _sync_directory(directory)
    return bool(found)


def missing_bytes(directory: Path, copy_bytes: int, todo: Plan, margin_bytes: int) -> tuple[int, int, int]:
    """(needed, free, short) bytes on the file system of ``directory`` for ``todo``; short is 0 when it fits.

    ``copy_bytes`` are those of the whole copy.
    """
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    stat = os.statvfs(existing)
    free = stat.f_bavail * stat.f_frsize
    needed = copy_bytes
    old = list(directory.glob("layer-*.rows*"))
    if todo.action == "replace":
        free += sum(_allocated(path) for path in old)
    else:
        needed -= sum(_allocated(path) for path in old)
    needed = max(0, needed)
    return needed, free, max(0, needed + margin_bytes - free) if needed else 0


def check_space(directory: Path, copy_bytes: int, todo: Plan, margin_bytes: int) -> None:
    """Raise EngramRowsError when the copy would not fit."""
    needed, free, short = missing_bytes(directory, copy_bytes, todo, margin_bytes)
    if short:
        raise EngramRowsError(
            f"{directory}: the rows need {_size(needed)} and {_size(margin_bytes)} margin, its file system has"
            f" {_size(free)} free: {_size(short)} missing; free them or choose another directory"
        )


def check_local(directory: Path) -> None:
    """Raise EngramRowsError when ``directory`` is not on a disk of this host."""
    faults = shared_path_faults({"the directory for the rows": str(directory)}, parse_mounts(MOUNTS.read_text()))
    if faults:
        raise EngramRowsError(faults[0])


def _copy(directory: Path, source: Path, identity: Identity, rows: Sequence[RankRows], options: Options) -> Outcome:
    journals = [_Journal.take_up(directory, identity, r, source) for r in rows]
    check_space(directory, sum(journal.size for journal in journals), Plan("copy", []), options.margin_bytes)
    for journal in journals:
        journal.reserve()
    pace = _Pace(options, sum(journal.size for journal in journals))
    # A local disk that cannot be read is not going to be.
    away = network_mount(source.absolute(), parse_mounts(MOUNTS.read_text()))
    patience_s = options.patience_s if away else 0
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        files = [
            _Files(
                journal,
                stack.enter_context(_file(source / journal.rows.table.file)),
                stack.enter_context(_file(journal.partial, os.O_RDWR)),
            )
            for journal in journals
        ]
        # Layers take turns: a file that is written to cannot be read back at the same moment, another one can.
        jobs = sorted(
            ((of, index) for of in files for index in range(segment_count(of.journal.size))), key=lambda job: job[1]
        )
        work = functools.partial(_copy_segment, pace=pace, outcome=outcome, patience_s=patience_s)
        _for_each(options.workers, Packer, work, jobs)
        for of in files:
            _compare_rows(source / of.journal.rows.table.file, of.copy, of.journal.rows, patience_s)
            os.fsync(of.copy)
    for journal in journals:
        now = patiently(patience_s, functools.partial(_fingerprint, source, journal.rows))
        if now != journal.fingerprint:
            for stale in journals:
                stale.discard()
            raise EngramRowsError(
                f"{source / journal.rows.table.file} changed while it was copied; the copy was discarded: run it again"
            )
    for journal in journals:
        journal.partial.rename(journal.final)
    _sync_directory(directory)
    _write_manifest(directory, identity, journals)
    for journal in journals:
        journal.path.unlink()
    return outcome


@dataclass(frozen=True)
class _Files:
    """The open files of one layer."""

    journal: _Journal
    shard: int
    copy: int


def _copy_segment(packer: Packer, job: tuple[_Files, int], *, pace: _Pace, outcome: Outcome, patience_s: float) -> None:
    """Bring one segment to what the source has, and read it back; skip it when the disk has what is recorded."""
    of, index = job
    journal, shard, copy = of.journal, of.shard, of.copy
    span = segment_span(journal.size, index)
    recorded = journal.digests.get(index)
    pace.wait(span[1] - span[0])
    if recorded:
        found = packer.source.read(copy, span)
        if digest_of(found) == recorded:
            with pace.lock:
                outcome.kept_bytes += len(found)
            pace.done(len(found))
            return
    first = index * SEGMENT_ROWS
    r = journal.rows
    count = min(SEGMENT_ROWS, r.rows - first)
    weights, scales = r.weight_offset + first * WEIGHT_BYTES, r.scale_offset + first * SCALE_BYTES
    try:
        wanted = patiently(patience_s, lambda: packer.pack(shard, weights, scales, count))
    except OSError as error:
        raise EngramRowsError(
            f"{r.table.file}, bytes {weights} on: {error.strerror}; look at the source"
            " and its mount, then run again: what is copied is kept"
        ) from error
    digest = digest_of(wanted)
    if recorded and digest != recorded:
        raise EngramRowsError(
            f"{r.table.file} no longer has the rows that {journal.final.name} was copied from (segment {index});"
            " verify the checkpoint, then remove the copy and run again"
        )
    if recorded:
        blocks = write_changed_blocks(copy, wanted, packer.source.read(copy, span), span[0])
    else:
        write(copy, wanted, span[0])
        blocks = 0
    if not same(packer.source.read(copy, span), wanted):
        raise EngramRowsError(
            f"{journal.partial}: bytes [{span[0]}, {span[1]}) read back differ from those written: the disk is failing;"
            " look at its SMART log"
        )
    if not recorded:
        journal.record(index, digest)
    with pace.lock:
        outcome.copied_bytes += 0 if recorded else len(wanted)
        outcome.repaired_blocks += blocks
    pace.done(len(wanted))


def _compare_rows(shard: Path, copy: int, rows: RankRows, patience_s: float) -> None:
    """Compare some rows one by one, by the format's formula: another way than the one that packed them."""
    if not rows.rows:
        return
    buffer = Buffer()

    def source_row(i: int) -> bytes:
        with shard.open("rb", buffering=0) as file:
            weight = os.pread(file.fileno(), WEIGHT_BYTES, rows.weight_offset + i * WEIGHT_BYTES)
            return weight + os.pread(file.fileno(), SCALE_BYTES, rows.scale_offset + i * SCALE_BYTES)

    some = {0, rows.rows - 1, *(random.randrange(rows.rows) for _ in range(SAMPLED_ROWS))}  # noqa: S311 no secret
    for i in sorted(some):
        offset = row_offset(i)
        start = offset // BLOCK_BYTES * BLOCK_BYTES
        found = bytes(buffer.read(copy, (start, start + BLOCK_BYTES))[offset - start : offset - start + ROW_BYTES])
        if found != patiently(patience_s, functools.partial(source_row, i)):
            raise EngramRowsError(f"layer {rows.table.layer}: row {rows.start + i} of the copy is not the source's")


# The files of a copy


def _names(layer: int) -> tuple[str, str, str]:
    """Final, partial and journal file of a layer."""
    final = f"layer-{layer}.rows"
    return final, f"{final}.partial", f"{final}.journal"


def _entry(rows: RankRows) -> dict[str, Any]:
    """What the manifest says of a layer, but for the digests."""
    return {
        "layer": rows.table.layer,
        "file": _names(rows.table.layer)[0],
        "start": rows.start,
        "end": rows.end,
        "table_rows": rows.table.rows,
        "bytes": pack_bytes(rows.rows),
        "source": {
            "file": rows.table.file,
            "bytes": rows.table.file_bytes,
            "header_sha256": rows.table.header_sha256,
            "weight_offset": rows.weight_offset,
            "scale_offset": rows.scale_offset,
        },
    }


def _fingerprint(source: Path, rows: RankRows) -> list[int]:
    """Size and time of last change of the source shard. Opening it makes an NFS client ask the server."""
    with _file(source / rows.table.file) as shard:
        stat = os.fstat(shard)
        return [stat.st_size, stat.st_mtime_ns]


@dataclass
class _Journal:
    """The segments of one partial file that are on disk, verified: a line of JSON each, under a line of identity."""

    path: Path
    partial: Path
    final: Path
    rows: RankRows
    fingerprint: list[int]
    digests: dict[int, str]

    @property
    def size(self) -> int:
        return pack_bytes(self.rows.rows)

    @classmethod
    def take_up(cls, directory: Path, identity: Identity, rows: RankRows, source: Path) -> _Journal:
        """Open a layer's journal; begin it and the partial file anew unless they are of this very source and rank."""
        final, partial, path = (directory / name for name in _names(rows.table.layer))
        fingerprint = _fingerprint(source, rows)
        journal = cls(path, partial, final, rows, fingerprint, {})
        if final.exists():  # renamed, but no manifest came of it: as good as a partial file
            final.rename(partial)
        head = journal.head(identity)
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        if partial.exists() and lines[0] == head:
            for line in lines[1:-1]:  # what follows the last newline was cut off by a kill
                with contextlib.suppress(ValueError):
                    index, digest = json.loads(line)
                    journal.digests[index] = digest
        else:
            journal.discard()
        journal.save(identity)
        return journal

    def head(self, identity: Identity) -> bytes:
        return json.dumps({**vars(identity), **_entry(self.rows), "fingerprint": self.fingerprint}).encode()

    def save(self, identity: Identity) -> None:
        lines = [self.head(identity), *(json.dumps(item).encode() for item in self.digests.items()), b""]
        write_atomic(self.path, b"\n".join(lines))

    def record(self, index: int, digest: str) -> None:
        with self.path.open("ab") as file:  # one write of one line: threads append without a lock
            file.write(json.dumps([index, digest]).encode() + b"\n")
        self.digests[index] = digest

    def reserve(self) -> None:
        """Give the partial file its size and blocks now, so that the disk cannot become full half way."""
        try:
            with _file(self.partial, os.O_RDWR | os.O_CREAT) as fd:
                os.ftruncate(fd, self.size)
                if self.size:
                    os.posix_fallocate(fd, 0, self.size)
        except OSError:
            if not self.digests:
                self.discard()
            raise

    def discard(self) -> None:
        for path in (self.path, self.partial):
            path.unlink(missing_ok=True)


def _demote(directory: Path, identity: Identity, rows: Sequence[RankRows], source: Path) -> None:
    """Turn a damaged copy into an unfinished one whose journal holds all the manifest's digests."""
    entries = {entry["layer"]: entry for entry in read_manifest(directory)["layers"]}
    for r in rows:
        final, partial, path = (directory / name for name in _names(r.table.layer))
        digests = dict(enumerate(entries[r.table.layer]["segments"]))
        _Journal(path, partial, final, r, _fingerprint(source, r), digests).save(identity)
        if not final.exists():
            final.touch(mode=0o644)
    (directory / MANIFEST).unlink()
    _sync_directory(directory)


def _write_manifest(directory: Path, identity: Identity, journals: Sequence[_Journal]) -> None:
    layers = []
    for journal in journals:
        segments = [journal.digests[index] for index in range(segment_count(journal.size))]
        layers.append({**_entry(journal.rows), "segments": segments})
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    manifest = {**CONSTANTS, **vars(identity), "layers": layers, "created": now}
    write_atomic(directory / MANIFEST, json.dumps({**manifest, "sha256": sha256_document(manifest)}, indent=1).encode())


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_file(path: Path, size: int) -> list[str]:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        return [f"{path}: cannot be read: {error.strerror}"]
    try:
        found = os.fstat(fd).st_size
        if found != size:
            return [f"{path}: has {found} bytes, wanted {size}"]
        hole = os.lseek(fd, 0, os.SEEK_HOLE) if size else 0
        return [f"{path}: has a hole at byte {hole}, it would be read as zero rows"] if hole < size else []
    finally:
        os.close(fd)


def _describe(directory: Path, damaged: Mapping[int, Sequence[int]]) -> list[str]:
    return [
        f"{directory / _names(layer)[0]}: {len(indices)} of its 8 MiB segments have other bytes than were verified,"
        f" the first at byte {segment_span(sys.maxsize, indices[0])[0]}"
        for layer, indices in damaged.items()
    ]


def _allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def _length(entry: Mapping[str, Any], index: int) -> int:
    start, end = segment_span(entry["bytes"], index)
    return end - start


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB ({size / 2**30:.2f} GiB)"


# Running


@contextlib.contextmanager
def _file(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """An open descriptor, past the page cache."""
    fd = open_uncached(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory itself as the lock: it needs no file and ends with the process."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise EngramRowsError(f"{directory}: another run is working on this copy; wait for it") from error
    finally:
        os.close(fd)


@contextlib.contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Turn what the operating system refused into a fault with its next step."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise EngramRowsError(
                f"{error.filename or directory}: {error.strerror}; run again: what is copied is kept"
            ) from error
        stat = os.statvfs(directory)
        raise EngramRowsError(
            f"{directory}: its file system became full, {_size(stat.f_bavail * stat.f_frsize)} free; free some and run"
            " again: what is copied is kept"
        ) from error


class _Pace:
    """Holds the threads to a rate together and shows how far they are."""

    def __init__(self, options: Options, total: int) -> None:
        self.lock = threading.Lock()
        self.done = Meter(options.progress, total).done
        self._rate, self._due = options.bytes_per_s, time.monotonic()

    def wait(self, size: int) -> None:
        """Sleep until ``size`` more bytes may be read."""
        if not self._rate:
            return
        with self.lock:
            due = max(self._due, time.monotonic())
            self._due = due + size / self._rate
        time.sleep(max(0.0, due - time.monotonic()))


def _for_each(
    workers: int, make_state: Callable[[], Any], work: Callable[[Any, Any], None], jobs: Sequence[Any]
) -> None:
    """Run ``work(state, job)`` on threads that make one state each; the first exception ends them all."""
    states = threading.local()

    def run(job: Any) -> None:
        if not hasattr(states, "mine"):
            states.mine = make_state()
        work(states.mine, job)

    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(run, jobs):  # leaving the loop by an exception cancels the jobs that have not begun
            pass


def main(argv: Sequence[str] | None = None) -> int:
    """Verify or make a copy by hand; returns 0, or 1 after printing every fault."""
    parser = argparse.ArgumentParser(prog="gb10.engram_rows", description="Verify or make a rank's Engram rows.")
    parser.add_argument("verb", choices=["verify", "copy"])
    parser.add_argument("--directory", type=Path, required=True, help="where the copy is")
    parser.add_argument("--source", type=Path, required=True, help="the checkpoint; verify reads only its config.json")
    parser.add_argument("--model", default="deepseek-ai/DeepSeek-V4.1-Flash")
    parser.add_argument("--revision", required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--level", choices=LEVELS, default="manifest")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--mb-per-s", type=int, default=0, help="0: as fast as it goes")
    parser.add_argument("--margin-mb", type=int, default=1000, help="space to leave free")
    args = parser.parse_args(argv)
    options = Options(args.workers, args.mb_per_s * 10**6, args.margin_mb * 10**6)
    try:
        ranges = rank_ranges(read_config(args.source), args.tp, args.rank)
        faults = verify(args.directory, args.rank, args.tp, args.revision, ranges, args.level, options)
        if args.verb == "copy":
            identity = Identity(args.model, args.revision, args.tp, args.rank)
            rows = rank_rows(args.source, args.tp, args.rank)
            todo = plan(args.directory, identity, rows, faults)
            print(todo.action, make_present(args.directory, args.source, identity, rows, todo, options))
            faults = []
    except (EngramLayoutError, EngramRowsError) as error:
        faults = [str(error)]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
