"""The comparison of hosts: majorities, ties, vendors, baselines, waivers, mounts."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.module_utils.gb10.host_parity import ParityError, Verdict, judge, judge_documents

CLEAN = {
    "product_name": "NVIDIA_DGX_Spark",
    "kernel_release": "6.17.0-1032-nvidia",
    "kernels_installed": ["6.17.0-1032-nvidia"],
    "page_size": 4096,
    "gpu_driver": "580.173.02",
    "firmware_uefi": "5.36_0ACUM027",
    "mem_total_kib": 127_600_000,
    "nccl_libraries": {"/usr/lib/libnccl.so.2": "a", "/opt/e/libnccl.so.2": "b"},
    "nfs_mounts": [],
}


def fleet(*changes: dict[str, Any], count: int = 4) -> dict[str, Any]:
    """Hosts a, b, ... of clean facts, the n-th with the n-th change."""
    hosts = {}
    for name, change in zip("abcd"[:count], [*changes, *[{}] * count], strict=False):
        hosts[name] = {
            fact: {"value": value, "source": "test"} | ({"unknown": "no tool"} if value is None else {})
            for fact, value in (CLEAN | change).items()
        }
    return hosts


def lines(verdict: Verdict) -> list[str]:
    return [finding.sentence() for finding in verdict.findings]


GX10 = {"product_name": "GX10", "firmware_uefi": "GX10DGX.0105"}

# changes of hosts a, b, c, d -> findings as (name, host, value)
COMPARISONS: list[tuple[str, list[dict[str, Any]], list[tuple[str, str, str]]]] = [
    ("clean", [], []),
    ("one odd", [{}, {"kernel_release": "6.14"}], [("kernel_release", "b", "6.14")]),
    (
        "two odd, two values",
        [{}, {"gpu_driver": "1"}, {"gpu_driver": "2"}],
        [("gpu_driver", "b", "1"), ("gpu_driver", "c", "2")],
    ),
    (
        "two against two",
        [{"page_size": 65536}, {"page_size": 65536}],
        [("page_size", "a, b, c, d", "65536 on a and b, 4096 on c and d")],
    ),
    ("unknown on one", [{"gpu_driver": None}], [("gpu_driver", "a", "unknown (no tool)")]),
    ("unknown on all", [{"gpu_driver": None}] * 4, []),
    ("memory within a percent", [{"mem_total_kib": 126_900_000}], []),
    ("memory set aside", [{"mem_total_kib": 125_508_532}], [("mem_total_kib", "a", "125508532")]),
    ("two vendors, each alike", [GX10, GX10], []),
    (
        "two vendors, one odd",
        [GX10, GX10 | {"firmware_uefi": "GX10DGX.0104"}, {}, {}],
        [("firmware_uefi", "a, b", "GX10DGX.0105 on a, GX10DGX.0104 on b")],
    ),
    (
        "another NCCL build",
        [{"nccl_libraries": {"/usr/lib/libnccl.so.2": "z", "/opt/e/libnccl.so.2": "b"}}],
        [("nccl_libraries", "a", "z")],
    ),
    ("engine not installed yet", [{"nccl_libraries": {"/usr/lib/libnccl.so.2": "a"}}], []),
]


@pytest.mark.parametrize(("changes", "expected"), [case[1:] for case in COMPARISONS], ids=[c[0] for c in COMPARISONS])
def test_comparison(changes: list[dict[str, Any]], expected: list[tuple[str, str, str]]) -> None:
    verdict = judge(fleet(*changes))
    assert [(one.name, one.host, one.value) for one in verdict.findings] == expected


def test_a_pair_that_differs_asks_which_value_is_meant() -> None:
    (line,) = lines(judge(fleet({}, {"gpu_driver": "580.142"}, count=2)))
    assert line.startswith("a, b: driver 580.173.02 on a, 580.142 on b, want one value; say which is meant with")


def test_a_baseline_decides_a_tie_and_finds_what_all_share() -> None:
    pair = fleet({}, {"gpu_driver": "580.142"}, count=2)
    assert lines(judge(pair, baseline={"gpu_driver": "580.142"})) == [
        "a: driver 580.173.02, want 580.142; install driver 580.142 and reboot;"
        " two levels cost one fleet half its prefill"
    ]
    assert len(judge(fleet(), baseline={"kernel_release": "6.17.0-1026-nvidia"}).findings) == 4


def test_a_baseline_of_firmware_is_by_product() -> None:
    wanted = {"firmware_uefi": {"NVIDIA_DGX_Spark": "5.36_0ACUM027", "GX10": "GX10DGX.0106"}}
    verdict = judge(fleet(GX10, GX10), baseline=wanted)
    assert [(one.host, one.value, one.wanted) for one in verdict.findings] == [
        ("a", "GX10DGX.0105", "GX10DGX.0106"),
        ("b", "GX10DGX.0105", "GX10DGX.0106"),
    ]


def test_a_waiver_is_shown_with_its_reason_and_does_not_hide_other_faults() -> None:
    hosts = fleet({"gpu_driver": "580.142"}, {"kernel_release": "6.14"})
    verdict = judge(hosts, waivers={"gpu_driver": "host a waits for its window, until May"})
    assert [one.name for one in verdict.findings] == ["kernel_release"]
    assert "[waived: host a waits for its window, until May]" in verdict.report()


WRONG = [
    ({"baseline": {"gpu_drivr": "1"}}, "baseline gpu_drivr names nothing; known are "),
    ({"waivers": {"kernel": "old"}}, "waiver kernel names nothing"),
    ({"waivers": {"gpu_driver": " "}}, "waiver gpu_driver has no reason"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_a_baseline_or_waiver_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParityError, match=message):
        judge(fleet(), **options)


def test_a_host_that_was_not_reached_is_a_finding_and_the_others_are_compared() -> None:
    verdict = judge({**fleet({}, {"kernel_release": "6.14"}), "a": None})
    assert [(one.name, one.host) for one in verdict.findings] == [("reached", "a"), ("kernel_release", "b")]


def test_a_pin_wants_the_kernel_installed_and_running() -> None:
    other = {"kernel_release": "6.14", "kernels_installed": ["6.14"]}
    booted_old = {"kernel_release": "6.14", "kernels_installed": ["6.14", "6.17.0-1032-nvidia"]}
    verdict = judge(fleet(other, booted_old), kernel_pin="6.17.0-1032-nvidia")
    assert [(one.name, one.host, one.value) for one in verdict.findings] == [
        ("kernel_pin", "a", "6.14"),
        ("kernel_release", "b", "6.14"),
    ]


def mount(state: str, server: str = "10.10.0.11") -> dict[str, Any]:
    return {"nfs_mounts": [{"path": "/srv/models", "server": server, "export": "/srv/models", "state": state}]}


ADDRESSES = {"10.10.0.11": "a"}
SILENT = "c: /srv/models from 10.10.0.11 gives no answer in 10 s; start the export on a, then remount"


def test_a_silent_mount_of_a_host_that_is_off_stops_the_run() -> None:
    hosts = {**fleet({}, {}, mount("no answer in 10 s")), "a": None}
    assert SILENT in lines(judge(hosts, addresses=ADDRESSES))


def test_a_mount_that_the_storage_stage_can_repair_is_a_note() -> None:
    for state in ("no answer in 10 s", "Stale file handle"):
        verdict = judge(fleet({}, {}, mount(state)), addresses=ADDRESSES)
        assert verdict.findings == ()
        assert "/srv/models from 10.10.0.11" in verdict.report()
    assert judge(fleet({}, {}, mount("ok"))).report() == "all hosts are alike"


def test_layers_of_one_mount_are_one_fault() -> None:
    layers = {"nfs_mounts": mount("no answer in 10 s", "192.0.2.9")["nfs_mounts"] * 3}
    assert len(judge(fleet(layers)).findings) == 1


RULE = {
    "id": "old-kernel",
    "when": {"fact": "kernel_release", "matches": "^6.14"},
    "wanted": "a newer kernel",
    "remedy": "upgrade",
    "source": "test",
    "explains": ["kernel_release", "gpu_driver"],
}


def test_a_rule_speaks_for_the_facts_that_it_explains() -> None:
    hosts = fleet({"kernel_release": "6.14", "gpu_driver": None})
    verdict = judge_documents(hosts, [RULE])
    assert [(one["name"], one["host"]) for one in verdict["findings"]] == [("old-kernel", "a")]
    waived = judge_documents(hosts, [RULE], waivers={"old-kernel": "known"})
    assert [one["name"] for one in waived["findings"]] == ["kernel_release", "gpu_driver"]
    assert [one["name"] for one in waived["waived"]] == ["old-kernel"]


def test_a_rule_that_reports_stops_nothing() -> None:
    verdict = judge_documents(fleet(*[{"kernel_release": "6.14"}] * 4), [RULE | {"severity": "report"}])
    assert verdict["findings"] == ()
    assert len(verdict["notes"]) == 4


def test_the_table_has_every_host_of_a_property_that_differs() -> None:
    report = judge(fleet({}, {"kernel_release": "6.14"})).report()
    table = report.split("\n\n")[-1].splitlines()
    assert table[0].split() == ["property", "host", "value"]
    assert [line.split() for line in table[1:]] == [
        ["kernel", "a", "6.17.0-1032-nvidia"],
        ["kernel", "b", "6.14", "<-", "odd"],
        ["kernel", "c", "6.17.0-1032-nvidia"],
        ["kernel", "d", "6.17.0-1032-nvidia"],
    ]
