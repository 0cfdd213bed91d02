"""What can be wrong with the fabric, made so on a real host: the run stops and names host, interface, found, wanted."""

from __future__ import annotations

import io
import ipaddress
import re
import subprocess
import tarfile

import pytest

from tests.embedded_hosts import HOSTS, PROJECT, on, one_line, run

ADDRESSES = {host: f"198.18.1.{11 + number}" for number, host in enumerate(HOSTS)}
FAULTS = {
    "mtu-of-one-host": ("ip link set vec1 mtu 600", "spark-c vec1: MTU 600 [(]RoCE 256[)], fleet 1500 [(]1024[)]"),
    "link-down": (
        "ip link set vec1 down",
        "spark-c: no interface carries the fabric address 198.18.1.13: .*; vec1 [(]link is down[)] no address. Next: ",
    ),
    "address-missing": (
        "ip address del 198.18.1.13/24 dev vec1",
        "spark-c: no interface carries the fabric address 198.18.1.13: found .*; vec1 fe80:[^ ]*. Next: ",
    ),
    "address-of-another-host": (
        "ip address add 198.18.1.12/24 dev vec1",
        "spark-c vec1: carries 198.18.1.12, which is spark-b's; wanted there alone",
    ),
}
UNDO = "ip link set vec1 up mtu 1500; networkctl reload; networkctl reconfigure vec1"
# Trees of /sys recorded on GB10 hosts; vec1 takes the part of their port with a cable.
TREES = PROJECT / "tests/fixtures/rdma"
RECORDED_INTERFACE, INTERFACE = "enp1s0f0np0", "vec1"


def recorded_sysfs(name: str, address: str) -> bytes:
    """A recorded tree as a tar archive, its address and interface those of an embedded host."""
    mapped = ipaddress.IPv6Address(f"::ffff:{address}").exploded
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for line in (TREES / f"{name}.tree").read_text().splitlines():
            path, _, value = line.partition(": ")
            value = re.sub(r"^(0000:){5}ffff:.*", mapped, value).replace(RECORDED_INTERFACE, INTERFACE)
            entry = tarfile.TarInfo(path)
            entry.size = len(value) + 1
            tar.addfile(entry, io.BytesIO(f"{value}\n".encode()))
    return archive.getvalue()


def through_the_fabric(*options: str) -> subprocess.CompletedProcess[str]:
    return run("ansible-playbook", "playbooks/fabric.yml", *options)


@pytest.fixture
def faulty(request):
    """A fault of the network on spark-c, and the network as it was afterwards."""
    script, sentence = FAULTS[request.param]
    on(["spark-c"], script)
    yield re.compile(sentence)
    on(["spark-c"], UNDO)


@pytest.mark.parametrize("faulty", FAULTS, indirect=True)
def test_network_fault_stops_the_fabric_stage(faulty):
    result = through_the_fabric()
    assert result.returncode != 0, result.stdout
    assert faulty.search(one_line(result.stdout)), result.stdout
    assert "Prove the paths between all hosts" not in result.stdout


@pytest.mark.parametrize("faulty", ["address-missing"], indirect=True)
def test_nothing_of_the_bring_up_runs_behind_a_refused_fabric(faulty):
    result = run("ansible-playbook", "site.yml")
    assert result.returncode != 0, result.stdout
    assert faulty.search(one_line(result.stdout)), result.stdout
    assert "PLAY [Prove the fabric]" in result.stdout
    assert "PLAY [Export the checkpoint" not in result.stdout


@pytest.fixture
def recorded(request):
    """Every host with the recorded tree in /run/sys, spark-c with the one named by the test."""
    for host, address in ADDRESSES.items():
        name = request.param if host == "spark-c" else "normal_index3"
        on([host], "rm -rf /run/sys; mkdir /run/sys; tar -x -C /run/sys", recorded_sysfs(name, address))
    yield ["-e", '{"fabric_sysfs": "/run/sys", "fabric_require_rdma": true}']
    for host in HOSTS:
        on([host], "rm -rf /run/sys")


@pytest.mark.parametrize("recorded", ["normal_index3"], indirect=True)
def test_recorded_roce_ports_are_let_through(recorded):
    result = through_the_fabric(*recorded)
    assert result.returncode == 0, result.stdout
    for host, address in ADDRESSES.items():
        assert re.search(rf"{host} +vec1 +{address} +1500/1024 +rocep1s0f0:1 +3 +ACTIVE", one_line(result.stdout)), (
            result.stdout
        )


@pytest.mark.parametrize("recorded", ["linklocal_only"], indirect=True)
def test_table_of_link_local_gids_stops_the_fabric_stage(recorded):
    result = through_the_fabric(*recorded)
    assert result.returncode != 0, result.stdout
    assert "spark-c vec1: " in one_line(result.stdout)
    assert "Prove the paths between all hosts" not in result.stdout
