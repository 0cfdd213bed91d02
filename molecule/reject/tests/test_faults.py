"""Every fault of tests/fixtures/faults.yml, injected on a real host, through the playbook an operator runs."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from tests.embedded_hosts import HOSTS, PROJECT, on, one_line, run

FAULTS = yaml.safe_load((PROJECT / "tests/fixtures/faults.yml").read_text())
# A reset double has forgotten what the clock unit told it; the unit is started again only where a fault failed it.
UNDO = """gb10-doubles reset; nvidia-smi --persistence-mode=1; nvidia-smi --lock-gpu-clocks=0,2200
systemctl reset-failed gb10-gpu-clock; systemctl start gb10-gpu-clock"""


def refused(playbook: str, *options: str) -> str:
    """Output of a run that has to be refused."""
    result = run("ansible-playbook", playbook, *options)
    assert result.returncode != 0, result.stdout
    return one_line(result.stdout + result.stderr)


def numbered(stage: str) -> list[tuple[int, dict]]:
    return list(enumerate(fault for fault in FAULTS if fault["stage"] == stage))


def inject(first: int, fault: dict) -> list[str]:
    """Make the fault on as many hosts as it says, from the host FIRST on; returns them."""
    chosen = sorted(HOSTS[(first + offset) % 4] for offset in range(fault.get("hosts", 1)))
    on(chosen, f"set -e\nexport GB10_ROOT=\n{fault['inject']}")
    return chosen


def in_pairs(faults: list[tuple[int, dict]]) -> list[list[tuple[int, dict]]]:
    """Each fault with one of another kind: a run takes seconds, and both have to be told, each of its own host."""
    half = len(faults) // 2
    pairs = [[faults[number], faults[number + half]] for number in range(half)]
    return pairs if len(faults) % 2 == 0 else [*pairs, [faults[-1]]]


@pytest.fixture
def injected(request):
    """The faults with the hosts that have them: each time others, and another for each fault."""
    made = [(fault, inject(request.param[0][0] + place, fault)) for place, (_, fault) in enumerate(request.param)]
    yield made
    on(sorted({host for _, chosen in made for host in chosen}), UNDO)


def named(groups: list[list[tuple[int, dict]]]):
    names = ["+".join(f"{number}-{fault['name']}" for number, fault in group) for group in groups]
    return pytest.mark.parametrize("injected", groups, indirect=True, ids=names)


def sentence_of(fault: dict, chosen: list[str]) -> str:
    return one_line(fault["sentence"].replace("{host}", ", ".join(chosen)))


def extra(fault: dict) -> list[str]:
    return [word for key, value in fault.get("vars", {}).items() for word in ("-e", f"{key}={shlex.quote(str(value))}")]


def test_clean_fleet_is_let_through():
    result = run("ansible-playbook", "playbooks/hosts.yml")
    assert result.returncode == 0, result.stdout
    assert "all hosts are alike" in result.stdout


@named(in_pairs(numbered("host_parity")))
def test_unequal_or_bad_host_stops_the_run(injected):
    output = refused("playbooks/hosts.yml", *(word for fault, _ in injected for word in extra(fault)))
    assert f"{len(injected)} finding(s):" in output
    for fault, chosen in injected:
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


@named([[fault] for fault in numbered("gpu_clock")])
def test_clock_fault_stops_the_bring_up(injected):
    ((fault, chosen),) = injected
    output = refused("site.yml", *extra(fault))
    assert sentence_of(fault, chosen) in output
    assert "PLAY [Prove the fabric]" not in output


def test_every_host_is_told_its_own_verdict_under_load(request):
    """One run of the proof, another fault on each host: they are measured at the same time and reported together."""
    proved = [fault for fault in FAULTS if fault["stage"] == "gpu_clock_prove" and fault["name"] != "gpu-weak"]
    assert len(proved) == len(HOSTS)
    # The probe runs with the engine's torch.
    assert run("ansible-playbook", "playbooks/stop.yml", "playbooks/engine.yml").returncode == 0
    request.addfinalizer(lambda: on(HOSTS, UNDO))
    for host, fault in zip(HOSTS, proved, strict=True):
        on([host], f"export GB10_ROOT=\n{fault['inject']}")
    output = refused("playbooks/prove_gpu.yml", *(word for fault in proved for word in extra(fault)))
    for host, fault in zip(HOSTS, proved, strict=True):
        told = re.search(rf"fatal: \[{host}\]: FAILED! (.*?)(?:fatal: |PLAY RECAP)", output)
        assert told, output
        assert sentence_of(fault, [host]) in told[1]
    assert "GEMV by second" in output
