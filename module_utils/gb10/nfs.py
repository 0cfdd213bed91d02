"""The model store: one read-only NFS export of the head, one live mount of it on every worker.

Pure parsers first; `Server` and `Client` read a host's live state, say what is wrong and repair it. What counts is
always the kernel's view (/proc/self/mounts, /proc/fs/nfsd, etab), never a configuration file.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .systemd import systemctl

NFSD = Path("/proc/fs/nfsd")
ETAB = Path("/var/lib/nfs/etab")
MOUNTS = Path("/proc/self/mounts")


class NfsError(Exception):
    """What keeps the model store from working and the next step, one fault a line."""


# --------------------------------------------------------------------------------------------- parsing


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mounts."""

    source: str
    path: str
    kind: str
    options: frozenset[str]

    @property
    def is_nfs(self) -> bool:
        return self.kind in ("nfs", "nfs4")

    def option(self, key: str) -> str:
        prefix = f"{key}="
        return next((word.removeprefix(prefix) for word in self.options if word.startswith(prefix)), "")


def _unescape(text: str) -> str:
    """The kernel writes space, tab, newline and backslash of a path as octal (proc(5))."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def parse_mounts(text: str) -> list[Mount]:
    """Mounts in the kernel's order: a later one on the same path covers an earlier one."""
    rows = (line.split(" ") for line in text.splitlines() if line.count(" ") >= 3)
    return [Mount(_unescape(row[0]), _unescape(row[1]), row[2], frozenset(row[3].split(","))) for row in rows]


def layers(mounts: list[Mount], path: Path) -> list[Mount]:
    """All NFS layers on PATH, lowest first; the autofs trap below them is no layer."""
    return [mount for mount in mounts if mount.path == str(path) and mount.kind != "autofs"]


# What a host serves to others, or fetches from them; none of it is a disk of its own.
NETWORK_KINDS = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "gpfs", "beegfs", "fuse"}


def network_mount(path: Path, mounts: list[Mount]) -> Mount | None:
    """The network file system that ``path`` (absolute, links not followed) lies on, None for a disk of this host."""
    holders = [mount for mount in mounts if path.is_relative_to(mount.path)]
    # Of several on one path the last one is on top; an automount's trap shows beside what it mounts.
    top = max(reversed(holders), key=lambda mount: len(mount.path), default=None)
    # A program serves fuse.sshfs, fuse.glusterfs and the like; fuseblk is a disk of this host.
    return top if top and top.kind.partition(".")[0] in NETWORK_KINDS else None


def shared_path_faults(paths: Mapping[str, str], mounts: list[Mount]) -> list[str]:
    """Every name in ``paths`` (name to absolute path) whose path, links followed, lies on a network file system.

    For the caches of compilers: ranks that share one deadlock or read each other's half-written files.
    """
    faults = []
    for name, path in sorted(paths.items()):
        mount = network_mount(Path(os.path.realpath(path)), mounts)
        if mount:
            faults.append(f"{name} is {path}, on {mount.source} ({mount.kind}): choose a directory on this host's disk")
    return faults


def parse_etab(text: str) -> dict[tuple[str, str], frozenset[str]]:
    """(exported path, client) to options, as the kernel's export table was last given them."""
    exports = {}
    for line in text.splitlines():
        match = re.match(r"(\S+)\t([^(\s]+)\(([^)]*)\)", line)
        if match:
            exports[_unescape(match[1]), match[2]] = frozenset(match[3].split(","))
    return exports


def mount_fault(found: list[Mount], path: Path, source: str, version: str) -> str:
    """One sentence on how the live mount differs from the wish, empty when it is right."""
    if not found:
        return f"{path}: nothing is mounted, wanted {source} read-only"
    if len(found) > 1:
        sources = ", ".join(layer.source for layer in found)
        return f"{path}: {len(found)} mounts stacked ({sources}), wanted one of {source}"
    live = found[0]
    if not live.is_nfs or live.source != source:
        return f"{path}: {live.source} ({live.kind}) is mounted, wanted {source}"
    if "ro" not in live.options:
        return f"{path}: {source} is mounted read-write, wanted read-only"
    if version and not live.option("vers").startswith(version):
        return f"{path}: {source} is mounted as NFS {live.option('vers')}, wanted {version}"
    return ""


def options_fault(live: Mount, wanted: list[str]) -> str:
    """One sentence on wanted options that the kernel shows for every mount and does not show for this one."""
    shown = [word for word in wanted if word.partition("=")[0] in ("softerr", "hard", "timeo", "retrans", "nconnect")]
    shown += ["proto=rdma"] if "rdma" in wanted else []
    missing = [word for word in shown if word not in live.options]
    return f"{live.path}: {live.source} is mounted without {','.join(missing)}" if missing else ""


# --------------------------------------------------------------------------------------------- probing


@dataclass(frozen=True)
class Probe:
    """Outcome of a bounded look at a path: `fault` is empty when it answered."""

    fault: str = ""
    stale: bool = False
    silent: bool = False


def bounded(action: Callable[[], None], timeout: float) -> Probe:
    """Run ACTION in a child that is given up after TIMEOUT seconds, because a dead NFS server stops no clock.

    The child is killed; where it sleeps uninterruptibly it ends when the server answers, and nobody waits for it.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        message = ""
        try:
            action()
        except OSError as error:
            message = f"{error.errno}\0{error.strerror}: {error.filename}"
        with contextlib.suppress(OSError):
            os.write(writer, message.encode())
        os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline:
            if os.waitpid(child, os.WNOHANG)[0]:
                message = os.read(reader, 4096).decode("utf-8", "replace")
                if not message:
                    return Probe()
                number, _, text = message.partition("\0")
                return Probe(fault=text, stale=number == str(_ESTALE))
            time.sleep(0.02)
        os.kill(child, signal.SIGKILL)
        time.sleep(0.1)
        os.waitpid(child, os.WNOHANG)
        return Probe(fault=f"no answer in {timeout:.0f} s", silent=True)
    finally:
        os.close(reader)


_ESTALE = 116  # errno.ESTALE on Linux


def read_one_byte(path: Path) -> Callable[[], None]:
    """An action for `bounded`: open PATH anew, which asks the server whatever the client has cached."""

    def action() -> None:
        with path.open("rb", buffering=0) as handle:
            handle.read(1)

    return action


def probe_mount(path: Path, source: str, timeout: float, file: str = "") -> Probe:
    """Whether SOURCE is mounted on PATH and answers; FILE (relative) is read, else the folder is listed.

    Triggers an automount. The fault names path, source and the next step.
    """
    server = source.partition(":")[0]
    target = path / file

    def action() -> None:
        if file:
            read_one_byte(target)()
        else:
            list(path.iterdir())

    probe = bounded(action, timeout)
    if probe.silent:
        fault = f"{path} from {source} gives no answer in {timeout:.0f} s: start the export on {server}, then retry"
        return Probe(fault, silent=True)
    if probe.fault:
        return Probe(f"{path} from {source}: {probe.fault}: check the export on {server}", stale=probe.stale)
    fault = mount_fault(layers(parse_mounts(MOUNTS.read_text()), path), path, source, "")
    return Probe(f"{fault}: rerun playbooks/storage.yml" if fault else "")


# --------------------------------------------------------------------------------------------- server and client


@dataclass
class Outcome:
    """What was repaired and what is still wrong."""

    repaired: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def _run(*command: str, timeout: float = 60) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise NfsError(f"{' '.join(command)} gave no answer in {timeout:.0f} s") from error
    if result.returncode != 0:
        raise NfsError(f"{' '.join(command)} failed with {result.returncode}: {result.stderr.strip()}")
    return result.stdout


def search_faults(path: Path) -> list[str]:
    """Folders above and at PATH that other users may not search; root_squash makes every NFS client one of them."""
    return [
        f"{folder}: mode {folder.stat().st_mode & 0o7777:04o} lets no other user in: chmod o+x {folder}"
        for folder in [*reversed(path.parents), path]
        if not folder.stat().st_mode & 0o001
    ]


def serve(path: Path, client: str, options: list[str], threads: int, *, check: bool) -> Outcome:
    """Make the kernel export PATH to CLIENT (an address range) with OPTIONS and THREADS, and prove it."""
    outcome = Outcome()

    def exported() -> bool:
        live = parse_etab(ETAB.read_text()) if ETAB.exists() else {}
        return set(options) <= live.get((str(path), client), frozenset())

    if not exported():
        outcome.repaired.append(f"export {path} to {client}")
        if not check:
            _run("exportfs", "-ra")
            if not exported():
                outcome.faults.append(f"{path} is not exported to {client} with {','.join(options)} after exportfs -ra")
    counter = NFSD / "threads"
    found = int(counter.read_text()) if counter.exists() else 0
    if found != threads:
        outcome.repaired.append(f"NFS threads {found} -> {threads}")
        if not check:
            # Writing 0 to a running server would stop it; any other count takes effect at once.
            counter.write_text(f"{threads}\n")
    return outcome


def attach(
    path: Path,
    source: str,
    version: str,
    unit: str,
    file: str,
    options: list[str],
    *,
    timeout: float,
    in_use: bool,
    check: bool,
) -> Outcome:
    """Make the live mount on PATH right: one answering layer of SOURCE. With IN_USE a rank runs on it and it stays."""
    outcome = Outcome()
    probe = probe_mount(path, source, timeout, file)
    live = layers(parse_mounts(MOUNTS.read_text()), path)
    fault = mount_fault(live, path, source, version)
    # Other options than the wanted ones are no reason to end a rank that works; they come with the next mount.
    drift = "" if fault or in_use else options_fault(live[0], options)
    if not probe.fault and not fault and not drift:
        return outcome
    reason = fault or probe.fault or drift
    if probe.silent and not fault:
        # The right mount of a server that is away comes back with the server; a new one would hang just the same.
        outcome.faults.append(probe.fault)
        return outcome
    if in_use:
        outcome.faults.append(
            f"{reason}; the rank is running, so the mount stays: stop the group first (playbooks/stop.yml)"
        )
        return outcome
    outcome.repaired.append(reason)
    if check:
        return outcome
    for _ in range(len(live)):
        with contextlib.suppress(NfsError):
            _run("umount", "-l", str(path))
    with contextlib.suppress(Exception):
        systemctl("reset-failed", f"{unit}.mount", f"{unit}.automount")
    systemctl("restart", f"{unit}.automount", timeout=timeout + 30)
    probe = probe_mount(path, source, timeout, file)
    if probe.fault:
        outcome.faults.append(probe.fault)
    fault = mount_fault(layers(parse_mounts(MOUNTS.read_text()), path), path, source, version)
    if fault and not probe.fault:
        outcome.faults.append(f"{fault} even after mounting anew")
    return outcome


@contextlib.contextmanager
def mounted(source: str, at: Path, options: list[str]) -> Iterator[Path]:
    """Mount SOURCE on AT while the block runs, and what an earlier block left there no longer."""
    at.mkdir(parents=True, exist_ok=True)
    for _ in layers(parse_mounts(MOUNTS.read_text()), at):
        _run("umount", "-l", str(at))
    _run("mount", "-t", "nfs", "-o", ",".join([*options, "retry=0"]), source, str(at))
    try:
        yield at
    finally:
        _run("umount", "-l", str(at))
