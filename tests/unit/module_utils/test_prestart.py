"""What a host checks before each start of its rank, all faults together, and what it writes for the launcher."""

from __future__ import annotations

import getpass
import json
from types import SimpleNamespace

import pytest
from ansible.module_utils.gb10 import launcher, prestart, rank, release, roce

AWKWARD = "π \"quoted\" 'single' %c $HOME \\ back  two"
FABRIC = {"VLLM_HOST_IP": "192.0.2.11", "GLOO_SOCKET_IFNAME": "enp1s0f0np0"}


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host on which everything is right; tests spoil one thing."""
    for name in ("CONFIGURATION", "LAUNCH", "RUNNING"):
        monkeypatch.setattr(rank, name, tmp_path / f"{name.lower()}.json")
    monkeypatch.setattr(rank, "memory_available_mib", lambda: 4000)
    monkeypatch.setattr(release, "faults", lambda link: [])
    monkeypatch.setattr(roce, "resolve", lambda *_, **__: SimpleNamespace(environment=dict(FABRIC), report="vec1"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    release.switch(tmp_path / "current", tmp_path / "release-1")
    wanted = {
        "rank": 0,
        "world_size": 4,
        "user": getpass.getuser(),
        "argv": ["serve", "/m", "--speculative-config", json.dumps({"method": AWKWARD}), AWKWARD],
        "environment": {"KEY": AWKWARD},
        "python": "/usr/bin/python3",
        "python_path": ["/a", "/b"],
        "release_link": str(tmp_path / "current"),
        "checkpoint": str(tmp_path / "model"),
        "checkpoint_files": ["config.json"],
        "mount": None,
        "memory_floor_mib": 1500,
        "fabric": {"address": "192.0.2.11", "require_rdma": True, "hca": "", "gid_index": None, "wait_s": 0},
    }
    rank.CONFIGURATION.write_text(json.dumps(wanted))
    rank.LAUNCH.write_text(json.dumps({"launch_id": "l2", "master_port": 21007}))
    return tmp_path, wanted


def refused(capsys) -> str:
    assert prestart.main() == 1
    assert not rank.RUNNING.exists() or json.loads(rank.RUNNING.read_text())["launch_id"] != "new"
    return capsys.readouterr().out


def test_right_host_writes_what_the_launcher_takes(host, monkeypatch):
    _, wanted = host
    assert prestart.main() == 0
    seen = {}
    monkeypatch.setattr(launcher.os, "execve", lambda path, argv, env: seen.update(path=path, argv=argv, env=env))
    launcher.main()
    assert seen["argv"][3:] == [*wanted["argv"], "--master-port", "21007"]
    assert seen["env"]["KEY"] == AWKWARD
    assert seen["env"]["VLLM_HOST_IP"] == "192.0.2.11"
    assert seen["env"]["PYTHONPATH"] == "/a:/b"
    assert seen["env"]["PATH"].startswith("/a/bin:/b/bin:/")
    assert "PYTEST_CURRENT_TEST" not in seen["env"]


def test_all_faults_are_told_at_once(host, monkeypatch, capsys):
    folder, _ = host
    rank.LAUNCH.unlink()
    (folder / "model" / "config.json").unlink()
    monkeypatch.setattr(rank, "memory_available_mib", lambda: 900)
    monkeypatch.setattr(release, "faults", lambda link: ["edited after patching"])
    output = refused(capsys)
    for text in ("names no launch", "config.json is missing", "MemAvailable is 900 MiB, wanted 1500", "edited after"):
        assert text in output


def test_same_launch_is_not_joined_twice(host, capsys):
    assert prestart.main() == 0
    assert "already started on this host" in refused(capsys)


def test_fabric_fault_stops_the_start(host, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise roce.RoceError("no interface has 192.0.2.11", "plug it in")

    monkeypatch.setattr(roce, "resolve", fail)
    assert "no interface has 192.0.2.11" in refused(capsys)


def test_empty_variable_is_never_passed_on(host, monkeypatch, capsys):
    empty = SimpleNamespace(environment=FABRIC | {"NCCL_IB_GID_INDEX": ""}, report="")
    monkeypatch.setattr(roce, "resolve", lambda *_, **__: empty)
    assert "NCCL_IB_GID_INDEX would be empty" in refused(capsys)


def test_host_without_configuration_says_what_to_run(host, capsys):
    rank.CONFIGURATION.unlink()
    assert "run playbooks/serve.yml for this host first" in refused(capsys)
