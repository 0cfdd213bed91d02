"""What systemd says of a unit, and the few orders given to it."""

from __future__ import annotations

import math
import re
import subprocess
from dataclasses import dataclass
from pathlib import PurePath


class SystemdError(Exception):
    """systemctl refused; the text carries its own words."""


def systemctl(*arguments: str, timeout: float = 60) -> str:
    """Run systemctl and return its output; raises SystemdError with what it said."""
    try:
        result = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise SystemdError(f"systemctl {' '.join(arguments)} gave no answer in {timeout:.0f} s") from error
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip()
        raise SystemdError(f"systemctl {' '.join(arguments)} failed with {result.returncode}: {said}")
    return result.stdout


@dataclass(frozen=True)
class Unit:
    """State of one unit at one moment. Times are seconds since the epoch, 0 when it never was in that state.

    `memory_lock` is LimitMEMLOCK as the manager applies it: bytes, or "infinity".
    """

    name: str
    load: str
    active: str
    sub: str
    enabled: str
    needs_reload: bool
    main_pid: int
    invocation: str
    control_group: str
    result: str
    exit_status: int
    entered_active: float
    entered_inactive: float
    left_inactive: float = 0.0
    memory_lock: str = ""

    @property
    def exists(self) -> bool:
        return self.load == "loaded"


_PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,UnitFileState,NeedDaemonReload,MainPID,InvocationID,ControlGroup,Result,"
    "ExecMainStatus,ActiveEnterTimestamp,InactiveEnterTimestamp,InactiveExitTimestamp,LimitMEMLOCK"
)


def _seconds(text: str) -> float:
    return float(text.removeprefix("@")) if text.startswith("@") else 0.0


def show(*names: str) -> dict[str, Unit]:
    """Name to state, for several units in one call."""
    output = systemctl("show", "--timestamp=unix", f"--property={_PROPERTIES}", "--", *names)
    units = {}
    for name, block in zip(names, output.strip().split("\n\n"), strict=True):
        values = dict(line.split("=", 1) for line in block.splitlines())
        units[name] = Unit(
            name=name,
            load=values["LoadState"],
            active=values["ActiveState"],
            sub=values["SubState"],
            enabled=values.get("UnitFileState", ""),
            needs_reload=values["NeedDaemonReload"] == "yes",
            main_pid=int(values.get("MainPID", "0")),
            invocation=values.get("InvocationID", ""),
            control_group=values.get("ControlGroup", ""),
            result=values.get("Result", ""),
            exit_status=int(values.get("ExecMainStatus", "0")),
            entered_active=_seconds(values["ActiveEnterTimestamp"]),
            entered_inactive=_seconds(values["InactiveEnterTimestamp"]),
            left_inactive=_seconds(values.get("InactiveExitTimestamp", "")),
            memory_lock=values.get("LimitMEMLOCK", ""),
        )
    return units


# --------------------------------------------------------------------------------------------- unit files

_START_LIMITS = ("StartLimitIntervalSec", "StartLimitInterval", "StartLimitBurst", "StartLimitAction")
KINDS = ("Service", "Timer", "Mount", "Automount", "Socket", "Path", "Swap", "Slice")
# Units whose start takes long: the slowest load of a checkpoint that is known took 18 minutes.
SLOWEST_START_S = {"vllm-rank.service": 1080.0}


def settings(text: str) -> list[tuple[str, str, str]]:
    """Section, key and value of every setting of a unit file, in order."""
    found, section = [], ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            section = line.strip("[] ")
        elif "=" in line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            found.append((section, key.strip(), value.strip()))
    return found


def unit_file_faults(path: PurePath, text: str) -> list[str]:
    """What systemd accepts in the unit file or drop-in PATH and does not do, one sentence each with the next step.

    Settings in a section where they are ignored; in a whole unit also start limits that are never reached, and a start
    time-out below `SLOWEST_START_S` where the unit reports by itself that it is ready. Nothing for other files.
    """
    drop_in = path.suffix == ".conf" and path.parent.suffix == ".d"
    name = path.parent.stem if drop_in else path.name
    kind = PurePath(name).suffix.removeprefix(".").capitalize()
    if kind not in KINDS:
        return []
    entries = settings(text)
    faults = []
    for section, key, value in entries:
        if section not in ("Unit", "Install", kind) and not section.startswith("X-"):
            where = f"in [{section}]" if section else "above every section"
            faults.append(f"{key}={value} stands {where}, where systemd ignores it; move it to [Unit] or [{kind}]")
        elif key in _START_LIMITS and section != "Unit":
            faults.append(
                f"{key}={value} stands in [{section}], wanted in [Unit], its place since systemd 230; move it"
            )
    if drop_in:
        return faults  # sums need the whole unit
    try:
        return faults + _sum_faults({key: value for _, key, value in entries}, SLOWEST_START_S.get(name, 0))
    except (SystemdError, ValueError) as error:
        return [*faults, f"{error}; wanted as in systemd.time(7), such as 90s, and a whole number of starts"]


def _sum_faults(values: dict[str, str], slowest_start_s: float) -> list[str]:
    faults = []
    if values.get("Restart", "no") != "no":
        pause = seconds(values.get("RestartSec", "100ms"))
        burst = int(values.get("StartLimitBurst", "5"))
        interval = seconds(values.get("StartLimitIntervalSec", values.get("StartLimitInterval", "10s")))
        if interval and pause * (burst - 1) >= interval:
            faults.append(
                f"{burst} starts {pause:g} s apart (RestartSec, StartLimitBurst) never fall within "
                f"StartLimitIntervalSec {interval:g} s: it restarts for ever; wanted above {pause * (burst - 1):g} s"
            )
    reports = values.get("Type", "simple") in ("notify", "notify-reload") or "ExecStartPost" in values
    allowed = seconds(values.get("TimeoutStartSec", values.get("TimeoutSec", "90s")))
    if reports and 0 < allowed < slowest_start_s:  # 0 turns the time-out off
        faults.append(f"start time-out {allowed:g} s < load time {slowest_start_s:g} s; raise TimeoutStartSec")
    return faults


_SPANS = {"us": 1e-6, "ms": 1e-3, "": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "hr": 3600, "d": 86400}


def seconds(span: str) -> float:
    """Seconds of a time span of systemd.time(7), without months and years; infinity for what systemd takes as none."""
    if span == "infinity":
        return math.inf
    parts = re.findall(r"([\d.]+)\s*([a-z]*)", span)
    if not parts or any(unit not in _SPANS for _, unit in parts):
        raise SystemdError(f"{span!r} is no time span")
    return sum(float(number) * _SPANS[unit] for number, unit in parts)
