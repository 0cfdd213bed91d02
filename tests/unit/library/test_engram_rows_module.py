"""The module through main(): states, check mode, and what it says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import gb10_engram_rows
import pytest
from ansible.module_utils.testing import patch_module_args

from embedded.checkpoints.engram import make_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(directory, vocab_size=211)
    return directory


@pytest.fixture
def run(tmp_path, source, capsys):
    def call(**arguments):
        base = {
            "directory": str(tmp_path / "engram"),
            "source": str(source),
            "model": "m",
            "revision": "r",
            "tp": 2,
            "rank": 1,
            "margin_gb": 0,
            "progress": str(tmp_path / "progress.json"),
        }
        with patch_module_args({**base, **arguments}), pytest.raises(SystemExit):
            gb10_engram_rows.main()
        return json.loads(capsys.readouterr().out)

    return call


def files(tmp_path):
    return sorted(path.name for path in tmp_path.glob("engram/*"))


def test_present_copies_once(run, source, tmp_path):
    first = run()
    assert (first["changed"], first["action"], first["copied_bytes"]) == (True, "copy", first["bytes"])
    assert first["diff"]["before"] == "no copy\n"
    assert first["diff"]["before_header"] == str(tmp_path / "engram")
    (start, end), _ = first["ranges"].values()
    assert first["diff"]["after"].splitlines()[0] == f"{first['bytes'] / 1e9:.1f} GB of {source} (copy)"
    assert first["diff"]["after"].splitlines()[1] == f"layer 1 rows [{start}, {end})"
    second = run(level="whole")
    assert (second["changed"], second["action"], second["copied_bytes"]) == (False, "keep", 0)
    assert second["diff"]["before"] == second["diff"]["after"] == ""
    assert second["ranges"] == first["ranges"]
    assert json.loads((tmp_path / "progress.json").read_text())["done_bytes"] == first["bytes"]


def test_check_mode_says_and_writes_nothing(run, tmp_path):
    said = run(_ansible_check_mode=True)
    assert (said["changed"], said["action"], said["copied_bytes"]) == (True, "copy", 0)
    assert files(tmp_path) == []
    done = run()
    assert (done["ranges"], done["bytes"]) == (said["ranges"], said["bytes"])
    assert not run(_ansible_check_mode=True)["changed"]
    assert run(_ansible_check_mode=True, rank=0)["action"] == "replace"
    assert run(_ansible_check_mode=True, state="absent")["changed"]
    assert not run()["changed"]


def test_verified_judges_and_changes_nothing(run, tmp_path):
    missing = run(state="verified")
    assert missing["failed"]
    assert "manifest.json: cannot be read" in missing["msg"]
    run()
    good = run(state="verified", level="whole")
    assert not good["changed"]
    with (tmp_path / "engram/layer-14.rows").open("r+b") as file:
        file.seek(5000)
        file.write(b"\0\1\2\3")
    assert not run(state="verified")["faults"]
    for check in (False, True):
        bad = run(state="verified", level="whole", _ansible_check_mode=check)
        assert bad["failed"]
        assert bad.keys() >= good.keys() - {"diff"}
        assert "layer-14.rows: 1 of its 8 MiB segments" in bad["msg"]
    repaired = run(level="whole")
    assert (repaired["action"], repaired["repaired_blocks"], repaired["copied_bytes"]) == ("repair", 1, 0)


def test_absent_removes(run, tmp_path):
    run()
    assert run(state="absent")["action"] == "remove"
    assert files(tmp_path) == []
    assert not run(state="absent")["changed"]


def test_with_a_config_an_intact_copy_needs_no_source(run, source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    assert run(config=config)["changed"]
    kept = run(config=config, source=str(tmp_path / "gone"))
    assert not kept["changed"]
    gone = run(config=config, source=str(tmp_path / "gone"), rank=0)
    assert gone["failed"]
    assert "gone: No such file or directory" in gone["msg"]
    unmounted = {"config": config, "source": str(tmp_path / "gone"), "rank": 0, "_ansible_check_mode": True}
    said = run(**unmounted)
    assert said["action"] == "copy"
    assert said["diff"]["before"].endswith("gone cannot be read yet: check mode mounts nothing\n")
    assert (
        "free them or choose another directory"
        in run(**unmounted, directory=str(tmp_path / "new"), margin_gb=10**6)["msg"]
    )


def test_a_config_of_another_model_is_refused(run, tmp_path):
    make_checkpoint(tmp_path / "other", vocab_size=223)
    config = json.loads((tmp_path / "other/config.json").read_text())
    refused = run(config=config)
    assert refused["failed"]
    assert "engram_* keys are not the profile's" in refused["msg"]


def test_a_rank_without_rows_is_refused(run):
    refused = run(tp=7, rank=6)
    assert "rank 6 of 7 owns no rows of layer 1, layer 14: 24 hash columns" in refused["msg"]


def test_an_unpinned_revision_is_refused(run):
    assert "pin the checkpoint's revision" in run(revision="")["msg"]


def test_a_source_that_never_answers_is_given_up(run, monkeypatch):
    monkeypatch.setattr(gb10_engram_rows, "read_one_byte", lambda path: lambda: time.sleep(60))
    begun = time.monotonic()
    refused = run(timeout=0.2)
    assert "no answer in 0 s; bring the model store up" in refused["msg"]
    assert time.monotonic() - begun < 5


def test_too_little_space_is_refused_before_writing(run, tmp_path):
    refused = run(margin_gb=10**6)
    assert refused["failed"]
    assert "free them or choose another directory" in refused["msg"]
    assert files(tmp_path) == []
    assert not Path(tmp_path, "engram/manifest.json").exists()


def test_a_running_rank_is_held_to_its_journal(run, monkeypatch):
    copied = run()
    monkeypatch.setattr(gb10_engram_rows, "read_journal", lambda unit: "")
    refused = run(state="verified", unit="vllm-rank.service")
    assert refused["failed"]
    assert len(refused["faults"]) == 2
    directory = Path(copied["invocation"]["module_args"]["directory"])
    text = "".join(
        f"Engram layer {layer} rows [{a}, {b}) read from {directory / f'layer-{layer}.rows'} (row pack)\n"
        for layer, (a, b) in copied["ranges"].items()
    )
    monkeypatch.setattr(gb10_engram_rows, "read_journal", lambda unit: text)
    assert run(state="verified", unit="vllm-rank.service")["faults"] == []
