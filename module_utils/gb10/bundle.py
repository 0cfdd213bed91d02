"""One concern of a host applied in one step: packages, users, directories, files, units.

On the smallest hosts a module run costs more than the work it does, so a role states all it wants in one document.
Nothing here depends on what an earlier run reported: a unit is restarted because a file is younger than its last
start, not because a task was "changed", so a run that was killed half-way is completed by the next.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import write_atomic
from .systemd import Unit, show, systemctl, unit_file_faults

UNIT_DIRECTORY = "/etc/systemd/system/"


class BundleError(Exception):
    """What could not be applied and why."""


@dataclass
class Plan:
    """What differs from the wish. `before` and `after` map a readable key to text, for the diff."""

    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    packages: list[str] = field(default_factory=list)
    users: list[dict[str, Any]] = field(default_factory=list)
    directories: list[dict[str, Any]] = field(default_factory=list)
    files: list[dict[str, Any]] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        return self.before != self.after

    def note(self, key: str, before: str, after: str) -> None:
        self.before[key], self.after[key] = before, after


def missing_packages(wanted: list[str]) -> list[str]:
    """Packages of WANTED that dpkg does not have installed."""
    if not wanted:
        return []
    query = ["dpkg-query", "-W", "-f", "${Package}\t${db:Status-Status}\n", *wanted]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    installed = {line.split("\t")[0] for line in lines if line.endswith("\tinstalled")}
    return [package for package in wanted if package not in installed]


def _user_id(name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return -1


def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return -1


def _state(path: Path) -> tuple[int, int, int] | None:
    """Owner, group and mode of PATH; None if there is nothing."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_uid, status.st_gid, status.st_mode & 0o7777


def _wanted_state(entry: dict[str, Any], default_mode: str) -> tuple[int, int, int]:
    owner, group = _user_id(entry.get("owner") or "root"), _group_id(entry.get("group") or "root")
    return owner, group, int(entry.get("mode") or default_mode, 8)


def _state_text(state: tuple[int, int, int] | None) -> str:
    """A state as ls would name it."""
    if state is None:
        return "absent"
    uid, gid, mode = state
    user, group = str(uid), str(gid)
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(uid).pw_name
    with contextlib.suppress(KeyError):
        group = grp.getgrgid(gid).gr_name
    return f"{user}:{group} {mode:04o}"


def _wanted_text(entry: dict[str, Any], default_mode: str) -> str:
    """By the wish's own names: a user that this run makes has no number yet."""
    mode = int(entry.get("mode") or default_mode, 8)
    return f"{entry.get('owner') or 'root'}:{entry.get('group') or 'root'} {mode:04o}"


def _file_text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return None


def plan(wish: dict[str, Any]) -> Plan:
    """Compare the host with WISH (keys packages, users, directories, files; units are judged by `plan_units`)."""
    result = Plan()
    result.packages = missing_packages(wish.get("packages") or [])
    if result.packages:
        result.note("packages", "", " ".join(result.packages))
    for user in wish.get("users") or []:
        groups = set(user.get("groups") or [])
        if _user_id(user["name"]) == -1:
            result.users.append(user)
            result.note(
                f"user {user['name']}", "absent", f"present{', in ' if groups else ''}{', '.join(sorted(groups))}"
            )
        elif missing := groups - {entry.gr_name for entry in grp.getgrall() if user["name"] in entry.gr_mem}:
            result.users.append(user)
            result.note(f"user {user['name']}", "present", f"present, also in {', '.join(sorted(missing))}")
    for entry in wish.get("directories") or []:
        found, wanted = _state(Path(entry["path"])), _wanted_state(entry, "0755")
        if found != wanted:
            result.directories.append(entry)
            result.note(f"directory {entry['path']}", _state_text(found), _wanted_text(entry, "0755"))
    brief: dict[Path, list[str]] = {}
    for entry in wish.get("files") or []:
        path = Path(entry["path"])
        text = _file_text(path)
        if entry.get("absent"):
            if text is not None:
                result.files.append(entry)
                result.note(str(path), text, "absent")
            continue
        found, wanted = _state(path), _wanted_state(entry, "0644")
        if text != entry["content"] or found != wanted:
            result.files.append(entry)
            if entry.get("brief"):
                brief.setdefault(path.parent, []).append("" if text is None else path.name)
                continue
            secret = bool(entry.get("secret"))
            result.note(
                str(path),
                "absent" if text is None else f"{_state_text(found)}\n{'(secret)' if secret else text}",
                f"{_wanted_text(entry, '0644')}\n{'(secret, differs)' if secret else entry['content']}",
            )
    for directory, names in brief.items():
        there = [f"{name} differs" for name in names if name]
        absent = [f"{names.count('')} absent"] if "" in names else []
        result.note(f"files in {directory}", "\n".join(absent + there), f"{len(names)} as wanted")
    return result


def apply(todo: Plan) -> None:
    """Carry out what `plan` found, in the order that each step needs."""
    if todo.packages:
        _run(["apt-get", "-q", "-y", "--no-install-recommends", "install", *todo.packages], timeout=1800)
    for user in todo.users:
        if _user_id(user["name"]) == -1:
            home = user.get("home") or "/nonexistent"
            shell = user.get("shell") or "/usr/sbin/nologin"
            _run(["useradd", "--system", "--home-dir", home, "--shell", shell, "--user-group", user["name"]])
        if user.get("groups"):
            _run(["usermod", "--append", "--groups", ",".join(user["groups"]), user["name"]])
    for entry in todo.directories:
        path = Path(entry["path"])
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(int(entry.get("mode") or "0755", 8))
        shutil.chown(path, entry.get("owner") or "root", entry.get("group") or "root")
    for entry in todo.files:
        _apply_file(entry)


def _apply_file(entry: dict[str, Any]) -> None:
    path = Path(entry["path"])
    if entry.get("absent"):
        path.unlink(missing_ok=True)
        return
    uid, gid = _user_id(entry.get("owner") or "root"), _group_id(entry.get("group") or "root")
    if -1 in (uid, gid):
        raise BundleError(f"{path}: owner {entry.get('owner')}:{entry.get('group')} does not exist on this host")
    if entry.get("validate"):
        candidate = path.parent / f".{path.name}.candidate{path.suffix}"
        write_atomic(candidate, entry["content"].encode(), mode=0o600)
        try:
            _run([part.replace("%s", str(candidate)) for part in entry["validate"]])
        finally:
            candidate.unlink()
    write_atomic(path, entry["content"].encode(), mode=int(entry.get("mode") or "0644", 8), uid=uid, gid=gid)


def _run(command: list[str], timeout: float = 120) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip()[-2000:]
        raise BundleError(f"{' '.join(command)} failed with {result.returncode}: {said}")


@dataclass(frozen=True)
class UnitStep:
    """One order for one unit, with the reason as the operator reads it."""

    verb: str
    unit: str
    found: str
    wanted: str


def _younger_than_start(paths: list[str], unit: Unit) -> bool:
    times = [Path(path).stat().st_mtime for path in paths if Path(path).exists()]
    # systemd reports whole seconds; a file written in the second of the start was there before it.
    return bool(times) and max(times) >= unit.entered_active + 1


def plan_units(wishes: list[dict[str, Any]], units: dict[str, Unit], files_changed: set[str]) -> list[UnitStep]:
    """Compare units with what is wanted of them; FILES_CHANGED are paths that this run writes or would write."""
    steps = []
    for wish in wishes:
        unit = units[wish["name"]]
        if "enabled" in wish and wish["enabled"] is not None:
            wanted = "enabled" if wish["enabled"] else "disabled"
            static = unit.enabled in ("static", "alias", "generated", "indirect")
            is_enabled = unit.enabled in ("enabled", "enabled-runtime")
            if not static and is_enabled != wish["enabled"]:
                steps.append(
                    UnitStep("enable" if wish["enabled"] else "disable", unit.name, unit.enabled or "absent", wanted)
                )
        watched = list(wish.get("restart_on") or [])
        stale = bool(files_changed & set(watched)) or _younger_than_start(watched, unit)
        if wish.get("state") == "started":
            if unit.active not in ("active", "activating", "reloading"):
                steps.append(UnitStep("start", unit.name, unit.active, "active"))
            elif stale:
                steps.append(UnitStep("restart", unit.name, "started before its configuration", "restarted"))
        elif wish.get("state") == "stopped" and unit.active not in ("inactive", "failed"):
            steps.append(UnitStep("stop", unit.name, unit.active, "inactive"))
    return steps


def refuse_units(files: list[dict[str, Any]]) -> None:
    """Raise BundleError with every fault of the unit files among FILES that systemd would pass over in silence."""
    faults = [
        f"{entry['path']}: {fault}"
        for entry in files
        if entry["path"].startswith(UNIT_DIRECTORY) and not entry.get("absent")
        for fault in unit_file_faults(Path(entry["path"]), entry["content"])
    ]
    if faults:
        raise BundleError("\n".join([*faults, "nothing was written: mend the role's template or its variables"]))


def run(wish: dict[str, Any], *, check: bool) -> tuple[Plan, list[UnitStep]]:
    """Bring the host to WISH, or with CHECK only say what would change. Raises BundleError or SystemdError."""
    refuse_units(wish.get("files") or [])
    todo = plan(wish)
    if not check:
        apply(todo)
    unit_wishes = wish.get("units") or []
    steps: list[UnitStep] = []
    names = [entry["name"] for entry in unit_wishes]
    changed = {entry["path"] for entry in todo.files}
    if not check and any(path.startswith(UNIT_DIRECTORY) for path in changed):
        systemctl("daemon-reload")
    if names:
        units = show(*names)
        if not check and any(unit.needs_reload for unit in units.values()):
            # A run that was killed between writing a unit and reloading is completed here.
            systemctl("daemon-reload")
            units = show(*names)
        steps = plan_units(unit_wishes, units, changed)
        for step in steps:
            todo.note(f"unit {step.unit} ({step.verb})", step.found, step.wanted)
            if not check:
                systemctl(step.verb, step.unit, timeout=300)
    return todo, steps
