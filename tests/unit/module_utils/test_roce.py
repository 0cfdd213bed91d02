"""The lookup over recorded and constructed sysfs trees. A tree file holds one ``path: value`` line per attribute."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import roce

FIXTURES = Path(__file__).parents[2] / "fixtures/rdma"
ADDRESS = "192.168.192.1"
LINK_LOCAL = "fe80:0000:0000:0000:0200:00ff:fe00:0a01"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"


def mapped(address: str) -> str:
    return roce.ipaddress.IPv6Address(f"::ffff:{address}").exploded


def v6(address: str) -> str:
    return roce.ipaddress.IPv6Address(address).exploded


Row = tuple[int, str, str | None, str | None]


def port(
    hca: str,
    *gids: Row,
    number: int = 1,
    state: str = "4: ACTIVE",
    phys: str = "5: LinkUp",
    rate: str = "200 Gb/sec (4X HDR)",
    layer: str = "Ethernet",
    net: str | None = None,
) -> dict[str, str | None]:
    """The attributes of one port; a value of None is an attribute that cannot be read."""
    base = f"class/infiniband/{hca}"
    here = f"{base}/ports/{number}"
    tree: dict[str, str | None] = {
        f"{here}/state": state,
        f"{here}/phys_state": phys,
        f"{here}/rate": rate,
        f"{here}/link_layer": layer,
        f"{base}/fw_ver": "28.45.4028",
    }
    if net:
        tree[f"{base}/device/net/{net}/mtu"] = "9000"
    for index in range(8):
        tree[f"{here}/gids/{index}"] = ZERO
    for index, gid, kind, netdev in gids:
        tree[f"{here}/gids/{index}"] = gid
        tree[f"{here}/gid_attrs/types/{index}"] = kind
        tree[f"{here}/gid_attrs/ndevs/{index}"] = netdev
    return tree


def pair(first: int, gid: str, netdev: str) -> tuple[Row, Row]:
    """The two rows, RoCE v1 and v2, that the kernel makes of one address."""
    return (first, gid, "IB/RoCE v1", netdev), (first + 1, gid, "RoCE v2", netdev)


F0 = "enp1s0f0np0"
NORMAL = port("rocep1s0f0", *pair(0, LINK_LOCAL, F0), *pair(2, mapped(ADDRESS), F0))
UNCABLED = port(
    "rocep1s0f1",
    *pair(0, "fe80:0000:0000:0000:0200:00ff:fe00:0a02", "enp1s0f1np1"),
    state="1: DOWN",
    phys="3: Disabled",
    rate="40 Gb/sec (4X QDR)",
)

CONSTRUCTED: dict[str, dict[str, str | None]] = {
    "mlx5_names": UNCABLED | port("mlx5_0", *pair(0, LINK_LOCAL, F0), *pair(2, mapped(ADDRESS), F0)),
    "ten_devices_share_a_prefix": port("mlx5_1", *pair(0, LINK_LOCAL, "enx1"))
    | port("mlx5_10", *pair(2, mapped(ADDRESS), F0)),
    "v2_before_v1": port("rocep1s0f0", (0, mapped(ADDRESS), "RoCE v2", F0), (1, mapped(ADDRESS), "IB/RoCE v1", F0)),
    "first_slot_is_the_address": port("rocep1s0f0", *pair(0, mapped(ADDRESS), F0)),
    "soft_roce_has_no_v1": port(
        "rocep1s0f0", (0, LINK_LOCAL, "RoCE v2", F0), (1, mapped(ADDRESS), "RoCE v2", F0), rate="2.5 Gb/sec (1X SDR)"
    ),
    "high_index": port("rocep1s0f0", *pair(0, LINK_LOCAL, F0), *pair(200, mapped(ADDRESS), F0)),
    "second_port_of_one_device": port("mlx5_0", *pair(0, LINK_LOCAL, "ens1"), state="1: DOWN")
    | port("mlx5_0", *pair(4, mapped(ADDRESS), F0), number=2),
    "einval_slot_before_it": port("rocep1s0f0", (2, mapped(ADDRESS), None, None), (5, mapped(ADDRESS), "RoCE v2", F0)),
    "netdev_unreadable": port("rocep1s0f0", (3, mapped(ADDRESS), "RoCE v2", None), net=F0),
    "second_address_moved_it": port(
        "rocep1s0f0", *pair(0, LINK_LOCAL, F0), *pair(2, mapped("192.168.192.77"), F0), *pair(4, mapped(ADDRESS), F0)
    ),
    "vlan_beside_its_parent": port("rocep1s0f0", *pair(2, mapped(ADDRESS), F0), *pair(4, mapped(ADDRESS), f"{F0}.100")),
    "infiniband_port_beside_it": port("ibp1s0", (0, LINK_LOCAL, None, None), layer="InfiniBand") | NORMAL,
    "bond_one_active_port": port("rocep1s0f0", *pair(2, mapped(ADDRESS), "bond0"))
    | port("rocep1s0f1", *pair(2, mapped(ADDRESS), "bond0"), state="1: DOWN"),
    "bond_two_active_ports": port("rocep1s0f0", *pair(2, mapped(ADDRESS), "bond0"))
    | port("rocep1s0f1", *pair(4, mapped(ADDRESS), "bond0")),
    "renamed_netdev": port("rocep1s0f0", *pair(2, mapped(ADDRESS), "fabric0")),
    "ipv6": port("rocep1s0f0", *pair(0, LINK_LOCAL, F0), *pair(2, v6("2001:db8::1"), F0)),
    "v1_only": port("rocep1s0f0", (2, mapped(ADDRESS), "IB/RoCE v1", F0)),
    "down_but_physically_up": port("rocep1s0f0", *pair(2, mapped(ADDRESS), F0), state="1: DOWN"),
    "gid_of_another_interface": port("rocep1s0f0", *pair(2, mapped(ADDRESS), "enP2p1s0f0np0")),
    "uncabled_only": UNCABLED,
    "link_down_all_zero": port("rocep1s0f0", state="1: DOWN", phys="3: Disabled", net=F0),
    "no_device": {},
}


@pytest.fixture
def sysfs(tmp_path: Path) -> Callable[[str], Path]:
    def build(name: str) -> Path:
        recorded = FIXTURES / f"{name}.tree"
        if recorded.exists():
            tree = dict(line.split(": ", 1) for line in recorded.read_text().splitlines())
        else:
            tree = CONSTRUCTED[name]
        for path, value in tree.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if value is None:
                file.mkdir()  # reading it fails, as EINVAL does on an unused slot
            else:
                file.write_text(value + "\n")
        return tmp_path

    return build


def interfaces(name: str = F0, address: str = f"{ADDRESS}/24", mtu: int = 9000, **more: str) -> list[roce.Netdev]:
    """The recorded interfaces, with the one that carries the fabric address as named."""
    rows = json.loads((FIXTURES / "ip_j_addr.constructed.json").read_text())
    local, _, length = address.partition("/")
    rows[0]["ifname"], rows[0]["mtu"] = name, mtu
    rows[0]["addr_info"][0] |= {"local": local, "prefixlen": int(length)}
    rows[0]["linkinfo"] = {"info_kind": more.get("kind", "")}
    return roce.parse_netdevs(json.dumps(rows))


def resolve(root: Path, address: str = ADDRESS, **options: object) -> roce.FabricEnvironment:
    netdevs = options.pop("netdevs", None) or interfaces()
    defaults: dict[str, object] = {"require_rdma": True, "sysfs": root, "netdevs": lambda: netdevs}
    return roce.resolve(address, **(defaults | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tree", "options", "hca", "gid"),
    [
        ("normal_index3", {}, "rocep1s0f0:1", 3),
        ("index3_empty_v2_at_4", {}, "rocep1s0f0:1", 4),
        ("moved_4_5_second_linklocal", {}, "rocep1s0f0:1", 5),
        ("ipv4_ll_169_254_on_2_3", {}, "rocep1s0f0:1", 5),
        ("rails_differ_3_and_4", {}, "rocep1s0f0:1", 3),
        ("rails_differ_3_and_4", {"address": "192.168.193.1"}, "roceP2p1s0f0:1", 4),
        ("mlx5_names", {}, "mlx5_0:1", 3),
        ("ten_devices_share_a_prefix", {}, "mlx5_10:1", 3),
        ("v2_before_v1", {}, "rocep1s0f0:1", 0),
        ("first_slot_is_the_address", {}, "rocep1s0f0:1", 1),
        ("soft_roce_has_no_v1", {}, "rocep1s0f0:1", 1),
        ("high_index", {}, "rocep1s0f0:1", 201),
        ("second_port_of_one_device", {}, "mlx5_0:2", 5),
        ("einval_slot_before_it", {}, "rocep1s0f0:1", 5),
        ("netdev_unreadable", {}, "rocep1s0f0:1", 3),
        ("second_address_moved_it", {}, "rocep1s0f0:1", 5),
        ("vlan_beside_its_parent", {}, "rocep1s0f0:1", 3),
        ("vlan_beside_its_parent", {"netdevs": interfaces(f"{F0}.100")}, "rocep1s0f0:1", 5),
        ("infiniband_port_beside_it", {}, "rocep1s0f0:1", 3),
        ("bond_one_active_port", {"netdevs": interfaces("bond0")}, "rocep1s0f0:1", 3),
        ("bond_two_active_ports", {"netdevs": interfaces("bond0"), "hca": "rocep1s0f1"}, "rocep1s0f1:1", 5),
        ("renamed_netdev", {"netdevs": interfaces("fabric0")}, "rocep1s0f0:1", 3),
        ("ipv6", {"netdevs": interfaces(address="2001:db8::1/64"), "address": "2001:db8::1"}, "rocep1s0f0:1", 3),
        ("normal_index3", {"hca": "rocep1s0f0:1", "gid_index": 3}, "rocep1s0f0:1", 3),
    ],
)
def test_lookup_finds_the_gid_of_the_fabric_address(sysfs, tree, options, hca, gid):
    fabric = resolve(sysfs(tree), **options)

    assert fabric.environment["NCCL_IB_HCA"] == f"={hca}"
    assert fabric.environment["NCCL_IB_GID_INDEX"] == str(gid)
    assert fabric.report["rdma"] is True
    assert all(fabric.environment.values())


@pytest.mark.parametrize(
    ("tree", "options", "finding", "row"),
    [
        (
            "linklocal_only",
            {},
            f"{F0}: only link-local GIDs for {ADDRESS} on rocep1s0f0 port 1 ACTIVE/LinkUp",
            "gid 1: fe80",
        ),
        (
            "all_zero_peer_power_loss",
            {},
            f"{F0} carries {ADDRESS}, but no RDMA port belongs to it",
            "every slot is zero",
        ),
        ("v1_only", {}, f"{F0}: the GIDs of {ADDRESS} are rocep1s0f0 gid 2 IB/RoCE v1; wanted", "gid 2: 192.168.192.1"),
        ("down_but_physically_up", {}, f"{F0}: rocep1s0f0 port 1 is DOWN/LinkUp; wanted ACTIVE/LinkUp", "gid 3:"),
        ("gid_of_another_interface", {}, "belongs to another interface: rocep1s0f0 gid 3 on enP2p1s0f0np0", "gid 3:"),
        (
            "uncabled_only",
            {},
            f"{F0} carries {ADDRESS}, but no RDMA port belongs to it",
            "rocep1s0f1 port 1: DOWN/Disabled, 40 Gb/s",
        ),
        (
            "link_down_all_zero",
            {},
            f"{F0}: no GID at all for {ADDRESS} on rocep1s0f0 port 1 DOWN/Disabled",
            "every slot is zero",
        ),
        ("no_device", {}, "no RDMA device under /sys/class/infiniband", ""),
        (
            "bond_two_active_ports",
            {"netdevs": interfaces("bond0")},
            "several active RDMA ports (rocep1s0f0:1 gid 3, rocep1s0f1:1 gid 5)",
            "gid 5:",
        ),
        ("index3_empty_v2_at_4", {"gid_index": 3}, "GID index 3 of rocep1s0f0 is empty; wanted 192.168.192.1", "gid 4"),
        ("ipv4_ll_169_254_on_2_3", {"gid_index": 3}, "GID index 3 of rocep1s0f0 holds 169.254.10.1 RoCE v2", "gid 5"),
        ("normal_index3", {"gid_index": 2}, "GID index 2 of rocep1s0f0 holds 192.168.192.1 IB/RoCE v1", "gid 3"),
        ("normal_index3", {"hca": "mlx5_0"}, "override mlx5_0 is not a RoCE port of this host: found", "rocep1s0f0"),
        ("normal_index3", {"hca": "rocep1s0f0:2"}, "override rocep1s0f0:2 is not a RoCE port", "gid 3"),
        ("normal_index3", {"hca": "rocep1s0f1"}, f"{F0} carries {ADDRESS}, but no RDMA port belongs to it", ""),
        ("normal_index3", {"hca": ""}, "the HCA override is ''; wanted a device name", ""),
        (
            "normal_index3",
            {"address": "192.168.192.9"},
            "no interface carries the fabric address 192.168.192.9",
            "gid 3",
        ),
        ("normal_index3", {"address": ""}, "fabric_address is ''; wanted", ""),
        ("normal_index3", {"address": "192.168.192.1/24"}, "without prefix length", ""),
        (
            "normal_index3",
            {"netdevs": interfaces("wlP9s9")},
            "wlP9s9: the fabric address 192.168.192.1 is on Wi-Fi",
            "",
        ),
        ("normal_index3", {"netdevs": interfaces("docker0")}, "is on a bridge; wanted the RoCE Ethernet port", ""),
        ("normal_index3", {"netdevs": interfaces("br0", kind="bridge")}, "br0: the fabric address", ""),
        ("normal_index3", {"netdevs": interfaces() * 2}, "all carry the fabric address", ""),
        (
            "normal_index3",
            {"netdevs": interfaces(mtu=1500), "mtu": 9000},
            f"{F0}: MTU 1500 (RoCE 1024), wanted 9000",
            "",
        ),
    ],
)
def test_lookup_refuses_with_the_whole_table_and_a_next_step(sysfs, tree, options, finding, row):
    with pytest.raises(roce.RoceError) as caught:
        resolve(sysfs(tree), **options)

    assert finding in caught.value.finding
    assert row in caught.value.table
    assert caught.value.next_step
    assert caught.value.finding in str(caught.value)
    assert caught.value.table in str(caught.value)


def test_environment_of_a_rank_names_the_rail_exactly(sysfs):
    assert resolve(sysfs("moved_4_5_second_linklocal"), mtu=9000).environment == {
        "VLLM_HOST_IP": "192.168.192.1",
        "GLOO_SOCKET_IFNAME": F0,
        "TP_SOCKET_IFNAME": F0,
        "NCCL_SOCKET_IFNAME": f"={F0}",
        "NCCL_SOCKET_FAMILY": "AF_INET",
        "NCCL_NET": "IB",
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_HCA": "=rocep1s0f0:1",
        "NCCL_IB_GID_INDEX": "5",
        "NCCL_IB_ROCE_VERSION_NUM": "2",
        "NCCL_IB_ADDR_FAMILY": "AF_INET",
        "NCCL_IB_ADDR_RANGE": "192.168.192.0/24",
    }


def test_report_keeps_link_and_mtu(sysfs):
    report = resolve(sysfs("rails_differ_3_and_4")).report

    assert (report["state"], report["rate_gbps"], report["netdev_mtu"], report["rdma_mtu"]) == (
        "ACTIVE",
        200,
        9000,
        4096,
    )
    assert report["firmware"] == "28.45.4028"
    assert "  gid 3: 192.168.192.1  RoCE v2  enp1s0f0np0" in report["gid_table"]
    json.dumps(report)


@pytest.mark.parametrize("tree", ["no_device", "linklocal_only"])
def test_host_without_usable_rdma_gets_the_socket_variables_alone(sysfs, tree):
    fabric = resolve(sysfs(tree), require_rdma=False)

    assert sorted(fabric.environment) == [
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_FAMILY",
        "NCCL_SOCKET_IFNAME",
        "TP_SOCKET_IFNAME",
        "VLLM_HOST_IP",
    ]
    assert fabric.report["rdma"] is False
    assert fabric.report["notes"][0].startswith("no RDMA device" if tree == "no_device" else "RDMA not used: ")


def test_wrong_override_stops_even_where_rdma_is_optional(sysfs):
    with pytest.raises(roce.RoceError, match="override GID index 2"):
        resolve(sysfs("normal_index3"), require_rdma=False, gid_index=2)


@pytest.mark.parametrize(
    ("netdev", "rdma"), [(9000, 4096), (4200, 4096), (4192, 4096), (4191, 2048), (1500, 1024), (1119, 512), (300, 0)]
)
def test_rdma_mtu_follows_the_netdev(netdev, rdma):
    assert roce.rdma_mtu(netdev) == rdma


def test_equal_rdma_mtu_under_another_ethernet_mtu_is_a_note(sysfs):
    fabric = resolve(sysfs("normal_index3"), netdevs=interfaces(mtu=4200), mtu=9000)

    assert fabric.report["notes"] == [f"{F0}: MTU 4200 (RoCE 4096), wanted 9000 (4096)"]


class Clock:
    """Seconds that pass only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_address_that_appears_later_is_waited_for(sysfs):
    clock, root = Clock(), sysfs("normal_index3")

    def netdevs() -> list[roce.Netdev]:
        return interfaces(address=f"{ADDRESS}/24" if clock.now >= 5 else "10.0.0.57/24")

    fabric = roce.resolve(
        ADDRESS, require_rdma=True, sysfs=root, wait_s=30, netdevs=netdevs, sleep=clock.sleep, clock=clock
    )

    assert fabric.environment["NCCL_IB_GID_INDEX"] == "3"
    assert clock.now == 5


def test_wait_is_bounded_and_names_the_addresses_that_are_there(sysfs):
    clock, root = Clock(), sysfs("normal_index3")

    with pytest.raises(roce.RoceError, match=r"found enp1s0f0np0 10\.0\.0\.57/24.*\(waited 30 s\)"):
        roce.resolve(
            ADDRESS,
            require_rdma=False,
            sysfs=root,
            wait_s=30,
            netdevs=lambda: interfaces(address="10.0.0.57/24"),
            sleep=clock.sleep,
            clock=clock,
        )
    assert clock.now == 30


def test_table_that_fills_later_is_waited_for_where_rdma_is_optional(sysfs):
    clock, root = Clock(), sysfs("linklocal_only")

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        sysfs("normal_index3")

    fabric = roce.resolve(
        ADDRESS, require_rdma=False, sysfs=root, wait_s=30, netdevs=interfaces, sleep=sleep, clock=clock
    )

    assert fabric.report["rdma"] is True


def test_fault_that_no_wait_cures_is_told_at_once(sysfs):
    clock, root = Clock(), sysfs("normal_index3")

    with pytest.raises(roce.RoceError, match="override"):
        roce.resolve(
            ADDRESS,
            require_rdma=True,
            sysfs=root,
            gid_index=0,
            wait_s=30,
            netdevs=interfaces,
            sleep=clock.sleep,
            clock=clock,
        )
    assert clock.now == 0


def test_command_writes_an_environment_file_or_the_reason(sysfs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(roce.subprocess, "run", lambda *_, **__: FakeIp())
    root, target = sysfs("normal_index3"), tmp_path / "fabric.env"

    assert roce.main([ADDRESS, "--sysfs", str(root), "--environment-file", str(target)]) == 0
    assert "NCCL_IB_GID_INDEX=3\n" in target.read_text()

    assert roce.main([ADDRESS, "--sysfs", str(root), "--gid-index", "2"]) == 1
    assert "gid 3: 192.168.192.1" in capsys.readouterr().err


class FakeIp:
    returncode = 0
    stderr = ""
    stdout = (FIXTURES / "ip_j_addr.constructed.json").read_text()
