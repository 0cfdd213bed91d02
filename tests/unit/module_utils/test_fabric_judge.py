"""One sentence for every fault. Hosts and cases follow the incident with one MTU among four hosts."""

from __future__ import annotations

import pytest
from ansible.module_utils.gb10 import fabric_judge, roce

HOSTS = ("spark-a", "spark-b", "spark-c", "spark-d")


def host(name: str, **changes: object) -> dict[str, object]:
    number = HOSTS.index(name) + 1
    address = f"10.10.0.1{number}"
    found: dict[str, object] = {
        "address": address,
        "addresses": {address: "enp1s0f0np0", f"192.0.2.{number}": "enP7s7"},
        "interface": "enp1s0f0np0",
        "mac": f"02:00:00:00:0a:0{number}",
        "mtu": 9000,
        "prefix": 24,
        "also_in_subnet": [],
        "boot_id": f"boot-{number}",
        "firmware": "28.45.4028",
        "rdma": {
            "hca": "rocep1s0f0",
            "port": 1,
            "gid_index": 3,
            "state": "ACTIVE",
            "phys_state": "LinkUp",
            "rate_gbps": 200.0,
        },
        "persistence": {"file": "/etc/netplan/50.yaml", "mtu": 9000, "volatile": []},
        "notes": [],
        "fault": "",
        "next_step": "",
    }
    found |= changes
    return found | {"rdma_mtu": roce.rdma_mtu(int(str(found["mtu"])))}


def fleet(**changed: dict[str, object]) -> dict[str, dict[str, object]]:
    return {name: host(name, **changed.get(name.replace("-", "_"), {})) for name in HOSTS}


def links(hosts: dict[str, dict[str, object]], **settings: object) -> dict[str, list[str]]:
    defaults: dict[str, object] = {
        "subnet": "10.10.0.0/24",
        "mtu": 9000,
        "rate_gbps": 200,
        "require_rdma": True,
        "require_persistent": True,
    }
    return fabric_judge.judge_links(hosts, **(defaults | settings))  # type: ignore[arg-type]


def outcome(peer: str, **changes: object) -> dict[str, object]:
    return {
        "host": peer,
        "address": host(peer)["address"],
        "bytes": 9000,
        "small": 3,
        "full": 3,
        "detail": "",
        "tcp": "open",
        "answered_by": [host(peer)["mac"]],
        "route": "enp1s0f0np0",
    } | changes


def directions(**changes: dict[str, object]) -> dict[str, list[dict[str, object]]]:
    """All twelve; a change is named a_d for spark-a -> spark-d."""
    return {
        one: [outcome(two, **changes.get(f"{one[-1]}_{two[-1]}", {})) for two in HOSTS if two != one] for one in HOSTS
    }


def test_healthy_fleet_has_neither_faults_nor_notes():
    assert links(fleet()) == {"faults": [], "notes": []}
    assert fabric_judge.judge_paths(fleet(), directions()) == {"faults": [], "notes": []}


@pytest.mark.parametrize(
    ("hosts", "settings", "fault"),
    [
        (
            fleet(spark_c={"mtu": 1500}),
            {},
            "spark-c enp1s0f0np0: MTU 1500 (RoCE 1024), fleet 9000 (4096)",
        ),
        (
            fleet(
                spark_b={
                    "fault": "enp1s0f0np0: rocep1s0f0 port 1 is DOWN/Disabled; wanted ACTIVE/LinkUp",
                    "next_step": "check cable",
                    "rdma": None,
                }
            ),
            {},
            "spark-b enp1s0f0np0: rocep1s0f0 port 1 is DOWN/Disabled; wanted ACTIVE/LinkUp. Next: check cable",
        ),
        (
            fleet(
                spark_d={
                    "fault": "no interface carries the fabric address 10.10.0.14: found lo 127.0.0.1/8",
                    "next_step": "link up",
                    "interface": "",
                    "rdma": None,
                }
            ),
            {},
            "spark-d: no interface carries the fabric address 10.10.0.14: found lo 127.0.0.1/8. Next: link up",
        ),
        (
            fleet(spark_c={"addresses": {"10.10.0.13": "enp1s0f0np0", "10.10.0.12": "enP2p1s0f0np0"}}),
            {},
            "spark-c enP2p1s0f0np0: carries 10.10.0.12, which is spark-b's; wanted there alone",
        ),
        (
            fleet(spark_b={"address": "10.10.0.11"}),
            {},
            "spark-a, spark-b: the same fabric address 10.10.0.11 in the inventory; wanted one for each host",
        ),
        (
            fleet(spark_a={"rdma": host("spark-a")["rdma"] | {"rate_gbps": 40.0}}),
            {},
            "spark-a enp1s0f0np0: rocep1s0f0 runs at 40 Gb/s; wanted 200 Gb/s",
        ),
        (fleet(spark_a={"prefix": 16}), {}, "spark-a enp1s0f0np0: prefix length /16; wanted /24 as in 10.10.0.0/24"),
        (
            fleet(spark_a={"address": "10.11.0.11"}),
            {},
            "spark-a enp1s0f0np0: fabric address 10.11.0.11; wanted one in 10.10.0.0/24",
        ),
        (
            fleet(spark_a={"persistence": {"file": "", "mtu": 0, "volatile": ["/run/NetworkManager/x.nmconnection"]}}),
            {},
            "spark-a enp1s0f0np0: address 10.10.0.11 is only in /run/NetworkManager/x.nmconnection; wanted in the "
            "network configuration below /etc, or the next boot loses it",
        ),
        (
            fleet(spark_a={"persistence": {"file": "", "mtu": 0, "volatile": []}}),
            {},
            "spark-a enp1s0f0np0: address 10.10.0.11 is in no file that is read at boot; wanted in the "
            "network configuration below /etc, or the next boot loses it",
        ),
        (
            fleet(spark_a={"persistence": {"file": "/etc/netplan/50.yaml", "mtu": 0, "volatile": []}}),
            {},
            "spark-a enp1s0f0np0: MTU 9000 is live, but /etc/netplan/50.yaml gives none; "
            "wanted in the network configuration below /etc",
        ),
    ],
)
def test_fault_of_one_host_is_one_sentence(hosts, settings, fault):
    assert links(hosts, **settings)["faults"] == [fault]


def test_equal_rdma_mtu_under_another_ethernet_mtu_is_reported_only():
    kept = {"file": "/etc/netplan/50.yaml", "mtu": 4200, "volatile": []}
    verdict = links(fleet(spark_a={"mtu": 4200, "persistence": kept}))

    assert verdict == {"faults": [], "notes": ["spark-a enp1s0f0np0: MTU 4200 (RoCE 4096), fleet 9000 (4096)"]}


def test_fleet_that_agrees_on_the_wrong_mtu_is_refused_host_by_host():
    verdict = links(fleet(**{name.replace("-", "_"): {"mtu": 1500} for name in HOSTS}))

    assert verdict["faults"] == [f"{name} enp1s0f0np0: MTU 1500 (RoCE 1024), wanted 9000 (4096)" for name in HOSTS]


def test_all_faults_are_reported_together():
    hosts = fleet(spark_a={"prefix": 16}, spark_c={"mtu": 1500}, spark_d={"also_in_subnet": ["wlP9s9"]})
    verdict = links(hosts)

    assert len(verdict["faults"]) == 2
    assert verdict["notes"] == ["spark-d enp1s0f0np0: wlP9s9 also has an address in 10.10.0.0/24"]


def test_what_the_next_boot_loses_can_be_reported_only():
    hosts = fleet(spark_a={"persistence": {"file": "", "mtu": 0, "volatile": []}})

    assert links(hosts, require_persistent=False)["faults"] == []
    assert len(links(hosts, require_persistent=False)["notes"]) == 1


def test_default_mtu_needs_no_file():
    kept = {"file": "the kernel command line", "mtu": 0, "volatile": []}
    hosts = {"spark-a": host("spark-a", mtu=1500, persistence=kept)}

    assert links(hosts, mtu=1500) == {"faults": [], "notes": []}


def test_host_without_rdma_is_noted_where_the_profile_needs_none():
    hosts = fleet(**{name.replace("-", "_"): {"rdma": None, "notes": ["no RDMA device"]} for name in HOSTS})

    assert links(hosts, require_rdma=False) == {
        "faults": [],
        "notes": [f"{name} enp1s0f0np0: no RDMA device" for name in HOSTS],
    }


def test_switch_port_with_another_mtu_is_blamed_in_every_failed_direction():
    lost = {"full": 0}
    paths = directions(a_d=lost, b_d=lost, c_d=lost, d_a=lost, d_b=lost, d_c=lost)
    faults = fabric_judge.judge_paths(fleet(), paths)["faults"]

    assert len(faults) == 6
    assert faults[0] == (
        "spark-a enp1s0f0np0 -> spark-d: 9000-byte don't-fragment pings are lost, small ones arrive; "
        "the hosts agree on MTU 9000: look at the switch port and the cable"
    )
    assert {tuple(f.split(":")[0].split(" enp1s0f0np0 -> ")) for f in faults} == {
        (one, two) for one in HOSTS for two in HOSTS if one != two and "spark-d" in (one, two)
    }


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"small": 0, "full": 0, "tcp": "timeout"}, "no answer to a ping; wanted 3. Next: link, cable, switch port"),
        (
            {"full": 0, "detail": "message too long, mtu=1500"},
            "9000-byte don't-fragment pings are lost (message too long, mtu=1500), small ones arrive; "
            "the hosts agree on MTU 9000: look at the switch port and the cable",
        ),
        (
            {"tcp": "timeout"},
            "TCP to an ephemeral port: timeout; wanted open. Next: let 10.10.0.11 through the firewall of spark-b",
        ),
        ({"route": "wlP9s9"}, "the route leaves by wlP9s9; wanted enp1s0f0np0"),
        (
            {"answered_by": ["02:00:00:00:0a:02", "02:00:00:00:ff:ff"]},
            "02:00:00:00:ff:ff answers for 10.10.0.12; wanted 02:00:00:00:0a:02 alone: two machines have this address",
        ),
    ],
)
def test_fault_of_one_direction_is_one_sentence(change, fault):
    faults = fabric_judge.judge_paths(fleet(), directions(a_b=change))["faults"]

    assert len(faults) == 1
    assert faults[0].startswith("spark-a enp1s0f0np0 -> spark-b: ")
    assert faults[0].endswith(fault)


def test_second_owner_of_the_own_address_is_a_fault():
    paths = directions()
    paths["spark-a"].append(outcome("spark-a", host="", answered_by=["02:00:00:00:ff:ff"]))

    assert fabric_judge.judge_paths(fleet(), paths)["faults"] == [
        "spark-a enp1s0f0np0: 02:00:00:00:ff:ff also answers for 10.10.0.11; wanted one machine with it"
    ]


def test_matrix_shows_every_host_and_direction():
    paths = directions(a_d={"full": 0}, b_c={"small": 0}, c_a={"tcp": "timeout"})
    lines = fabric_judge.matrix(fleet(spark_d={"rdma": None}), paths | {"spark-d": []})

    assert lines[1] == "spark-a enp1s0f0np0 10.10.0.11 9000/4096 rocep1s0f0:1 3 ACTIVE 200"
    assert lines[4].endswith("9000/4096 no RDMA")
    assert lines[6:] == [
        "spark-a - ok ok no-9000",
        "spark-b ok - silent ok",
        "spark-c no-tcp ok - ok",
        "spark-d untested untested untested -",
    ]


def test_fabric_in_use_or_unusable_is_not_measured():
    idle = {"fault": "", "busy": []}
    hosts = {
        "a": idle,
        "b": idle | {"busy": ["vllm-rank.service"]},
        "c": idle | {"fault": "enp1s0f0np0: no GID", "next_step": "look"},
    }

    assert fabric_judge.unfit(hosts) == [
        "c: enp1s0f0np0: no GID. Next: look",
        "b: vllm-rank.service is running; wanted the fabric at rest. Next: playbooks/stop.yml",
    ]
    assert fabric_judge.unfit({"a": idle}) == []
