"""What systemd says of a unit, and the few orders given to it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass


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
    """State of one unit at one moment. `entered_active` is seconds since the epoch, 0 when it never was active."""

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

    @property
    def exists(self) -> bool:
        return self.load == "loaded"


_PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,UnitFileState,NeedDaemonReload,MainPID,InvocationID,ControlGroup,Result,"
    "ExecMainStatus,ActiveEnterTimestamp,InactiveEnterTimestamp"
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
        )
    return units
