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
# A reset double has forgotten what the clock unit told it; the unit is started again only where a fault failed it.
UNDO = """gb10-doubles reset; nvidia-smi --persistence-mode=1; nvidia-smi --lock-gpu-clocks=0,2200
systemctl reset-failed gb10-gpu-clock; systemctl start gb10-gpu-clock"""


def ansible(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=PROJECT, capture_output=True, text=True, check=False)


def on(hosts: list[str], script: str) -> None:
    result = ansible("ansible", ",".join(hosts), "-m", "ansible.builtin.shell", "-a", script)
    assert result.returncode == 0, result.stdout + result.stderr


def one_line(text: str) -> str:
    """Undo what YAML output does to a long sentence: line breaks and doubled quotes."""
    return re.sub(r"\s+", " ", text).replace("''", "'")


def refused(playbook: str, *options: str) -> str:
    """Output of a run that has to be refused."""
    result = ansible("ansible-playbook", playbook, *options)
    assert result.returncode != 0, result.stdout
    return one_line(result.stdout + result.stderr)


def faults_of(stage: str):
    chosen = list(enumerate(fault for fault in FAULTS if fault["stage"] == stage))
    names = [f"{number}-{fault['name']}" for number, fault in chosen]
    return pytest.mark.parametrize("injected", chosen, indirect=True, ids=names)


@pytest.fixture
def injected(request):
    """Inject a fault on as many hosts as it says, each time on others, and undo it afterwards."""
    number, fault = request.param
    chosen = sorted(HOSTS[(number + offset) % 4] for offset in range(fault.get("hosts", 1)))
    on(chosen, f"set -e\nexport GB10_ROOT=\n{fault['inject']}")
    yield fault, chosen
    on(chosen, UNDO)


def sentence_of(fault: dict, chosen: list[str]) -> str:
    return one_line(fault["sentence"].replace("{host}", ", ".join(chosen)))


def extra(fault: dict) -> list[str]:
    return [word for key, value in fault.get("vars", {}).items() for word in ("-e", f"{key}={shlex.quote(str(value))}")]


def test_clean_fleet_is_let_through():
    result = ansible("ansible-playbook", "playbooks/hosts.yml")
    assert result.returncode == 0, result.stdout
    assert "all hosts are alike" in result.stdout


@faults_of("host_parity")
def test_unequal_or_bad_host_stops_the_run(injected):
    fault, chosen = injected
    output = refused("playbooks/hosts.yml", *extra(fault))
    assert sentence_of(fault, chosen) in output
    assert "Tune the hosts and lock their clocks" not in output


@faults_of("gpu_clock")
def test_clock_fault_stops_the_bring_up(injected):
    fault, chosen = injected
    output = refused("site.yml", *extra(fault))
    assert sentence_of(fault, chosen) in output
    assert "PLAY [Prove the fabric]" not in output
