"""gb10_rank and gb10_rank_info through main(): the order of their steps and what they return when one fails."""

from __future__ import annotations

import json

import gb10_rank
import gb10_rank_info
import pytest
from ansible.module_utils.gb10 import evidence, rank
from ansible.module_utils.gb10.completion import Completion
from ansible.module_utils.testing import patch_module_args


def run(module, capsys, **arguments):
    with patch_module_args(arguments), pytest.raises(SystemExit):
        module.main()
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def steps(monkeypatch):
    """What the module did, in order."""
    done = []
    monkeypatch.setattr(evidence, "save", lambda reason: done.append(f"evidence: {reason}") or "/evidence/now")
    monkeypatch.setattr(rank, "stop", lambda user, timeout: done.append(f"stop {user}") or True)
    monkeypatch.setattr(rank, "start", lambda launch, timeout: done.append(f"start {launch}") or True)
    monkeypatch.setattr(rank, "record_ready", lambda: done.append("ready") or {"ready": 90.0})
    monkeypatch.setattr(rank, "launch", lambda: {"master_port": 21000})
    monkeypatch.setattr(rank, "issue_launch", lambda port: {"launch_id": "n", "master_port": port + 1})
    return done


def test_evidence_is_saved_before_anything_is_stopped(steps, capsys):
    result = run(gb10_rank, capsys, state="stopped", evidence="rank 2 ended")
    assert steps == ["evidence: rank 2 ended", "stop vllm"]
    assert (result["changed"], result["evidence"]) == (True, "/evidence/now")


def test_plain_stop_saves_none(steps, capsys):
    assert run(gb10_rank, capsys, state="stopped", user="other", issue_launch=True)["launch"] == {
        "launch_id": "n",
        "master_port": 21001,
    }
    assert steps == ["stop other"]


def test_stop_that_cannot_prove_itself_fails_and_still_names_the_evidence(steps, monkeypatch, capsys):
    def fail(user, timeout):
        raise rank.RankError("pid 9 stays")

    monkeypatch.setattr(rank, "stop", fail)
    result = run(gb10_rank, capsys, state="stopped", evidence="x")
    assert result["failed"]
    assert (result["msg"], result["evidence"]) == ("pid 9 stays", "/evidence/now")


def test_launch_that_came_through_a_template_keeps_its_types(steps, capsys):
    result = run(gb10_rank, capsys, state="started", launch={"launch_id": "n", "master_port": "21001"})
    assert steps == ["start {'launch_id': 'n', 'master_port': 21001}"]
    assert result["launch"]["master_port"] == 21001


def test_ready_returns_the_times(steps, capsys):
    result = run(gb10_rank, capsys, state="ready")
    assert (steps, result["phases"], result["changed"]) == (["ready"], {"ready": 90.0}, False)


@pytest.mark.parametrize("state", ["started", "ready"])
def test_check_mode_touches_nothing(steps, capsys, state):
    run(gb10_rank, capsys, state=state, launch={"launch_id": "n", "master_port": 1}, _ansible_check_mode=True)
    assert steps == []


# ------------------------------------------------------------------------------------------------ asking


@pytest.fixture
def asked(monkeypatch):
    """Requests that the module sent; the server answers each with a token."""
    sent = []

    def complete(**request):
        sent.append(request)
        return Completion(text="abc")

    monkeypatch.setattr(gb10_rank_info, "complete", complete)
    return sent


OPTIONS = {"base_url": "http://x", "model": "m", "prompt": "one two", "max_tokens": 4, "timeout": 9}


def test_warm_up_comes_first_and_only_the_last_answer_is_judged(asked, tmp_path):
    gb10_rank_info.ask(warm_up=[1, 3], key_file=str(tmp_path / "none"), pattern="^abc", **OPTIONS)
    assert [request["prompt"] for request in asked] == ["one two", "one two one two one two", "one two"]
    assert [request.get("pattern") for request in asked] == [None, None, "^abc"]
    assert {request["api_key"] for request in asked} == {""}


def test_key_of_the_host_is_sent(asked, tmp_path):
    (tmp_path / "api-key").write_text("k%c $é\n", encoding="utf-8")
    gb10_rank_info.ask(warm_up=[1], key_file=str(tmp_path / "api-key"), pattern=".", **OPTIONS)
    assert {request["api_key"] for request in asked} == {"k%c $é"}


def test_failed_warm_up_is_the_answer(monkeypatch, tmp_path):
    monkeypatch.setattr(gb10_rank_info, "complete", lambda **request: Completion(fault="answered 500"))
    answer = gb10_rank_info.ask(warm_up=[8], key_file=str(tmp_path / "none"), pattern=".", **OPTIONS)
    assert answer.fault == "warm-up with the prompt 8 times: answered 500"


def test_rank_that_is_down_is_not_asked(asked, monkeypatch, capsys):
    monkeypatch.setattr(rank, "state", lambda: {"active": False})
    assert run(gb10_rank_info, capsys, completion=OPTIONS)["completion"] == {"text": "", "fault": ""}
    assert asked == []
