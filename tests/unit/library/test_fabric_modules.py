"""The fabric modules through main(), as Ansible calls them."""

from __future__ import annotations

import importlib
import ipaddress
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import fabric_path, roce
from ansible.module_utils.testing import patch_module_args

NETDEV = roce.Netdev("enp1s0f0np0", 1500, "UP", "02:00:00:00:0a:01", (ipaddress.ip_interface("192.168.192.1/24"),))
OWN = {
    "address": "192.168.192.1",
    "interface": "enp1s0f0np0",
    "mac": "02:00:00:00:0a:01",
    "mtu": 9000,
    "boot_id": "boot-a",
    "firmware": "",
    "rdma": {"hca": "rocep1s0f0", "port": 1, "gid_index": 3, "rate_gbps": 200},
}
PEER = {
    "host": "b",
    "address": "192.168.192.2",
    "mtu": 9000,
    "mac": "02:00:00:00:0a:02",
    "boot_id": "boot-b",
    "firmware": "",
}
GOOD = fabric_path.Outcome("b", "192.168.192.2", 9000, 3, 3, "", "open", (PEER["mac"],), "enp1s0f0np0")


@pytest.fixture
def run(capsys, monkeypatch) -> Callable[..., dict[str, object]]:
    """Run a module's main() and return its result."""
    monkeypatch.setattr(roce, "read_netdevs", lambda: [NETDEV])

    def call(name: str, **arguments: object) -> dict[str, object]:
        module = importlib.import_module(f"gb10_fabric_{name}")
        with patch_module_args(arguments), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return call


def test_config_plans_in_check_mode_and_writes_nothing(run):
    result = run("config", address="192.168.192.1", subnet="192.168.192.0/24", mtu=9000, _ansible_check_mode=True)

    assert result["changed"] is True
    assert result["diff"]["before"]["mtu"] == 1500
    assert "MTUBytes=9000" in result["diff"]["after"]["file"] or "mtu: 9000" in result["diff"]["after"]["file"]
    assert not Path(result["file"]).exists()


def test_config_fails_with_the_reason(run):
    result = run("config", address="192.168.192.9", subnet="192.168.192.0/24", mtu=9000, interface="eth9")

    assert result["failed"] is True
    assert "fabric_interface is eth9; found enp1s0f0np0" in result["msg"]


def test_info_returns_the_fault_instead_of_failing(run, tmp_path, monkeypatch):
    link = importlib.import_module("ansible.module_utils.gb10.fabric_link")
    monkeypatch.setattr(link.facts, "__kwdefaults__", link.facts.__kwdefaults__ | {"netdevs": lambda: [NETDEV]})
    result = run("info", address="192.168.192.1", subnet="192.168.192.0/24", sysfs=str(tmp_path))

    assert result["changed"] is False
    assert result["fabric"]["interface"] == "enp1s0f0np0"
    assert result["fabric"]["fault"].startswith("no RDMA device")


def test_path_is_tested_once_and_then_remembered(run, tmp_path, monkeypatch):
    tested = []
    monkeypatch.setattr(fabric_path, "probe_paths", lambda *_, **__: tested.append(1) or [GOOD])
    arguments = {"own": OWN, "peers": [PEER], "memory": str(tmp_path / "memory.json")}

    assert run("path", **arguments)["changed"] is True
    second = run("path", **arguments)
    assert (second["changed"], second["remembered"], second["paths"][0]["tcp"]) == (False, True, "open")
    assert len(tested) == 1
    assert run("path", **arguments, force=True)["remembered"] is False
    assert len(tested) == 2


def test_path_remembers_nothing_in_check_mode_and_forgets_after_a_bad_result(run, tmp_path, monkeypatch):
    memory = tmp_path / "memory.json"
    monkeypatch.setattr(fabric_path, "probe_paths", lambda *_, **__: [GOOD])
    run("path", own=OWN, peers=[PEER], memory=str(memory), _ansible_check_mode=True)
    assert not memory.exists()

    memory.write_text("{}")
    bad = fabric_path.Outcome("b", "192.168.192.2", 9000, 3, 0, "", "open", (), "enp1s0f0np0")
    monkeypatch.setattr(fabric_path, "probe_paths", lambda *_, **__: [bad])
    result = run("path", own=OWN, peers=[PEER], memory=str(memory))
    assert (result["changed"], result["paths"][0]["full"], memory.exists()) == (False, 0, False)


def test_path_fails_when_it_cannot_test(run, tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise fabric_path.PathError("cannot listen on 192.168.192.1 port 47610: Address already in use; free it")

    monkeypatch.setattr(fabric_path, "probe_paths", refuse)

    assert "port 47610" in run("path", own=OWN, peers=[PEER], memory=str(tmp_path / "m"))["msg"]


def test_perftest_is_measured_once_and_then_remembered(run, tmp_path, monkeypatch):
    perftest = importlib.import_module("ansible.module_utils.gb10.fabric_perftest")
    monkeypatch.setattr(perftest, "measure", lambda *_, **__: [{"to": "b", "gbps": 98.1, "latency_us": 2.1}])
    arguments = {"host": "a", "addresses": {"a": "1", "b": "2"}, "own": OWN, "memory": str(tmp_path / "memory.json")}

    assert run("perftest", **arguments)["changed"] is True
    second = run("perftest", **arguments)
    assert (second["changed"], second["results"]) == (False, [{"to": "b", "gbps": 98.1, "latency_us": 2.1}])
    assert run("perftest", **arguments, conditions=["rebooted"])["changed"] is True


PROBE = """\
import json, os, sys
print("a line of the engine's own")
print(json.dumps({"argv": sys.argv[1:], "host_ip": os.environ["VLLM_HOST_IP"], "extra": os.environ["X"]}))
"""
ARGUMENTS = {
    "python": sys.executable,
    "rank": 1,
    "world": 2,
    "master_address": "192.168.192.2",
    "address": "192.168.192.1",
    "environment": {"X": 1, "VLLM_HOST_IP": "never from the profile"},
}


@pytest.fixture
def probe(tmp_path, monkeypatch) -> Callable[[str], list[str]]:
    monkeypatch.setattr(roce.resolve, "__kwdefaults__", roce.resolve.__kwdefaults__ | {"netdevs": lambda: [NETDEV]})

    def write(text: str) -> list[str]:
        (tmp_path / "gb10").mkdir()
        (tmp_path / "gb10/__init__.py").touch()
        (tmp_path / "gb10/allreduce_probe.py").write_text(text)
        return [str(tmp_path)]

    return write


def test_allreduce_runs_the_probe_in_the_fabric_environment(run, probe):
    result = run("allreduce", **ARGUMENTS, python_path=probe(PROBE), require_rdma=False)

    assert (result["result"]["host_ip"], result["result"]["extra"], result["hca"]) == ("192.168.192.1", "1", "")
    arguments = dict(zip(result["result"]["argv"][::2], result["result"]["argv"][1::2], strict=True))
    assert (arguments["--rank"], arguments["--world"]) == ("1", "2")
    assert (arguments["--master-address"], arguments["--master-port"]) == ("192.168.192.2", "47620")


@pytest.mark.parametrize(
    ("text", "options", "error"),
    [
        (
            "raise SystemExit('no torch')",
            {},
            "exit 1: no torch; NCCL was not reached",
        ),
        ("import time; time.sleep(9)", {"timeout": 0.3}, "no end within 0.3 s; NCCL was not reached"),
        (
            "import sys; open(sys.argv[-1], 'w').write('x NCCL WARN Failed to initialize any NET plugin'); sys.exit(1)",
            {},
            "exit 1: no output; NCCL: Failed to initialize any NET plugin",
        ),
    ],
)
def test_allreduce_returns_the_probes_failure(run, probe, text, options, error):
    result = run("allreduce", **ARGUMENTS, python_path=probe(text), require_rdma=False, **options)

    assert result["result"]["error"].startswith(error)


def test_allreduce_without_the_engine_says_so(run, probe):
    arguments = ARGUMENTS | {"python": "/nowhere/python", "python_path": probe(""), "require_rdma": False}

    assert "is the engine installed?" in run("allreduce", **arguments)["result"]["error"]
