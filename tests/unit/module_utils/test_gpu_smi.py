"""What nvidia-smi answers, by the texts that hosts gave."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.module_utils.gb10 import gpu_smi
from ansible.module_utils.gb10.gpu_smi import (
    GpuProcess,
    classify,
    parse_cells,
    parse_processes,
    query_status,
    reason_names,
)
from ansible.module_utils.gb10.host_command import MissingCommandError, SilentCommandError, run_bounded

RECORDED = Path(__file__).resolve().parents[2] / "fixtures/nvidia_smi"

STATUSES = [
    (0, "csv_name_driver_noheader.csv", gpu_smi.OK),
    (9, "driver_not_loaded_rc9.txt", gpu_smi.NO_DRIVER),
    (6, "no_devices_rc6.txt", gpu_smi.NO_DEVICE),
    (0, "no_devices_rc6.txt", gpu_smi.NO_DEVICE),
    (255, "device_handle_unknown_error.txt", gpu_smi.LOST),
    (4, "lgc_not_permitted_rc4.txt", gpu_smi.NO_PERMISSION),
    (4, "pm_not_permitted.txt", gpu_smi.NO_PERMISSION),
    (2, "invalid_field_rc2.txt", gpu_smi.FAILED),
]


@pytest.mark.parametrize(("exit_status", "recorded", "status"), STATUSES)
def test_status(exit_status: int, recorded: str, status: str) -> None:
    assert classify(exit_status, (RECORDED / recorded).read_text()) == status


CELLS = [
    ("csv_name_memory_driver_noheader_nounits.csv", ["NVIDIA GB10", None, None, None, "580.159.03"]),
    ("csv_memory_util_noheader_nounits.csv", [None, None, "0"]),
    ("csv_device_addressing_noheader_nounits.csv", ["0x2E1210DE", "12.1", "ATS", "0", "4.52", "47"]),
]


@pytest.mark.parametrize(("recorded", "cells"), CELLS)
def test_cells_that_gb10_does_not_report_are_none(recorded: str, cells: list[str | None]) -> None:
    assert parse_cells((RECORDED / recorded).read_text()) == cells


PROCESSES = [
    ("114687, /usr/local/bin/python, 19135", [GpuProcess(114687, "/usr/local/bin/python", 19135)]),
    ("12, /opt/a, b/run, [N/A]\n", [GpuProcess(12, "/opt/a, b/run", None)]),
    ("", []),
    ("No running processes found\n", []),
]


@pytest.mark.parametrize(("output", "processes"), PROCESSES)
def test_processes(output: str, processes: list[GpuProcess]) -> None:
    assert parse_processes(output) == processes


@pytest.mark.parametrize(
    ("reasons", "names"),
    [
        (0x0, []),
        (0x1, []),
        (0x4, ["SW power cap"]),
        (0x68, ["HW slowdown", "SW thermal slowdown", "HW thermal slowdown"]),
    ],
)
def test_only_throttling_reasons_are_named(reasons: int, names: list[str]) -> None:
    assert reason_names(reasons) == names


def script(folder: Path, text: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_field_that_the_driver_does_not_know_costs_that_field_alone(tmp_path: Path) -> None:
    lines = [
        'case "$1" in *clocks_event_reasons*)',
        "  echo 'Field \"clocks_event_reasons.active\" is not a valid field to query.'; exit 2;;",
        "esac",
        "echo NVIDIA GB10, 570.1, [N/A], Enabled, 208, 3003, 4.52, 36, P8",
    ]
    command = script(tmp_path, "\n".join(lines))
    answer = query_status(5.0, command)
    assert answer.status == gpu_smi.OK
    assert answer.values["clocks.sm"] == "208"
    assert answer.values["vbios_version"] is None
    assert "clocks_event_reasons.active" not in answer.values


def test_an_answer_with_too_few_cells_is_a_failure(tmp_path: Path) -> None:
    assert query_status(5.0, script(tmp_path, "echo NVIDIA GB10, 570.1")).status == gpu_smi.FAILED


def test_a_silent_tool_is_given_up(tmp_path: Path) -> None:
    answer = query_status(0.2, script(tmp_path, "exec sleep 5"))
    assert answer.status == gpu_smi.SILENT
    assert answer.text.endswith("gave no answer in 0.2 s")


def test_an_absent_tool_is_absent(tmp_path: Path) -> None:
    assert query_status(1.0, str(tmp_path / "none")).status == gpu_smi.ABSENT


def test_run_bounded_tells_missing_from_silent(tmp_path: Path) -> None:
    with pytest.raises(MissingCommandError, match="cannot be run: No such file"):
        run_bounded([str(tmp_path / "none")], 1.0)
    with pytest.raises(SilentCommandError, match=r"gave no answer in 0\.1 s"):
        run_bounded(["sleep", "5"], 0.1)
