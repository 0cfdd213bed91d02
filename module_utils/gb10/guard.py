"""Ends the engine before the host runs out of memory: run by gb10-memory-guard.service, as its own user with CAP_KILL.

A GB10 without memory neither kills nor panics. It hangs until somebody switches it off. MemAvailable falls there with
CUDA allocations too, since GPU and CPU share one memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import read_json, write_json

CONFIGURATION = Path("/etc/gb10/guard.json")
RECORD = Path("/var/lib/gb10/guard/last.json")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")

INTERVAL_S = 1.0
# Under twice the floor: an allocation at the speed of the memory takes seconds, not minutes, from there to the floor.
ALERT_INTERVAL_S = 0.1
SAMPLE_S = 5.0
SAMPLES = 12
PAGE_MIB = os.sysconf("SC_PAGESIZE") / (1 << 20)
MCL_CURRENT, MCL_FUTURE = 1, 2


class GuardError(Exception):
    """What keeps the guard from watching."""


@dataclass(frozen=True)
class Settings:
    """Floors in MiB of MemAvailable. `serving` and `started` are files whose times tell a rank that loads from one that
    serves."""

    mode: str
    startup_floor_mib: int
    steady_floor_mib: int
    startup_seconds: float
    control_group: str
    serving: Path = Path("/run/gb10/serving")
    started: Path = Path("/run/gb10/rank.json")

    @classmethod
    def parse(cls, document: Any) -> Settings:
        """Settings of the JSON DOCUMENT; GuardError lists all that is wrong with it."""
        if not isinstance(document, dict):
            raise GuardError(f"{CONFIGURATION} is missing: run the role memory_guard")
        faults = []
        if document.get("mode") not in ("observe", "enforce"):
            faults.append(f"mode is {document.get('mode')!r}, wanted observe or enforce")
        for key in ("startup_floor_mib", "steady_floor_mib", "startup_seconds"):
            value = document.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                faults.append(f"{key} is {value!r}, wanted a whole number above 0")
        group = document.get("control_group")
        if not isinstance(group, str) or not group.strip("/") or ".." in group:
            faults.append(
                f"control_group is {group!r}, wanted a path below {CONTROL_GROUPS}, for instance system.slice/X"
            )
        if faults:
            raise GuardError(f"{CONFIGURATION}: " + "; ".join(faults))
        return cls(
            mode=document["mode"],
            startup_floor_mib=document["startup_floor_mib"],
            steady_floor_mib=document["steady_floor_mib"],
            startup_seconds=float(document["startup_seconds"]),
            control_group=document["control_group"].strip("/"),
        )


# --------------------------------------------------------------------------------------------- reading


class Meminfo:
    """MemAvailable through one descriptor and one buffer, for as long as the guard lives."""

    def __init__(self, path: Path = PROC / "meminfo") -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._buffer = bytearray(4096)

    def available_mib(self) -> int:
        size = os.preadv(self._descriptor, [self._buffer], 0)
        start = self._buffer.find(b"MemAvailable:", 0, size)
        if start < 0:
            raise GuardError("/proc/meminfo has no line MemAvailable")
        return int(self._buffer[start + 13 : self._buffer.index(b"kB", start)]) // 1024


def group_processes(group: Path) -> list[int]:
    """Processes of a control group and of those below it (a container's), none when it does not exist."""
    pids: list[int] = []
    for folder, _, _ in os.walk(group):
        with contextlib.suppress(OSError):
            pids += [int(line) for line in Path(folder, "cgroup.procs").read_bytes().split()]
    return pids


def group_mib(group: Path) -> float:
    """Memory of a control group that cannot be dropped (anonymous and shared), MiB; without what a GPU driver holds."""
    try:
        lines = (group / "memory.stat").read_bytes().splitlines()
    except OSError:
        return 0.0
    fields = dict(line.split(b" ", 1) for line in lines)
    return (int(fields.get(b"anon", 0)) + int(fields.get(b"shmem", 0))) / (1 << 20)


@dataclass(frozen=True)
class Process:
    pid: int
    name: str
    mib: int

    def __str__(self) -> str:
        return f"{self.name} ({self.pid}) {self.mib} MiB"


def processes(proc: Path, without: set[int]) -> list[Process]:
    """All processes but WITHOUT by resident memory, the largest first; kernel threads have none."""
    found = []
    for entry in os.scandir(proc):
        if not entry.name.isdigit() or int(entry.name) in without:
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            resident = int(Path(entry.path, "statm").read_bytes().split()[1])
            if resident:
                name = Path(entry.path, "comm").read_bytes().decode("utf-8", "replace").strip()
                found.append(Process(int(entry.name), name, round(resident * PAGE_MIB)))
    return sorted(found, key=lambda process: -process.mib)


# --------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Sample:
    """Who held how much at a moment of the monotonic clock, MiB."""

    at: float
    available: int
    engine: float
    others: float
    largest: tuple[Process, ...] = ()


def cause(before: Sample, now: Sample) -> str:
    """One sentence: whose memory grew most between two samples, or who holds most where nobody's grew."""
    seconds = max(1, round(now.at - before.at))
    consumed = before.available - now.available
    engine, others = now.engine - before.engine, now.others - before.others
    # What no process shows: a GPU driver's allocations, page tables, the kernel's own.
    rest = consumed - engine - others
    largest = f", the largest is {now.largest[0]}" if now.largest else ""
    top = max(engine, others, rest)
    if top < max(16, 0.01 * now.available):
        return (
            f"nothing grew by much in {seconds} s: the engine's processes hold {now.engine:.0f} MiB, "
            f"other processes {now.others:.0f} MiB{largest}"
        )
    if top == engine:
        return f"the engine's own processes grew by {engine:.0f} MiB in {seconds} s to {now.engine:.0f} MiB"
    if top == others:
        return (
            f"something else took the memory: processes outside of the engine grew by {others:.0f} MiB in {seconds} s "
            f"to {now.others:.0f} MiB{largest}"
        )
    return (
        f"memory that belongs to no process grew by {rest:.0f} MiB in {seconds} s (GPU allocations, the kernel); "
        f"the engine's processes hold {now.engine:.0f} MiB, others {now.others:.0f} MiB{largest}"
    )


def modified(path: Path) -> float:
    """Time of the last change, 0 where there is no file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


@dataclass
class Guard:
    """One watch over one engine. `tick` looks once and returns how long to sleep."""

    settings: Settings
    available_mib: Callable[[], int]
    proc: Path = PROC
    control_groups: Path = CONTROL_GROUPS
    record: Path = RECORD
    kill: Callable[[int, int], None] = os.kill
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    say: Callable[[str], None] = lambda text: print(text, flush=True)
    lowest: int = 1 << 40
    _history: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _engine_since: float | None = None
    _warned: bool = False

    @property
    def group(self) -> Path:
        return self.control_groups / self.settings.control_group

    def phase(self) -> str:
        """'steady' once the group serves or the time for a start is over, 'startup' before."""
        settings = self.settings
        if 0 < modified(settings.started) <= modified(settings.serving):
            return "steady"
        if self._engine_since is not None and self.clock() - self._engine_since > settings.startup_seconds:
            return "steady"
        return "startup"

    def floor(self) -> int:
        startup = self.phase() == "startup"
        return self.settings.startup_floor_mib if startup else self.settings.steady_floor_mib

    def sample(self, available: int, ended: Iterable[int] = ()) -> Sample:
        """Who holds what now; ENDED are processes of the engine that may still be on their way out."""
        outside = processes(self.proc, {*group_processes(self.group), *ended, os.getpid()})
        return Sample(
            self.clock(), available, group_mib(self.group), sum(one.mib for one in outside), tuple(outside[:3])
        )

    def tick(self) -> float:
        available = self.available_mib()
        running = (self.group / "cgroup.procs").exists() and bool(group_processes(self.group))
        if not running:
            self._engine_since, self._warned = None, False
            self._history.clear()
            return INTERVAL_S
        if self._engine_since is None:
            self._engine_since = self.clock()
            self.lowest = available
        self.lowest = min(self.lowest, available)
        floor = self.floor()
        if available < floor:
            self._act(available, floor)
        elif available > floor * 1.25:
            self._warned = False
        if not self._history or self.clock() - self._history[-1].at >= SAMPLE_S:
            self._history.append(self.sample(available))
        return ALERT_INTERVAL_S if available < 2 * floor else INTERVAL_S

    def _act(self, available: int, floor: int) -> None:
        enforce = self.settings.mode == "enforce"
        if self._warned and not enforce:
            return
        phase, engine = self.phase(), group_mib(self.group)
        # First the deed, with nothing but signals; looking at other processes and writing come after it.
        killed, left = self._end() if enforce else ([], [])
        now = self.sample(available, killed)
        now = Sample(now.at, available, engine, now.others, now.largest)
        # Nothing is known to have grown where this is the first look at the engine.
        why = cause(self._history[0] if self._history else now, now)
        deed = (
            f"ended {len(killed)} processes of {self.settings.control_group}" if enforce else "observe: nothing ended"
        )
        largest = ", ".join(map(str, now.largest))
        self.say(
            f"<2>MemAvailable {available} MiB is under the {phase} floor of {floor} MiB: {deed}; cause: {why}; "
            f"largest outside: {largest}; now {self.available_mib()} MiB"
        )
        if left:
            self.say(f"<2>processes {left} do not end: in state D nothing ends them; if the host hangs, switch it off")
        self._warned = True
        self._history.clear()
        document = {
            "time": int(time.time()),
            "mode": self.settings.mode,
            "phase": phase,
            "cause": why,
            "available_mib": available,
            "floor_mib": floor,
            "killed": killed,
            "not_ended": left,
            "largest": [{"pid": one.pid, "name": one.name, "mib": one.mib} for one in now.largest],
        }
        try:
            write_json(self.record, document)
        except OSError as error:
            self.say(f"<4>{self.record} cannot be written: {error}")

    def _end(self, patience_s: float = 10.0) -> tuple[list[int], list[int]]:
        """Kill until the control group is empty: a process that forks is caught in the next round."""
        killed: list[int] = []
        deadline = self.clock() + patience_s
        while pids := group_processes(self.group):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    self.kill(pid, signal.SIGKILL)
            killed += [pid for pid in pids if pid not in killed]
            if self.clock() > deadline:
                return killed, pids
            self.sleep(0.02)
        return killed, []


# --------------------------------------------------------------------------------------------- running


def notify(text: str) -> None:
    """Tell systemd (sd_notify(3)); nothing where nobody listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.sendto(text.encode(), "\0" + address[1:] if address.startswith("@") else address)


def lock_memory() -> None:
    """Keep every page of this process in memory, those of the future too."""
    if ctypes.CDLL(None, use_errno=True).mlockall(MCL_CURRENT | MCL_FUTURE) != 0:
        raise GuardError(f"mlockall failed: {os.strerror(ctypes.get_errno())}; the unit needs LimitMEMLOCK=infinity")


def main() -> int:
    try:
        settings = Settings.parse(read_json(CONFIGURATION))
        guard = Guard(settings, Meminfo().available_mib)
        guard.sample(guard.available_mib())  # loads what the moment of need will use
        lock_memory()
    except (GuardError, ValueError, OSError) as error:
        print(f"<3>not watching: {error}", flush=True)
        return 1
    gc.freeze()
    print(
        f"{settings.mode}: floor {settings.startup_floor_mib} MiB while a rank loads, {settings.steady_floor_mib} MiB "
        f"when it serves, for {settings.control_group}; MemAvailable is {guard.available_mib()} MiB",
        flush=True,
    )
    notify("READY=1")
    told = 0.0
    while True:
        pause = guard.tick()
        now = time.monotonic()
        if now - told >= SAMPLE_S:
            lowest = f", lowest beside this engine {guard.lowest} MiB" if guard.lowest < 1 << 40 else ""
            notify(f"WATCHDOG=1\nSTATUS=MemAvailable {guard.available_mib()} MiB{lowest}")
            told = now
        time.sleep(pause)


if __name__ == "__main__":
    sys.exit(main())
