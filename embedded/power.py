"""Power of the embedded hosts. A host is one process session; killing it is a power loss."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from pathlib import Path

from .settings import CACHE, GATEWAY, HOST_MEMORY_MIB, STATE, EmbeddedError, Host

KERNEL = Path("/usr/bin/linux.uml")


def _session_members(session: int) -> list[int]:
    """Processes of a session. Field 6 of /proc/PID/stat, counted after the parenthesised name (proc(5))."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            members.append(int(stat.parent.name))
    return members


def _start_time(pid: int) -> str:
    """Start time in clock ticks since boot, empty for a process that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _preload() -> Path:
    """Compile the library that widens UML's register buffer; see its head for why."""
    source = Path(__file__).with_name("uml_xstate.c")
    library = CACHE / f"uml_xstate-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    if not library.exists():
        partial = library.with_suffix(f".partial.{os.getpid()}")
        subprocess.run(["gcc", "-O2", "-Wall", "-shared", "-fPIC", "-o", str(partial), str(source), "-ldl"], check=True)
        partial.rename(library)
    return library


def _session_of_record(record: Path) -> int:
    try:
        pid, started = record.read_text().split()
    except (OSError, ValueError):
        return 0
    session = int(pid)
    if _start_time(session) == started:
        return session
    # The first process is gone: only an orphan that still carries the host's name in its command line is ours.
    for member in _session_members(session):
        if f"umid={record.stem}".encode() in Path(f"/proc/{member}/cmdline").read_bytes():
            return session
    return 0


def session_of(host: Host) -> int:
    """Return the host's session id, 0 when it is off. A reused pid does not count: start times must match."""
    return _session_of_record(host.pid_record)


def anyone_on(state: Path) -> bool:
    """Whether a host of the fleet whose state is in the folder STATE is on."""
    return any(_session_of_record(record) for record in state.glob("*.pid"))


def is_on(host: Host) -> bool:
    return session_of(host) != 0


def power_on(host: Host, image: Path) -> None:
    """Start the host's kernel; returns at once, long before the host answers.

    A new disk is made on IMAGE. One that exists names its image itself, and fits no other.
    """
    if is_on(host):
        return
    disk = str(host.disk) if host.disk.exists() else f"{host.disk},{image}"
    management, fabric = host.taps
    address = f"ip={host.management_address}::{GATEWAY}:255.255.255.0:{host.name}:vec0:off"
    arguments = [
        f"umid={host.name}",
        f"uml_dir={STATE}/uml",
        f"mem={HOST_MEMORY_MIB}M",
        f"ubd0={disk}",
        "root=/dev/ubda",
        "rw",
        "con=null",
        "con0=null,fd:1",
        "ssl=null",
        f"vec0:transport=tap,ifname={management},depth=64,gro=1,mac={host.macs[0]}",
        f"vec1:transport=tap,ifname={fabric},depth=64,gro=1,mac={host.macs[1]}",
        f"systemd.hostname={host.name}",
        address,
        f"ip={host.fabric_address}:::255.255.255.0::vec1:off",
    ]
    with host.console.open("ab") as console:
        process = subprocess.Popen(
            [str(KERNEL), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"LD_PRELOAD": str(_preload())},
        )
    host.pid_record.write_text(f"{process.pid} {_start_time(process.pid)}\n")


def power_loss(host: Host) -> None:
    """Kill every process of the host at once, as pulled mains would; raise when one survives 10 s."""
    session = session_of(host)
    if session:
        deadline = time.monotonic() + 10
        while members := _session_members(session):
            for pid in members:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > deadline:
                raise EmbeddedError(f"{host.name}: processes {members} survive SIGKILL for 10 s; see /proc/PID/stack")
            time.sleep(0.05)
    host.pid_record.unlink(missing_ok=True)
