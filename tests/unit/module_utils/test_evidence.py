"""What is kept of a failure: everything that can be read, no secret, not too much."""

from __future__ import annotations

import io
import json

import pytest
from ansible.module_utils.gb10 import evidence, rank, roce

KEY = 'sk-"a"$b%c é'
STATE = {
    "unit": "active",
    "release": "r1",
    "release_faults": [],
    "process": {"argv": ["serve", "--api-key", KEY, "--x"], "environment": {"VLLM_API_KEY": "(secret)", "A": "1"}},
}


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "FOLDER", tmp_path / "evidence")
    for name in ("CONFIGURATION", "LAUNCH", "RUNNING", "API_KEY", "GUARD_RECORD"):
        monkeypatch.setattr(rank, name, tmp_path / name.lower())
    rank.API_KEY.write_text(KEY + "\n")
    rank.CONFIGURATION.write_text(json.dumps({"argv": ["serve"], "environment": {"HF_TOKEN": "hf-1", "A": "1"}}))
    rank.RUNNING.write_text(json.dumps({"argv": ["serve"], "environment": {"HF_TOKEN": "hf-1", "NCCL_IB_HCA": "=x:1"}}))
    monkeypatch.setattr(rank, "state", lambda: STATE)
    monkeypatch.setattr(evidence, "show", lambda name: {name: None})
    monkeypatch.setattr(rank, "journal", lambda unit, lines: f"line\nkey {KEY} and {json.dumps(KEY)}\nlast line\n")
    monkeypatch.setattr(evidence, "_output", lambda *command: " ".join(command))
    monkeypatch.setattr(roce, "read_ports", list)
    return tmp_path


def test_folder_has_what_an_analysis_needs(host):
    folder = evidence.save("rank 2 ended")
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "reason.txt",
        "state.json",
        "argv.json",
        "environment.json",
        "launch.json",
        "unit.txt",
        "journal.txt",
        "kernel.txt",
        "meminfo.txt",
        "processes.txt",
        "gids.txt",
        "guard.txt",
    }
    assert folder.name.endswith("Z")
    assert (folder / "reason.txt").read_text() == "rank 2 ended\n"
    assert "MemAvailable" in (folder / "meminfo.txt").read_text()
    assert json.loads((folder / "environment.json").read_text())["given"]["NCCL_IB_HCA"] == "=x:1"
    assert (folder / "journal.txt").read_text().endswith("last line\n")


@pytest.mark.parametrize(
    ("broken", "outcome"),
    [
        ("", {"evidence": "/evidence/now", "stay": ""}),
        ("save", {"evidence": "none: no space left", "stay": ""}),
        ("stop", {"evidence": "/evidence/now", "stay": "no space left"}),
    ],
)
def test_lost_rank_is_ended_at_once_whatever_becomes_of_the_evidence(monkeypatch, capsys, broken, outcome):
    done = []

    def step(name, result):
        def call(*arguments, **options):
            done.append((name, arguments, options))
            if name == broken:
                raise OSError("no space left")
            return result

        return call

    monkeypatch.setattr(evidence, "save", step("save", "/evidence/now"))
    monkeypatch.setattr(rank, "stop", step("stop", True))
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"evidence": "rank 2 ended", "user": "vllm"})))
    assert evidence.main() == 0
    assert json.loads(capsys.readouterr().out) == outcome
    assert done == [("save", ("rank 2 ended",), {}), ("stop", ("vllm", 120), {"at_once": True})]


def test_no_secret_is_in_it(host):
    folder = evidence.save("the key is " + KEY)
    text = "".join(path.read_text() for path in folder.iterdir())
    for secret in (KEY, json.dumps(KEY)[1:-1], json.dumps(KEY, ensure_ascii=False)[1:-1], "hf-1"):
        assert secret not in text
    assert "(secret)" in text


def test_only_root_reads_it(host):
    folder = evidence.save("x")
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_part_that_cannot_be_read_does_not_cost_the_rest(host, monkeypatch):
    def fail(unit, lines):
        raise TimeoutError("journalctl gave no answer")

    monkeypatch.setattr(rank, "journal", fail)
    folder = evidence.save("x")
    assert "journalctl gave no answer" in (folder / "journal.txt").read_text()
    assert json.loads((folder / "state.json").read_text())["release"] == "r1"


def test_size_is_bounded_and_the_end_is_kept(host, monkeypatch):
    monkeypatch.setattr(evidence, "LARGEST", 100)
    monkeypatch.setattr(rank, "journal", lambda unit, lines: "x" * 1000 + "the end")
    folder = evidence.save("x")
    assert max(path.stat().st_size for path in folder.iterdir()) == 100
    assert (folder / "journal.txt").read_text().endswith("the end")


def test_number_is_bounded_and_the_newest_stay(host):
    for hour in range(15):
        (evidence.FOLDER / f"2026-01-01T{hour:02}-00-00Z").mkdir(parents=True)
    (evidence.FOLDER / ".partial-2026-01-01T00-00-00Z").mkdir()
    folder = evidence.save("x")
    names = sorted(path.name for path in evidence.FOLDER.iterdir())
    assert len(names) == evidence.KEPT
    assert names[0] == "2026-01-01T06-00-00Z"
    assert names[-1] == folder.name


def test_host_without_configuration_still_gives_evidence(host):
    rank.CONFIGURATION.unlink()
    rank.RUNNING.unlink()
    assert json.loads((evidence.save("x") / "argv.json").read_text())["wanted"] == []
