"""A host's memory, and room for a model that is about to be loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .host_command import CommandError, run_bounded

MEMINFO = Path("/proc/meminfo")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
SYNC_TIMEOUT_S = 60.0

_LINE = re.compile(r"^(MemTotal|MemFree|MemAvailable):\s+(\d+) kB$", re.MULTILINE)


class MeminfoError(Exception):
    """The kernel's table of memory is not what proc(5) says."""


@dataclass(frozen=True)
class Memory:
    """MiB, rounded down."""

    total: int
    free: int
    available: int


def parse(text: str) -> Memory:
    """Memory of /proc/meminfo's TEXT (proc_meminfo(5)); MeminfoError names what is missing."""
    found = {name: int(kib) // 1024 for name, kib in _LINE.findall(text)}
    try:
        return Memory(found["MemTotal"], found["MemFree"], found["MemAvailable"])
    except KeyError as error:
        raise MeminfoError(f"{MEMINFO} has no line {error.args[0]}") from error


def drop_wanted(memory: Memory, floor_mib: int) -> bool:
    """Whether the cache keeps a load from FLOOR MiB that the host could give.

    CUDA on a GB10 takes MemFree for all there is, so pages of the last model's files count as used.
    """
    return memory.free < floor_mib


def make_room(floor_mib: int, meminfo: Path = MEMINFO, drop_caches: Path = DROP_CACHES) -> str:
    """Drop the page cache where MemFree is under FLOOR MiB, and say in one sentence what was found and done."""
    before = parse(meminfo.read_text())
    if not drop_wanted(before, floor_mib):
        return f"MemFree is {before.free} MiB, wanted {floor_mib} MiB: the page cache stays"
    try:
        # Only clean pages can be dropped. A server of a mount that is gone must not keep the rank from its refusal.
        run_bounded(["sync"], SYNC_TIMEOUT_S)
        drop_caches.write_text("3\n")
    except (CommandError, OSError) as error:
        return f"MemFree is {before.free} MiB, wanted {floor_mib} MiB, and the page cache could not be dropped: {error}"
    after = parse(meminfo.read_text())
    return (
        f"dropped the page cache: MemFree {before.free} to {after.free} MiB, MemAvailable {before.available} to "
        f"{after.available} MiB, wanted {floor_mib} MiB"
    )
