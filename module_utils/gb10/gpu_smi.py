"""Ask nvidia-smi, and name what it answers: texts and exit statuses as GB10 hosts gave them.

Traps seen on GB10: memory and power limits are ``[N/A]``, errors come on standard output, a missing
device exits 6 or 0, and an unknown field fails the whole query with exit status 2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .host_command import MissingCommandError, SilentCommandError, run_bounded

STATUS_FIELDS = (
    "name",
    "driver_version",
    "vbios_version",
    "persistence_mode",
    "clocks.sm",
    "clocks.max.sm",
    "power.draw",
    "temperature.gpu",
    "pstate",
    "clocks_event_reasons.active",
)

OK = "ok"
ABSENT = "absent"
SILENT = "no answer"
NO_DRIVER = "driver not loaded"
NO_DEVICE = "no device"
LOST = "lost"
MISMATCH = "driver and library differ"
NO_PERMISSION = "no permission"
FAILED = "failed"

# The first text that occurs decides: a GPU off the bus prints "No devices were found" as its second line.
_TEXTS = (
    ("Unable to determine the device handle", LOST),
    ("GPU is lost", LOST),
    ("couldn't communicate with the NVIDIA driver", NO_DRIVER),
    ("Driver/library version mismatch", MISMATCH),
    ("Insufficient Permissions", NO_PERMISSION),
    ("does not have permission", NO_PERMISSION),
    ("No devices were found", NO_DEVICE),
)
_INVALID_FIELD = re.compile(r'Field "([^"]+)" is not a valid field')

# Bits of clocks_event_reasons.active that lower the clock for want of power or cooling (NVML's names).
THROTTLE_REASONS = {
    0x04: "SW power cap",
    0x08: "HW slowdown",
    0x20: "SW thermal slowdown",
    0x40: "HW thermal slowdown",
    0x80: "HW power brake",
}


@dataclass(frozen=True)
class GpuAnswer:
    """One query's outcome: a status (OK or one of the others), the values by field, and the text behind a failure."""

    status: str
    values: dict[str, str | None] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds the GPU; mib is None where the driver does not say."""

    pid: int
    name: str
    mib: int | None


def reason_names(reasons: int) -> list[str]:
    """The throttling reasons among the active bits, by name."""
    return [name for bit, name in THROTTLE_REASONS.items() if reasons & bit]


def classify(exit_status: int, output: str) -> str:
    """The status that an answer of nvidia-smi means."""
    for text, status in _TEXTS:
        if text in output:
            return status
    return OK if exit_status == 0 else FAILED


def parse_cells(line: str) -> list[str | None]:
    """Cells of one csv line; what GB10 does not report is None."""
    cells = [cell.strip() for cell in line.split(",")]
    return [None if cell in ("[N/A]", "N/A", "[Not Supported]", "") else cell for cell in cells]


def parse_processes(output: str) -> list[GpuProcess]:
    """Lines of ``--query-compute-apps=pid,process_name,used_memory`` without header and units."""
    found = []
    for line in output.splitlines():
        # A path may hold commas: the pid is the first cell and the memory the last.
        first, _, rest = line.partition(",")
        name, _, last = rest.rpartition(",")
        if first.strip().isdigit():
            found.append(GpuProcess(int(first), name.strip(), int(last) if last.strip().isdigit() else None))
    return found


def query_status(timeout_s: float, command: str = "nvidia-smi") -> GpuAnswer:
    """Ask for STATUS_FIELDS; a field that this driver does not know is left out and the rest asked again."""
    fields = list(STATUS_FIELDS)
    while True:
        argv = [command, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", "0"]
        try:
            exit_status, output = run_bounded(argv, timeout_s)
        except MissingCommandError as error:
            return GpuAnswer(ABSENT, text=str(error))
        except SilentCommandError as error:
            return GpuAnswer(SILENT, text=str(error))
        unknown = _INVALID_FIELD.search(output)
        if unknown is None or unknown[1] not in fields:
            break
        fields.remove(unknown[1])
    status = classify(exit_status, output)
    cells = parse_cells(output.strip().splitlines()[0]) if output.strip() else []
    if status == OK and len(cells) != len(fields):
        status = FAILED
    if status != OK:
        return GpuAnswer(status, text=" ".join(output.split()))
    return GpuAnswer(OK, dict(zip(fields, cells, strict=True)))


def query_processes(timeout_s: float, command: str = "nvidia-smi") -> tuple[str, list[GpuProcess]]:
    """Status and the processes that hold the GPU; the list means nothing unless the status is OK."""
    argv = [command, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    try:
        exit_status, output = run_bounded(argv, timeout_s)
    except MissingCommandError:
        return ABSENT, []
    except SilentCommandError:
        return SILENT, []
    status = classify(exit_status, output)
    return status, parse_processes(output) if status == OK else []
