"""Copies of Engram rows: right to the byte, and whatever goes wrong with them is found and repaired."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import engram_pack, engram_rows
from ansible.module_utils.gb10.engram_layout import rank_rows
from ansible.module_utils.gb10.engram_rows import EngramRowsError, Identity, Options, Plan

from embedded.checkpoints.engram import make_checkpoint

PROJECT = Path(__file__).parents[3]
REVISION = "dba1be0a40aa45a94ad051997016db3960a90277"
ME = Identity("deepseek-ai/DeepSeek-V4.1-Flash", REVISION, 2, 1)
FAST = Options(margin_bytes=0)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """3.5 MB of tables: less than a segment."""
    directory = tmp_path_factory.mktemp("small")
    make_checkpoint(directory, vocab_size=211)
    return directory


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """66 MB of tables: four segments a layer at TP1, two at TP2."""
    directory = tmp_path_factory.mktemp("large")
    make_checkpoint(directory, vocab_size=5003)
    return directory


def run(directory, source, identity=ME, level="manifest", options=FAST):
    rows = rank_rows(source, identity.tp, identity.rank)
    todo = engram_rows.plan(directory, identity, rows, faults(directory, source, identity, level))
    return todo, engram_rows.make_present(directory, source, identity, rows, todo, options)


def faults(directory, source, identity=ME, level="whole"):
    ranges = {r.table.layer: (r.start, r.end) for r in rank_rows(source, identity.tp, identity.rank)}
    return engram_rows.verify(directory, identity.rank, identity.tp, identity.revision, ranges, level, FAST)


def naive_packs(source, identity=ME):
    """The format's definition, row by row."""
    packs = {}
    for rows in rank_rows(source, identity.tp, identity.rank):
        shard = (source / rows.table.file).read_bytes()
        pack = bytearray()
        for i in range(rows.rows):
            weight, scale = rows.weight_offset + i * 256, rows.scale_offset + i * 8
            pack += shard[weight : weight + 256] + shard[scale : scale + 8]
            if i % 15 == 14 or i == rows.rows - 1:
                pack += bytes(-len(pack) % 4096)
        packs[f"layer-{rows.table.layer}.rows"] = bytes(pack)
    return packs


def packs_of(directory):
    return {path.name: path.read_bytes() for path in directory.glob("layer-*.rows")}


@pytest.fixture
def copy(tmp_path, small):
    """An intact small copy, as a directory that a test may damage."""
    run(tmp_path / "copy", small)
    return tmp_path / "copy"


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1), (3, 2), (4, 3), (7, 5), (7, 6)])
def test_every_byte_is_the_definitions(tmp_path, small, tp, rank):
    identity = Identity("m", REVISION, tp, rank)
    todo, outcome = run(tmp_path, small, identity)
    assert todo.action == "copy"
    assert packs_of(tmp_path) == naive_packs(small, identity)
    assert outcome.copied_bytes == sum(map(len, packs_of(tmp_path).values()))
    assert faults(tmp_path, small, identity) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layer-1.rows", "layer-14.rows", "manifest.json"]


def test_many_segments_on_many_threads_are_right(tmp_path, large):
    run(tmp_path, large, Identity("m", REVISION, 1, 0))
    assert packs_of(tmp_path) == naive_packs(large, Identity("m", REVISION, 1, 0))


def test_an_intact_copy_is_left_alone(copy, small):
    before = {path.name: path.stat().st_mtime_ns for path in copy.iterdir()}
    for level in engram_rows.LEVELS:
        todo, outcome = run(copy, small, level=level)
        assert (todo.action, outcome) == ("keep", engram_rows.Outcome())
    assert {path.name: path.stat().st_mtime_ns for path in copy.iterdir()} == before


def test_200_flipped_bits_are_each_found_and_repaired(copy, small):
    rng = random.Random(4)  # noqa: S311 a repeatable test
    files = sorted(copy.iterdir())
    weights = [path.stat().st_size if path.suffix == ".rows" else 200_000 for path in files]

    def flip(path, place, bit):
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << bit]))

    places = [
        (path, rng.randrange(path.stat().st_size), rng.randrange(8)) for path in rng.choices(files, weights, k=200)
    ]
    assert {path.name for path, _, _ in places} == {path.name for path in files}
    for place in places:
        flip(*place)
        assert faults(copy, small), place
        flip(*place)
    assert faults(copy, small) == []
    data = [place for place in places if place[0].suffix == ".rows"]
    for place in data:
        flip(*place)
    todo, outcome = run(copy, small, level="whole")
    assert todo.action == "repair"
    assert outcome.repaired_blocks == len({(path, place // 4096) for path, place, _ in data})
    assert packs_of(copy) == naive_packs(small)
    assert faults(copy, small) == []


def rewrite_manifest(copy, **changes):
    """A manifest that is whole, but of something else."""
    manifest = engram_rows.read_manifest(copy) | changes
    manifest["sha256"] = engram_rows.sha256_document(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))


def make_hole(copy):
    path = copy / "layer-14.rows"
    data = path.read_bytes()
    path.unlink()
    with path.open("wb") as file:
        file.write(data[:8192])
        file.seek(16384)
        file.write(data[16384:])


DAMAGES = [
    (lambda copy: (copy / "manifest.json").unlink(), "manifest.json: cannot be read: No such file"),
    (lambda copy: (copy / "manifest.json").write_text("{}"), "is no manifest"),
    (lambda copy: rewrite_manifest(copy, rank=0), "rank is 0, wanted 1"),
    (lambda copy: rewrite_manifest(copy, tp=4), "tp is 4, wanted 2"),
    (lambda copy: rewrite_manifest(copy, revision="df42c1"), "revision is 'df42c1', wanted 'dba1be"),
    (lambda copy: rewrite_manifest(copy, version=2), "version is 2, wanted 1"),
    (lambda copy: rewrite_manifest(copy, complete=False), "complete is False, wanted True"),
    (
        lambda copy: rewrite_manifest(copy, layers=engram_rows.read_manifest(copy)["layers"][:1]),
        "layer 14 rows are absent",
    ),
    (lambda copy: os.truncate(copy / "layer-14.rows", 4096), "layer-14.rows: has 4096 bytes, wanted"),
    (lambda copy: os.truncate(copy / "layer-1.rows", 1 << 24), "layer-1.rows: has 16777216 bytes, wanted"),
    (lambda copy: (copy / "layer-1.rows").unlink(), "layer-1.rows: cannot be read: No such file"),
    (make_hole, "layer-14.rows: has a hole at byte 8192"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_start_refuses_and_the_next_run_repairs(copy, small, damage, message):
    damage(copy)
    found = faults(copy, small, level="manifest")
    assert len(found) == 1
    assert message in found[0]
    run(copy, small)
    assert packs_of(copy) == naive_packs(small)
    assert faults(copy, small) == []


def test_faults_are_reported_together(copy, small):
    rewrite_manifest(copy, rank=0, tp=4, revision="x")
    os.truncate(copy / "layer-1.rows", 0)
    assert len(faults(copy, small, level="manifest")) == 4


@pytest.mark.parametrize("other", [Identity(ME.model, REVISION, 2, 0), Identity(ME.model, REVISION, 4, 1)])
def test_rows_of_another_rank_are_refused_and_replaced(tmp_path, small, other):
    run(tmp_path, small, other)
    assert [fault for fault in faults(tmp_path, small) if "layer 1 rows are" in fault]
    todo, _ = run(tmp_path, small)
    assert todo.action == "replace"
    assert packs_of(tmp_path) == naive_packs(small)
    assert faults(tmp_path, small) == []


def test_another_checkpoint_under_the_same_revision_is_replaced(copy, small, tmp_path):
    make_checkpoint(tmp_path / "other", vocab_size=223)
    todo, _ = run(copy, tmp_path / "other")
    assert todo.action == "replace"
    assert packs_of(copy) == naive_packs(tmp_path / "other")


def test_damage_is_repaired_in_place_for_a_reader_that_has_the_file_open(copy, small):
    with (copy / "layer-1.rows").open("r+b") as reader:
        reader.seek(300)
        reader.write(b"damaged")
        reader.flush()
        run(copy, small, level="whole")
        assert os.fstat(reader.fileno()).st_ino == (copy / "layer-1.rows").stat().st_ino
        reader.seek(0)
        assert reader.read() == naive_packs(small)["layer-1.rows"]


def test_repair_refuses_a_source_that_has_other_rows_now(copy, small, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(small, source)
    rows = rank_rows(source, 2, 1)[0]
    for path, place in ((copy / "layer-1.rows", 0), (source / rows.table.file, rows.weight_offset)):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"other rows")
    with pytest.raises(
        EngramRowsError, match=r"no longer has the rows that layer-1.rows was copied from \(segment 0\)"
    ):
        run(copy, source, level="whole")
    assert faults(copy, small)
    assert not (copy / "manifest.json").exists()


def test_a_source_that_changes_while_it_is_copied_is_refused(tmp_path, small, monkeypatch):
    source, copy = tmp_path / "source", tmp_path / "copy"
    shutil.copytree(small, source)
    compare = engram_rows._compare_rows

    def change(shard, fd, rows, patience_s):
        compare(shard, fd, rows, patience_s)
        os.utime(source / rows.table.file)

    monkeypatch.setattr(engram_rows, "_compare_rows", change)
    with pytest.raises(EngramRowsError, match="changed while it was copied"):
        run(copy, source)
    assert list(copy.iterdir()) == []
    monkeypatch.undo()
    run(copy, source)
    assert faults(copy, source) == []


def test_a_source_that_ends_early_is_refused(tmp_path, small, monkeypatch):
    source, copy = tmp_path / "source", tmp_path / "copy"
    shutil.copytree(small, source)
    rows = rank_rows(source, 2, 1)
    os.truncate(source / rows[1].table.file, 1_300_000)
    with pytest.raises(
        EngramRowsError, match=r"model-00003-of-00003.safetensors, bytes \d+ on: ends at or before byte \d+"
    ):
        engram_rows.make_present(copy, source, ME, rows, Plan("copy", []), FAST)
    assert faults(copy, small)


@pytest.fixture
def flaky(small, tmp_path, monkeypatch):
    """A mounted source whose server is away for some reads: [errno, how often]."""
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\n10.10.0.11:/srv {small} nfs4 ro,softerr 0 0\n")
    monkeypatch.setattr(engram_rows, "MOUNTS", mounts)
    monkeypatch.setattr("ansible.module_utils.gb10.disk_io.time.sleep", lambda _: None)
    pack, left = engram_pack.Packer.pack, []

    def read(*args):
        if left:
            raise OSError(left[0], os.strerror(left.pop(0)))
        return pack(*args)

    monkeypatch.setattr(engram_pack.Packer, "pack", read)
    return left


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EIO])
def test_a_server_that_goes_away_in_mid_copy_is_awaited(tmp_path, small, flaky, number):
    flaky += [number] * 30
    run(tmp_path / "copy", small)
    assert packs_of(tmp_path / "copy") == naive_packs(small)


def test_a_server_that_stays_away_ends_the_copy_and_the_next_run_takes_it_up(tmp_path, small, flaky):
    flaky += [errno.ETIMEDOUT] * 1000
    with pytest.raises(EngramRowsError, match=r"bytes \d+ on: Connection timed out; look at the source and its mount"):
        run(tmp_path / "copy", small, options=Options(margin_bytes=0, patience_s=0))
    assert faults(tmp_path / "copy", small)
    flaky.clear()
    run(tmp_path / "copy", small)
    assert packs_of(tmp_path / "copy") == naive_packs(small)


def test_a_local_disk_that_cannot_be_read_is_not_awaited(tmp_path, small, flaky):
    (tmp_path / "mounts").write_text("/dev/vda / ext4 rw 0 0\n")
    flaky += [errno.EIO] * 1000
    with pytest.raises(EngramRowsError, match="Input/output error"):
        run(tmp_path / "copy", small)
    assert len(flaky) > 900


def test_reads_that_return_less_than_was_asked_for_go_on(tmp_path, large, monkeypatch):
    """As NFS reads do when the server goes away."""
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:1048576], *buffers[1:700]], offset)
    )
    run(tmp_path, large)
    assert packs_of(tmp_path) == naive_packs(large)


def test_a_disk_that_writes_something_else_is_caught(tmp_path, small, monkeypatch):
    def bad(fd, data, offset):
        data[5] ^= 1
        engram_pack.write(fd, data, offset)
        data[5] ^= 1

    monkeypatch.setattr(engram_rows, "write", bad)
    with pytest.raises(EngramRowsError, match=r"read back differ from those written: the disk is failing"):
        run(tmp_path, small)
    assert faults(tmp_path, small)


def test_wrongly_packed_rows_are_caught(tmp_path, small, monkeypatch):
    pack = engram_pack.Packer.pack
    monkeypatch.setattr(
        engram_pack.Packer, "pack", lambda self, fd, weight, scale, rows: pack(self, fd, weight - 256, scale, rows)
    )
    with pytest.raises(EngramRowsError, match=r"layer 1: row \d+ of the copy is not the source's"):
        run(tmp_path, small)
    assert faults(tmp_path, small)


def test_a_second_run_beside_the_first_is_refused(tmp_path, small):
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(EngramRowsError, match="another run is working"):
        run(tmp_path, small)
    os.close(fd)
    run(tmp_path, small)


def test_a_run_that_was_killed_20_times_is_taken_up(tmp_path, large):
    """At whatever moment the power goes, a copy without faults is right, and finished segments are not copied again."""
    rng = random.Random(11)  # noqa: S311 a repeatable test
    argv = [sys.executable, "-m", "gb10.engram_rows", "copy", "--directory", str(tmp_path), "--source", str(large)]
    argv += [
        "--model",
        ME.model,
        "--revision",
        REVISION,
        "--tp=2",
        "--rank=1",
        "--workers=2",
        "--mb-per-s=30",
        "--margin-mb=0",
    ]
    killed, found = 0, []
    while killed < 20:
        process = subprocess.Popen(
            argv, env=os.environ | {"PYTHONPATH": str(PROJECT / "module_utils")}, stdout=subprocess.DEVNULL
        )
        begun = time.monotonic()
        while not list(tmp_path.glob("*.partial")) and process.poll() is None and time.monotonic() < begun + 10:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:  # it was done: begin again with nothing
            assert faults(tmp_path, large) == []
            engram_rows.remove(tmp_path)
            continue
        killed += 1
        found.append(faults(tmp_path, large))
    assert all(found)
    segments = sum(len(path.read_bytes().splitlines()) - 1 for path in tmp_path.glob("*.journal"))
    todo, outcome = run(tmp_path, large)
    assert todo.action == "resume"
    assert outcome.kept_bytes >= (segments - 2) * engram_pack.SEGMENT_BYTES
    assert packs_of(tmp_path) == naive_packs(large)
    assert faults(tmp_path, large) == []


def test_what_a_journal_says_is_hashed_before_it_is_believed(tmp_path, large, monkeypatch):
    monkeypatch.setattr(engram_rows, "_write_manifest", lambda *_: (_ for _ in ()).throw(OSError(5, "killed here")))
    with pytest.raises(EngramRowsError, match="killed here"):
        run(tmp_path, large)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.glob("*.rows")) == ["layer-1.rows", "layer-14.rows"]
    assert "manifest.json: cannot be read" in faults(tmp_path, large)[0]
    with (tmp_path / "layer-1.rows").open("r+b") as file:
        file.seek(9_000_000)
        file.write(b"lost in the power failure")
    with (tmp_path / "layer-14.rows.journal").open("ab") as journal:
        journal.write(b"[1, ")  # cut off
    _, outcome = run(tmp_path, large)
    assert outcome.repaired_blocks == 1
    assert outcome.copied_bytes == 0
    assert packs_of(tmp_path) == naive_packs(large)


def test_a_source_that_changed_since_the_run_that_was_killed_begins_anew(tmp_path, small, monkeypatch):
    source, copy = tmp_path / "source", tmp_path / "copy"
    shutil.copytree(small, source)
    monkeypatch.setattr(engram_rows, "_write_manifest", lambda *_: (_ for _ in ()).throw(OSError(5, "killed here")))
    with pytest.raises(EngramRowsError):
        run(copy, source)
    monkeypatch.undo()
    os.utime(source / "model-00002-of-00003.safetensors")
    _, outcome = run(copy, source)
    assert outcome.copied_bytes == len(packs_of(copy)["layer-1.rows"])
    assert outcome.kept_bytes == len(packs_of(copy)["layer-14.rows"])


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 2 MiB, less than the copy of the small checkpoint needs."""
    if os.geteuid():
        pytest.skip("mounting a tmpfs needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2M", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tiny_disk, small):
    with pytest.raises(EngramRowsError, match=r"rows need 0.0\d GB .* margin, its file system has 0.00 GB .*missing"):
        run(tiny_disk / "copy", small)
    assert list(tiny_disk.glob("copy/*.partial")) == []


def test_a_disk_that_becomes_full_in_mid_copy_leaves_no_copy(tiny_disk, small, monkeypatch):
    monkeypatch.setattr(engram_rows, "check_space", lambda *_: None)
    copy = tiny_disk / "copy"
    with pytest.raises(EngramRowsError, match=r"disk/copy: its file system became full, .* free; free some"):
        run(copy, small)  # found while the space is reserved
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    with pytest.raises(EngramRowsError, match="became full"):
        run(copy, small)  # found by a write
    assert list(copy.glob("*.rows")) == []
    assert faults(copy, small)
    monkeypatch.undo()
    subprocess.run(["mount", "-o", "remount,size=64M", str(tiny_disk)], check=True)
    run(copy, small)
    assert packs_of(copy) == naive_packs(small)
    assert faults(copy, small) == []


def test_the_space_of_a_real_rank_is_52_gb(tmp_path, monkeypatch):
    ranges = [(96000564, 192001740), (96003054, 192007016)]
    size = sum(engram_pack.pack_bytes(end - start) for start, end in ranges)
    monkeypatch.setattr(
        os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 0, 0, 51 * 10**9 // 4096, 0, 0, 0, 0, 255))
    )
    with pytest.raises(EngramRowsError, match=r"need 52.43 GB \(48.83 GiB\) .* has 51.00 GB .*: 2.50 GB .* missing"):
        engram_rows.check_space(tmp_path, size, Plan("copy", []), 1 << 30)


def test_other_rows_count_as_free_space(tmp_path, small):
    run(tmp_path, small, Identity("m", REVISION, 1, 0))
    size = sum(map(len, naive_packs(small).values()))
    needed, free, _ = engram_rows.missing_bytes(tmp_path, size, Plan("replace", []), 0)
    assert needed == size
    freed = free - os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert abs(freed - sum(map(len, packs_of(tmp_path).values()))) < 1 << 24


def test_a_directory_on_nfs_is_refused(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\n10.10.0.11:/srv {tmp_path}/srv nfs ro,vers=3 0 0\n")
    monkeypatch.setattr(engram_rows, "MOUNTS", mounts)
    engram_rows.check_local(tmp_path / "srv2/engram")
    with pytest.raises(EngramRowsError, match=r"srv/engram, on 10.10.0.11:/srv \(nfs\): choose a dir"):
        engram_rows.check_local(tmp_path / "srv/engram")


def test_remove_leaves_nothing_of_it(copy):
    (copy / "layer-1.rows.partial").touch()
    (copy / "kept").touch()
    assert engram_rows.remove(copy)
    assert [path.name for path in copy.iterdir()] == ["kept"]
    assert not engram_rows.remove(copy)


def test_a_sample_has_the_first_the_last_and_62_other_segments(tmp_path, small, monkeypatch):
    run(tmp_path, small)
    looked = []
    monkeypatch.setattr(engram_rows, "_for_each", lambda _workers, _make, _work, jobs: looked.extend(jobs))
    layers = engram_rows.read_manifest(tmp_path)["layers"]
    layers[0] |= {"segments": ["0" * 64] * 1500, "bytes": 1500 * engram_pack.SEGMENT_BYTES}
    rewrite_manifest(tmp_path, layers=layers)
    engram_rows.damaged_segments(tmp_path, "sampled", FAST)
    sample = {index for entry, index in looked if entry["layer"] == 1}
    assert len(sample) == 64
    assert {0, 1499} <= sample


def test_the_rate_is_held_and_progress_is_written(tmp_path, large):
    progress = tmp_path / "progress/engram.json"
    begun = time.time()
    run(tmp_path / "copy", large, options=Options(bytes_per_s=60_000_000, margin_bytes=0, progress=progress))
    size = sum(map(len, packs_of(tmp_path / "copy").values()))
    seconds = time.time() - begun
    # The first segment is not waited for; the last one's writing and the manifest come on top.
    assert (size - engram_pack.SEGMENT_BYTES) / 60e6 < seconds < 1.1 * size / 60e6 + 2
    state = json.loads(progress.read_text())
    assert (state["done_bytes"], state["total_bytes"]) == (size, size)
    assert begun <= state["started"] <= begun + seconds


def test_memory_stays_below_200_mib(tmp_path, large):
    code = "from gb10.engram_rows import main; main(); print(open('/proc/self/status').read())"
    argv = [sys.executable, "-c", code, "copy", "--directory", str(tmp_path), "--source", str(large)]
    argv += ["--revision=r", "--tp=1", "--rank=0", "--margin-mb=0"]
    env = os.environ | {"PYTHONPATH": str(PROJECT / "module_utils")}
    printed = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout
    assert "copied_bytes=68362240" in printed
    assert int(printed.split("VmHWM:")[1].split()[0]) < 200 * 1024


def test_the_command_names_every_fault(copy, small, capsys):
    argv = ["verify", "--directory", str(copy), "--source", str(small), "--revision", REVISION, "--tp=2"]
    assert engram_rows.main([*argv, "--rank=1", "--level=whole"]) == 0
    assert engram_rows.main([*argv, "--rank=0"]) == 1
    assert "rank is 1, wanted 0" in capsys.readouterr().err
    assert engram_rows.main([*argv, "--rank=2"]) == 1
    assert "rank is 2, wanted one of [0, 2)" in capsys.readouterr().err


JOURNAL = """\
INFO [engram_disk.py:954] Engram layer 1 rows [10, 20) read from /var/lib/gb10/engram/layer-1.rows (row pack)
INFO [engram_disk.py:954] Engram layer 14 rows [11, 21) read from /var/lib/gb10/engram/layer-14.rows (row pack)
INFO [core.py:1] Application startup complete.
"""


def test_the_line_that_is_looked_for_is_the_patched_engines():
    patch = (PROJECT / "files/patches/vllm-0.33.0/0001-engram-on-disk.patch").read_text()
    (said,) = re.findall(r'^\+ +"(Engram layer .*)",$', patch, re.MULTILINE)
    kinds = set(re.findall(r'^\+.*"(local copy|checkpoint)"', patch, re.MULTILINE))
    assert kinds == {"local copy", "checkpoint"}
    for directory, kind in ((Path("/var/lib/gb10/engram"), "local copy"), (Path("/srv/models/m"), "checkpoint")):
        text = f"(Worker_TP1 pid=7) INFO 11-29 20:14:57 [engram_disk.py:970] {said}\n"
        lines = "".join(text % (layer, layer, 20, directory / f"layer-{layer}.rows", kind) for layer in (1, 14))
        found = engram_rows.check_journal(lines, Path("/var/lib/gb10/engram"), {1: (1, 20), 14: (14, 20)})
        assert bool(found) == (kind == "checkpoint")


JOURNALS = [
    (JOURNAL, []),
    (JOURNAL.splitlines()[0], ["no line on layer 14, wanted rows [11, 21) read from"]),
    ("", ["no line on layer 1,", "no line on layer 14,"]),
    (
        JOURNAL.replace("[10, 20)", "[0, 10)"),
        ["layer 1 rows [0, 10) read from /var/lib/gb10/engram/layer-1.rows, wanted rows [10"],
    ),
    (
        JOURNAL.replace("/var/lib/gb10/engram/layer-14.rows (row pack)", "/srv/models/m/a.safetensors (checkpoint)"),
        ["layer 14 rows [11, 21) read from /srv/models/m/a.safetensors, wanted"],
    ),
    (JOURNAL + JOURNAL.replace("layer 1 ", "layer 2 "), ["layer 2 rows [10, 20)"]),
]


@pytest.mark.parametrize(("text", "messages"), JOURNALS)
def test_a_started_rank_must_say_that_it_reads_its_own_rows(text, messages):
    found = sorted(engram_rows.check_journal(text, Path("/var/lib/gb10/engram"), {1: (10, 20), 14: (11, 21)}))
    assert len(found) == len(messages)
    assert all(message in fault for message, fault in zip(messages, found, strict=True)), found
