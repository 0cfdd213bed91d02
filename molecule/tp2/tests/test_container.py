"""The engine in a container on two hosts: what an operator sees while it serves."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

import testinfra

HEAD, WORKER = "spark-a", "spark-b"
testinfra_hosts = [f"ssh://{HEAD}", f"ssh://{WORKER}"]
GROUP = "/sys/fs/cgroup/system.slice/vllm-rank.service"


def engine_pid(host) -> str:
    """The engine's own process: the one in the unit's control group that `vllm serve` became."""
    found = host.run(
        f"for pid in $(cat $(find {GROUP} -name cgroup.procs)); do "
        "tr '\\0' ' ' < /proc/$pid/cmdline | grep -q '^/usr/bin/python3 -m vllm.* serve' && echo $pid; done"
    ).stdout.split()
    assert len(found) == 1
    return found[0]


def words(host, pid: str, name: str) -> list[str]:
    return host.run(f"cat /proc/{pid}/{name}").stdout.removesuffix("\0").split("\0")


def test_image_is_the_pinned_one(host):
    pinned = (
        Path(os.environ.get("GB10_CACHE", "/var/cache/gb10-fleet")) / "environments/vllm-image.digest"
    ).read_text()
    record = json.loads(host.file("/opt/gb10/current/release.json").content_string)
    assert record["version"] == pinned
    running = host.run("podman inspect vllm-rank --format 'sha256:{{.Image}}'").stdout.strip()
    assert running == record["series"]


def test_both_hosts_run_the_same_image(host):
    ids = {
        testinfra.get_host(f"ssh://{name}", ssh_config=host.backend.ssh_config)
        .run("podman inspect vllm-rank --format '{{.Image}}'")
        .stdout
        for name in (HEAD, WORKER)
    }
    assert len(ids) == 1


def test_all_processes_of_the_container_are_in_the_unit(host):
    # Where podman would put them otherwise.
    assert host.run("ls -d /sys/fs/cgroup/machine.slice/libpod*").rc != 0
    inside = set(host.run(f"cat $(find {GROUP} -name cgroup.procs)").stdout.split())
    engines = set(host.run("pgrep -u vllm").stdout.split())
    assert engines
    assert engines <= inside


def test_arguments_arrive_unchanged(host):
    actual = words(host, engine_pid(host), "cmdline")
    wanted = json.loads(host.file("/etc/gb10/rank.json").content_string)["argv"]
    launch = json.loads(host.file("/etc/gb10/launch.json").content_string)
    assert actual[3:] == [*wanted, "--master-port", str(launch["master_port"])]


def test_environment_arrives_unchanged(host):
    actual = words(host, engine_pid(host), "environ")
    wanted = json.loads(host.file("/run/gb10/rank.json").content_string)["environment"]
    assert [f"{key}={value}" for key, value in wanted.items() if f"{key}={value}" not in actual] == []


def test_engine_has_no_privileges(host):
    status = dict(
        line.split(":\t", 1) for line in host.file(f"/proc/{engine_pid(host)}/status").content_string.splitlines()
    )
    assert int(status["CapBnd"], 16) == 1 << 14  # IPC_LOCK
    assert int(status["CapEff"], 16) in (0, 1 << 14)
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert host.run(f"stat -c %U /proc/{engine_pid(host)}").stdout.strip() == "vllm"


def test_engine_may_lock_memory_for_rdma(host):
    limits = host.run(f"grep 'Max locked memory' /proc/{engine_pid(host)}/limits").stdout.split()
    assert limits[3:5] == ["unlimited", "unlimited"]


def test_engine_shares_the_hosts_network_and_shared_memory(host):
    pid = engine_pid(host)
    for namespace in ("net", "ipc"):
        assert (
            host.run(f"readlink /proc/{pid}/ns/{namespace}").stdout
            == host.run(f"readlink /proc/1/ns/{namespace}").stdout
        )


def test_store_is_read_only_in_the_container(host):
    assert host.run("podman exec vllm-rank touch /srv/models/x").rc != 0
    assert host.run("podman exec vllm-rank ls /srv/models/tiny-llama/config.json").rc == 0


def test_caches_belong_to_this_image(host):
    release = host.run("readlink /opt/gb10/current").stdout.strip().rpartition("/")[2]
    environment = words(host, engine_pid(host), "environ")
    assert f"TRITON_CACHE_DIR=/var/cache/gb10/vllm/{release}/triton" in environment


def test_unit_file_is_clean(host):
    result = host.run("systemd-analyze verify vllm-rank.service")
    assert (result.rc, result.stdout, result.stderr) == (0, "", "")


def test_phases_are_read_from_the_containers_output(host):
    invocation = host.run("systemctl show -P InvocationID vllm-rank.service").stdout.strip()
    assert (
        "rank" in host.run(f"journalctl -q -o cat _SYSTEMD_INVOCATION_ID={invocation} | grep 'in world size 2'").stdout
    )


def test_completion_from_the_machine():
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 6, "temperature": 0}).encode()
    key = (Path(__file__).resolve().parents[1] / "files/key").read_text().removesuffix("\n")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request("http://198.18.0.11:8000/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        text = json.load(response)["choices"][0]["text"]
    assert text
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz ")
