"""Tables recorded from perftest 4.5 over soft-RoCE, and the tournament that pairs the hosts."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import fabric_perftest

FIXTURES = Path(__file__).parents[2] / "fixtures/rdma"
BANDWIDTH = (FIXTURES / "ib_write_bw_soft_roce.txt").read_text()
LATENCY = (FIXTURES / "ib_write_lat_soft_roce.txt").read_text()


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_every_pair_meets_once_and_no_host_twice_in_a_round(count):
    hosts = [f"h{n}" for n in range(count)]
    schedule = fabric_perftest.rounds(hosts)
    met = [frozenset(pair) for pairs in schedule for pair in pairs]

    assert sorted(map(sorted, met)) == sorted(map(list, itertools.combinations(hosts, 2)))
    assert all(len({h for pair in pairs for h in pair}) == 2 * len(pairs) for pairs in schedule)


def test_recorded_tables():
    assert fabric_perftest.parse_table(BANDWIDTH)["BW average[Gb/sec]"] == 0.004184
    assert fabric_perftest.parse_table(LATENCY)["t_typical[usec]"] == 6711.81


def test_row_with_a_deviation_that_is_no_number_is_read():
    """As two emulated guests on a busy machine gave it: only the figures that are used have to be numbers."""
    values = "  2 200 454.00 120037.14 3733.35 5639.97 -nan 76353.04 120037.14"
    header = next(line for line in LATENCY.splitlines() if line.strip().startswith("#bytes"))

    assert fabric_perftest.parse_table(f"{header}\n{values}\n")["t_typical[usec]"] == 3733.35


def test_output_without_a_table_is_an_error():
    with pytest.raises(fabric_perftest.PerftestError, match="Unable to init"):
        fabric_perftest.parse_table("Unable to init the socket connection")


@pytest.mark.parametrize(
    ("rate", "speed", "width", "bound", "name"),
    [
        (200, "32.0 GT/s PCIe", "4", 126.03, "PCIe 32.0 GT/s x4"),
        (100, "32.0 GT/s PCIe", "4", 100, "the link's rate"),
        (200, "32.0 GT/s PCIe", "16", 200, "the link's rate"),
        (2.5, "", "", 2.5, "the link's rate"),
        (200, "Unknown", "0", 200, "the link's rate"),
    ],
)
def test_slower_of_link_and_slot_bounds_the_expectation(rate, speed, width, bound, name):
    found = fabric_perftest.bound_gbps(rate, speed, width)

    assert (round(found[0], 2), found[1]) == (bound, name)


def test_bound_is_read_from_sysfs(tmp_path):
    device = tmp_path / "class/infiniband/rocep1s0f0/device"
    device.mkdir(parents=True)
    (device / "current_link_speed").write_text("32.0 GT/s PCIe\n")
    (device / "current_link_width").write_text("4\n")

    assert fabric_perftest.read_bound("rocep1s0f0", 200, tmp_path)[1] == "PCIe 32.0 GT/s x4"
    assert fabric_perftest.read_bound("rxe0", 2.5, tmp_path) == (2.5, "the link's rate")


@pytest.mark.parametrize(
    ("gbps", "latency", "faults"),
    [
        (98.1, 2.1, []),
        (13.2, 2.1, ["a -> b: RDMA writes at 13.2 Gb/s; wanted 88.2 Gb/s, 0.7 of PCIe 32.0 GT/s x4 (126 Gb/s)"]),
        (float("nan"), 2.1, ["a -> b: RDMA writes at nan Gb/s; wanted 88.2 Gb/s, 0.7 of PCIe 32.0 GT/s x4 (126 Gb/s)"]),
        (98.1, 40.0, ["a -> b: latency 40 us; wanted 10 us"]),
    ],
)
def test_direction_is_judged_against_the_link(gbps, latency, faults):
    bounds = {"a": (200.0, "the link's rate"), "b": (126.0, "PCIe 32.0 GT/s x4")}
    measured = {"a": [{"to": "b", "gbps": gbps, "latency_us": latency}]}

    assert fabric_perftest.judge(measured, bounds, share=0.7, latency_us=10) == faults


def test_both_hosts_of_a_pair_write_in_turn_to_the_ports_the_other_serves():
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2"}
    commands: dict[str, list[list[str]]] = {"a": [], "b": []}
    results = {}
    for host in addresses:

        def run(command, deadline, client, host=host):
            commands[host].append(list(command))
            return BANDWIDTH if command[0] == "ib_write_bw" else LATENCY

        rdma = {"hca": "rocep1s0f0", "port": 1, "gid_index": 5 if host == "a" else 4}
        results[host] = fabric_perftest.measure(host, addresses, rdma, seconds=2, wait_s=1, run=run)

    assert results["a"] == [{"to": "b", "gbps": 0.004184, "latency_us": 6711.81}]
    assert results["b"] == [{"to": "a", "gbps": 0.004184, "latency_us": 6711.81}]

    def ports(host: str, peer: str | None) -> list[str]:
        wanted = [c for c in commands[host] if (c[-1] in addresses.values()) == bool(peer)]
        return [c[c.index("-p") + 1] for c in wanted]

    assert ports("a", None) == ports("b", "a")
    assert ports("b", None) == ports("a", "b")
    assert all(c[c.index("-x") + 1] == "5" for c in commands["a"])
