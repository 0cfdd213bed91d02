"""Prove that a checkpoint is whole: every file of it, against a manifest made from a trusted copy.

The manifest is one JSON object: ``{"format": "gb10-checkpoint", "version": 1, "model", "revision", "files": {path:
{"bytes", "sha256"}}, "sha256"}``. The digests are plain SHA-256 of whole files, the same that the Hugging Face hub
states for large files, so a manifest can be checked by anyone. ``python3 -m gb10.checkpoint --help`` does all of it by
hand.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .disk_io import BLOCK_BYTES, chunks
from .files import sha256_document, write_json
from .meter import Meter
from .safetensors import SafetensorsError, read_header

FORMAT, VERSION = "gb10-checkpoint", 1
INDEX = "model.safetensors.index.json"
PARTIAL = ".incomplete"  # what huggingface_hub calls a download that has not ended


class CheckpointError(Exception):
    """The checkpoint or the manifest cannot be judged or made; the message ends with the next step."""


@dataclass(frozen=True)
class Entry:
    """What the manifest says of one file; a size below 0 where nobody knows it."""

    size: int
    sha256: str


UNKNOWN = Entry(-1, "")


@dataclass(frozen=True)
class Manifest:
    """A model at a revision: path, relative to the checkpoint, to Entry."""

    model: str
    revision: str
    files: Mapping[str, Entry]

    @property
    def total_bytes(self) -> int:
        return sum(max(0, entry.size) for entry in self.files.values())

    @property
    def digest(self) -> str:
        """SHA-256 of what the manifest states."""
        return sha256_document(_content(self))


@dataclass(frozen=True)
class Partials:
    """Downloads that never ended below a cache."""

    paths: tuple[Path, ...]
    total_bytes: int
    oldest_s: float

    def __str__(self) -> str:
        days = self.oldest_s / 86400
        return f"{size_text(self.total_bytes)} in {len(self.paths)} abandoned partials, oldest {days:.0f} days"


# The manifest


def read_manifest(path: Path) -> Manifest:
    """Read and prove a manifest; raises CheckpointError."""
    try:
        content = json.loads(path.read_bytes())
        stated = content.pop("sha256")
        kind = (content["format"], content["version"])
        files = {name: Entry(int(e["bytes"]), str(e["sha256"])) for name, e in content["files"].items()}
        manifest = Manifest(content["model"], content["revision"], files)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is no checkpoint manifest: {error}; make it from a trusted copy") from error
    if kind != (FORMAT, VERSION) or stated != sha256_document(content):
        raise CheckpointError(f"{path}: is no {FORMAT} {VERSION}, or was changed; make it from a trusted copy")
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write ``manifest`` atomically."""
    write_json(path, {**_content(manifest), "sha256": manifest.digest})


def manifest_path(directory: Path) -> Path:
    """Where the manifest of the checkpoint in ``directory`` lies: beside it, so that whoever mounts one sees both."""
    return directory.with_name(f"{directory.name}.manifest.json")


def _content(manifest: Manifest) -> dict[str, Any]:
    files = {name: {"bytes": e.size, "sha256": e.sha256} for name, e in sorted(manifest.files.items())}
    return {
        "format": FORMAT,
        "version": VERSION,
        "files": files,
        "model": manifest.model,
        "revision": manifest.revision,
    }


def files_of(directory: Path) -> list[str]:
    """Relative paths of the checkpoint's files, links included; hidden ones and unfinished downloads are none of it."""
    found = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if not any(part.startswith(".") for part in name.parts) and (path.is_symlink() or path.is_file()):
            found.append(str(name))
    return [name for name in found if not name.endswith(PARTIAL) and not (directory / name).is_dir()]


# Judging


def check_files(directory: Path, manifest: Manifest, root: Path | None = None) -> list[str]:
    """Every file that is absent, a link to nowhere, a link out of ``root``, or of another size. Reads no content.

    A checkpoint in a Hugging Face cache is a folder of links into a folder of blobs, which may lie outside the model's
    folder: copied or exported without it, the links dangle, or on an NFS client point into the client's own disk. With
    ``root``, the tree that was copied or exported, such a link is found even where it happens to resolve.
    """
    faults, dangling, outside, readable = [], [], [], 0
    for name, entry in sorted(manifest.files.items()):
        path = directory / name
        target = Path(os.path.realpath(path))
        if path.is_symlink() and root and not target.is_relative_to(os.path.realpath(root)):
            outside.append(f"{path} -> {path.readlink()}")
            continue
        try:
            size = path.stat().st_size
        except OSError as error:
            if path.is_symlink() and error.errno == errno.ENOENT:
                dangling.append(f"{path} -> {path.readlink()}")
            else:
                faults.append(f"{path}: {error.strerror}" + (f", wanted {entry.size} bytes" if entry.size >= 0 else ""))
            continue
        readable += 1
        if entry.size >= 0 and size != entry.size:
            state = "truncated" if size < entry.size else "too long"
            faults.append(f"{path}: {state}: {size} bytes, wanted {entry.size}")
    said = f" the manifest says {manifest.total_bytes} bytes:" if manifest.total_bytes else ""
    for links, what in ((dangling, "dangling links"), (outside, f"links that leave {root}")):
        if links:
            faults.insert(
                0,
                f"{readable} of {len(manifest.files)} files readable ({len(links)} {what}; first: {links[0]});"
                f"{said} copy or export the blobs too, or resolve the links",
            )
    return faults


def judge(directory: Path, manifest: Manifest, root: Path | None, margin_bytes: int) -> list[str]:
    """Everything that is wrong with a checkpoint on this host's disk, without reading its tensors.

    That is check_files, check_headers where an index is wanted, check_revision; then, as the likely reasons, downloads
    below ``root`` that never ended, and whether the rest would fit beside ``margin_bytes``.
    """
    faults = check_files(directory, manifest, root)
    if INDEX in manifest.files and _size_of(directory / INDEX) >= 0:
        faults += check_headers(directory)
    if manifest.revision and not faults:
        faults += check_revision(directory, manifest.revision)
    if faults:
        cache = root or directory
        faults += [f"{path}: a download that never ended" for path in find_partials(cache).paths]
        faults += check_space(cache, directory, manifest, margin_bytes) if cache.exists() else []
    return faults


def verify_whole(
    directory: Path, manifest: Manifest, workers: int, state: Path | None = None, progress: Path | None = None
) -> list[str]:
    """check_digests after hashing every file. An interrupted run is taken up from ``state``, a finished one is not."""
    found = hash_files(directory, list(manifest.files), workers, state, progress)
    if state:
        state.unlink(missing_ok=True)
    return check_digests(directory, manifest, found)


def check_revision(directory: Path, revision: str) -> list[str]:
    """Whether the hub's own traces say another revision: a snapshot folder's name, or the notes of a plain download.

    No trace is no fault: a copy need not have any.
    """
    found = {}
    if directory.parent.name == "snapshots":
        found[directory] = directory.name
    for note in directory.glob(".cache/huggingface/download/**/*.metadata"):
        found[note] = (note.read_text().splitlines() or [""])[0]  # commit, etag, time
    wrong = {path: name for path, name in found.items() if name != revision}
    if not wrong:
        return []
    path, name = min(wrong.items())
    return [f"{path}: is of revision {name}, wanted {revision} ({len(wrong)} of {len(found)} traces say another one)"]


def check_headers(directory: Path) -> list[str]:
    """Every shard whose header and length, and every tensor whose shard, is not what the index says."""
    try:
        index = json.loads((directory / INDEX).read_bytes())
        weight_map, total = dict(index["weight_map"]), index.get("metadata", {}).get("total_size")
    except OSError as error:
        return [f"{directory / INDEX}: cannot be read: {error.strerror}"]
    except (ValueError, KeyError, TypeError) as error:
        return [f"{directory / INDEX}: is no index: {error!r}"]
    faults: list[str] = []
    found: dict[str, str] = {}
    bytes_found = 0
    for shard in sorted(set(weight_map.values())):
        try:
            header = read_header(directory / shard)
        except SafetensorsError as error:
            faults.append(str(error))
            continue
        found |= dict.fromkeys(header.tensors, shard)
        bytes_found += header.file_bytes - header.data_start
        lost = [name for name, of in weight_map.items() if of == shard and name not in header.tensors]
        extra = [name for name in header.tensors if weight_map.get(name) != shard]
        if lost:
            faults.append(f"{directory / shard}: lacks {len(lost)} tensors of the index, first {lost[0]}")
        if extra:
            faults.append(f"{directory / shard}: has {len(extra)} tensors not of the index, first {extra[0]}")
    if not faults and total is not None and bytes_found != total:
        faults.append(f"{directory}: its tensors have {bytes_found} bytes, the index says {total}")
    return faults


def hash_files(
    directory: Path, names: Sequence[str], workers: int, state: Path | None = None, progress: Path | None = None
) -> dict[str, Entry]:
    """Size and SHA-256 of each file, hashed by ``workers`` threads, the largest first.

    ``state`` is a journal of finished files: a run that was interrupted takes it up, and believes a line only while the
    file's size, inode and time of change are the same. Raises CheckpointError when a file cannot be read.
    """
    known = _read_state(state, directory)
    sizes = {name: (directory / name).stat().st_size for name in names}
    meter = Meter(progress, sum(sizes.values()))
    found: dict[str, Entry] = {}

    def work(name: str) -> None:
        before = _stamp(directory / name)
        if known.get(name, ("", []))[1] == before:
            found[name] = Entry(sizes[name], known[name][0])
            meter.done(sizes[name])
            return
        digest = hash_file(directory / name, meter)
        if _stamp(directory / name) != before:
            raise CheckpointError(f"{directory / name}: changed while it was read; verify again when nothing writes it")
        found[name] = Entry(before[0], digest)
        if state:
            with state.open("ab") as file:
                # The newline comes first, so that a line that a kill cut off costs only itself.
                file.write(b"\n" + json.dumps([str(directory), name, digest, before]).encode())

    if state:
        state.parent.mkdir(parents=True, exist_ok=True)
    try:
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(work, sorted(names, key=lambda name: -sizes[name])):
                pass
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or directory}: {error.strerror}; run again: what is done is kept"
        ) from error
    return found


def check_digests(directory: Path, manifest: Manifest, found: Mapping[str, Entry]) -> list[str]:
    """Every file whose content is not the manifest's."""
    return [
        f"{directory / name}: sha256 is {found[name].sha256}, wanted {entry.sha256}: remove it and fetch it again"
        for name, entry in sorted(manifest.files.items())
        if name in found and found[name] != entry
    ]


def hash_file(path: Path, meter: Meter | None = None) -> str:
    """SHA-256 of a file, as it is on the disk."""
    digest = hashlib.sha256()
    for data in chunks(path):
        digest.update(data)
        if meter:
            meter.done(len(data))
    return digest.hexdigest()


# Downloads that never ended, and space


def find_partials(cache: Path) -> Partials:
    """Unfinished downloads below ``cache`` that no process of this host holds open."""
    held = _open_files()
    paths, total, oldest = [], 0, 0.0
    for path in sorted(cache.rglob(f"*{PARTIAL}")):
        with contextlib.suppress(OSError):
            stat = path.lstat()
            if path.is_symlink() or (stat.st_dev, stat.st_ino) in held:
                continue
            paths.append(path)
            total += stat.st_blocks * 512
            oldest = max(oldest, time.time() - stat.st_mtime)
    return Partials(tuple(paths), total, oldest)


def remove_partials(cache: Path, min_age_s: float = 3600) -> Partials:
    """Remove what find_partials finds; the young are spared, as another host of a shared cache may be writing them."""
    found = find_partials(cache)
    old = [path for path in found.paths if time.time() - path.stat().st_mtime >= min_age_s]
    removed = Partials(tuple(old), sum(path.stat().st_blocks * 512 for path in old), found.oldest_s if old else 0.0)
    for path in old:
        path.unlink()
    return removed


def check_space(cache: Path, directory: Path, manifest: Manifest, margin_bytes: int) -> list[str]:
    """Whether the rest of the checkpoint fits: one fault that also says what abandoned downloads hold."""
    have = 0
    for name, entry in manifest.files.items():
        with contextlib.suppress(OSError):
            size = (directory / name).stat().st_size
            have += entry.size if size == entry.size else 0
    needed = manifest.total_bytes - have
    stat = os.statvfs(cache)
    free = stat.f_bavail * stat.f_frsize
    if not needed or needed + margin_bytes <= free:
        return []
    partials = find_partials(cache)
    hint = f"; {partials}: remove them with python3 -m gb10.checkpoint clean-partials {cache}" if partials.paths else ""
    return [f"{cache}: need {size_text(needed)} and {size_text(margin_bytes)} margin, free {size_text(free)}{hint}"]


@contextlib.contextmanager
def sole_writer(cache: Path, host: str = socket.gethostname()) -> Iterator[None]:
    """Hold ``cache`` against a second downloader, also one on another host; raises CheckpointError while it is held.

    The claim is a file made with O_EXCL, which NFS keeps exclusive, where advisory locks may silently not work. It
    tells who made it; a claim of this host whose process is gone is taken over, one of another host is not.
    """
    claim = cache / ".gb10-download"
    mine = json.dumps([host, os.getpid(), _started(os.getpid())])
    for _ in range(2):
        try:
            with claim.open("x") as file:
                file.write(mine)
            break
        except FileExistsError:
            try:
                holder, pid, started = json.loads(claim.read_text())
            except (OSError, ValueError):
                holder, pid, started = "unknown", 0, ""
            if holder != host or _started(pid) == started:
                raise CheckpointError(
                    f"{cache}: {holder} (process {pid}) downloads into it; wait for it, or remove {claim} if it is gone"
                ) from None
            claim.unlink(missing_ok=True)
    try:
        yield
    finally:
        if claim.exists() and claim.read_text() == mine:
            claim.unlink()


def size_text(size: int) -> str:
    """Decimal, as disks are sold, and binary, as df prints."""
    return f"{size / 1e9:.1f} GB ({size / 2**30:.1f} GiB)"


# Copying


def fetch(
    source: Path,
    directory: Path,
    manifest: Manifest,
    workers: int,
    progress: Path | None = None,
    *,
    known: Manifest | None = None,
    margin_bytes: int = 1 << 30,
    patience_s: float = 0,
) -> list[str]:
    """Copy what ``directory`` lacks of the manifest from ``source``, links resolved; returns the names of it.

    A file that is there with the right size is hashed, unless ``known``, what an earlier fetch proved, says what it is.
    Others are written under their name with ``.incomplete``, go on where an earlier run ended, and get their name when
    size and SHA-256 are the manifest's. A server that goes away meanwhile is awaited for ``patience_s`` seconds. Raises
    CheckpointError when a file is another one, and when nothing may be written now.
    """
    directory.mkdir(parents=True, exist_ok=True)
    there = [name for name, entry in manifest.files.items() if _size_of(directory / name) == entry.size]
    proven = {name: known.files[name] for name in there if known and name in known.files}
    proven |= hash_files(directory, [name for name in there if name not in proven], workers)
    lacking = [name for name, entry in manifest.files.items() if proven.get(name) != entry]
    faults = check_files(source, Manifest(manifest.model, manifest.revision, {n: manifest.files[n] for n in lacking}))
    faults += check_space(directory, directory, manifest, margin_bytes)
    if faults:
        raise CheckpointError("\n".join(faults))
    meter = Meter(progress, sum(manifest.files[name].size for name in lacking))

    def work(name: str) -> None:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + PARTIAL)
        resumed = partial.exists()
        digest = _append(source / name, partial, meter, patience_s)
        if digest != manifest.files[name].sha256 and resumed:  # by a run that copied something else
            partial.unlink()
            digest = _append(source / name, partial, meter, patience_s)
        if digest != manifest.files[name].sha256:
            partial.unlink()
            wanted = manifest.files[name].sha256
            raise CheckpointError(f"{source / name}: sha256 is {digest}, wanted {wanted}: not copied")
        partial.rename(path)

    try:
        with sole_writer(directory), ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(work, lacking):
                pass
    except OSError as error:
        full = f", {size_text(shutil.disk_usage(directory).free)} free" if error.errno == errno.ENOSPC else ""
        raise CheckpointError(
            f"{error.filename or directory}: {error.strerror}{full}; run again: what is copied is kept"
        ) from error
    return lacking


def _append(source: Path, partial: Path, meter: Meter, patience_s: float) -> str:
    """Bring ``partial`` to the length of ``source``; the digest of what the disk then has."""
    with partial.open("ab", buffering=0) as writer:
        kept = writer.tell() // BLOCK_BYTES * BLOCK_BYTES
        writer.truncate(kept)
        meter.done(kept)
        for data in chunks(source, kept, patience_s):
            done = 0
            while done < len(data):
                done += writer.write(data[done:])
            meter.done(done)
        os.fsync(writer.fileno())
        os.posix_fadvise(writer.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return hash_file(partial)


# Helpers


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def _read_state(state: Path | None, directory: Path) -> dict[str, tuple[str, list[int]]]:
    known: dict[str, tuple[str, list[int]]] = {}
    if state and state.exists():
        for line in state.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError):
                of, name, digest, stamp = json.loads(line)
                if of == str(directory):
                    known[name] = (digest, stamp)
    return known


def _open_files() -> set[tuple[int, int]]:
    """(device, inode) of every file that a process of this host holds open."""
    held = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            stat = link.stat()
            held.add((stat.st_dev, stat.st_ino))
    return held


def _started(pid: int) -> str:
    """Start time of a process, in clock ticks since boot; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Make a manifest, verify or copy a checkpoint, clean a cache; returns 0, or 1 after printing every fault."""
    parser = argparse.ArgumentParser(prog="gb10.checkpoint", description="Prove that a checkpoint is whole.")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("manifest", help="make a manifest from a trusted copy")
    verb.add_argument("directory", type=Path)
    verb.add_argument("manifest", type=Path)
    verb.add_argument("--model", required=True)
    verb.add_argument("--revision", required=True)
    verb = verbs.add_parser("verify", help="verify a checkpoint")
    verb.add_argument("directory", type=Path)
    verb.add_argument("manifest", type=Path)
    verb.add_argument("--whole", action="store_true", help="hash every byte")
    verb.add_argument("--root", type=Path, help="tree that no link may leave")
    verb.add_argument("--state", type=Path, help="journal that an interrupted run is taken up from")
    verb = verbs.add_parser("fetch", help="copy a checkpoint, verified")
    verb.add_argument("source", type=Path)
    verb.add_argument("directory", type=Path)
    verb.add_argument("manifest", type=Path)
    verb = verbs.add_parser("clean-partials", help="remove downloads that never ended")
    verb.add_argument("cache", type=Path)
    args = parser.parse_args(argv)
    try:
        faults = _run(args)
    except CheckpointError as error:
        faults = [str(error)]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def _run(args: argparse.Namespace) -> list[str]:
    if args.verb == "clean-partials":
        print(f"removed {remove_partials(args.cache)}")
        return []
    if args.verb == "manifest":
        found = hash_files(args.directory, files_of(args.directory), args.workers)
        write_manifest(args.manifest, Manifest(args.model, args.revision, found))
        return check_headers(args.directory)
    manifest = read_manifest(args.manifest)
    if args.verb == "fetch":
        print(f"copied {len(fetch(args.source, args.directory, manifest, args.workers))} files")
        return []
    faults = check_files(args.directory, manifest, args.root) or check_headers(args.directory)
    return faults or (verify_whole(args.directory, manifest, args.workers, args.state) if args.whole else [])


if __name__ == "__main__":
    sys.exit(main())
