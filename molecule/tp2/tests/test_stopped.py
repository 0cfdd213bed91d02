"""After the tests of what is served: a stop ends all of a container, and keeps its image."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3]
INVENTORY = PROJECT / "molecule" / "tp2" / "inventory"
testinfra_hosts = ["ssh://spark-a", "ssh://spark-b"]


@pytest.fixture(scope="session", autouse=True)
def _stopped():
    """Stop the model on both hosts."""
    result = subprocess.run(
        ["ansible-playbook", "-i", str(INVENTORY), "playbooks/stop.yml"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_stop_leaves_no_process(host):
    assert host.run("pgrep -u vllm").stdout == ""
    assert host.run("pgrep -x conmon").stdout == ""
    assert not host.file("/sys/fs/cgroup/system.slice/vllm-rank.service").exists


def test_stop_leaves_no_container(host):
    result = host.run("podman ps --all --quiet")
    assert (result.rc, result.stdout) == (0, "")


def test_stop_leaves_no_port(host):
    listening = host.run("ss -Hltn").stdout
    launch = json.loads(host.file("/etc/gb10/launch.json").content_string)
    assert f":{launch['master_port']} " not in listening
    assert ":8000 " not in listening


def test_stop_leaves_no_shared_memory(host):
    assert host.run("find /dev/shm -user vllm").stdout == ""


def test_stop_leaves_no_mount_of_the_container(host):
    assert host.run("grep -c /var/lib/containers/storage/overlay/ /proc/self/mounts").stdout.strip() == "0"


def test_image_stays_for_the_next_start(host):
    record = json.loads(host.file("/opt/gb10/current/release.json").content_string)
    assert host.run(f"podman image exists {record['series']}").rc == 0
