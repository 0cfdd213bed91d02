"""The inventory's judgement, launch reasons, status table and patch series as tables."""

from __future__ import annotations

import gb10_fleet
import pytest
from ansible.errors import AnsibleFilterError


def fleet(**changes):
    """A right inventory of four hosts; CHANGES maps host to variables that replace or (None) remove."""
    hosts = ["a", "b", "c", "d"]
    hostvars = {
        host: {
            "rank": rank,
            "fabric_address": f"192.0.2.{11 + rank}",
            "fabric_subnet": "192.0.2.0/24",
            "profile": "tiny-cpu-tp4",
        }
        for rank, host in enumerate(hosts)
    }
    for host, values in changes.items():
        hostvars[host].update(values)
        hostvars[host] = {key: value for key, value in hostvars[host].items() if value is not None}
    groups = {"fleet": hosts, "head": ["a"], "workers": ["b", "c", "d"]}
    return groups, hostvars


def test_right_inventory_has_no_fault():
    assert gb10_fleet.gb10_inventory_faults(*fleet()) == []


FAULTS = {
    "duplicate rank": ({"c": {"rank": 1}}, ["b, c: rank is 1 on each", "rank 2 is missing"]),
    "missing rank": ({"c": {"rank": None}}, ["c: rank is not set", "rank 2 is missing"]),
    "rank out of range": ({"d": {"rank": 4}}, ["d: rank is 4, wanted a number from 0 to 3", "rank 3 is missing"]),
    "rank as a word": ({"d": {"rank": "last"}}, ["d: rank is 'last'", "rank 3 is missing"]),
    "other subnet": ({"b": {"fabric_address": "192.0.3.12"}}, ["b: fabric_address 192.0.3.12 is outside"]),
    "same address": ({"b": {"fabric_address": "192.0.2.13"}}, ["c: fabric_address 192.0.2.13 is also that of b"]),
    "no address": ({"b": {"fabric_address": None}}, ["b: fabric_address is None"]),
    "address with prefix": ({"b": {"fabric_address": "192.0.2.12/24"}}, ["without prefix length"]),
    "no subnet": ({"a": {"fabric_subnet": None}}, ["fabric_subnet is not set"]),
    "subnet with host bits": ({"a": {"fabric_subnet": "192.0.2.1/24"}}, ["has host bits set"]),
    "unknown profile": (
        {host: {"profile": "gone"} for host in "abcd"},
        ["profile 'gone' does not exist", "tiny-cpu-tp4"],
    ),
    "two profiles": ({"d": {"profile": "other"}}, ["profile differs between hosts (other, tiny-cpu-tp4)"]),
}


@pytest.mark.parametrize(("changes", "wanted"), FAULTS.values(), ids=FAULTS)
def test_fault_is_named_with_its_host(changes, wanted):
    faults = gb10_fleet.gb10_inventory_faults(*fleet(**changes))
    for text in wanted:
        assert any(text in fault for fault in faults), faults


def test_all_faults_come_in_one_list():
    groups, hostvars = fleet(b={"rank": 0, "fabric_address": "10.0.0.1"}, c={"rank": None})
    groups["head"] = ["a", "b"]
    faults = gb10_fleet.gb10_inventory_faults(groups, hostvars)
    for text in ("group head has 2 hosts (a, b)", "both head and workers", "a, b: rank is 0", "10.0.0.1 is outside"):
        assert any(text in fault for fault in faults), faults


def test_tensor_parallel_size_must_be_the_host_count():
    groups, hostvars = fleet()
    groups = {"fleet": ["a", "b"], "head": ["a"], "workers": ["b"]}
    assert gb10_fleet.gb10_inventory_faults(groups, hostvars) == [
        "profile tiny-cpu-tp4 is for 4 hosts (tensor_parallel_size), group fleet has 2"
    ]


def test_rows_must_be_kept_where_the_engine_reads_them():
    groups, hostvars = fleet(**{host: {"profile": "deepseek-v4.1-flash-tp4"} for host in "abcd"})
    assert gb10_fleet.gb10_inventory_faults(groups, hostvars) == []
    hostvars["a"]["engram_rows_directory"] = "/data/rows"
    faults = gb10_fleet.gb10_inventory_faults(groups, hostvars)
    assert len(faults) == 1
    assert "engram_rows_directory is /data/rows" in faults[0]


def test_head_must_be_rank_0():
    groups, hostvars = fleet(a={"rank": 1}, b={"rank": 0})
    assert gb10_fleet.gb10_inventory_faults(groups, hostvars) == ["a: is the head and has rank 1, wanted rank 0"]


def test_empty_fleet_is_one_fault():
    assert len(gb10_fleet.gb10_inventory_faults({"fleet": []}, {})) == 1


def state(**changes):
    return {
        "active": True,
        "unit": "active",
        "launch_id": "l1",
        "release": "r1",
        "running_release": "r1",
        "release_faults": [],
        "drift": "",
        "differs": {"release": False, "arguments": False, "environment": False, "other": False},
        "process": {"pid": 7, "argv": ["serve"], "environment": {"X": "16"}, "unknown": ""},
        "needs_reload": False,
        "log_missing": [],
        "phase": "serving",
        "cause": "",
        "guard": "",
        "memory_available_mib": 2048,
    } | changes


TOKEN = {"text": "abc", "fault": ""}


@pytest.mark.parametrize(
    ("changes", "answer", "reason"),
    [
        ({}, TOKEN, ""),
        ({}, None, ""),  # before the head is asked
        ({"b": state(active=False, unit="failed")}, TOKEN, "b: the rank is failed"),
        ({"b": state(active=False, unit="failed")}, {}, "b: the rank is failed"),
        ({"b": state(launch_id="l0")}, TOKEN, "ranks of several launches run (a l1, b l0)"),
        ({}, {"text": "", "fault": "answered 500"}, "a: answered 500"),
        ({"b": state(drift="running X=8, configured X=16")}, TOKEN, ""),
    ],
)
def test_reason_to_start(changes, answer, reason):
    reasons = gb10_fleet.gb10_launch_reasons({"a": state(), "b": state()} | changes, "a", answer)
    assert reasons == ([reason] if reason else [])


UNKNOWN = {"pid": 0, "argv": [], "environment": {}, "unknown": "no process of the unit is an engine (yet)"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (state(drift="running X=8, configured X=16"), "b: running X=8, configured X=16; group restart needed"),
        (state(release_faults=["edited"]), "b: edited"),
        (state(release="r0"), "hosts have different releases (a r1, b r0)"),
        (state(needs_reload=True), "b: the unit's file is newer than what systemd has read"),
        (state(log_missing=["UE8M0"]), "b: the journal of the start lacks 'UE8M0'"),
        (state(process=UNKNOWN), "b: what its rank was started with is unknown: no process"),
    ],
)
def test_served_but_not_as_configured(changes, text):
    faults = gb10_fleet.gb10_verify_faults({"a": state(), "b": changes}, "a", TOKEN)
    assert len(faults) == 1
    assert text in faults[0]


def test_head_that_was_not_asked_proves_nothing():
    assert gb10_fleet.gb10_verify_faults({"a": state()}, "a", {}) == ["a: was not asked for a token"]


def test_unreachable_host_is_named_and_the_others_listed():
    results = {"a": {"rank": {}}, "b": {"unreachable": True, "msg": "timed out"}, "c": {"rank": {}}}
    faults = gb10_fleet.gb10_reachability_faults(["a", "b", "c"], results)
    assert len(faults) == 1
    assert faults[0].startswith("b: does not answer (timed out)")
    assert faults[0].endswith("reachable are a, c")


def table(**results):
    hostvars = {host: {"rank": rank, "s": result} for rank, (host, result) in enumerate(results.items())}
    return gb10_fleet.gb10_status_table(list(results), hostvars, "s")


def columns(header, line, *names):
    """Cells of LINE below the NAMES of HEADER."""
    starts = {name: header.index(name) for name in names}
    return [line[start:].split("  ")[0].strip() for start in starts.values()]


FACTS = ("release", "arguments", "environment")


@pytest.mark.parametrize(
    ("changes", "cells"),
    [
        ({}, ["r1", "same", "same"]),
        ({"process": UNKNOWN}, ["r1", "unknown", "unknown"]),
        (
            {"process": {"pid": 7, "argv": ["serve"], "environment": {}, "unknown": "denied"}},
            ["r1", "same", "unknown"],
        ),
        ({"differs": {"arguments": True, "environment": False}}, ["r1", "differs", "same"]),
        ({"differs": {"arguments": False, "environment": True}}, ["r1", "same", "differs"]),
        ({"running_release": "r0"}, ["r0, configured r1", "same", "same"]),
        ({"running_release": ""}, ["unknown", "same", "same"]),
        ({"active": False, "unit": "failed"}, ["r1", "down", "down"]),
    ],
)
def test_status_shows_what_runs_against_what_is_configured(changes, cells):
    header, line, *_ = table(a={"rank": state(**changes), "mount": "local"})
    assert columns(header, line, *FACTS) == cells


def test_status_tells_what_a_guard_saw_that_only_observes():
    *_, below = table(a={"rank": state(guard="the memory guard only observes: it fell"), "mount": "local"})
    assert below == "a: the memory guard only observes: it fell"


def test_status_shows_unknown_for_a_silent_host():
    header, first, second, below = table(
        a={"rank": state(), "mount": "local"}, b={"unreachable": True, "msg": "timed out"}
    )
    assert header.split()[:3] == ["host", "rank", "unit"]
    assert "2.0 GiB" in first
    assert second.split()[:3] == ["b", "1", "unknown"]
    assert columns(header, second, *FACTS) == ["unknown"] * 3
    assert below == "b: timed out"


def test_status_tells_every_difference_below_the_table():
    lines = table(
        a={
            "rank": state(drift="running X=8, configured X=16", release_faults=["edited"], needs_reload=True),
            "mount": "local",
        },
        b={"rank": state(active=False, unit="failed", cause="killed [killed]"), "mount": "x"},
    )
    assert lines[3:] == [
        "a: edited",
        "a: running X=8, configured X=16",
        "a: systemd has not read the unit's present file",
        "b: likely cause of its end: killed [killed]",
    ]


def test_time_to_ready_is_told_for_each_host():
    hostvars = {"a": {"r": {"phases": {"ready": 90.4, "joined": 10.0}}}}
    assert gb10_fleet.gb10_ready_lines(["a"], hostvars, "r") == ["a: joined after 10 s, ready after 90 s"]


@pytest.mark.parametrize("key", ["plain", "k%c$HOME\\n'\"`é x"])
def test_key_is_taken_as_it_is(key):
    assert gb10_fleet.gb10_api_key(key + "\n") == key + "\n"
    assert gb10_fleet.gb10_api_key(key) == key + "\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        ("\n", "is empty"),
        ("secret-a\nsecret-b\n", "does not print"),
        (" secret", "white space"),
        ("secret-π", "'π' is no Latin-1 character"),
    ],
)
def test_key_that_no_client_could_send_is_refused_without_showing_it(text, why):
    with pytest.raises(AnsibleFilterError, match=why) as raised:
        gb10_fleet.gb10_api_key(text)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("engine", sorted(path.parent.name for path in gb10_fleet.PATCHES.glob("*/series.yml")))
def test_series_is_whole(engine):
    series = gb10_fleet.gb10_patch_series(engine)
    assert series["patches"]
    assert all(patch["text"].count("\n+++ ") for patch in series["patches"])


def test_series_with_carriage_returns_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gb10_fleet, "PATCHES", tmp_path)
    folder = tmp_path / "e-1"
    folder.mkdir()
    (folder / "series.yml").write_text(
        "engine: {package: e, version: 1}\npatches: [{file: p.patch, why: w, drop_when: d}]\nfiles: {}\n"
    )
    (folder / "p.patch").write_bytes(b"--- a/x\r\n+++ b/x\r\n")
    with pytest.raises(AnsibleFilterError, match="carriage returns"):
        gb10_fleet.gb10_patch_series("e-1")
