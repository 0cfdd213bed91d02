"""The module through main(): what it judges, in which order, and what it says."""

from __future__ import annotations

import json
import os
import time

import gb10_checkpoint_verify
import pytest
from ansible.module_utils.gb10 import checkpoint
from ansible.module_utils.testing import patch_module_args

from embedded.checkpoints.engram import make_checkpoint

SHARD = "model-00003-of-00003.safetensors"


@pytest.fixture
def model(tmp_path):
    make_checkpoint(tmp_path / "model", vocab_size=31)
    found = checkpoint.hash_files(tmp_path / "model", checkpoint.files_of(tmp_path / "model"), 2)
    checkpoint.write_manifest(tmp_path / "manifest.json", checkpoint.Manifest("m", "r", found))
    return tmp_path / "model"


@pytest.fixture
def run(tmp_path, model, capsys):
    def call(**arguments):
        base = {
            "directory": str(model),
            "revision": "r",
            "manifest": str(tmp_path / "manifest.json"),
            "state": str(tmp_path / "state"),
            "progress": str(tmp_path / "progress"),
        }
        given = {key: value for key, value in {**base, **arguments}.items() if value is not None}
        with patch_module_args(given), pytest.raises(SystemExit):
            gb10_checkpoint_verify.main()
        return json.loads(capsys.readouterr().out)

    return call


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("level", ["sizes", "whole"])
def test_a_whole_checkpoint_passes(run, model, level, check):
    said = run(level=level, root=str(model), _ansible_check_mode=check)
    assert (said["changed"], said["faults"], said["files"]) == (False, [], 5)
    assert said["bytes"] == sum(path.stat().st_size for path in model.iterdir())


def test_a_flipped_bit_is_found_by_the_whole_level(run, model):
    with (model / SHARD).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert run()["faults"] == []
    bad = run(level="whole")
    assert bad["failed"]
    assert f"{SHARD}: sha256 is" in bad["msg"]
    assert bad.keys() >= {"faults", "files", "bytes", "changed"}


def test_partial_downloads_are_named_with_the_space_they_hold(run, model, monkeypatch):
    (model / SHARD).rename(model / f"{SHARD}.incomplete")
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 0, 0, 1, 0, 0, 0, 0, 255)))
    said = "\n".join(run()["faults"])
    assert f"{SHARD}: No such file or directory" in said
    assert f"{SHARD}.incomplete: a download that never ended" in said
    assert "in 1 abandoned partials, oldest 0 days" in said


def test_files_of_a_profile_stand_in_for_a_manifest(run, model):
    entry = {"bytes": (model / SHARD).stat().st_size, "sha256": checkpoint.hash_file(model / SHARD)}
    assert run(manifest=None, files={SHARD: entry}, level="whole")["files"] == 1
    assert "wanted 1" in run(manifest=None, files={SHARD: {**entry, "bytes": 1}})["msg"]
    assert run(manifest=None)["files"] == 0
    assert "manifest, files" in run(manifest=None, level="whole")["msg"]


def test_a_manifest_of_another_revision_is_refused(run):
    assert "is of revision r, wanted q; make it from a trusted copy" in run(revision="q")["msg"]


def test_a_directory_that_never_answers_is_given_up(run, monkeypatch):
    monkeypatch.setattr(gb10_checkpoint_verify, "read_one_byte", lambda path: lambda: time.sleep(60))
    assert "bring the model store up" in run(timeout=0.2)["msg"]
