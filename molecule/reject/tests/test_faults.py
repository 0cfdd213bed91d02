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


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=PROJECT, capture_output=True, text=True, check=False)


def on(hosts: list[str], script: str) -> None:
    """Straight through ssh: an ad-hoc ansible run would cost more than the run under test."""
    for host in hosts:
        result = run("ssh", "-F", ".embedded/ssh_config", host, script)
        assert result.returncode == 0, result.stdout + result.stderr


def one_line(text: str) -> str:
    """Undo what YAML output does to a long sentence: line breaks and doubled quotes."""
    return re.sub(r"\s+", " ", text).replace("''", "'")


def refused(playbook: str, *options: str) -> str:
    """Output of a run that has to be refused."""
    result = run("ansible-playbook", playbook, *options)
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
    result = run("ansible-playbook", "playbooks/hosts.yml")
    assert result.returncode == 0, result.stdout
    assert "all hosts are alike" in result.stdout


@faults_of("host_parity")
def test_unequal_or_bad_host_stops_the_run(injected):
    fault, chosen = injected
    output = refused("playbooks/hosts.yml", *extra(fault))
    assert sentence_of(fault, chosen) in output
    assert "Tune the hosts and lock their clocks" not in output


def test_waived_difference_is_shown_with_its_reason_and_stops_nothing(request):
    fault = next(fault for fault in FAULTS if fault["name"] == "dgx_release")
    request.addfinalizer(lambda: on(["spark-b"], UNDO))
    on(["spark-b"], f"export GB10_ROOT=\n{fault['inject']}")
    result = run(
        "ansible-playbook",
        "playbooks/hosts.yml",
        "-e",
        '{"host_parity_waivers": {"dgx_release": "on trial until May"}}',
    )
    assert result.returncode == 0, result.stdout
    waived = one_line(result.stdout).partition("waived")[2]
    assert sentence_of(fault, ["spark-b"]) in waived
    assert "on trial until May" in waived


@faults_of("gpu_clock")
def test_clock_fault_stops_the_bring_up(injected):
    fault, chosen = injected
    output = refused("site.yml", *extra(fault))
    assert sentence_of(fault, chosen) in output
    assert "PLAY [Prove the fabric]" not in output


def test_every_host_is_told_its_own_verdict_under_load(request):
    """One run of the proof, another fault on each host: they are measured at the same time and reported together."""
    proved = [fault for fault in FAULTS if fault["stage"] == "gpu_clock_prove" and fault["name"] != "gpu-weak"]
    assert len(proved) == len(HOSTS)
    request.addfinalizer(lambda: on(HOSTS, UNDO))
    for host, fault in zip(HOSTS, proved, strict=True):
        on([host], f"export GB10_ROOT=\n{fault['inject']}")
    output = refused("playbooks/prove_gpu.yml", *(word for fault in proved for word in extra(fault)))
    for host, fault in zip(HOSTS, proved, strict=True):
        told = re.search(rf"fatal: \[{host}\]: FAILED! (.*?)(?:fatal: |PLAY RECAP)", output)
        assert told, output
        assert sentence_of(fault, [host]) in told[1]
    assert "GEMV by second" in output
