"""What an operator would see on two real kernels whose GID tables move. The order is the order of events."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import testinfra
from testinfra.host import Host

from embedded.guests import FABRIC_INTERFACE as INTERFACE
from embedded.guests import GUEST_STATE, GUESTS, HCA, KNOWN_HOSTS
from embedded.guests.machine import ssh
from embedded.settings import SSH_KEY

T = TypeVar("T")
PROJECT = Path(__file__).resolve().parents[3]
INVENTORY = PROJECT / "molecule/fabric/inventory"
ADDRESS = {guest.name: guest.fabric_address for guest in GUESTS}
SWITCH_PORT = GUESTS[1].taps[1]  # where the second guest's fabric cable ends on this machine
TABLE = PROJECT / "tests/fixtures/rdma/linklocal_only.tree"


@pytest.fixture(scope="module")
def guests() -> dict[str, Host]:
    # One connection for all: to make one costs an emulated processor a second.
    options = f"-o UserKnownHostsFile={KNOWN_HOSTS} -o BatchMode=yes -o LogLevel=ERROR -o ConnectTimeout=5 "
    options += f"-o ControlMaster=auto -o ControlPersist=60 -o ControlPath={GUEST_STATE}/%h.ssh"
    return {
        guest.name: testinfra.get_host(
            f"ssh://root@{guest.management_address}", ssh_identity_file=str(SSH_KEY), ssh_extra_args=options
        )
        for guest in GUESTS
    }


def on_each(guests: dict[str, Host], action: Callable[[str, Host], T]) -> dict[str, T]:
    """Do the same on both guests at the same time: each has one processor of its own."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(guests, pool.map(action, guests, guests.values()), strict=True))


def sh(guest: Host, command: str) -> str:
    done = guest.run(command)
    assert done.rc == 0, f"{command}: {done.stderr}"
    return str(done.stdout)


def play(playbook: str, **variables: object) -> tuple[int, str]:
    """Run a playbook of the project against the guests; output without line breaks of the terminal."""
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(INVENTORY), str(PROJECT / playbook)]
    done = subprocess.run(
        [*command, "-e", json.dumps(variables)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=os.environ | {"ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        timeout=240,
    )
    return done.returncode, " ".join(done.stdout.split())


def wait_until(true: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.5)


def wait_for_address(name: str, guest: Host) -> None:
    wait_until(lambda: ADDRESS[name] in guest.run(f"ip -br address show {INTERFACE}").stdout, "the address is back", 20)


def live_table(guest: Host) -> dict[str, int]:
    """GID -> index as the kernel has it now: what the lookup must agree with, read another way."""
    rows = sh(guest, f"cd /sys/class/infiniband/{HCA}/ports/1/gids && grep . 0 1 2 3 4 5 6 7").split()
    return {row.partition(":")[2]: int(row.partition(":")[0]) for row in rows}


def gid(address: str) -> str:
    return "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}".format(*map(int, address.split(".")))


def start_rank(guest: Host) -> dict[str, str]:
    """Start the rank-like unit anew and return the environment that its process really has."""
    text = sh(guest, "systemctl restart fabric-rank && cat /proc/$(systemctl show -P MainPID fabric-rank)/environ")
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


MOVES = {
    "as the role left it": "true",
    "an address came before it": "ip address flush dev {interface} scope global; "
    "ip address add {second}/24 dev {interface}; ip address add {own}/24 dev {interface}",
    "the link flapped": "ip link set {interface} down; sleep 1; ip link set {interface} up; sleep 1",
    "addresses changed places": "ip address flush dev {interface} scope global; "
    "for a in {third} {second} {own}; do ip address add $a/24 dev {interface}; done",
}


def test_address_and_mtu_survive_a_reboot(guests):
    # One of the two, for it costs half a minute: netplan writes networkd's files anew at every boot.
    name = "roce2"

    def boot_id() -> str:
        """Over a connection of its own, empty while the guest does not answer."""
        command = ssh(GUESTS[1], "cat", "/proc/sys/kernel/random/boot_id")
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    before = boot_id()
    subprocess.run(ssh(GUESTS[1], "systemctl", "reboot"), capture_output=True, check=False)
    wait_until(lambda: boot_id() not in ("", before), f"{name} is up again", 120)
    wait_for_address(name, guests[name])

    assert guests[name].file(f"/sys/class/net/{INTERFACE}/mtu").content_string.strip() == "9000"


def test_next_start_of_a_rank_follows_the_gid(guests):
    def follow(name: str, guest: Host) -> None:
        seen = []
        # Each guest gets addresses of its own: they stay, and the next test talks from whichever comes first.
        more = {"second": f"198.18.9.20{name[-1]}", "third": f"198.18.9.21{name[-1]}"}
        for what, command in MOVES.items():
            sh(guest, command.format(own=ADDRESS[name], interface=INTERFACE, **more))
            environment = start_rank(guest)
            assert int(environment["NCCL_IB_GID_INDEX"]) == live_table(guest)[gid(ADDRESS[name])], what
            assert environment["NCCL_IB_HCA"] == f"={HCA}:1"
            assert environment["VLLM_HOST_IP"] == ADDRESS[name]
            seen.append(environment["NCCL_IB_GID_INDEX"])
        # A test in which the index never moved would prove nothing.
        assert len(set(seen)) > 1

    on_each(guests, follow)


def test_rdma_is_measured_with_the_indexes_as_they_are_now(guests):
    code, output = play("playbooks/prove_fabric.yml")

    assert code == 0, output
    for direction in ("roce1 -> roce2", "roce2 -> roce1"):
        figures = re.search(rf"{direction}: ([0-9.]+) Gb/s, ([0-9.]+) us", output)
        assert figures, output
        assert float(figures[1]) > 0
        assert float(figures[2]) > 0
    assert "roce1: all-reduces not measured: no rank is installed" in output


@pytest.mark.parametrize(("mtu", "rdma"), [(1500, 1024), (4200, 4096), (9000, 4096)])
def test_derived_rdma_mtu_is_the_kernels(guests, mtu, rdma):
    seen = sh(guests["roce1"], f"ip link set {INTERFACE} mtu {mtu} && ibv_devinfo -d {HCA}")

    assert f"active_mtu:\t\t{rdma} " in seen


def test_each_guest_was_configured_by_what_it_uses(guests):
    for name, guest in guests.items():
        assert guest.file("/etc/netplan/60-gb10-fabric.yaml").exists is (name == "roce2")
        assert guest.file("/etc/systemd/network/05-gb10-fabric.network").exists is (name == "roce1")


@pytest.fixture
def linklocal_tree(guests) -> Iterator[str]:
    """A recorded table with link-local entries only, on the first guest."""
    tree = "/run/linklocal"
    rows = [line.split(": ", 1) for line in TABLE.read_text().splitlines()]
    sh(guests["roce1"], "mkdir -p $(dirname " + " ".join(f"{tree}/{path}" for path, _ in rows) + ")")
    sh(guests["roce1"], "\n".join(f"echo '{value}' > {tree}/{path}" for path, value in rows))
    yield tree
    sh(guests["roce1"], f"rm -r {tree}")


def test_stage_stops_with_every_fault_in_one_list(guests, linklocal_tree):
    sh(guests["roce1"], f"ip link set {INTERFACE} mtu 1500")
    sh(guests["roce2"], f"ip address add {ADDRESS['roce1']}/32 dev mgmt0; ip link set {INTERFACE} down")
    tree = f"{{{{ '{linklocal_tree}' if inventory_hostname == 'roce1' else '/sys' }}}}"
    code, output = play("playbooks/fabric.yml", fabric_configure=False, fabric_sysfs=tree)
    sh(guests["roce2"], f"ip address del {ADDRESS['roce1']}/32 dev mgmt0")

    assert code != 0
    assert f"roce1 {INTERFACE}: MTU 1500 (RoCE 1024), fleet 9000 (4096)" in output
    assert f"roce1 {INTERFACE}: only link-local GIDs for 198.18.9.11 on rocep1s0f0 port 1 ACTIVE/LinkUp" in output
    assert f"roce2 {INTERFACE}: {HCA} port 1 is DOWN/Disabled; wanted ACTIVE/LinkUp" in output
    assert "roce2 mgmt0: carries 198.18.9.11, which is roce1's; wanted there alone" in output


def test_start_of_a_rank_without_its_address_names_the_reason(guests):
    # networkd gives the address back when the link comes up, and not when somebody takes it away later.
    guest = guests["roce2"]
    sh(guest, f"ip link set {INTERFACE} up")
    wait_for_address("roce2", guest)
    sh(guest, f"ip address flush dev {INTERFACE} scope global")

    assert guest.run("systemctl restart fabric-rank").rc != 0
    journal = sh(guest, "journalctl -u fabric-rank -n 20 -o cat")

    assert "no interface carries the fabric address 198.18.9.12" in journal
    assert "(waited 3 s)" in journal


def test_stage_repairs_the_hosts_and_then_blames_the_switch(guests):
    subprocess.run(["ip", "link", "set", SWITCH_PORT, "mtu", "1500"], check=True)
    try:
        code, output = play("playbooks/fabric.yml")
    finally:
        subprocess.run(["ip", "link", "set", SWITCH_PORT, "mtu", "9000"], check=True)

    assert code != 0
    # A bridge port checks what leaves by it, so this is the direction that is sure to fail.
    assert f"roce1 {INTERFACE} -> roce2: 9000-byte don't-fragment pings are lost" in output
    assert "the hosts agree on MTU 9000: look at the switch port and the cable" in output
    for name, guest in guests.items():
        assert guest.file(f"/sys/class/net/{INTERFACE}/mtu").content_string.strip() == "9000"
        assert ADDRESS[name] in sh(guest, f"ip -br address show {INTERFACE}")
