"""The judge over logs and figures recorded on two NVIDIA H200 (NCCL 2.28.9), and RoCE lines in NCCL's public form."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import allreduce

FIXTURES = Path(__file__).parents[2] / "fixtures/rdma"
RECORDED = json.loads((FIXTURES / "allreduce_2xh200.json").read_text())
THRESHOLDS = {"p50_us": 100, "step_ms": 7, "slow": 0.05}

ROCE = """\
spark-a:571:571 [0] NCCL INFO NET/IB : Using [0]rocep1s0f0:1/RoCE [RO]; OOB enp1s0f0np0:192.168.192.1<0>
spark-a:571:571 [0] NCCL INFO Using network IB
spark-a:571:571 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0
spark-a:571:571 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""
TWO_RAILS = ROCE.replace("rocep1s0f0:1/RoCE", "rocep1s0f0:1/RoCE [1]roceP2p1s0f0:1/RoCE")


def transport(text: str) -> dict[str, object]:
    parsed = allreduce.parse_nccl_log(text)
    return asdict(parsed) | {"used": parsed.used}


def result(**changes: object) -> dict[str, object]:
    """A healthy rank: the figures of the NVLink run, RoCE as its transport."""
    sizes = {size: row | {"slow": 0.0} for size, row in RECORDED["P2P.0"]["sizes"].items()}
    return RECORDED["P2P.0"] | {"sizes": sizes, "transport": transport(ROCE)} | changes


def judge(**results: object) -> dict[str, list[str]]:
    return allreduce.judge(
        results,
        list(results),
        require_rdma=True,
        hcas=dict.fromkeys(results, "rocep1s0f0:1"),
        thresholds=THRESHOLDS,
    )


@pytest.mark.parametrize(
    ("name", "used", "devices"),
    [
        ("nccl_2.28.9_p2p", ("P2P",), ("eth0",)),
        ("nccl_2.28.9_shm", ("SHM",), ("eth0",)),
        ("nccl_2.28.9_socket", ("NET/Socket",), ("eth0",)),
        ("nccl_2.28.9_ibonly", (), ()),
    ],
)
def test_transport_of_a_recorded_log(name, used, devices):
    parsed = allreduce.parse_nccl_log((FIXTURES / f"{name}.log").read_text())

    assert parsed.used == used
    assert parsed.devices == devices
    # "NET/IB : Using [RO]" stands in every one of them though the machine has no RDMA device.
    assert "IB" not in parsed.networks


def test_transport_of_roce_lines():
    parsed = allreduce.parse_nccl_log(ROCE)

    assert (parsed.networks, parsed.devices, parsed.used) == (("IB",), ("rocep1s0f0:1",), ("NET/IB",))
    assert allreduce.parse_nccl_log(TWO_RAILS).devices == ("rocep1s0f0:1", "roceP2p1s0f0:1")


def test_refusal_of_nccl_is_kept():
    text = (FIXTURES / "nccl_2.28.9_ibonly.log").read_text()

    assert allreduce.parse_nccl_log(text).warnings == ("Failed to initialize any NET plugin",)


def test_rdma_with_the_wanted_device_passes():
    assert judge(a=result(), b=result()) == {"faults": [], "notes": []}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"transport": RECORDED["NET/Socket.0"]["transport"]},
            "a: NCCL used NET/Socket over eth0: this is not RDMA; wanted NET/IB with rocep1s0f0:1",
        ),
        (
            {"transport": RECORDED["P2P.0"]["transport"]},
            "a: NCCL used P2P over eth0: ranks of one machine did not cross the fabric; "
            "wanted NET/IB with rocep1s0f0:1",
        ),
        (
            {"transport": transport(ROCE.replace("rocep1s0f0", "roceP2p1s0f0"))},
            "a: NCCL used NET/IB with roceP2p1s0f0:1; wanted NET/IB with rocep1s0f0:1",
        ),
        (
            {"transport": transport(TWO_RAILS)},
            "a: NCCL used NET/IB with rocep1s0f0:1, roceP2p1s0f0:1; wanted NET/IB with rocep1s0f0:1",
        ),
        ({"transport": transport("")}, "a: NCCL's log names no channel; wanted NET/IB with rocep1s0f0:1. Next:"),
        ({"wrong_sums": [61440]}, "a: wrong all-reduce sums at 61440 bytes; wanted exact sums. Do not serve"),
        (
            {"step_ms": RECORDED["NET/Socket.0"]["step_ms"]},
            "a: 88 all-reduces of 60 KiB took 11.62 ms; wanted at most 7 ms",
        ),
        ({"sizes": RECORDED["NET/Socket.0"]["sizes"]}, "a: p50 at 60 KiB 146.8 us; wanted at most 100 us"),
        (
            {"sizes": RECORDED["P2P.0"]["sizes"]},
            "a: 14% of the 60 KiB operations slower than 1.25 x p10; wanted at most 0.05",
        ),
        ({"error": "timed out after 60 s"}, "a: the all-reduce did not run: timed out after 60 s; wanted a result"),
    ],
)
def test_one_bad_rank_gives_one_sentence(changes, fault):
    faults = judge(a=result(**changes), b=result())["faults"]

    assert len(faults) == 1
    assert faults[0].startswith(fault)


def test_rank_without_a_result_is_a_fault():
    verdict = allreduce.judge({}, ["a"], require_rdma=False, hcas={}, thresholds={})

    assert verdict["faults"] == ["a: the all-reduce did not run: no result; wanted a result from every rank"]


def test_gloo_is_measured_but_says_nothing_about_rdma():
    verdict = judge(a=result(backend="gloo", transport=None), b=result())

    assert verdict["faults"] == []
    assert verdict["notes"] == ["a: measured over gloo (no GPU): says nothing about RDMA or speed"]


def test_wrong_sums_over_gloo_are_a_fault():
    assert judge(a=result(backend="gloo", wrong_sums=[8192]))["faults"]


@pytest.mark.parametrize(
    ("samples", "summary"),
    [
        ([5.0], {"p10": 5.0, "p50": 5.0, "p90": 5.0, "slow": 0.0}),
        (list(range(1, 11)), {"p10": 1, "p50": 5, "p90": 9, "slow": 0.9}),
        ([4.0] * 9 + [5.1], {"p10": 4.0, "p50": 4.0, "p90": 4.0, "slow": 0.1}),
    ],
)
def test_summary_of_samples(samples, summary):
    assert allreduce.summarise(samples) == summary


def test_table_has_a_line_for_each_size_and_the_step():
    lines = allreduce.table({"a": RECORDED["P2P.0"], "b": {"error": "no"}}).splitlines()

    assert len(lines) == len(allreduce.SIZES) + 3
    assert lines[0] == "p50/p90 of one all-reduce"
    assert lines[5].split() == ["61440", "40.6/55.7", "us"]
    assert lines[-1].split() == ["88x60KiB", "3.49/3.82", "ms"]


SKIPPED = {"skipped": "no rank is installed"}


def test_fleet_without_an_engine_is_noted_and_one_host_without_is_a_fault():
    judge = functools.partial(allreduce.judge, hosts=["a", "b"], require_rdma=False, hcas={}, thresholds={})
    gloo = {"sizes": {}, "step_ms": {}, "wrong_sums": [], "backend": "gloo"}

    assert judge({"a": SKIPPED, "b": SKIPPED}) == {
        "faults": [],
        "notes": [f"{host}: all-reduces not measured: no rank is installed" for host in "ab"],
    }
    assert judge({"a": gloo, "b": SKIPPED})["faults"] == [
        "b: the all-reduce did not run: no rank is installed; wanted a result from every rank"
    ]
    assert allreduce.table({"a": SKIPPED}) == ""
