"""Whole checkpoints, and every way in which one is not: links, partials, other bytes, full disks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import checkpoint
from ansible.module_utils.gb10.checkpoint import CheckpointError, Entry, Manifest

from embedded.checkpoints.engram import make_checkpoint

REVISION = "dba1be0a40aa45a94ad051997016db3960a90277"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def plain(tmp_path):
    make_checkpoint(tmp_path / "plain", vocab_size=31)
    return tmp_path / "plain"


@pytest.fixture
def manifest(plain):
    return Manifest("m", REVISION, checkpoint.hash_files(plain, checkpoint.files_of(plain), 2))


def to_cache(plain: Path, hub: Path, blobs: str) -> Path:
    """A snapshot of links; ``blobs`` is the blob folder as seen from the hub."""
    snapshot = hub / "models--o--m/snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (hub / blobs).mkdir(parents=True)
    for number, path in enumerate(sorted(plain.iterdir())):
        blob = hub / blobs / f"{number:040x}"
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def judge(directory, manifest, root=None):
    faults = checkpoint.check_files(directory, manifest, root) + checkpoint.check_headers(directory)
    return faults or checkpoint.check_digests(
        directory, manifest, checkpoint.hash_files(directory, list(manifest.files), 2)
    )


@pytest.mark.parametrize("blobs", [None, "models--o--m/blobs", "blobs/ab"])
def test_a_whole_checkpoint_has_no_faults_in_any_layout(plain, manifest, tmp_path, blobs):
    directory = to_cache(plain, tmp_path / "hub", blobs) if blobs else plain
    assert judge(directory, manifest, tmp_path) == []
    assert checkpoint.check_revision(directory, REVISION) == []
    assert sorted(manifest.files) == sorted(path.name for path in plain.iterdir())


def test_links_copied_without_their_blobs_are_found(plain, manifest, tmp_path):
    """The model's folder alone is copied, links preserved: exit status 0, and no weights."""
    to_cache(plain, tmp_path / "hub", "blobs/ab")
    copy = tmp_path / "copy/models--o--m"
    shutil.copytree(tmp_path / "hub/models--o--m", copy, symlinks=True)
    faults = checkpoint.check_files(copy / "snapshots" / REVISION, manifest)
    assert len(faults) == 1
    assert faults[0].startswith("0 of 5 files readable (5 dangling links; first: ")
    assert "config.json -> ../../../blobs/ab/" in faults[0]
    assert f"the manifest says {manifest.total_bytes} bytes" in faults[0]


def test_a_link_that_leaves_the_export_is_found_though_it_resolves(plain, manifest, tmp_path):
    """On an NFS client it resolves to whatever lies at that place of the client's own disk."""
    snapshot = to_cache(plain, tmp_path / "hub", "blobs/ab")
    assert checkpoint.check_files(snapshot, manifest) == []
    faults = checkpoint.check_files(snapshot, manifest, tmp_path / "hub/models--o--m")
    assert "(5 links that leave " in faults[0]


def damage(change):
    def apply(directory):
        path = directory / SHARD
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)

    return apply


def flip_last(data):
    data[-1] ^= 1


def reindex(directory, change):
    index = json.loads((directory / checkpoint.INDEX).read_text())
    change(index)
    (directory / checkpoint.INDEX).write_text(json.dumps(index))


DAMAGES = [
    (lambda d: (d / SHARD).unlink(), f"{SHARD}: No such file or directory, wanted"),
    (lambda d: os.truncate(d / SHARD, 1000), f"{SHARD}: truncated: 1000 bytes, wanted"),
    (damage(lambda data: data.extend(b"\0")), f"{SHARD}: too long"),
    (damage(flip_last), f"{SHARD}: sha256 is "),
    (damage(lambda data: data.__setitem__(3, 255)), f"{SHARD}: no safetensors header"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGES)
def test_a_damaged_file_is_named(plain, manifest, change, message):
    change(plain)
    faults = judge(plain, manifest)
    assert any(message in fault for fault in faults), faults
    assert all(SHARD in fault for fault in faults)


INDEX_FAULTS = [
    (lambda index: index["weight_map"].update(lost=SHARD), f"{SHARD}: lacks 1 tensors of the index, first lost"),
    (lambda index: index["weight_map"].pop("layers.1.engram.q_weight"), "has 1 tensors not of the index"),
    (lambda index: index["metadata"].update(total_size=7), "bytes, the index says 7"),
    (lambda index: index.pop("weight_map"), "is no index"),
]


@pytest.mark.parametrize(("change", "message"), INDEX_FAULTS)
def test_an_index_that_its_shards_do_not_bear_out_is_refused(plain, change, message):
    assert checkpoint.check_headers(plain) == []
    reindex(plain, change)
    assert message in checkpoint.check_headers(plain)[0]


def test_all_faults_are_reported_together(plain, manifest):
    (plain / "config.json").unlink()
    os.truncate(plain / SHARD, 5)
    assert len(checkpoint.check_files(plain, manifest)) == 2


def test_traces_of_another_revision_are_found(plain, manifest, tmp_path):
    snapshot = to_cache(plain, tmp_path / "hub", "blobs/ab")
    assert "is of revision dba1be" in checkpoint.check_revision(snapshot, "df42c1")[0]
    notes = plain / ".cache/huggingface/download"
    notes.mkdir(parents=True)
    (notes / "config.json.metadata").write_text(f"{REVISION}\netag\n1.0\n")
    (notes / "a.metadata").write_text("df42c1\netag\n1.0\n")
    assert "(1 of 2 traces say another one)" in checkpoint.check_revision(plain, REVISION)[0]
    assert sorted(checkpoint.files_of(plain)) == sorted(manifest.files)


def test_a_manifest_proves_itself(tmp_path, manifest):
    path = tmp_path / "checkpoint.json"
    checkpoint.write_manifest(path, manifest)
    assert checkpoint.read_manifest(path) == manifest
    path.write_text(path.read_text().replace(REVISION, "df42c1"))
    with pytest.raises(CheckpointError, match="was changed; make it from a trusted copy"):
        checkpoint.read_manifest(path)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="is no checkpoint manifest"):
        checkpoint.read_manifest(path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        checkpoint.read_manifest(tmp_path / "absent")


def test_an_interrupted_run_is_taken_up(plain, manifest, tmp_path, monkeypatch):
    state = tmp_path / "state/verify.jsonl"
    names = list(manifest.files)
    checkpoint.hash_files(plain, names[:3], 1, state)
    with state.open("ab") as file:
        file.write(b'\n["cut off')
    hashed = []
    real = checkpoint.hash_file
    monkeypatch.setattr(checkpoint, "hash_file", lambda path, meter: hashed.append(path.name) or real(path, meter))
    progress = tmp_path / "progress.json"
    assert checkpoint.hash_files(plain, names, 1, state, progress) == manifest.files
    assert sorted(hashed) == sorted(names[3:])
    assert json.loads(progress.read_text())["done_bytes"] == manifest.total_bytes
    hashed.clear()
    os.utime(plain / names[0])  # touched since: what was known of it is void
    checkpoint.hash_files(plain, names, 1, state)
    assert hashed == [names[0]]


def test_a_file_that_changes_while_it_is_read_is_refused(plain, manifest, monkeypatch):
    real = checkpoint.hash_file

    def change(path, meter):
        digest = real(path, meter)
        os.utime(path)
        return digest

    monkeypatch.setattr(checkpoint, "hash_file", change)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        checkpoint.hash_files(plain, list(manifest.files), 2)


@pytest.fixture
def cache(tmp_path):
    """12 downloads that never ended, 9 days old."""
    blobs = tmp_path / "hub/models--o--m/blobs"
    blobs.mkdir(parents=True)
    (blobs / "verified").write_bytes(b"x" * 8192)
    (tmp_path / "outside.incomplete").write_bytes(b"x")
    (blobs / "link.incomplete").symlink_to(tmp_path / "outside.incomplete")
    for number in range(12):
        path = blobs / f"{number}.{number:08x}.incomplete"
        path.write_bytes(b"x" * 8192)
        os.utime(path, (0, time.time() - 9 * 86400))
    return tmp_path / "hub"


def statvfs(free):
    return lambda _: os.statvfs_result((4096, 4096, 0, 0, free // 4096, 0, 0, 0, 0, 255))


def test_a_full_disk_is_blamed_on_abandoned_partials(cache, plain, monkeypatch):
    verified = {path.name: Entry(path.stat().st_size, "") for path in plain.iterdir()}
    manifest = Manifest("m", REVISION, {**verified, "shard": Entry(498 * 10**9, "")})
    monkeypatch.setattr(os, "statvfs", statvfs(310 * 10**9))
    (fault,) = checkpoint.check_space(cache, plain, manifest, 10 * 10**9)
    assert "need 498.0 GB (463.8 GiB) and 10.0 GB (9.3 GiB) margin, free 310.0 GB (288.7 GiB)" in fault
    assert "in 12 abandoned partials, oldest 9 days" in fault
    assert f"clean-partials {cache}" in fault
    monkeypatch.setattr(os, "statvfs", statvfs(509 * 10**9))
    assert checkpoint.check_space(cache, plain, manifest, 10 * 10**9) == []
    assert checkpoint.check_space(cache, plain, Manifest("m", REVISION, verified), 10**15) == []


def test_cleaning_spares_what_is_open_young_verified_or_outside(cache, tmp_path):
    blobs = cache / "models--o--m/blobs"
    os.utime(blobs / "1.00000001.incomplete")
    with (blobs / "0.00000000.incomplete").open("rb"):
        removed = checkpoint.remove_partials(cache)
    assert len(removed.paths) == 10
    assert str(removed) == "0.0 GB (0.0 GiB) in 10 abandoned partials, oldest 9 days"
    assert sorted(path.name for path in blobs.iterdir()) == [
        "0.00000000.incomplete",
        "1.00000001.incomplete",
        "link.incomplete",
        "verified",
    ]
    assert (tmp_path / "outside.incomplete").exists()


def test_a_second_downloader_is_refused(tmp_path):
    with checkpoint.sole_writer(tmp_path, "spark-a"):
        for host in ("spark-a", "spark-b"):
            with (
                pytest.raises(CheckpointError, match=rf"spark-a \(process {os.getpid()}\) downloads into it"),
                checkpoint.sole_writer(tmp_path, host),
            ):
                pass
    with checkpoint.sole_writer(tmp_path, "spark-b"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_claim_of_a_dead_process_is_taken_over_by_its_own_host_alone(tmp_path):
    (tmp_path / ".gb10-download").write_text(json.dumps(["spark-a", 2**22 + 1, "12345"]))
    with (
        pytest.raises(CheckpointError, match=r"remove .*gb10-download if it is gone"),
        checkpoint.sole_writer(tmp_path, "spark-b"),
    ):
        pass
    with checkpoint.sole_writer(tmp_path, "spark-a"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_fetch_resolves_links_and_proves_what_it_copied(plain, manifest, tmp_path):
    snapshot = to_cache(plain, tmp_path / "hub", "blobs/ab")
    target = tmp_path / "target"
    assert sorted(checkpoint.fetch(snapshot, target, manifest, 2)) == sorted(manifest.files)
    assert judge(target, manifest, target) == []
    assert not any(path.is_symlink() for path in target.iterdir())
    assert checkpoint.fetch(snapshot, target, manifest, 2) == []


def test_fetch_goes_on_where_a_killed_one_ended(plain, manifest, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / f"{SHARD}.incomplete").write_bytes((plain / SHARD).read_bytes()[:1234])
    checkpoint.fetch(plain, target, manifest, 2)
    assert judge(target, manifest) == []


def test_fetch_names_a_source_that_is_not_the_manifests(plain, manifest, tmp_path):
    damage(flip_last)(plain)
    with pytest.raises(CheckpointError, match=rf"{SHARD}: sha256 is .*: not copied"):
        checkpoint.fetch(plain, tmp_path / "target", manifest, 2)
    assert not list((tmp_path / "target").glob(f"{SHARD}*"))
    damage(flip_last)(plain)
    checkpoint.fetch(plain, tmp_path / "target", manifest, 2)
    assert judge(tmp_path / "target", manifest) == []


def test_fetch_onto_a_disk_that_becomes_full_leaves_no_file_and_goes_on(plain, manifest, tmp_path, monkeypatch):
    if os.geteuid():
        pytest.skip("mounting a tmpfs needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    size = manifest.files[SHARD].size
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size // 2}", "tmpfs", str(disk)], check=True)
    try:
        with pytest.raises(CheckpointError, match=r"disk: need 0.0 GB .* margin, free"):
            checkpoint.fetch(plain, disk, manifest, 1)
        assert list(disk.iterdir()) == []
        monkeypatch.setattr(checkpoint, "check_space", lambda *_, **__: [])
        with pytest.raises(CheckpointError, match=r"No space left on device, .* free; run again"):
            checkpoint.fetch(plain, disk, manifest, 1)
        assert not (disk / SHARD).exists()
        subprocess.run(["mount", "-o", "remount,size=64M", str(disk)], check=True)
        checkpoint.fetch(plain, disk, manifest, 1)
        assert judge(disk, manifest) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_command_makes_and_verifies(plain, tmp_path):
    def gb10(*argv):
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "module_utils")}
        argv = [sys.executable, "-m", "gb10.checkpoint", *map(str, argv)]
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)

    path = tmp_path / "checkpoint.json"
    made = gb10("manifest", plain, path, "--model=m", f"--revision={REVISION}")
    assert (made.returncode, made.stderr) == (0, "")
    assert gb10("verify", plain, path, "--whole").returncode == 0
    assert gb10("fetch", plain, tmp_path / "other", path).stdout == "copied 5 files\n"
    damage(flip_last)(plain)
    assert gb10("verify", plain, path).returncode == 0
    found = gb10("verify", plain, path, "--whole")
    assert found.returncode == 1
    assert f"{SHARD}: sha256 is" in found.stderr
    assert gb10("clean-partials", tmp_path).stdout.startswith("removed 0.0 GB (0.0 GiB) in 0 abandoned")
