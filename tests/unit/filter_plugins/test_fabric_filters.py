"""The fabric's filters over what the modules return."""

from __future__ import annotations

import json
from pathlib import Path

import gb10_fabric

RECORDED = json.loads((Path(__file__).parents[2] / "fixtures/rdma/allreduce_2xh200.json").read_text())
FILTERS = gb10_fabric.FilterModule().filters()


def test_peers_are_all_hosts_but_one():
    host = {"address": "10.0.0.1", "mtu": 9000, "mac": "m", "boot_id": "b", "firmware": "f", "rdma": None}
    peers = FILTERS["gb10_fabric_peers"]({"a": host, "b": host | {"address": "10.0.0.2"}}, "a")

    assert peers == [{"host": "b", "address": "10.0.0.2", "mtu": 9000, "mac": "m"}]


def test_perftest_is_judged_by_the_slower_end():
    results = {
        "a": {"results": [{"to": "b", "gbps": 13.0, "latency_us": 2.0}], "bound": [126.0, "PCIe"]},
        "b": {"results": [{"to": "a", "gbps": 98.0, "latency_us": 2.0}], "bound": [200.0, "the link's rate"]},
    }

    verdict = FILTERS["gb10_fabric_perftest"](results, 0.7, 0)

    assert verdict["faults"] == ["a -> b: RDMA writes at 13 Gb/s; wanted 88.2 Gb/s, 0.7 of PCIe (126 Gb/s)"]
    assert verdict["table"] == ["a -> b: 13 Gb/s, 2 us", "b -> a: 98 Gb/s, 2 us"]


def test_allreduce_over_sockets_is_called_out():
    results = {f"h{n}": {"result": RECORDED[f"NET/Socket.{n}"], "hca": "rocep1s0f0:1"} for n in (0, 1)}
    verdict = FILTERS["gb10_fabric_allreduce"](results, ["h0", "h1"], True, {})

    assert [fault.split(";")[0] for fault in verdict["faults"]] == [
        f"h{n}: NCCL used NET/Socket over eth0: this is not RDMA" for n in (0, 1)
    ]
    assert verdict["table"][5].split() == ["61440", "146.8/160.9", "us", "146.4/160.4", "us"]
