"""Processes as the kernel shows them below /proc: whose they are, what they were started with, which port they hold."""

from __future__ import annotations

import contextlib
import pwd
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
# vLLM names its children so (set_process_title); its servers are found by their arguments.
CHILD_NAME = "VLLM::"


@dataclass(frozen=True)
class Process:
    """One process. `state` is the letter of proc(5); `memory_mib` its resident set, not what only a driver counts."""

    pid: int
    uid: int
    name: str
    state: str
    memory_mib: int
    control_group: str
    arguments: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return str(self.uid)

    @property
    def is_server(self) -> bool:
        """Whether this is what `vllm serve` or `python -m vllm.entrypoints...` becomes, in a container or not."""
        first = Path(self.arguments[0]).name if self.arguments else ""
        words = [Path(word).name for word in self.arguments[:5]]
        if first.startswith("python"):
            return "vllm" in words[1:2] or any(word.startswith("vllm.entrypoints") for word in words)
        return first == "vllm"

    @property
    def is_engine(self) -> bool:
        return self.name.startswith(CHILD_NAME) or self.is_server

    def __str__(self) -> str:
        command = " ".join(self.arguments[:4])[:120] or self.name
        return f"pid {self.pid} ({self.name}: {command}) of {self.owner}, state {self.state}, {self.memory_mib} MiB"


def read(pid: int, proc: Path = PROC) -> Process | None:
    """The process PID, None when there is none or it is a kernel's thread or a zombie."""
    folder = proc / str(pid)
    try:
        status = dict(re.findall(r"^(\w+):\s+(.*)$", (folder / "status").read_text(errors="replace"), re.MULTILINE))
        group = (folder / "cgroup").read_text().rpartition("::")[2].strip()
    except OSError:
        return None
    state = status["State"][0]
    if "VmSize" not in status or state in "ZX":
        return None
    arguments: tuple[str, ...] = ()
    if state != "D":  # reading the arguments of a process that hangs in the kernel can hang the reader
        with contextlib.suppress(OSError):
            arguments = _words(folder / "cmdline")
    return Process(
        pid=pid,
        uid=int(status["Uid"].split()[1]),
        name=status["Name"],
        state=state,
        memory_mib=int(status.get("VmRSS", "0").split()[0]) // 1024,
        control_group=group,
        arguments=arguments,
    )


def _words(path: Path) -> tuple[str, ...]:
    text = path.read_bytes().decode("utf-8", "surrogateescape")
    return tuple(text.removesuffix("\0").split("\0")) if text else ()


def all_of_host(proc: Path = PROC) -> Iterator[Process]:
    """Every user process."""
    for entry in proc.iterdir():
        if entry.name.isdigit() and (process := read(int(entry.name), proc)):
            yield process


def environment(pid: int, proc: Path = PROC) -> dict[str, str]:
    """The environment that PID was started with; raises OSError where it cannot be read."""
    return dict(word.partition("=")[::2] for word in _words(proc / str(pid) / "environ") if "=" in word)


def members(control_group: str, root: Path = CONTROL_GROUPS) -> list[int]:
    """Process ids at and below a control group (cgroup v2)."""
    if not control_group:
        return []
    pids: list[int] = []
    for path in Path(f"{root}{control_group}").rglob("cgroup.procs"):
        with contextlib.suppress(OSError):
            pids += [int(line) for line in path.read_text().split()]
    return pids


def listeners(proc: Path = PROC) -> dict[int, str]:
    """Local TCP port in LISTEN state (0A in proc_net_tcp) to the inode of its socket."""
    ports: dict[int, str] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    ports[int(fields[1].rpartition(":")[2], 16)] = fields[9]
    return ports


def listens(pid: int, listening: Mapping[int, str], proc: Path = PROC) -> tuple[int, ...]:
    """Those of the LISTENING ports that PID itself holds."""
    links = set()
    with contextlib.suppress(OSError):
        for link in (proc / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                links.add(str(link.readlink()))
    return tuple(sorted(port for port, inode in listening.items() if f"socket:[{inode}]" in links))


def holder(inode: str, proc: Path = PROC) -> int:
    """The process that holds the socket with INODE, 0 when none is seen."""
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                for link in (entry / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        if str(link.readlink()) == f"socket:[{inode}]":
                            return int(entry.name)
    return 0


@dataclass(frozen=True)
class Leftover:
    """A process in a rank's way, the ports it holds of those that the rank needs, and all that it listens on."""

    process: Process
    ports: tuple[int, ...]
    listens: tuple[int, ...] = ()

    def __str__(self) -> str:
        numbers = sorted({*self.ports, *self.listens})
        ports = f", listens on port {', '.join(map(str, numbers))}" if numbers else ""
        return f"{self.process}{ports}"


def leftovers(control_group: str, ports: Iterable[int], proc: Path = PROC) -> list[Leftover]:
    """Engine processes outside CONTROL_GROUP, and whatever holds one of PORTS there."""
    listening = listeners(proc)
    held: dict[int, list[int]] = {}
    for port in sorted(set(ports) & set(listening)):
        held.setdefault(holder(listening[port], proc), []).append(port)
    found = []
    for process in all_of_host(proc):
        inside = bool(control_group) and (process.control_group + "/").startswith(control_group + "/")
        if not inside and (process.is_engine or process.pid in held):
            own = listens(process.pid, listening, proc)
            found.append(Leftover(process, tuple(held.get(process.pid, ())), own))
    return sorted(found, key=lambda one: one.process.pid)
