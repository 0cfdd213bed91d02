"""What a host checks before each start of its rank, all faults together, and what it writes for the launcher."""

from __future__ import annotations

import getpass
import json
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ansible.module_utils.gb10 import access, gpu_smi, launcher, memory, nfs, prestart, processes, rank, release, roce

AWKWARD = "π \"quoted\" 'single' %c $HOME \\ back  two"
FABRIC = {"VLLM_HOST_IP": "192.0.2.11", "GLOO_SOCKET_IFNAME": "enp1s0f0np0"}
LEFTOVERS = processes.leftovers
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
LIMITS = {resource.RLIMIT_MEMLOCK: UNLIMITED, resource.RLIMIT_NOFILE: (1048576, 1048576)}


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host on which everything is right; tests spoil one thing."""
    monkeypatch.setattr(prestart.resource, "getrlimit", lambda which: LIMITS[which])
    monkeypatch.setattr(processes, "leftovers", lambda group, ports: [])
    monkeypatch.setattr(memory, "make_room", lambda floor: f"room for {floor} MiB")
    for name in ("CONFIGURATION", "LAUNCH", "RUNNING", "SERVING", "API_KEY"):
        monkeypatch.setattr(rank, name, tmp_path / f"{name.lower()}.json")
    monkeypatch.setattr(rank, "memory_available_mib", lambda: 4000)
    monkeypatch.setattr(release, "faults", lambda link: [])
    monkeypatch.setattr(roce, "resolve", lambda *_, **__: SimpleNamespace(environment=dict(FABRIC), report="vec1"))
    monkeypatch.setattr(launcher, "CACHES", tmp_path / "caches")
    (tmp_path / "caches" / "release-1" / "triton").mkdir(parents=True)
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
        "writable": [str(tmp_path / "home")],
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


def test_rank_with_8_mib_of_locked_memory_is_refused(host, monkeypatch, capsys):
    monkeypatch.setitem(LIMITS, resource.RLIMIT_MEMLOCK, (8388608, 8388608))
    assert "memlock is 8388608 bytes in the rank unit, wanted infinity" in refused(capsys)


def test_each_cache_on_the_network_is_told_once(host, monkeypatch, capsys):
    folder, wanted = host
    wanted["environment"]["TRITON_CACHE_DIR"] = str(folder / "caches" / "mine")
    rank.CONFIGURATION.write_text(json.dumps(wanted))
    monkeypatch.setattr(nfs, "MOUNTS", folder / "mounts")
    nfs.MOUNTS.write_text(f"/dev/root / ext4 rw 0 0\nhead:/caches {folder}/caches nfs4 rw 0 0\n")
    output = refused(capsys)
    assert output.count("(nfs4): choose a directory on this host's disk") == 2
    assert f"the caches' directory is {folder}/caches, on head:/caches" in output
    assert f"TRITON_CACHE_DIR is {folder}/caches/mine, on head:/caches" in output


def test_rank_with_few_open_files_is_refused(host, monkeypatch, capsys):
    monkeypatch.setitem(LIMITS, resource.RLIMIT_NOFILE, (1024, 1048576))
    assert "open files are limited to 1024" in refused(capsys)


def test_leftover_is_named_and_not_ended(host, monkeypatch, capsys):
    engine = processes.Process(4711, 0, "VLLM::EngineCor", "S", 900, "/user.slice", ("VLLM::EngineCore",))
    monkeypatch.setattr(processes, "leftovers", lambda group, ports: [processes.Leftover(engine, (21007,))])
    gpu = [gpu_smi.GpuProcess(4711, "VLLM::EngineCore", 104277)]
    monkeypatch.setattr(gpu_smi, "query_processes", lambda timeout_s: ("ok", gpu))
    output = refused(capsys)
    for text in ("pid 4711", "VLLM::EngineCore", "104277 MiB of the GPU", "port 21007", "of root", "is in the way"):
        assert text in output


OLD_HEAD = """
import socket, sys, time
one = socket.create_server(("127.0.0.1", 0))
print(one.getsockname()[1], flush=True)
time.sleep(60)
"""


def test_old_head_that_still_listens_for_its_ranks_keeps_the_new_one_from_starting(host, monkeypatch, capsys, tmp_path):
    """A real process, started as vLLM is, on the very port of this launch; and one on another port, too."""
    monkeypatch.setattr(processes, "leftovers", lambda _, ports: LEFTOVERS("/system.slice/vllm-rank.service", ports))
    monkeypatch.setattr(gpu_smi, "query_processes", lambda timeout_s: ("none", []))
    (tmp_path / "vllm").write_text(OLD_HEAD)
    words = [sys.executable, str(tmp_path / "vllm"), "serve", "/m"]
    old = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        port = int(old.stdout.readline())
        rank.LAUNCH.write_text(json.dumps({"launch_id": "l2", "master_port": port}))
        output = refused(capsys)
        for text in (f"pid {old.pid} (", " ".join(words)[:60], f"of {getpass.getuser()}", f"listens on port {port}"):
            assert text in output
        rank.LAUNCH.write_text(json.dumps({"launch_id": "l3", "master_port": 1}))
        output = refused(capsys)
        for text in (f"pid {old.pid} (", f"listens on port {port}"):
            assert text in output
    finally:
        old.kill()
        old.wait()
    prestart.main()
    assert f"pid {old.pid} (" not in capsys.readouterr().out  # an engine that really runs here would be told


def test_what_the_user_cannot_use_is_refused(host, monkeypatch, capsys):
    seen = {}

    def faults(user, reads, writes):
        seen.update(user=user, reads=[path.name for path in reads], writes=[path.name for path in writes])
        return ["/cache (root:root 0755): user vllm cannot write in it"]

    monkeypatch.setattr(access, "faults", faults)
    assert "cannot write in it" in refused(capsys)
    assert seen == {"user": getpass.getuser(), "reads": ["config.json"], "writes": ["release-1", "triton", "home"]}


def test_start_that_cannot_be_checked_is_refused(host, monkeypatch, capsys):
    def fail(*_: object) -> None:
        raise access.AccessError("user vllm does not exist on this host")

    monkeypatch.setattr(access, "faults", fail)
    assert "user vllm does not exist" in refused(capsys)


def test_room_is_made_before_memory_is_judged(host, monkeypatch):
    free = {"mib": 900}
    monkeypatch.setattr(rank, "memory_available_mib", lambda: free["mib"])
    monkeypatch.setattr(memory, "make_room", lambda floor: str(free.update(mib=floor)))
    assert prestart.main() == 0


def test_new_start_ends_the_proof_of_the_old_one(host):
    rank.SERVING.write_text("l1")
    assert prestart.main() == 0
    assert not rank.SERVING.exists()


def test_launcher_can_read_what_was_written_under_the_units_umask(host):
    before = os.umask(0o077)
    try:
        assert prestart.main() == 0
    finally:
        os.umask(before)
    assert rank.RUNNING.stat().st_mode & 0o777 == 0o644
    assert rank.RUNNING.parent.stat().st_mode & 0o777 == 0o755
