"""gb10_host_info and gb10_gpu_verify through main()."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gb10_gpu_verify
import gb10_host_info
import pytest
from ansible.module_utils.gb10.host_info import Fact
from ansible.module_utils.testing import patch_module_args

from embedded.doubles.gb10_doubles import install

PROJECT = Path(__file__).resolve().parents[3]


def run(module: Any, arguments: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    with patch_module_args(arguments), pytest.raises(SystemExit):
        module.main()
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a host with the doubles first on PATH."""
    install(tmp_path)
    monkeypatch.setenv("GB10_DOUBLES_STATE", str(tmp_path / "etc/gb10-doubles.json"))
    monkeypatch.setenv("PATH", f"{tmp_path}/usr/local/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "")
    return tmp_path


def doubles(*arguments: str) -> None:
    subprocess.run(["gb10-doubles", *arguments], check=True)


def lock(value: str) -> None:
    for option in ("--persistence-mode=1", f"--lock-gpu-clocks={value}"):
        subprocess.run(["nvidia-smi", option], check=True, capture_output=True)


def test_host_info_gives_facts_and_changes_nothing(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roots = [str(host / "etc/gb10-doubles/root"), "/"]
    result = run(gb10_host_info, {"roots": roots, "_ansible_check_mode": True}, capsys)
    facts = result["ansible_facts"]["gb10_host"]
    assert result["changed"] is False
    assert facts["gpu_name"] == {"value": "NVIDIA GB10", "source": "nvidia-smi name"}
    assert facts["mem_available_kib"]["value"] > 0


# what is set on the double before, the wanted lock -> the first fault
CONTRADICTIONS = [
    (["set", "gpu.mode", "healthy"], "0,2200", ""),
    (
        ["set", "gpu.mode", "no_driver"],
        "0,2200",
        "GPU driver not loaded, want ok; nvidia-smi said: NVIDIA-SMI has failed",
    ),
    (["set", "gpu.busy", "true"], "0,2000", "SM clock 2177 MHz, want at most 2000: the lock is not in force"),
    (["set", "gpu.mode", "healthy"], "2200", "invalid literal"),
]


@pytest.mark.parametrize(("state", "wanted", "fault"), CONTRADICTIONS)
def test_gpu_verify_without_load(
    host: Path, capsys: pytest.CaptureFixture[str], state: list[str], wanted: str, fault: str
) -> None:
    lock("0,2200")
    doubles(*state)
    result = run(gb10_gpu_verify, {"lock": wanted}, capsys)
    assert bool(result.get("failed")) is bool(fault)
    assert result.get("msg", "").startswith(fault)


def engine_python(folder: Path, output: str, status: int = 0) -> str:
    """A stand-in for the engine's Python that prints what the probe would."""
    (folder / "answer").write_text(output)
    path = folder / "python"
    path.write_text(f"#!/bin/sh\ncat {folder}/answer\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


MEASURED = {
    "name": "NVIDIA GB10",
    "burn_tflops": {"mean": 88.6},
    "burn_clocks": [{"t": 1, "sm_mhz": 728.0, "watts": 14.0, "celsius": 45, "reasons": 0}],
    "gemv_gb_s": {"p50": 228.0, "timeline": [[1.0, 228.0]]},
    "copy_gb_s": {"p50": 241.0},
}
PROOFS = [
    (json.dumps(MEASURED | {"burn_clocks": []}), 0, ""),
    ("a warning of torch\n" + json.dumps(MEASURED) + "\nanother\n", 0, "GPU latched: SM clock 728 MHz"),
    (json.dumps({"error": "out of memory"}), 1, "GPU probe failed, want a measurement: out of memory"),
    ("Segmentation fault", 139, "GPU probe failed, want a measurement: {python} ended with 139: Segmentation fault"),
]


@pytest.mark.parametrize(("output", "status", "fault"), PROOFS)
def test_gpu_verify_proves(
    host: Path, capsys: pytest.CaptureFixture[str], output: str, status: int, fault: str
) -> None:
    lock("0,2200")
    python = engine_python(host, output, status)
    package = str(PROJECT / "module_utils")
    result = run(gb10_gpu_verify, {"lock": "0,2200", "prove": True, "python": python, "package": package}, capsys)
    assert bool(result.get("failed")) is bool(fault)
    assert result.get("msg", "").startswith(fault.format(python=python))
    if not fault:
        assert (result["state"], result["memory"], result["timeline"]) == ("healthy", "fast", [[1, 228.0]])


def test_gpu_verify_names_the_stage_that_installs_the_probe(
    host: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lock("0,2200")
    result = run(gb10_gpu_verify, {"prove": True, "python": sys.executable, "package": str(tmp_path)}, capsys)
    assert result["msg"].endswith(f"{tmp_path}/gb10/gpu_probe.py is missing; run playbooks/hosts.yml first")


def test_gpu_verify_refuses_beside_an_engine(
    host: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gb10_gpu_verify, "services", lambda _settings: {"engine_pids": Fact([4711], "test")})
    lock("0,2200")
    result = run(gb10_gpu_verify, {"prove": True, "python": "/nonexistent"}, capsys)
    assert result["msg"].startswith("GPU held by vllm-rank.service (pid 4711), want nobody; a process holds the GPU")


def test_the_probe_refuses_beside_a_process_that_the_driver_names(host: Path) -> None:
    doubles("set", "gpu.processes", '[[4711, "VLLM::Worker_TP0", 104277]]')
    done = subprocess.run(
        [sys.executable, "-m", "gb10.gpu_probe", "--json"],
        env={**os.environ, "PYTHONPATH": str(PROJECT / "module_utils")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert json.loads(done.stdout)["processes"] == ["4711, VLLM::Worker_TP0, 104277"]
