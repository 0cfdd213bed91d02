"""The doubles answer in the shapes that GB10 hosts gave."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from embedded.doubles.gb10_doubles import install

PROJECT = Path(__file__).resolve().parents[3]
RECORDED = PROJECT / "tests/fixtures/nvidia_smi"
FIELDS = (RECORDED / "query_fields.txt").read_text().strip()


class Host:
    """A folder with the doubles, as the root of one host's disk."""

    def __init__(self, root: Path) -> None:
        install(root)
        self.state = root / "etc/gb10-doubles.json"
        path = f"{root}/usr/local/bin:{os.environ['PATH']}"
        self.environment = {**os.environ, "GB10_DOUBLES_STATE": str(self.state), "PATH": path}

    def run(self, *argv: str) -> tuple[int, str]:
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, timeout=10)
        return done.returncode, done.stdout


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


# mode, lock, busy -> the recorded answer to the fields of query_fields.txt
READINGS = [
    ("healthy", None, False, "csv_preflight_nounits_idle_p8.constructed.csv"),
    ("healthy", "0,2200", False, "csv_preflight_nounits_locked_0_2200_idle.constructed.csv"),
    ("healthy", "0,2200", True, "csv_preflight_nounits_locked_0_2200_busy.constructed.csv"),
    ("healthy", None, True, "csv_preflight_nounits_unlocked_busy.constructed.csv"),
    ("latched", "0,2200", True, "csv_preflight_nounits_latched_low.constructed.csv"),
]


@pytest.mark.parametrize(("mode", "lock", "busy", "recorded"), READINGS)
def test_readings(host: Host, mode: str, lock: str | None, busy: bool, recorded: str) -> None:
    host.run("gb10-doubles", "set", "gpu.mode", mode)
    host.run("gb10-doubles", "set", "gpu.busy", json.dumps(busy))
    if lock:
        host.run("nvidia-smi", "-lgc", lock)
    answer = host.run("nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
    assert answer == (0, (RECORDED / recorded).read_text())


# state before, command -> exit status and the recorded text
COMMANDS = [
    ({}, "-lgc 0,2200", 0, "lgc_0_2200_success.txt"),
    ({}, "--lock-gpu-clocks=0,1976", 0, "lgc_0_1976_success.txt"),
    ({}, "-lmc 4000", 0, "lmc_not_supported_rc0.txt"),
    ({}, "-pm 1", 0, "pm_enabled_legacy.txt"),
    ({}, "-L", 0, "list_gpus.constructed.txt"),
    ({}, "--query-gpu=name,driver_version --format=csv", 0, "csv_name_driver_header.csv"),
    (
        {"gpu.driver": "580.178.04"},
        "--query-gpu=name,driver_version --format=csv,noheader",
        0,
        "csv_name_driver_noheader.csv",
    ),
    ({}, "--query-gpu=x --format=csv", 2, "invalid_field_rc2.txt"),
    ({"gpu.mode": "no_permission"}, "-lgc 0,2200", 4, "lgc_not_permitted_rc4.txt"),
    ({"gpu.mode": "no_permission"}, "-rgc", 4, "rgc_not_permitted_rc4.constructed.txt"),
    ({"gpu.mode": "no_permission"}, "-pm 1", 4, "pm_not_permitted.txt"),
    ({"gpu.mode": "no_driver"}, "-L", 9, "driver_not_loaded_rc9.txt"),
    ({"gpu.mode": "no_device"}, "-L", 6, "no_devices_rc6.txt"),
    ({"gpu.mode": "lost"}, "-L", 255, "device_handle_unknown_error.txt"),
    (
        {"gpu.processes": '[[114687, "/usr/local/bin/python", 19135]]'},
        "--query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv,noheader,nounits",
        0,
        "csv_compute_apps_noheader_nounits.csv",
    ),
]


@pytest.mark.parametrize(("state", "command", "status", "recorded"), COMMANDS)
def test_commands(host: Host, state: dict[str, str], command: str, status: int, recorded: str) -> None:
    for key, value in state.items():
        host.run("gb10-doubles", "set", key, value)
    exit_status, output = host.run("nvidia-smi", *command.split())
    assert exit_status == status
    # Only the lines' ends differ between captures: some were saved with a blank line behind.
    assert output.split() == (RECORDED / recorded).read_text().split()


def test_persistence_mode_is_remembered_until_reset(host: Host) -> None:
    query = ("nvidia-smi", "--query-gpu=persistence_mode", "--format=csv,noheader")
    assert host.run(*query) == (0, "Disabled\n")
    host.run("nvidia-smi", "-pm", "1")
    assert host.run("nvidia-smi", "-pm", "1") == (0, (RECORDED / "pm_already_enabled.txt").read_text())
    assert host.run(*query) == (0, "Enabled\n")
    host.run("gb10-doubles", "reset")
    assert host.run(*query) == (0, "Disabled\n")


def test_a_wedged_driver_never_returns(host: Host) -> None:
    host.run("gb10-doubles", "set", "gpu.mode", "wedged")
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["nvidia-smi", "-L"], env=host.environment, timeout=0.5, capture_output=True)


def test_reset_brings_a_removed_tool_and_file_back(host: Host) -> None:
    host.run("sh", "-c", "rm $(command -v nvidia-smi)")
    host.run("gb10-doubles", "remove", "proc/cmdline")
    host.run("gb10-doubles", "reset")
    assert host.run("nvidia-smi", "-L")[0] == 0
    assert (host.state.with_suffix("") / "root/proc/cmdline").exists()


def test_firmware_has_the_recorded_devices(host: Host) -> None:
    recorded = json.loads((PROJECT / "tests/fixtures/platform/fwupd_get_devices_fe.constructed.json").read_text())
    versions = {device["Guid"][0]: device["Version"] for device in recorded["Devices"] if "Guid" in device}
    status, output = host.run("fwupdmgr", "get-devices", "--json")
    answered = {device["Guid"][0]: device["Version"] for device in json.loads(output)["Devices"] if "Guid" in device}
    assert (status, answered) == (0, versions)
