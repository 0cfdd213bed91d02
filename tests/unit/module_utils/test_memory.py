from __future__ import annotations

import pytest
from ansible.module_utils.gb10 import memory
from ansible.module_utils.gb10.memory import MeminfoError, Memory, drop_wanted, make_room, parse

from tests.conftest import PROJECT

CAPTURED = (PROJECT / "tests/fixtures/platform/meminfo_gb10_after_stop_retained_pool.txt").read_text()


def table(free: int, available: int) -> str:
    return f"MemTotal:       128000 kB\nMemFree:        {free * 1024} kB\nMemAvailable:   {available * 1024} kB\n"


def test_a_gb10s_table_is_read_in_mib():
    found = parse(CAPTURED)
    lines = dict(line.split(":") for line in CAPTURED.splitlines() if line.startswith("Mem"))
    assert found.available == int(lines["MemAvailable"].split()[0]) // 1024
    assert found.free < found.available < found.total


def test_a_table_without_a_line_names_it():
    with pytest.raises(MeminfoError, match="MemAvailable"):
        parse("MemTotal: 1 kB\nMemFree: 1 kB\n")


@pytest.mark.parametrize(("free", "wanted"), [(102399, True), (102400, False), (110000, False)])
def test_the_cache_is_dropped_below_the_floor_only(free, wanted):
    assert drop_wanted(Memory(124000, free, 120000), 102400) is wanted


def test_room_is_made_and_told(tmp_path):
    meminfo, knob = tmp_path / "meminfo", tmp_path / "drop_caches"
    meminfo.write_text(table(40000, 110000))
    knob.write_text("")
    said = make_room(102400, meminfo, knob)
    assert knob.read_text() == "3\n"
    assert "MemFree 40000 to 40000 MiB" in said
    assert "wanted 102400 MiB" in said


def test_a_free_host_keeps_its_cache(tmp_path):
    meminfo, knob = tmp_path / "meminfo", tmp_path / "drop_caches"
    meminfo.write_text(table(103000, 110000))
    knob.write_text("")
    assert "the page cache stays" in make_room(102400, meminfo, knob)
    assert knob.read_text() == ""


def test_a_sync_that_hangs_is_told_and_not_waited_for(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(table(40000, 110000))
    monkeypatch.setattr(memory, "SYNC_TIMEOUT_S", 0.2)
    (tmp_path / "sync").write_text("#!/bin/sh\nexec sleep 20\n")
    (tmp_path / "sync").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    knob = tmp_path / "drop_caches"
    assert "could not be dropped: sync gave no answer in 0.2 s" in make_room(102400, meminfo, knob)
    assert not knob.exists()
