"""Leftover engines and who holds a port, on real processes; the end of one's own, and of nobody else's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from ansible.module_utils.gb10 import processes, rank

# A child that carries vLLM's name for its engine, holds a port and ignores polite requests.
ENGINE = """
import ctypes, signal, socket, sys, time
ctypes.CDLL(None).prctl(15, b"VLLM::EngineCore", 0, 0, 0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
one = socket.create_server(("127.0.0.1", 0))
print(one.getsockname()[1], flush=True)
time.sleep(60)
"""


@pytest.fixture
def engine():
    child = subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True)
    port = int(child.stdout.readline())
    threading.Thread(target=child.wait, daemon=True).start()
    yield child.pid, port
    child.kill()


def mine(found, pid):
    return [one for one in found if one.process.pid == pid]


def test_leftover_is_named_with_all_that_an_operator_needs(engine):
    pid, port = engine
    (found,) = mine(processes.leftovers("/system.slice/vllm-rank.service", [port]), pid)
    text = str(found)
    for part in (f"pid {pid}", "VLLM::EngineCor", "MiB", f"listens on port {port}", f"of {found.process.owner}"):
        assert part in text
    assert found.process.uid == os.getuid()
    assert found.process.memory_mib > 0


def test_process_of_the_unit_itself_is_no_leftover(engine):
    pid, port = engine
    group = processes.read(pid).control_group
    assert mine(processes.leftovers(group, [port]), pid) == [] or group == ""


def test_holder_of_a_needed_port_is_a_leftover_whatever_its_name():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = mine(processes.leftovers("/nowhere", [port]), os.getpid())
        assert [one.ports for one in found] == [(port,)]
        assert mine(processes.leftovers("/nowhere", [port + 1]), os.getpid()) == []


def test_engine_is_named_with_ports_that_nobody_else_needs(engine):
    pid, port = engine
    (found,) = mine(processes.leftovers("/system.slice/vllm-rank.service", []), pid)
    assert (found.ports, found.listens) == ((), (port,))
    assert f"listens on port {port}" in str(found)


def test_own_leftover_is_ended_by_its_id_though_it_ignores_sigterm(engine):
    pid, port = engine
    faults = rank.stop_faults("/nowhere", [port], os.getuid(), 0)
    assert any(f"pid {pid}" in fault for fault in faults)
    assert rank.end_own("/nowhere", [port], os.getuid(), patience=0.5)
    time.sleep(0.1)
    assert processes.read(pid) is None
    assert not any(f"pid {pid}" in fault for fault in rank.stop_faults("/nowhere", [port], os.getuid(), 0))


def test_engine_of_somebody_else_is_named_and_left_alone(engine):
    pid, port = engine
    other = os.getuid() + 1
    assert not rank.end_own("/nowhere", [port], other)
    assert processes.read(pid) is not None
    (fault,) = [one for one in rank.stop_faults("/nowhere", [port], other, 0) if f"pid {pid}" in one]
    assert "left alone" in fault


def test_process_that_cannot_be_killed_asks_for_a_reboot(monkeypatch):
    stuck = processes.Process(9, 1, "VLLM::Worker", "D", 1, "/g")
    monkeypatch.setattr(processes, "members", lambda group: [9])
    monkeypatch.setattr(processes, "read", lambda pid: stuck)
    monkeypatch.setattr(processes, "leftovers", lambda group, ports: [])
    (fault,) = rank.stop_faults("/g", [], 1, 0)
    assert "cannot be killed, a reboot of this host is needed" in fault


def test_memory_that_does_not_come_back_is_a_failed_stop(monkeypatch):
    monkeypatch.setattr(rank, "memory_available_mib", lambda: 900)
    monkeypatch.setattr(processes, "leftovers", lambda group, ports: [])
    (fault,) = rank.stop_faults("", [], 1, 1500)
    assert "MemAvailable is 900 MiB after the stop, wanted 1500 MiB" in fault


@pytest.mark.parametrize(
    ("name", "arguments", "is_engine"),
    [
        ("VLLM::Worker_TP0", ("VLLM::Worker_TP0",), True),
        ("python3", ("/usr/bin/python3", "-m", "vllm.entrypoints.cli.main", "serve", "/m"), True),
        ("vllm", ("/opt/env/bin/python", "/opt/env/bin/vllm", "serve", "/m"), True),
        ("vllm", ("/usr/bin/vllm", "serve"), True),
        ("ls", ("ls", "/var/cache/gb10/vllm"), False),
        ("journalctl", ("journalctl", "-fu", "vllm-rank"), False),
        ("python3", ("/usr/bin/python3", "-B", "-m", "gb10.launcher"), False),
        ("vi", ("vi", "vllm"), False),
    ],
)
def test_what_counts_as_an_engine(name, arguments, is_engine):
    assert processes.Process(1, 1, name, "S", 1, "", arguments).is_engine is is_engine


def test_environment_and_arguments_are_read_as_they_are():
    words = ["sleep", "60"]
    value = 'π "q" %c $HOME \\ ='
    child = subprocess.Popen(words, env={"A": value, "EMPTY": ""})
    try:
        time.sleep(0.1)
        assert processes.environment(child.pid) == {"A": value, "EMPTY": ""}
        assert processes.read(child.pid).arguments == tuple(words)
    finally:
        child.kill()
        child.wait()
    assert processes.read(child.pid) is None
