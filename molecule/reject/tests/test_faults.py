"""Every fault of tests/fixtures/faults.yml, injected on a real host, through the playbook an operator runs."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[3]
HOSTS = ["spark-a", "spark-b", "spark-c", "spark-d"]
FAULTS = yaml.safe_load((PROJECT / "tests/fixtures/faults.yml").read_text())
STAGE_PLAY = {
    "host_parity": "Refuse hosts that differ or are known to be bad",
    "gpu_clock": "Tune the hosts and lock their clocks",
}


def ansible(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=PROJECT, capture_output=True, text=True, check=False)


def on(pattern: str, script: str) -> None:
    result = ansible("ansible", pattern, "-m", "ansible.builtin.shell", "-a", script)
    assert result.returncode == 0, result.stdout + result.stderr


def play(playbook: str, *options: str) -> str:
    """Output of a run that has to be refused, line breaks of long messages undone."""
    result = ansible("ansible-playbook", playbook, *options)
    assert result.returncode != 0, result.stdout
    return re.sub(r"\s+", " ", result.stdout + result.stderr)


def cases(*stages: str) -> list:
    chosen = [fault for fault in FAULTS if fault["stage"] in stages]
    return [pytest.param(number, fault, id=f"{number}-{fault['name']}") for number, fault in enumerate(chosen)]


@pytest.fixture
def injected(request):
    """Inject the fault on as many hosts as it says, another one for each fault, and undo it afterwards."""
    number, fault = request.param
    chosen = [HOSTS[(number + offset) % 4] for offset in range(fault.get("hosts", 1))]
    on(",".join(chosen), f"set -e; export GB10_ROOT=; {fault['inject']}")
    yield fault, sorted(chosen)
    on("fleet", "gb10-doubles reset; nvidia-smi --persistence-mode=1; systemctl restart gb10-gpu-clock")


def extra(fault: dict) -> list[str]:
    return [word for key, value in fault.get("vars", {}).items() for word in ("-e", f"{key}={shlex.quote(str(value))}")]


def check(output: str, fault: dict, chosen: list[str], later: str) -> None:
    sentence = fault["sentence"].replace("{host}", ", ".join(chosen))
    assert re.sub(r"\s+", " ", sentence) in output.replace("''", "'")
    assert later not in output


@pytest.mark.parametrize(
    "injected",
    [(p.values[0], p.values[1]) for p in cases("host_parity")],
    indirect=True,
    ids=[p.id for p in cases("host_parity")],
)
def test_unequal_or_bad_host_stops_the_run(injected):
    fault, chosen = injected
    check(play("playbooks/hosts.yml", *extra(fault)), fault, chosen, STAGE_PLAY["gpu_clock"])


@pytest.mark.parametrize(
    "injected",
    [(p.values[0], p.values[1]) for p in cases("gpu_clock")],
    indirect=True,
    ids=[p.id for p in cases("gpu_clock")],
)
def test_clock_fault_stops_the_run(injected):
    fault, chosen = injected
    check(play("site.yml", *extra(fault)), fault, chosen, "PLAY [Prove the fabric]")


def test_clean_fleet_is_let_through():
    result = ansible("ansible-playbook", "playbooks/hosts.yml")
    assert result.returncode == 0, result.stdout
    assert "all hosts are alike" in result.stdout
