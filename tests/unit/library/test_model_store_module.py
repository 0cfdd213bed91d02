"""The module through main(): the head's checkpoint, the workers' mounts and copies."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import gb10_model_store
import pytest
from ansible.module_utils.gb10 import checkpoint, nfs
from ansible.module_utils.testing import patch_module_args

from embedded.checkpoints.engram import make_checkpoint

SHARD = "model-00003-of-00003.safetensors"


@pytest.fixture
def store(tmp_path):
    """The head's store, with a checkpoint named m."""
    make_checkpoint(tmp_path / "head/m", vocab_size=31)
    return tmp_path / "head"


@pytest.fixture
def run(tmp_path, store, capsys, monkeypatch):
    def call(**arguments):
        base = {
            "path": str(store if "client" in arguments else tmp_path / "worker"),
            "checkpoint": "m",
            "files": ["config.json", checkpoint.INDEX, SHARD],
            "revision": "r",
            "margin_gb": 0,
            "state": str(tmp_path / "state"),
            "progress": str(tmp_path / "progress"),
        }
        with patch_module_args({**base, **arguments}), pytest.raises(SystemExit):
            gb10_model_store.main()
        return json.loads(capsys.readouterr().out)

    @contextlib.contextmanager
    def mounted(source, at, options):
        yield store

    monkeypatch.setattr(nfs, "mounted", mounted)
    monkeypatch.setattr(nfs, "serve", lambda *_, **__: nfs.Outcome())
    monkeypatch.setattr(nfs, "search_faults", lambda _: [])
    (tmp_path / "worker").mkdir()
    return call


HEAD = {"client": "192.0.2.0/24"}
COPY = {"source": "192.0.2.11:/srv/models", "copy": True}


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def equal(tmp_path: Path) -> bool:
    names = checkpoint.files_of(tmp_path / "head/m")
    return all(
        (tmp_path / "worker/m" / name).read_bytes() == (tmp_path / "head/m" / name).read_bytes() for name in names
    )


def test_the_head_is_judged_by_headers_where_there_is_no_manifest(run, store):
    good = run(**HEAD)
    assert (good["changed"], good["faults"], good["digest"]) == (False, [], "")
    os.truncate(store / "m" / SHARD, 5000)
    (store / "m" / "model-00002-of-00003.safetensors").rename(store / "m/x.incomplete")
    bad = run(**HEAD)
    assert bad["failed"]
    assert f"{SHARD}: truncated: 5000 bytes" in bad["msg"]
    assert "model-00002-of-00003.safetensors: cannot be read" in bad["msg"]
    assert "x.incomplete: a download that never ended" in bad["msg"]


def test_a_manifest_is_recorded_on_demand_and_binds_from_then_on(run, store):
    assert run(**HEAD, verify="record", _ansible_check_mode=True)["changed"]
    assert "make it on a trusted copy with -e model_store_verify=record" in run(**HEAD, verify="whole")["msg"]
    made = run(**HEAD, verify="record", model="o/m")
    assert made["changed"]
    assert made["digest"] == checkpoint.read_manifest(store / "m.manifest.json").digest
    assert not run(**HEAD, verify="whole")["changed"]
    assert "is of revision r, wanted q" in run(**HEAD, revision="q")["msg"]
    assert "has no gone.json, which the profile wants" in run(**HEAD, files=["gone.json"])["msg"]
    (store / "m/config.json").write_text("{}")
    assert "config.json: truncated: 2 bytes" in run(**HEAD)["msg"]


def test_a_flipped_bit_on_the_head_is_found_by_every_run_of_the_whole_level(run, store):
    run(**HEAD, verify="record")
    assert run(**HEAD, verify="whole")["faults"] == []
    with (store / "m" / SHARD).open("r+b") as file:
        stat = os.fstat(file.fileno())
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    os.utime(store / "m" / SHARD, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert run(**HEAD)["faults"] == []
    assert f"{SHARD}: sha256 is" in run(**HEAD, verify="whole")["msg"]


def test_a_copy_is_equal_to_the_heads_and_made_once(run, store, tmp_path):
    head = run(**HEAD, copy=True)
    assert (head["changed"], head["repaired"]) == (True, [f"{store}/m.manifest.json: made of this host's copy"])
    assert not run(**HEAD, copy=True)["changed"]
    assert run(**COPY, digest=head["digest"], _ansible_check_mode=True)["changed"]
    assert list((tmp_path / "worker").iterdir()) == []
    assert run(**COPY, digest=head["digest"])["changed"]
    assert equal(tmp_path)
    for level in ("sizes", "whole"):
        assert not run(**COPY, digest=head["digest"], verify=level)["changed"]
    assert not run(**COPY)["changed"]


@pytest.fixture
def copied(run, tmp_path):
    head = run(**HEAD, copy=True)
    run(**COPY, digest=head["digest"])
    return head["digest"]


@pytest.mark.parametrize("level", ["sizes", "whole"])
def test_a_truncated_copy_is_repaired(run, copied, tmp_path, level):
    os.truncate(tmp_path / "worker/m" / SHARD, 100)
    assert f"{SHARD}: truncated" in run(**COPY, digest=copied, verify=level)["repaired"][0]
    assert equal(tmp_path)


def test_a_flipped_bit_of_a_copy_is_found_whole_and_repaired(run, copied, tmp_path):
    flip_last(tmp_path / "worker/m" / SHARD)
    assert not run(**COPY, digest=copied)["changed"]
    assert f"{SHARD}: sha256 is" in run(**COPY, digest=copied, verify="whole")["repaired"][0]
    assert equal(tmp_path)


def test_a_copy_of_what_the_head_had_before_is_replaced(run, copied, store, tmp_path):
    flip_last(store / "m" / SHARD)
    new = run(**HEAD, copy=True, verify="record")["digest"]
    assert new != copied
    assert "is another checkpoint's than the head's manifest" in run(**COPY, digest=new)["repaired"][0]
    assert equal(tmp_path)


def test_a_copy_without_its_manifest_is_hashed_not_believed(run, copied, tmp_path):
    (tmp_path / "worker/m.manifest.json").unlink()
    flip_last(tmp_path / "worker/m" / SHARD)
    assert run(**COPY, digest=copied)["changed"]
    assert equal(tmp_path)


def test_a_head_whose_file_is_not_its_manifests_is_never_copied(run, store, tmp_path):
    run(**HEAD, copy=True)
    flip_last(store / "m" / SHARD)
    refused = run(**COPY)
    assert refused["failed"]
    assert f"{SHARD}: sha256 is" in refused["msg"]
    assert not (tmp_path / "worker/m" / SHARD).exists()
    assert not (tmp_path / "worker/m.manifest.json").exists()


def test_a_store_that_is_still_mounted_is_not_copied_into(run, tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\n192.0.2.11:/srv/models {tmp_path}/worker nfs4 ro 0 0\n")
    monkeypatch.setattr(nfs, "MOUNTS", mounts)
    assert "is mounted, wanted this host's disk" in run(**COPY)["msg"]
    assert run(**COPY, _ansible_check_mode=True)["changed"]


def test_a_link_that_leaves_the_export_is_found_on_the_worker(run, store, tmp_path, monkeypatch):
    """It resolves to a file of the worker's own disk, which nobody verified."""
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "worker/m").mkdir()
    (tmp_path / "worker/m/config.json").symlink_to(tmp_path / "blob")
    monkeypatch.setattr(nfs, "attach", lambda *_, **__: nfs.Outcome())
    unit = type("Unit", (), {"active": "inactive"})
    monkeypatch.setattr(gb10_model_store, "show", lambda name: {name: unit})
    refused = run(source=COPY["source"], unit="u", files=["config.json"])
    assert f"0 of 1 files readable (1 links that leave {tmp_path}/worker; first: " in refused["msg"]
