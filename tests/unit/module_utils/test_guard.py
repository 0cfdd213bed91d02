from __future__ import annotations

import json
import os
import signal

import pytest
from ansible.module_utils.gb10.guard import Guard, GuardError, Meminfo, Process, Sample, Settings, cause, notify

from tests.conftest import PROJECT

GOOD = {
    "mode": "enforce",
    "startup_floor_mib": 5120,
    "steady_floor_mib": 3072,
    "startup_seconds": 3600,
    "control_group": "system.slice/vllm-rank.service",
}

FAULTS = [
    ({"mode": "off"}, "mode is 'off', wanted observe or enforce"),
    ({"steady_floor_mib": 0}, "steady_floor_mib is 0"),
    ({"startup_floor_mib": "5120"}, "startup_floor_mib is '5120'"),
    ({"startup_seconds": True}, "startup_seconds is True"),
    ({"control_group": "/"}, "control_group is '/'"),
    ({"control_group": "../etc"}, "control_group is '../etc'"),
]


@pytest.mark.parametrize(("change", "sentence"), FAULTS)
def test_a_wrong_setting_is_named(change, sentence):
    with pytest.raises(GuardError, match=sentence.replace("/", "/")):
        Settings.parse(GOOD | change)


def test_all_wrong_settings_are_named_together():
    with pytest.raises(
        GuardError, match=r"mode is None.*startup_floor_mib.*steady_floor_mib.*startup_s.*control_group"
    ):
        Settings.parse({})
    with pytest.raises(GuardError, match="run the role memory_guard"):
        Settings.parse(None)


class Host:
    """A host of small files: memory, an engine's control group with a container's below it, processes."""

    def __init__(self, root, mode="enforce"):
        self.root, self.now, self.available, self.killed, self.said = root, 1000.0, 90000, [], []
        self.group = root / "cgroup/system.slice/vllm-rank.service"
        self.serving, self.started = root / "serving", root / "rank.json"
        (root / "proc").mkdir()
        self.immortal: set[int] = set()
        document = GOOD | {"mode": mode}
        self.guard = Guard(
            Settings.parse(document),
            lambda: self.available,
            proc=root / "proc",
            control_groups=root / "cgroup",
            record=root / "last.json",
            kill=self.kill,
            clock=lambda: self.now,
            sleep=self.sleep,
            say=self.said.append,
        )
        object.__setattr__(self.guard.settings, "serving", self.serving)
        object.__setattr__(self.guard.settings, "started", self.started)

    def kill(self, pid, number):
        assert number == signal.SIGKILL
        self.killed.append(pid)
        for path in self.group.rglob("cgroup.procs"):
            pids = [word for word in path.read_text().split() if int(word) != pid or pid in self.immortal]
            path.write_text("\n".join(pids))

    def sleep(self, seconds):
        self.now += seconds

    def engine(self, mib, pids=(11, 12), container=(13,)):
        for group, members in ((self.group, pids), (self.group / "libpod-payload", container)):
            group.mkdir(parents=True, exist_ok=True)
            (group / "cgroup.procs").write_text("\n".join(map(str, members)))
        (self.group / "memory.stat").write_text(f"anon {mib << 20}\nfile 99\nshmem 0\n")
        for pid in (*pids, *container):
            self.process(pid, "VLLM::Worker", mib // 3)
        self.started.write_text("")
        os.utime(self.started, (500, 500))

    def process(self, pid, name, mib):
        folder = self.root / "proc" / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "comm").write_text(name + "\n")
        (folder / "statm").write_text(f"999 {mib * (1 << 20) // os.sysconf('SC_PAGESIZE')} 0 0 0 0 0\n")

    def serve(self):
        self.serving.write_text("")
        os.utime(self.serving, (600, 600))

    def tick(self, seconds=1.0):
        self.now += seconds
        return self.guard.tick()


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def test_nothing_is_ended_where_no_engine_runs(host):
    host.available = 10
    assert host.tick() == 1.0
    assert host.killed == host.said == []


FLOORS = [
    # serves, available, seconds since the engine was first seen, ended
    (False, 5119, 10, True),
    (False, 5120, 10, False),
    (True, 5119, 10, False),
    (True, 3072, 10, False),
    (True, 3071, 10, True),
    (False, 5119, 3601, False),
    (False, 3071, 3601, True),
]


@pytest.mark.parametrize(("serves", "available", "seconds", "ended"), FLOORS)
def test_the_floor_is_that_of_the_phase(host, serves, available, seconds, ended):
    host.engine(30000)
    if serves:
        host.serve()
    host.tick()
    host.available = available
    host.tick(seconds)
    assert bool(host.killed) is ended


def test_a_marker_of_an_earlier_start_is_no_marker(host):
    host.serve()
    host.engine(30000)
    os.utime(host.started, (700, 700))
    host.tick()
    assert host.guard.phase() == "startup"


def test_the_whole_control_group_ends_a_containers_too(host):
    host.engine(30000)
    host.tick()
    host.available = 4000
    host.tick()
    assert sorted(host.killed) == [11, 12, 13]


def test_cause_and_figures_are_told_and_kept(host):
    host.engine(30000)
    host.process(77, "hog", 500)
    host.tick()
    host.process(77, "hog", 80500)
    host.available = 4000
    host.tick(7)
    (line,) = host.said
    assert line.startswith("<2>MemAvailable 4000 MiB is under the startup floor of 5120 MiB: ended 3 processes of")
    assert "something else took the memory: processes outside of the engine grew by 80000 MiB in 7 s" in line
    assert "hog (77) 80500 MiB" in line
    record = json.loads((host.root / "last.json").read_text())
    assert (record["available_mib"], record["floor_mib"], record["phase"]) == (4000, 5120, "startup")
    assert sorted(record["killed"]) == [11, 12, 13]
    assert record["largest"][0] == {"pid": 77, "name": "hog", "mib": 80500}


def test_the_engine_itself_is_named_though_it_is_gone_when_it_is_told(host):
    host.engine(30000)
    host.tick()
    host.engine(110000)
    host.available = 4000
    host.tick(7)
    assert "the engine's own processes grew by 80000 MiB in 7 s to 110000 MiB" in host.said[0]


def test_observing_tells_once_an_episode_and_ends_nothing(tmp_path):
    host = Host(tmp_path, mode="observe")
    host.engine(30000)
    host.tick()
    for available, lines in ((4000, 1), (3900, 1), (6000, 1), (4000, 1), (6401, 1), (4000, 2)):
        host.available = available
        host.tick()
        assert len(host.said) == lines, available
    assert host.killed == []
    assert "observe: nothing ended" in host.said[0]


def test_first_look_at_an_engine_accuses_nobody_of_growing(host):
    host.engine(30000)
    host.process(99, "other", 5000)
    host.available = 4000
    host.tick()
    assert (
        "nothing grew by much in 1 s: the engine's processes hold 30000 MiB, other processes 5000 MiB" in host.said[0]
    )


def test_a_process_that_cannot_end_is_told(host):
    host.engine(30000)
    host.immortal = {12}
    host.tick()
    host.available = 4000
    host.tick()
    assert "processes [12] do not end" in host.said[1]


def test_the_watch_is_closer_near_the_floor(host):
    host.engine(30000)
    assert host.tick() == 1.0
    host.available = 10239
    assert host.tick() == 0.1


def sample(at, available, engine, others):
    return Sample(at, available, engine, others, (Process(7, "cc1plus", 900),))


CAUSES = [
    (
        sample(0, 20000, 90000, 1000),
        sample(55, 3000, 106900, 1100),
        "the engine's own processes grew by 16900 MiB in 55 s",
    ),
    (sample(0, 20000, 9000, 1000), sample(55, 3000, 9100, 17000), "outside of the engine grew by 16000 MiB in 55 s"),
    (
        sample(0, 20000, 9000, 1000),
        sample(55, 3000, 9100, 1100),
        "belongs to no process grew by 16800 MiB in 55 s (GPU",
    ),
    (sample(0, 3010, 9000, 1000), sample(55, 3000, 9001, 1003), "nothing grew by much in 55 s"),
]


@pytest.mark.parametrize(("before", "now", "words"), CAUSES)
def test_who_grew_most_is_the_cause(before, now, words):
    assert words in cause(before, now)


def test_memory_is_read_anew_through_one_descriptor(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text((PROJECT / "tests/fixtures/platform/meminfo_gb10_after_stop_retained_pool.txt").read_text())
    meminfo = Meminfo(path)
    first = meminfo.available_mib()
    assert first > 1000
    with path.open("r+") as handle:
        text = handle.read()
        handle.seek(0)
        handle.write(text.replace(text.split("MemAvailable:")[1].split()[0], "4194304", 1).ljust(len(text)))
    assert meminfo.available_mib() == 4096


def test_without_systemd_nobody_is_told(monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
