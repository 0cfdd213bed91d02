"""What an operator would look at on every host after site.yml, one fact a test."""

from __future__ import annotations

import json

testinfra_hosts = ["ssh://spark-a", "ssh://spark-b", "ssh://spark-c", "ssh://spark-d"]


def test_host_runs_systemd(host):
    assert host.file("/proc/1/comm").content_string.strip() == "systemd"


def test_rank_unit_is_active(host):
    assert host.service("vllm-rank.service").is_running


def test_rank_process_has_the_configured_arguments(host):
    pid = host.run("systemctl show -P MainPID vllm-rank.service").stdout.strip()
    actual = host.run(f"tr '\\0' '\\n' < /proc/{pid}/cmdline").stdout.splitlines()
    wanted = json.loads(host.file("/etc/gb10/rank.json").content_string)["argv"]
    launch = json.loads(host.file("/etc/gb10/launch.json").content_string)
    assert actual[3:] == [*wanted, "--master-port", str(launch["master_port"])]


def test_rank_runs_as_its_own_user(host):
    pid = host.run("systemctl show -P MainPID vllm-rank.service").stdout.strip()
    assert host.run(f"stat -c %U /proc/{pid}").stdout.strip() == "vllm"


def test_rank_may_lock_memory_for_rdma(host):
    pid = host.run("systemctl show -P MainPID vllm-rank.service").stdout.strip()
    limits = host.run(f"grep 'Max locked memory' /proc/{pid}/limits").stdout.split()
    assert limits[3:5] == ["unlimited", "unlimited"]


def test_rank_knows_its_fabric_address(host):
    pid = host.run("systemctl show -P MainPID vllm-rank.service").stdout.strip()
    environment = dict(
        word.split("=", 1) for word in host.run(f"tr '\\0' '\\n' < /proc/{pid}/environ").stdout.splitlines() if word
    )
    wanted = json.loads(host.file("/etc/gb10/rank.json").content_string)["fabric"]["address"]
    assert environment["VLLM_HOST_IP"] == wanted
    assert environment["GLOO_SOCKET_IFNAME"] == "vec1"


def test_unit_file_is_clean(host):
    result = host.run("systemd-analyze verify vllm-rank.service")
    assert (result.rc, result.stdout, result.stderr) == (0, "", "")


def test_no_unit_waits_for_a_reload(host):
    assert host.run("systemctl show -P NeedDaemonReload vllm-rank.service").stdout.strip() == "no"


def test_patched_file_is_the_reviewed_one(host):
    record = json.loads(host.file("/opt/gb10/current/release.json").content_string)
    for path, entry in record["files"].items():
        assert host.file(f"/opt/gb10/current/site/{path}").sha256sum == entry["after"]


def test_engine_was_imported_from_the_release(host):
    pid = host.run("systemctl show -P MainPID vllm-rank.service").stdout.strip()
    assert "/opt/gb10/current/site" in host.run(f"tr '\\0' '\\n' < /proc/{pid}/environ").stdout
