"""The fabric modules through main(), as Ansible calls them."""

from __future__ import annotations

import importlib
import ipaddress
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import fabric_config, fabric_path, roce
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
PEER = {"host": "b", "address": "192.168.192.2", "mtu": 9000, "mac": "02:00:00:00:0a:02"}
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


LINK = {"address": "192.168.192.1", "subnet": "192.168.192.0/24"}


@pytest.fixture
def facts_of_netdev(monkeypatch):
    link = importlib.import_module("ansible.module_utils.gb10.fabric_link")
    monkeypatch.setattr(link.facts, "__kwdefaults__", link.facts.__kwdefaults__ | {"netdevs": lambda: [NETDEV]})


@pytest.mark.usefixtures("facts_of_netdev")
def test_link_plans_in_check_mode_and_writes_nothing(run, tmp_path):
    result = run("link", **LINK, configure=True, sysfs=str(tmp_path), _ansible_check_mode=True)

    assert result["changed"] is True
    assert result["diff"]["before"]["mtu"] == 1500
    assert "MTUBytes=9000" in result["diff"]["after"]["file"] or "mtu: 9000" in result["diff"]["after"]["file"]
    assert not any(Path(f"/{file}").exists() for file in (fabric_config.NETWORKD_FILE, fabric_config.NETPLAN_FILE))


def test_link_fails_with_the_reason_when_it_cannot_configure(run):
    result = run("link", **LINK | {"address": "192.168.192.9"}, configure=True, interface="eth9")

    assert result["failed"] is True
    assert "fabric_interface is eth9; found enp1s0f0np0" in result["msg"]


@pytest.mark.usefixtures("facts_of_netdev")
def test_link_returns_the_fault_instead_of_failing(run, tmp_path):
    result = run("link", **LINK, sysfs=str(tmp_path))

    assert (result["changed"], "diff" in result) == (False, False)
    assert result["fabric"]["interface"] == "enp1s0f0np0"
    assert result["fabric"]["fault"].startswith("no RDMA device")


@pytest.mark.usefixtures("facts_of_netdev")
def test_link_returns_what_the_tests_remembered(run, tmp_path, monkeypatch):
    monkeypatch.setattr(fabric_path, "probe_paths", lambda *_, **__: [GOOD])
    run("path", own=OWN, peers=[PEER], key="k", memory=str(tmp_path / "fabric-path.json"))
    result = run("link", **LINK, memory=str(tmp_path), require_rdma=False)

    assert result["fabric"]["remembered"]["path"]["key"] == "k"
    assert result["fabric"]["remembered"]["path"]["result"][0]["tcp"] == "open"
    assert result["fabric"]["remembered"]["perftest"] is None


def test_path_remembers_nothing_in_check_mode_and_forgets_after_a_bad_result(run, tmp_path, monkeypatch):
    memory = tmp_path / "memory.json"
    arguments = {"own": OWN, "peers": [PEER], "key": "k", "memory": str(memory)}
    monkeypatch.setattr(fabric_path, "probe_paths", lambda *_, **__: [GOOD])
    assert run("path", **arguments, _ansible_check_mode=True)["changed"] is True
    assert not memory.exists()

    memory.write_text("{}")
    bad = fabric_path.Outcome("b", "192.168.192.2", 9000, 3, 0, "", "open", (), "enp1s0f0np0")
    monkeypatch.setattr(fabric_path, "probe_paths", lambda *_, **__: [bad])
    result = run("path", **arguments)
    assert (result["changed"], result["paths"][0]["full"], memory.exists()) == (False, 0, False)


def test_path_fails_when_it_cannot_test(run, tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise fabric_path.PathError("cannot listen on 192.168.192.1 port 47610: Address already in use; free it")

    monkeypatch.setattr(fabric_path, "probe_paths", refuse)

    assert "port 47610" in run("path", own=OWN, peers=[PEER], key="k", memory=str(tmp_path / "m"))["msg"]


def test_perftest_is_remembered_with_its_bound(run, tmp_path, monkeypatch):
    perftest = importlib.import_module("ansible.module_utils.gb10.fabric_perftest")
    monkeypatch.setattr(perftest, "measure", lambda *_, **__: [{"to": "b", "gbps": 98.1, "latency_us": 2.1}])
    memory = tmp_path / "memory.json"
    result = run("perftest", host="a", addresses={"a": "1", "b": "2"}, own=OWN, key="k", memory=str(memory))

    assert result["changed"] is True
    assert result["measured"]["results"] == [{"to": "b", "gbps": 98.1, "latency_us": 2.1}]
    assert fabric_path.recall(memory) == {"key": "k", "result": result["measured"]}


PROBE = """\
import json, os, sys
print("a line of the engine's own")
print(json.dumps({"argv": sys.argv[1:], "host_ip": os.environ["VLLM_HOST_IP"], "extra": os.environ["X"],
                  "path": os.environ["PYTHONPATH"]}))
"""
RANK = {
    "rank": 1,
    "python": sys.executable,
    "python_path": ["/opt/gb10/current/site"],
    "environment": {"X": 1, "VLLM_HOST_IP": "never from the profile"},
    "fabric": {"address": "192.168.192.1", "require_rdma": False, "hca": None, "gid_index": None},
}
ARGUMENTS = {"world": 2, "master_address": "192.168.192.2"}


@pytest.fixture
def probe(tmp_path, monkeypatch) -> Callable[..., dict[str, str]]:
    """Install a rank, and a probe of the given text; returns the module's arguments for both."""
    monkeypatch.setattr(roce.resolve, "__kwdefaults__", roce.resolve.__kwdefaults__ | {"netdevs": lambda: [NETDEV]})

    def write(text: str, **rank: object) -> dict[str, str]:
        (tmp_path / "gb10").mkdir()
        (tmp_path / "gb10/__init__.py").touch()
        (tmp_path / "gb10/allreduce_probe.py").write_text(text)
        (tmp_path / "rank.json").write_text(json.dumps(RANK | rank))
        return {"package": str(tmp_path), "configuration": str(tmp_path / "rank.json")}

    return write


def test_allreduce_runs_the_probe_as_the_rank_would_run(run, probe):
    result = run("allreduce", **ARGUMENTS, **probe(PROBE))

    assert (result["result"]["host_ip"], result["result"]["extra"], result["hca"]) == ("192.168.192.1", "1", "")
    assert result["result"]["path"].endswith(":/opt/gb10/current/site")
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
    assert run("allreduce", **ARGUMENTS, **probe(text), **options)["result"]["error"].startswith(error)


def test_allreduce_without_the_engine_says_so(run, probe):
    arguments = probe("", python="/nowhere/python")

    assert "is the engine installed?" in run("allreduce", **ARGUMENTS, **arguments)["result"]["error"]


def test_allreduce_without_a_rank_is_skipped(run, tmp_path):
    result = run("allreduce", **ARGUMENTS, configuration=str(tmp_path / "rank.json"))["result"]

    assert result == {"skipped": "no rank is installed: run playbooks/serve.yml first"}


def test_allreduce_of_a_container_is_skipped(run, probe):
    assert (
        "container image" in run("allreduce", **ARGUMENTS, **probe("", container={"image": "x"}))["result"]["skipped"]
    )
