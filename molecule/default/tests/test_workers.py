"""The workers' mount of the store."""

from __future__ import annotations

testinfra_hosts = ["ssh://spark-b", "ssh://spark-c", "ssh://spark-d"]


def nfs_mounts(host) -> list[list[str]]:
    return [line.split(" ") for line in host.file("/proc/self/mounts").content_string.splitlines() if " nfs4 " in line]


def test_store_is_mounted_once_from_the_heads_fabric_address(host):
    assert [mount[:2] for mount in nfs_mounts(host)] == [["198.18.1.11:/srv/models", "/srv/models"]]


def test_store_is_read_only(host):
    assert "ro" in nfs_mounts(host)[0][3].split(",")
    assert host.run("touch /srv/models/x").rc != 0


def test_mount_comes_back_at_boot(host):
    assert host.service("srv-models.automount").is_enabled


def test_a_head_without_power_is_noticed(host):
    watch = host.service("gb10-store-watch.service")
    assert watch.is_running
    assert watch.is_enabled


def test_nothing_is_exported(host):
    assert host.run("cat /proc/fs/nfsd/threads").rc != 0
