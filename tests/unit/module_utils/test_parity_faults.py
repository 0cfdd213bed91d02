"""Every fault of tests/fixtures/faults.yml, injected on one of four hosts that have the doubles: one finding each."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.gb10.host_info import FACTS, Settings, gather
from ansible.module_utils.gb10.host_parity import judge
from ansible.module_utils.gb10.known_bad import parse_rules

from embedded.doubles.gb10_doubles import install

PROJECT = Path(__file__).resolve().parents[3]
PLATFORM = PROJECT / "tests/fixtures/platform"
RULES = parse_rules(yaml.safe_load((PROJECT / "roles/host_parity/files/known_bad.yml").read_text()), FACTS)
ALL_FAULTS = yaml.safe_load((PROJECT / "tests/fixtures/faults.yml").read_text())
FAULTS = [fault for fault in ALL_FAULTS if fault["stage"] == "host_parity"]
HOSTS = ("spark-a", "spark-b", "spark-c", "spark-d")


def furnish(root: Path, number: int) -> None:
    """A root with what a host has and the doubles do not bring: memory, identity, packages."""
    files = {
        "proc/meminfo": (PLATFORM / "meminfo_gb10_full.txt").read_text(),
        "proc/self/mounts": "/dev/nvme0n1p2 / ext4 rw 0 0\n",
        "etc/os-release": (PLATFORM / "os_release_24.04.5.txt").read_text(),
        "etc/machine-id": f"{number:032x}\n",
        "etc/ssh/ssh_host_ed25519_key.pub": f"ssh-ed25519 {base64.b64encode(bytes([number]) * 32).decode()} root\n",
        "var/lib/dpkg/status": "Package: linux-image-6.17.0-1032-nvidia\nStatus: install ok installed\nVersion: 1\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    install(root)


def enter(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the doubles of the host below ``root`` the ones that are found."""
    monkeypatch.setenv("GB10_DOUBLES_STATE", str(root / "etc/gb10-doubles.json"))
    monkeypatch.setenv("PATH", f"{root}/usr/local/bin:{os.environ['PATH']}")
    monkeypatch.setenv("GB10_ROOT", str(root))


def gather_at(root: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 60.0) -> dict[str, Any]:
    """The facts of the host below ``root``."""
    enter(root, monkeypatch)
    return gather(Settings(roots=(root / "etc/gb10-doubles/root", root), timeout_s=timeout_s))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    facts = {}
    for number, host in enumerate(HOSTS):
        root = tmp_path_factory.mktemp(host)
        furnish(root, number)
        with pytest.MonkeyPatch.context() as monkeypatch:
            facts[host] = gather_at(root, monkeypatch)
    return facts


def test_a_clean_fleet_has_no_finding(clean: dict[str, Any]) -> None:
    verdict = judge(clean, RULES)
    assert verdict.report() == "all hosts are alike"
    unknown = {name for name, fact in clean["spark-a"].items() if fact["value"] is None}
    assert unknown == {"boot_id", "boot_target"}, "the doubles leave gaps that would hide faults"


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{number}-{fault['name']}" for number, fault in enumerate(FAULTS)])
def test_one_fault_gives_one_finding(
    fault: dict[str, Any], clean: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault["inject"].startswith("rm ") and shutil.which("nvidia-smi"):
        pytest.skip("this machine has an nvidia-smi of its own, so removing the double's leaves one")
    faulty = HOSTS[1 : 1 + fault.get("hosts", 1)]
    facts = dict(clean)
    for number, host in enumerate(faulty, start=1):
        root = tmp_path / host
        furnish(root, number)
        with monkeypatch.context() as patch:
            enter(root, patch)
            subprocess.run(["sh", "-e", "-c", fault["inject"]], check=True)
            # Only what never answers is worth a short wait; a busy machine makes the others slow.
            facts[host] = gather_at(root, patch, 1.0 if "wedged" in fault["inject"] else 60.0)
    verdict = judge(facts, RULES)
    assert [(one.name, one.host) for one in verdict.findings] == [(fault["name"], ", ".join(faulty))]
    (finding,) = verdict.findings
    assert fault["sentence"].format(host=finding.host) in finding.sentence()
    assert finding.wanted, "a finding says what was expected"
    assert finding.remedy, "a finding says what to do"
    assert finding.sentence() in verdict.report()


STAGES = {"host_parity", "gpu_clock", "gpu_clock_prove"}


@pytest.mark.parametrize("fault", ALL_FAULTS, ids=[f"{number}-{one['name']}" for number, one in enumerate(ALL_FAULTS)])
def test_every_fault_says_how_where_and_what(fault: dict[str, Any]) -> None:
    assert (
        {"name", "inject", "stage", "sentence"}
        <= set(fault)
        <= {"name", "inject", "stage", "sentence", "hosts", "vars"}
    )
    assert fault["stage"] in STAGES
    assert subprocess.run(["sh", "-n", "-c", fault["inject"]]).returncode == 0


def test_there_are_at_least_25_single_faults() -> None:
    assert len({(fault["name"], fault["inject"]) for fault in FAULTS}) >= 25


def test_faults_of_several_hosts_are_reported_together(clean: dict[str, Any]) -> None:
    facts = {host: dict(one) for host, one in clean.items()}
    facts["spark-b"]["kernel_release"] = {"value": "6.17.0-1014-nvidia", "source": "test"}
    facts["spark-c"]["firmware_ec"] = {"value": "0x03000302", "source": "test"}
    facts["spark-d"]["machine_id"] = facts["spark-a"]["machine_id"]
    report = judge(facts, RULES).report()
    assert report.startswith("3 finding(s):")
    for part in ("spark-b: kernel", "spark-c: EC firmware", "spark-a, spark-d: machine id"):
        assert part in report
