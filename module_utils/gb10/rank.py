"""One rank of the served model on this host: its configuration, its launch, its phase, its end.

Files: /etc/gb10/rank.json is what the playbooks want of this rank, /etc/gb10/launch.json the launch it belongs to
(written at every start of the group), /run/gb10/rank.json what the running process was started with, and
/run/gb10/serving is there once the group has generated a token.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import re
import select
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import causes, launches, processes, release
from .compare import argument_faults, environment_faults, masked, masked_words
from .files import read_json, sha256_document, write_json
from .systemd import SystemdError, Unit, show, systemctl

UNIT = "vllm-rank.service"
CONFIGURATION = Path("/etc/gb10/rank.json")
LAUNCH = Path("/etc/gb10/launch.json")
RUNNING = Path("/run/gb10/rank.json")
SERVING = Path("/run/gb10/serving")
API_KEY = Path("/etc/gb10/api-key")
CREDENTIAL = "api-key"
GUARD_RECORD = Path("/var/lib/gb10/guard/last.json")
MEMINFO = Path("/proc/meminfo")
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
    keys = ("argv", "environment", "fabric", "checkpoint", "python_path", "container", "world_size", "rank")
    link = Path(document["release_link"])
    return sha256_document([{key: document.get(key) for key in keys}, release.current(link)])


def ports(document: Mapping[str, Any], launched: Mapping[str, Any]) -> list[int]:
    """TCP ports that this rank has to listen on: the API's and, on rank 0, the rendezvous' of LAUNCHED."""
    own = [int(port) for port in document.get("ports") or []]
    return own + ([int(launched["master_port"])] if document.get("rank") == 0 and launched.get("master_port") else [])


# --------------------------------------------------------------------------------------------- the key


def read_api_key(path: Path) -> str:
    """The key in PATH without the line end that an editor leaves; empty where there is no file."""
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
    except FileNotFoundError:
        return ""


def credential(inherited: Mapping[str, str]) -> Path | None:
    """The file in which systemd hands the key to the unit, None where it hands over none."""
    path = Path(inherited.get("CREDENTIALS_DIRECTORY", "/nonexistent")) / CREDENTIAL
    return path if path.is_file() else None


def api_key_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """VLLM_API_KEY from the credential that systemd handed to the unit, nothing where it hands over none.

    The environment of a process is read by its own user and root only; its arguments are read by everybody.
    """
    path = credential(inherited)
    key = read_api_key(path) if path else ""
    return {"VLLM_API_KEY": key} if key else {}


def api_key_stamp() -> int:
    """When the key of this host was last written (nanoseconds), 0 where it has none: tells a new key from the old one
    without saying anything about either."""
    return API_KEY.stat().st_mtime_ns if API_KEY.exists() else 0


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
SERVED = Phase(7, "serving")


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
    if not unit.invocation and unit.left_inactive:
        command.append(f"--since=@{int(unit.left_inactive)}")  # nothing of the launch before
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    return result.stdout


# --------------------------------------------------------------------------------------------- the process


@dataclass(frozen=True)
class Seen:
    """What the kernel shows of the rank's process; `unknown` says why it shows nothing."""

    pid: int = 0
    argv: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    unknown: str = ""


def see(unit: Unit) -> Seen:
    """Arguments and environment of the engine in the unit's control group, a container's included."""
    candidates = [unit.main_pid, *processes.members(unit.control_group)]
    for pid in dict.fromkeys(pid for pid in candidates if pid):
        process = processes.read(pid)
        if process and process.is_server and "serve" in process.arguments:
            words = process.arguments
            try:
                return Seen(pid, words[words.index("serve") :], processes.environment(pid))
            except OSError as error:
                return Seen(pid, words[words.index("serve") :], unknown=f"its environment cannot be read: {error}")
    return Seen(unknown="no process of the unit is an engine (yet)")


def drift(wanted: Mapping[str, Any], actual: Mapping[str, Any], seen: Seen) -> dict[str, list[str]]:
    """How the running rank differs from its configuration: sentences by release, arguments, environment, other.

    ACTUAL is the record of the start; arguments and environment are those of the process itself where it is SEEN.
    """
    now = release.current(Path(wanted["release_link"]))
    running = actual.get("release", "unknown")
    configured = actual.get("configured") or {}
    port = ["--master-port", str(actual["master_port"])] if actual.get("master_port") else []
    argv = list(seen.argv) or [*(configured.get("argv") or []), *port]
    before = configured.get("environment") or {}
    environment = before if seen.environment is None else seen.environment
    removed = [key for key in before if key not in wanted["environment"]]
    found = {
        "release": [f"running release {running}, configured {now}"] if running != now else [],
        "arguments": argument_faults([*wanted["argv"], *port], argv),
        "environment": environment_faults(wanted["environment"], environment, removed),
        "other": [],
    }
    if seen.environment is not None:
        fabric = {key: value for key, value in (actual.get("environment") or {}).items() if key not in before}
        found["environment"] += environment_faults(fabric, seen.environment)
    if actual.get("api_key", 0) != api_key_stamp():
        found["other"].append("the API key was replaced after the rank was started")
    if not any(found.values()) and actual.get("digest") != wanted_digest(dict(wanted)):
        found["other"].append(f"running configuration differs from {CONFIGURATION}")
    return found


# --------------------------------------------------------------------------------------------- reading


def meminfo() -> dict[str, int]:
    """/proc/meminfo, KiB."""
    return {key: int(value) for key, value in re.findall(r"^(\w+):\s+(\d+) kB", MEMINFO.read_text(), re.MULTILINE)}


def memory_available_mib() -> int:
    """MemAvailable, MiB."""
    return meminfo().get("MemAvailable", 0) // 1024


def kernel_log(since: float, lines: int = 100) -> str:
    """The kernel's last LINES since SINCE (epoch)."""
    command = ["journalctl", "--no-pager", "-q", "-k", "-o", "cat", f"--since=@{since:.0f}", f"--lines={lines}"]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False).stdout


def host_facts(unit: Unit) -> causes.HostFacts:
    """What tells causes with the same line apart."""
    floor = (read_json(CONFIGURATION) or {}).get("memory_floor_mib", 0)
    return causes.HostFacts(
        memlock=int(unit.memory_lock) if unit.memory_lock.isdigit() else None,
        kernel=os.uname().release,
        kernel_command_line=Path("/proc/cmdline").read_text(),
        meminfo=meminfo(),
        memory_floor_mib=int(floor),
    )


# What gb10.prestart and gb10.launcher print before they end.
REFUSAL = re.compile(r"refusing to start(?: rank \d+)?: (.*)")


def guard_record(unit: Unit) -> dict[str, Any]:
    """What the memory guard did or saw since UNIT was last started, empty when nothing."""
    record = read_json(GUARD_RECORD) or {}
    return record if record.get("time", 0) >= unit.left_inactive > 0 else {}


def observed(record: Mapping[str, Any]) -> str:
    """A sentence on what the guard would have ended the engine for; empty where it did, or saw nothing."""
    if not record or record.get("killed"):
        return ""
    return (
        f"the memory guard only observes: MemAvailable was {record['available_mib']} MiB, under the {record['phase']} "
        f"floor of {record['floor_mib']} MiB; {record['cause']}"
    )


def likely_cause(unit: Unit, text: str) -> str:
    """The known cause of the end of UNIT that its lines, the kernel's and the guard's suggest; empty when none does."""
    if refused := REFUSAL.findall(text):
        return f"the host refused it: {refused[0]}"
    parts = [text, f"unit result {unit.result} exit status {unit.exit_status}"]
    if unit.left_inactive:
        parts.append(kernel_log(unit.left_inactive))
    guard = guard_record(unit)
    if guard.get("killed"):
        parts.append(f"gb10-memory-guard ended it: {guard.get('cause')}")
    row = causes.likely("\n".join(parts), host_facts(unit))
    return str(row) if row else ""


def state() -> dict[str, Any]:
    """All that status, readiness and drift detection need of this rank, in one dictionary."""
    unit = show(UNIT)[UNIT]
    wanted = read_json(CONFIGURATION)
    actual = running()
    active = unit.active in ("active", "activating")
    served = launches.ready_launch(actual.get("launch_id", "")) if active else {}
    phase, text = DOWN, ""
    if served:
        phase = SERVED  # a journal that runs for weeks has lost its first lines, and reading it takes long
    elif unit.exists:
        text = journal(unit, None if active else 200)
        phase = phase_of(text) if active else DOWN
    now = time.time()
    # vLLM ends with exit status 0 when its engine dies, so a result of success proves nothing.
    failed = not active and (bool(text) or unit.result != "success")
    result: dict[str, Any] = {
        "unit": unit.active,
        "unit_result": unit.result,
        "exit_status": unit.exit_status,
        "main_pid": unit.main_pid,
        "invocation": unit.invocation,
        "active": active,
        "needs_reload": unit.needs_reload,
        "since": unit.entered_active if active else unit.entered_inactive,
        "age": round(now - unit.left_inactive, 1) if active and unit.left_inactive else 0.0,
        "phase": phase.text,
        "phase_order": phase.order,
        "phase_name": phase.name,
        "phase_percent": phase.percent,
        "typical": launches.typical(launches.history(), wanted["profile"]) if wanted and "profile" in wanted else {},
        "ready_s": (served.get("phases") or {}).get(launches.READY, 0),
        "launch_id": actual.get("launch_id", "") if active else "",
        "master_port": actual.get("master_port", 0) if active else 0,
        "staged_launch_id": launch().get("launch_id", ""),
        "memory_available_mib": memory_available_mib(),
        "memory_total_mib": meminfo().get("MemTotal", 0) // 1024,
        "guard": observed(guard_record(unit)),
        "log_missing": served.get("log_missing") or [],
        "configured": bool(wanted),
        "drift": "",
        "differs": {},
        "process": {},
        "release": "",
        "running_release": actual.get("release", "") if active else "",
        "release_faults": [],
        "last_lines": [] if active else [line for line in text.splitlines() if line.strip()][-15:],
        "cause": likely_cause(unit, text) if failed and not actual.get("stopped") else "",
    }
    if wanted:
        link = Path(wanted["release_link"])
        result["rank"] = wanted["rank"]
        result["release"] = release.current(link)
        result["release_faults"] = release.faults(link) if link.exists() else [f"{link} is missing"]
        if active:
            seen = see(unit)
            differences = drift(wanted, actual, seen)
            result["differs"] = {key: bool(sentences) for key, sentences in differences.items()}
            result["drift"] = "; ".join(sentence for sentences in differences.values() for sentence in sentences)
            result["process"] = {
                "pid": seen.pid,
                "argv": masked_words(seen.argv),
                "environment": masked(seen.environment or {}),
                "unknown": seen.unknown,
            }
    return result


def ended(pidfd: int, seconds: float, *others: int) -> tuple[bool, list[int]]:
    """Wait SECONDS for the end of the process behind PIDFD or input on OTHERS; whether it ended, whose input."""
    readable = select.select([pidfd, *others], [], [], max(0.0, seconds))[0]
    return pidfd in readable, [one for one in readable if one != pidfd]


def follow(pid: int, lines: Sequence[str], known: tuple[int, str], seconds: float) -> None:
    """Return when the output of LINES (a command) shows another phase than KNOWN, when PID ends, or after SECONDS.

    Sleeps in the kernel meanwhile: waiting takes nothing from a rank that loads, and its end is seen at once.
    """
    deadline = time.monotonic() + seconds
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    follower = subprocess.Popen(lines, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert follower.stdout is not None  # noqa: S101 - a pipe was asked for
    text, phase, source = "", STARTING, [follower.stdout.fileno()]
    try:
        while (left := deadline - time.monotonic()) > 0:
            over, readable = ended(pidfd, left, *source)
            if over:
                return
            for one in readable:
                chunk = os.read(one, 1 << 16)
                if not chunk:
                    source = []  # the journal's reader ended; the process is still watched
                text += chunk.decode("utf-8", "replace")
            complete, _, text = text.rpartition("\n")
            phase = max(phase, phase_of(complete), key=lambda one: (one.order, one.percent))
            if phase.order > known[0] or (phase.order == known[0] and phase.text != known[1]):
                return
    finally:
        follower.kill()
        follower.wait()
        os.close(pidfd)


def wait(known_order: int, known_phase: str, seconds: float) -> dict[str, Any]:
    """`state` as soon as the phase is another than KNOWN or the rank is down, at the latest after SECONDS."""
    deadline = time.monotonic() + seconds
    unit = show(UNIT)[UNIT]
    while unit.active == "activating" and not unit.main_pid and time.monotonic() < deadline:
        time.sleep(1)  # the pre-start step still runs
        unit = show(UNIT)[UNIT]
    if unit.active not in ("active", "activating") or not unit.main_pid:
        return state()
    command = ["journalctl", "--no-pager", "-q", "-o", "cat", "--lines=all", "--follow"]
    command.append(f"_SYSTEMD_INVOCATION_ID={unit.invocation}")
    follow(unit.main_pid, command, (known_order, known_phase), deadline - time.monotonic())
    found = state()
    settled = time.monotonic() + 3
    while found["active"] and not processes.read(unit.main_pid) and time.monotonic() < settled:
        time.sleep(0.2)  # systemd needs a moment to see what the kernel has told already
        found = state()
    return found


def record_ready() -> dict[str, float]:
    """Remember that the group of this rank serves, and how long each phase of its launch took here."""
    unit, wanted, actual = show(UNIT)[UNIT], configuration(), running()
    if unit.active != "active":
        raise RankError(f"{UNIT} is {unit.active}, wanted active: a rank that does not run cannot be ready")
    command = ["journalctl", "--no-pager", "-q", "-o", "short-unix", f"_SYSTEMD_INVOCATION_ID={unit.invocation}"]
    text = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False).stdout
    times = launches.phase_times(text, unit.left_inactive, lambda line: phase_of(line).name if line else "")
    times.pop(STARTING.name, None)
    ready = time.time() - unit.left_inactive
    # Looked for now, while the journal has all of the launch. The head logs them, once.
    missing = [line for line in wanted.get("log_proof") or [] if line not in text] if wanted["rank"] == 0 else []
    launches.record(wanted["profile"], actual["launch_id"], times, ready, missing)
    SERVING.write_text(actual["launch_id"] + "\n", encoding="utf-8")
    return times | {launches.READY: round(ready, 1)}


# --------------------------------------------------------------------------------------------- acting


def issue_launch(previous_port: int) -> dict[str, Any]:
    """A new launch: an id nobody had and a master port that is free here and was not the last one."""
    busy = {*processes.listeners(), previous_port}
    free = [port for port in MASTER_PORTS if port not in busy]
    # Chance only has to keep an old rank from guessing the port.
    return {"launch_id": uuid.uuid4().hex[:12], "master_port": random.choice(free), "created": int(time.time())}  # noqa: S311


def _user_id(user: str) -> int:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return -1


def stop(user: str, timeout: float, *, at_once: bool = False) -> bool:
    """End the whole rank and prove it; RankError lists all that stays. Returns whether anything had to be ended.

    AT_ONCE kills it: one that still loads has nothing to bring to an end, and takes up to half a minute for it.
    """
    unit = show(UNIT)[UNIT]
    group = unit.control_group
    SERVING.unlink(missing_ok=True)
    was_up = unit.active not in ("inactive", "failed") or bool(processes.members(group))
    if was_up and at_once:
        with contextlib.suppress(SystemdError):  # it may have ended in this moment
            systemctl("kill", "--signal=KILL", UNIT)
    if was_up:
        systemctl("stop", UNIT, timeout=timeout)
    wanted = read_json(CONFIGURATION) or {}
    needed = ports(wanted, running())
    uid = _user_id(user)
    was_up = end_own(group, needed, uid) or was_up
    deadline = time.monotonic() + 10
    while (
        faults := stop_faults(group, needed, uid, wanted.get("memory_floor_mib", 0))
    ) and time.monotonic() < deadline:
        time.sleep(0.2)
    if faults:
        raise RankError("\n".join(faults))
    if was_up and RUNNING.exists():
        write_json(RUNNING, running() | {"stopped": True})  # an end that was asked for has no cause to look for
    if unit.active == "failed" or (was_up and show(UNIT)[UNIT].active == "failed"):
        systemctl("reset-failed", UNIT)
    return _remove_shared_memory(uid) or was_up


def end_own(group: str, needed: Sequence[int], uid: int, patience: float = 5) -> bool:
    """End engine processes of user UID that live outside the unit, each by its id. Returns whether there were any."""
    own = [
        one.process for one in processes.leftovers(group, needed) if one.process.uid == uid and one.process.is_engine
    ]
    for process in own:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(process.pid)
                try:
                    signal.pidfd_send_signal(pidfd, number)
                    if ended(pidfd, patience)[0]:
                        break
                finally:
                    os.close(pidfd)
    return bool(own)


def stop_faults(group: str, needed: Sequence[int], uid: int, floor_mib: int) -> list[str]:
    """What a stopped rank must not leave: processes, ports, memory."""
    inside = [process for pid in processes.members(group) if (process := processes.read(pid))]
    outside = [
        one
        for one in processes.leftovers(group, needed)
        if one.ports or (one.process.uid == uid and one.process.is_engine)
    ]
    faults = [_stays(process, str(process)) for process in inside]
    for one in outside:
        own = one.process.uid == uid
        faults.append(
            _stays(one.process, str(one)) if own else f"{one}: not this project's, so it is left alone; end it"
        )
    available = memory_available_mib()
    if available < floor_mib:
        faults.append(
            f"MemAvailable is {available} MiB after the stop, wanted {floor_mib} MiB: something else holds it, "
            "or the driver does; reboot this host if nothing does"
        )
    return faults


def _stays(process: processes.Process, text: str) -> str:
    if process.state == "D":
        return f"{text} stays: it hangs in the kernel and cannot be killed, a reboot of this host is needed"
    return f"{text} stays after {UNIT} was stopped: kill it by its id"


def _remove_shared_memory(owner: int) -> bool:
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
    if unit.needs_reload:
        systemctl("daemon-reload")
    try:
        systemctl("start", UNIT, timeout=timeout)
    except Exception as error:
        failed = show(UNIT)[UNIT]
        text = journal(failed, 60)
        refused = [f"refused to start: {reason}" for reason in REFUSAL.findall(text)]
        raise RankError("\n".join(refused or [str(error), *text.splitlines()[-20:]])) from error
    return True
