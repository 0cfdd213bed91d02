"""What the next boot gives the fabric interface, from small configuration trees."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import fabric_link, roce

ADDRESS = "192.168.192.1"
NETDEV = roce.Netdev("enp1s0f0np0", 9000, "UP", "02:00:00:00:0a:01", (ipaddress.ip_interface(f"{ADDRESS}/24"),))
NETWORKD = f"[Match]\nName=enp1s0f0np0\n\n[Link]\nMTUBytes=9000\n\n[Network]\nAddress={ADDRESS}/24\n"
KEYFILE = f"""\
[connection]
id=cx7
interface-name=enp1s0f0np0

[ethernet]
mtu=9000

[ipv4]
method=manual
address1={ADDRESS}/24
"""
NM = "NetworkManager/system-connections/cx7.nmconnection"


def persistence(root: Path, files: dict[str, str], generated: dict[str, str] | None = None) -> dict[str, object]:
    def write(into: Path, texts: dict[str, str]) -> None:
        for name, text in texts.items():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            (into / name).write_text(text)

    def generate(_: Path, into: Path) -> bool:
        write(into, generated or {})
        return bool(generated)

    write(root, files)
    return fabric_link.persistence(NETDEV, ipaddress.ip_address(ADDRESS), root, generate)


@pytest.mark.parametrize(
    ("files", "generated", "file", "mtu"),
    [
        ({"etc/systemd/network/05-x.network": NETWORKD}, {}, "/etc/systemd/network/05-x.network", 9000),
        (
            {"etc/systemd/network/05-x.network": NETWORKD.replace("Name=enp1s0f0np0", "Name=eth0 enp1s0f*")},
            {},
            "/etc/systemd/network/05-x.network",
            9000,
        ),
        (
            {"etc/systemd/network/05-x.network": NETWORKD.replace("Name=enp1s0f0np0", "MACAddress=02:00:00:00:0A:01")},
            {},
            "/etc/systemd/network/05-x.network",
            9000,
        ),
        (
            {
                "etc/systemd/network/05-x.network": NETWORKD.replace("MTUBytes=9000", ""),
                "etc/systemd/network/05-x.network.d/mtu.conf": "[Link]\nMTUBytes=9000\n",
            },
            {},
            "/etc/systemd/network/05-x.network",
            9000,
        ),
        (
            {
                "etc/systemd/network/05-x.network": NETWORKD.replace("MTUBytes=9000", ""),
                "etc/systemd/network/10-x.link": "[Match]\nOriginalName=enp1s0f0np0\n[Link]\nMTUBytes=9K\n",
            },
            {},
            "/etc/systemd/network/05-x.network",
            9216,
        ),
        (
            {},
            {"run/systemd/network/10-netplan-enp1s0f0np0.network": NETWORKD},
            "/etc/netplan -> run/systemd/network/10-netplan-enp1s0f0np0.network",
            9000,
        ),
        ({}, {f"run/{NM}": KEYFILE}, "/etc/netplan -> run/NetworkManager/cx7.nmconnection", 9000),
        ({f"etc/{NM}": KEYFILE}, {}, f"/etc/{NM}", 9000),
        ({f"etc/{NM}": KEYFILE.replace("mtu=9000", "")}, {}, f"/etc/{NM}", 0),
        (
            {
                "etc/network/interfaces": "auto lo\niface lo inet loopback\n"
                f"iface enp1s0f0np0 inet static\n  address {ADDRESS}\n  netmask 255.255.255.0\n  mtu 9000\n"
            },
            {},
            "/etc/network/interfaces",
            9000,
        ),
        (
            {"proc/cmdline": f"root=/dev/vda ip={ADDRESS}:::255.255.255.0:h:enp1s0f0np0:off quiet"},
            {},
            "the kernel command line",
            0,
        ),
    ],
)
def test_file_that_gives_the_address_at_the_next_boot(tmp_path, files, generated, file, mtu):
    assert persistence(tmp_path, files, generated) == {"file": file, "mtu": mtu, "volatile": []}


@pytest.mark.parametrize(
    ("files", "volatile"),
    [
        ({}, []),
        ({f"run/{NM}": KEYFILE}, [f"/run/{NM}"]),
        ({"run/systemd/network/70-x.network": NETWORKD}, ["/run/systemd/network/70-x.network"]),
        ({"etc/systemd/network/05-x.network": NETWORKD.replace(f"Address={ADDRESS}/24", "DHCP=yes")}, []),
        ({"etc/systemd/network/05-x.network": NETWORKD.replace("enp1s0f0np0", "enp1s0f1np1")}, []),
        ({f"etc/{NM}": KEYFILE.replace("enp1s0f0np0", "enP7s7")}, []),
        # An earlier file that matches the interface hides the one with the address.
        (
            {
                "etc/systemd/network/05-x.network": NETWORKD,
                "etc/systemd/network/01-all.network": "[Match]\nName=en*\n[Network]\nDHCP=yes\n",
            },
            [],
        ),
        # A file of the same name below /etc replaces the one of the package.
        (
            {
                "etc/systemd/network/05-x.network": "[Match]\nName=none\n",
                "usr/lib/systemd/network/05-x.network": NETWORKD,
            },
            [],
        ),
    ],
)
def test_address_that_the_next_boot_loses(tmp_path, files, volatile):
    assert persistence(tmp_path, files) == {"file": "", "mtu": 0, "volatile": volatile}


def test_facts_of_a_host_without_rdma(tmp_path):
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("b-1\n")
    found = fabric_link.facts(
        ADDRESS,
        "192.168.192.0/24",
        require_rdma=False,
        sysfs=tmp_path,
        root=tmp_path,
        netdevs=lambda: [NETDEV, roce.Netdev("eth9", 1500, "UP", "", (ipaddress.ip_interface("192.168.192.9/24"),))],
        generate=lambda *_: False,
    )

    assert (found["interface"], found["mtu"], found["rdma_mtu"], found["prefix"]) == ("enp1s0f0np0", 9000, 4096, 24)
    assert (found["rdma"], found["notes"], found["fault"]) == (None, ["no RDMA device"], "")
    assert found["also_in_subnet"] == ["eth9"]
    assert found["boot_id"] == "b-1"
    json.dumps(found)


def test_facts_of_a_host_that_lost_its_address(tmp_path):
    found = fabric_link.facts(
        "192.168.192.7", "192.168.192.0/24", require_rdma=True, sysfs=tmp_path, root=tmp_path, netdevs=lambda: [NETDEV]
    )

    assert found["interface"] == ""
    assert found["fault"] == (
        "no interface carries the fabric address 192.168.192.7: found enp1s0f0np0 192.168.192.1/24"
    )
    assert found["next_step"]
