"""One rank of the served model on this host: its configuration, its launch, its phase, its end.

Files: /etc/gb10/rank.json is what the playbooks want of this rank, /etc/gb10/launch.json the launch it belongs to
(written at every start of the group), /run/gb10/rank.json what the running process was started with.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import re
import select
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import release
from .files import read_json, sha256_document, write_json
from .systemd import Unit, show, systemctl

UNIT = "vllm-rank.service"
CONFIGURATION = Path("/etc/gb10/rank.json")
LAUNCH = Path("/etc/gb10/launch.json")
RUNNING = Path("/run/gb10/rank.json")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the name is the kernel's
# Left behind by Python's multiprocessing and by vLLM when a rank is killed.
SHARED_MEMORY_PREFIXES = ("psm_", "sem.mp-", "sem.loky-", "nccl-", "vllm")
# Below the ephemeral range (32768 and up), above the well-known ports.
MASTER_PORTS = range(21000, 29000)


class RankError(Exception):
    """What keeps a rank from being started, stopped or read, and the next step."""


def configuration() -> dict[str, Any]:
    """The wanted state of this host's rank. Raises RankError when the playbooks have not written it."""
    document = read_json(CONFIGURATION)
    if not isinstance(document, dict):
        raise RankError(f"{CONFIGURATION} is missing: run playbooks/serve.yml for this host first")
    return document


def launch() -> dict[str, Any]:
    """The launch this host was last told to join, empty before the first."""
    return read_json(LAUNCH) or {}


def running() -> dict[str, Any]:
    """What the rank process was started with, empty when it was not started since boot."""
    return read_json(RUNNING) or {}


def wanted_digest(document: dict[str, Any]) -> str:
    """Digest of all that decides what the process is: release, argv, environment, fabric, checkpoint."""
    keys = ("argv", "environment", "fabric", "checkpoint", "python_path", "world_size", "rank")
    link = Path(document["release_link"])
    return sha256_document([{key: document.get(key) for key in keys}, release.current(link)])


# --------------------------------------------------------------------------------------------- phases


@dataclass(frozen=True)
class Phase:
    """How far a starting rank is. `order` grows along a start; `percent` is that of the phase where one is known."""

    order: int
    name: str
    percent: int = 0

    @property
    def text(self) -> str:
        return f"{self.name} {self.percent} %" if self.percent else self.name


# Lines of vLLM 0.32 and 0.33 (v1/worker, v1/core/kv_cache_utils.py, model_loader, uvicorn).
_PHASES: tuple[tuple[int, str, re.Pattern[str]], ...] = (
    (1, "joined", re.compile(r"rank \d+ in world size \d+ is assigned")),
    (2, "loading", re.compile(r"Loading \w+ checkpoint shards:\s+(\d+)%")),
    (3, "loaded", re.compile(r"Model loading took|Loading weights took")),
    (4, "KV cache", re.compile(r"KV cache size")),
    (5, "graphs", re.compile(r"Capturing (?:CUDA )?graphs?.*?(\d+)%")),
    (6, "warmed", re.compile(r"init engine .* took|Graph capturing finished")),
    (7, "serving", re.compile(r"Application startup complete")),
)
STARTING = Phase(0, "starting")
DOWN = Phase(-1, "down")


def phase_of(journal: str) -> Phase:
    """The furthest phase that JOURNAL (the text of one invocation) shows."""
    best = STARTING
    for order, name, pattern in _PHASES:
        matches = pattern.findall(journal)
        if matches:
            percent = int(matches[-1]) if pattern.groups else 0
            best = Phase(order, name, percent)
    return best


def journal(unit: Unit, lines: int | None = None) -> str:
    """Text of the unit's present invocation, or of the last one when it is down; the last LINES of it when given."""
    # systemd forgets the invocation of a unit that ended well, and vLLM ends with exit code 0 when its engine dies.
    which = f"_SYSTEMD_INVOCATION_ID={unit.invocation}" if unit.invocation else f"--unit={unit.name}"
    command = ["journalctl", "--no-pager", "-q", "-o", "cat", which]
    command += ["--lines", str(lines or ("all" if unit.invocation else 60))]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    return result.stdout


# --------------------------------------------------------------------------------------------- reading


def processes_of(control_group: str) -> list[int]:
    """Living processes below a control group (cgroup v2)."""
    if not control_group:
        return []
    pids: list[int] = []
    for path in Path(f"/sys/fs/cgroup{control_group}").rglob("cgroup.procs"):
        with contextlib.suppress(OSError):
            pids += [int(line) for line in path.read_text().split()]
    return pids


def memory_available_mib() -> int:
    """MemAvailable of /proc/meminfo, MiB."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match.group(1)) // 1024 if match else 0


def state() -> dict[str, Any]:
    """All that status, readiness and drift detection need of this rank, in one dictionary."""
    unit = show(UNIT)[UNIT]
    wanted = read_json(CONFIGURATION)
    actual = running()
    active = unit.active in ("active", "activating")
    text = journal(unit) if unit.exists else ""
    phase = phase_of(text) if active else DOWN
    result: dict[str, Any] = {
        "unit": unit.active,
        "unit_result": unit.result,
        "exit_status": unit.exit_status,
        "main_pid": unit.main_pid,
        "invocation": unit.invocation,
        "active": active,
        "since": unit.entered_active if active else unit.entered_inactive,
        "phase": phase.text,
        "phase_order": phase.order,
        "launch_id": actual.get("launch_id", "") if active else "",
        "master_port": actual.get("master_port", 0) if active else 0,
        "staged_launch_id": launch().get("launch_id", ""),
        "memory_available_mib": memory_available_mib(),
        "configured": bool(wanted),
        "drift": "",
        "release": "",
        "release_faults": [],
        "last_lines": [] if active else [line for line in text.splitlines() if line.strip()][-15:],
    }
    if wanted:
        link = Path(wanted["release_link"])
        result["rank"] = wanted["rank"]
        result["release"] = release.current(link)
        result["release_faults"] = release.faults(link) if link.exists() else [f"{link} is missing"]
        if active:
            result["drift"] = drift(wanted, actual)
    return result


def drift(wanted: dict[str, Any], actual: dict[str, Any]) -> str:
    """One sentence on how the running rank differs from its configuration, empty when it does not."""
    if actual.get("digest") == wanted_digest(wanted):
        return ""
    parts = []
    now = release.current(Path(wanted["release_link"]))
    if actual.get("release") != now:
        parts.append(f"running release {actual.get('release', 'unknown')}, configured {now}")
    configured = actual.get("configured") or {}
    if configured.get("argv") != wanted["argv"]:
        removed = [word for word in configured.get("argv") or [] if word not in wanted["argv"]]
        added = [word for word in wanted["argv"] if word not in (configured.get("argv") or [])]
        parts.append(f"running argv has {removed}, configured has {added}")
    before, after = configured.get("environment") or {}, wanted["environment"]
    for key in sorted(set(before) | set(after)):
        if before.get(key) != after.get(key):
            parts.append(f"running {key}={before.get(key, 'unset')}, configured {key}={after.get(key, 'unset')}")
    return "; ".join(parts) or "running configuration differs from /etc/gb10/rank.json"


def wait(known_order: int, known_phase: str, seconds: float) -> dict[str, Any]:
    """Return `state` as soon as the phase is another than KNOWN or the rank is down, at the latest after SECONDS.

    Follows the journal through one child and looks at /proc, so that waiting takes nothing from a rank that loads.
    """
    deadline = time.monotonic() + seconds
    unit = show(UNIT)[UNIT]
    while unit.active in ("active", "activating") and not unit.main_pid and time.monotonic() < deadline:
        time.sleep(1)  # the pre-start step still runs
        unit = show(UNIT)[UNIT]
    if unit.active not in ("active", "activating") or not unit.main_pid:
        return state()
    command = ["journalctl", "--no-pager", "-q", "-o", "cat", "--lines=all", "--follow"]
    follower = subprocess.Popen(
        [*command, f"_SYSTEMD_INVOCATION_ID={unit.invocation}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert follower.stdout is not None  # noqa: S101 - a pipe was asked for
    text, phase = "", STARTING
    try:
        while time.monotonic() < deadline and Path(f"/proc/{unit.main_pid}").exists():
            if select.select([follower.stdout], [], [], 1)[0]:
                text += os.read(follower.stdout.fileno(), 1 << 16).decode("utf-8", "replace")
                lines, _, text = text.rpartition("\n")
                phase = max(phase, phase_of(lines), key=lambda one: (one.order, one.percent))
                if phase.order > known_order or (phase.order == known_order and phase.text != known_phase):
                    break
    finally:
        follower.kill()
        follower.wait()
    if not Path(f"/proc/{unit.main_pid}").exists():
        time.sleep(1)  # systemd needs a moment to see what the kernel has told already
    return state()


# --------------------------------------------------------------------------------------------- acting


def _listening_ports() -> set[int]:
    """Local TCP ports in LISTEN state (proc_net_tcp: state 0A)."""
    ports = set()
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def issue_launch(previous_port: int) -> dict[str, Any]:
    """A new launch: an id nobody had and a master port that is free here and was not the last one."""
    busy = _listening_ports() | {previous_port}
    free = [port for port in MASTER_PORTS if port not in busy]
    # Chance only has to keep an old rank from guessing the port.
    return {"launch_id": uuid.uuid4().hex[:12], "master_port": random.choice(free), "created": int(time.time())}  # noqa: S311


def stop(user: str, timeout: float) -> bool:
    """End the whole rank and prove it; RankError if something stays. Returns whether anything had to be ended."""
    unit = show(UNIT)[UNIT]
    group = unit.control_group
    was_up = unit.active not in ("inactive", "failed") or bool(processes_of(group))
    if was_up:
        systemctl("stop", UNIT, timeout=timeout)
        deadline = time.monotonic() + 10
        while left := processes_of(group):
            if time.monotonic() > deadline:
                raise RankError(
                    f"{UNIT} is stopped but processes {left} stay in its control group: "
                    "if they are in state D they cannot be killed, reboot this host"
                )
            time.sleep(0.2)
    if unit.active == "failed":
        systemctl("reset-failed", UNIT)
    return _remove_shared_memory(user) or was_up


def _remove_shared_memory(user: str) -> bool:
    try:
        owner = pwd.getpwnam(user).pw_uid
    except KeyError:
        return False
    removed = False
    for path in SHARED_MEMORY.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.name.startswith(SHARED_MEMORY_PREFIXES) and path.lstat().st_uid == owner:
                path.unlink()
                removed = True
    return removed


def start(wanted_launch: dict[str, Any], timeout: float) -> bool:
    """Start this rank as part of a launch. Returns False when it already runs in that launch."""
    unit = show(UNIT)[UNIT]
    if unit.active in ("active", "activating"):
        present = running().get("launch_id")
        if present == wanted_launch["launch_id"]:
            return False
        raise RankError(
            f"{UNIT} still runs in launch {present}, wanted {wanted_launch['launch_id']}: "
            "one rank is never restarted alone; run playbooks/serve.yml"
        )
    write_json(LAUNCH, wanted_launch)
    try:
        systemctl("start", UNIT, timeout=timeout)
    except Exception as error:
        failed = show(UNIT)[UNIT]
        lines = [line for line in journal(failed, 20).splitlines() if line.strip()]
        raise RankError("\n".join([str(error), *lines])) from error
    return True


def user_can_read(user: str, path: Path) -> bool:
    """Whether USER could read PATH: tried in a child process that becomes that user."""
    entry = pwd.getpwnam(user)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(OSError):
            os.setgid(entry.pw_gid)
            os.setuid(entry.pw_uid)
            with path.open("rb") as handle:
                handle.read(1)
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
