"""Whatever happens to a rank's rows or to their head: nothing wrong is served, and the next run repairs it.

The expected bytes are computed here, from the generator and the format's definition, not by the code under test.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from embedded.checkpoints import engram as synthetic
from tests.embedded_hosts import HOSTS, PROJECT, on, run, ssh

WORKERS = HOSTS[1:]
PROFILE = yaml.safe_load((PROJECT / "profiles/tiny-engram-tp4.yml").read_text())
REVISION, VOCABULARY = PROFILE["checkpoint"]["revision"], PROFILE["engram"]["engram_vocab_size"]
MOLECULE = yaml.safe_load((Path(__file__).parents[1] / "molecule.yml").read_text())
VARS = [MOLECULE["ansible"]["executor"]["args"]["ansible_playbook"][1]]
STORE, ROWS, LIBRARY = "/srv/models/tiny-engram", "/var/lib/gb10/engram", "/run/gb10-engram-test"


def play(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("ansible-playbook", "-v", f"playbooks/{name}.yml", *VARS, *arguments)


def done(result: subprocess.CompletedProcess[str]) -> dict[str, dict]:
    """Host to the last result that the run printed for it; the run has to have succeeded."""
    assert result.returncode == 0, result.stdout + result.stderr
    printed = re.findall(r"^(?:ok|changed): \[(\S+)\] => \n((?: .*\n|\n)+)", result.stdout, re.MULTILINE)
    return {host: yaml.safe_load(text) for host, text in printed}


def rows(verb: str, rank: int, *, directory: str = ROWS, source: str = STORE, **options) -> str:
    """The command that makes or judges a copy by hand, as a rank's start judges it."""
    given = {"revision": REVISION, "tp": 4, "margin-mb": 0, **options}
    words = " ".join(f"--{name}={value}" for name, value in given.items())
    command = f"python3 -B -m gb10.engram_rows {verb} --model=gb10-fleet/tiny-engram --directory={directory}"
    return f"PYTHONPATH={LIBRARY} {command} --source={source} --rank={rank} {words}"


@pytest.fixture(scope="session", autouse=True)
def library():
    """The project's package on every host, whatever release is installed there."""
    archive = subprocess.run(["tar", "-C", PROJECT / "module_utils", "-c", "gb10"], capture_output=True, check=True)
    on(HOSTS, f"mkdir -p {LIBRARY} && tar -x -C {LIBRARY}", archive.stdout)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """The checkpoint that the head was given."""
    directory = tmp_path_factory.mktemp("checkpoint")
    synthetic.make_checkpoint(directory, VOCABULARY)
    return directory


@pytest.fixture(scope="session")
def ranges() -> dict[int, list[tuple[int, int]]]:
    """Layer to the rows of each rank: six buckets of a prime number of rows."""
    primes = synthetic.primes_from(VOCABULARY, 48)
    buckets = {1: primes[:24], 14: primes[24:]}
    return {layer: list(pairwise(sum(sizes[: 6 * i]) for i in range(5))) for layer, sizes in buckets.items()}


@pytest.fixture(scope="session")
def expected(checkpoint, ranges) -> list[list[str]]:
    """Rank to the SHA-256 of its two row packs, by the format's definition."""
    digests: list[list[str]] = [[], [], [], []]
    for number, layer in enumerate(ranges):
        shard = (checkpoint / f"model-{number + 2:05}-of-00003.safetensors").read_bytes()
        length = int.from_bytes(shard[:8], "little")
        header = json.loads(shard[8 : 8 + length])
        weight, scale = (
            8 + length + header[f"layers.{layer}.engram.embed.{part}"]["data_offsets"][0]
            for part in ("weight", "scale")
        )
        for rank, (start, end) in enumerate(ranges[layer]):
            pack = bytearray()
            for row in range(start, end):
                pack += (
                    shard[weight + row * 256 : weight + row * 256 + 256] + shard[scale + row * 8 : scale + row * 8 + 8]
                )
                if (row - start) % 15 == 14 or row == end - 1:
                    pack += bytes(-len(pack) % 4096)
            digests[rank].append(hashlib.sha256(pack).hexdigest())
    return digests


def packs_of(host: str, directory: str = ROWS) -> list[str]:
    (text,) = on([host], f"cd {directory} && sha256sum layer-1.rows layer-14.rows && test -e manifest.json")
    return [line.split()[0] for line in text.splitlines()]


def all_packs() -> list[list[str]]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(packs_of, HOSTS))


def test_every_host_has_the_rows_of_its_rank_and_no_others(expected):
    assert all_packs() == expected
    assert len({digest for of_rank in expected for digest in of_rank}) == 8


def test_a_host_that_has_its_rows_says_so_in_seconds():
    begun = time.monotonic()
    results = done(play("engram", "--check", "--diff"))
    assert time.monotonic() - begun < 30
    assert {(host, results[host]["action"]) for host in HOSTS} == {(host, "keep") for host in HOSTS}


def test_a_running_rank_has_to_say_that_it_reads_its_own_rows(ranges):
    for rank, host in enumerate(HOSTS):
        # What a rank writes whose engine was told of no copy: it reads the checkpoint over the network.
        place = f"{STORE}/shard (checkpoint)" if host == "spark-b" else f"{ROWS}/layer-%d.rows (local copy)"
        lines = "".join(
            f"INFO Engram layer {layer} rows [{start}, {end}) read from {place.replace('%d', str(layer))}\n"
            for layer, (start, end) in ((layer, of_ranks[rank]) for layer, of_ranks in ranges.items())
        )
        on(
            [host],
            f"printf {shlex.quote(lines)} > /run/rows; systemd-run -q --collect --unit=gb10-rows sh -c "
            "'cat /run/rows; exec sleep 600'",
        )
    wish = {"state": "verified", "directory": ROWS, "revision": REVISION, "tp": 4, "unit": "gb10-rows.service"}
    wish |= {"rank": "{{ rank }}", "config": "{{ gb10_profile.engram }}"}
    said = run("ansible", "fleet", *VARS, "-m", "gb10_engram_rows", "-a", json.dumps(wish)).stdout
    on(HOSTS, "systemctl stop gb10-rows; rm /run/rows")
    for host in HOSTS:
        assert f"{host} | {'FAILED' if host == 'spark-b' else 'SUCCESS'}" in said, said
    assert f"read from {STORE}/shard, wanted rows [" in " ".join(said.split())


FLIP = f"""python3 - <<'END'
import random
with open("{ROWS}/layer-14.rows", "r+b") as file:
    places = random.sample(range(file.seek(0, 2) // 4096), 3)
    for place in places:
        file.seek(place * 4096 + random.randrange(264 * 15))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1 << random.randrange(8)]))
END"""
HOLE = f"fallocate --punch-hole --offset 8192 --length 4096 {ROWS}/layer-1.rows"
KILLED = f"""rm {ROWS}/*; {{ {rows("copy", 3, **{"mb-per-s": 8})} & }}
while ! [ -s {ROWS}/layer-1.rows.partial ]; do sleep 0.1; done; sleep 1; kill -9 $!; wait"""
ROUNDS = [
    {
        "spark-a": (FLIP, "segments have other bytes than were verified", "repair"),
        "spark-b": (f"truncate -s 8M {ROWS}/layer-1.rows", "layer-1.rows: has 8388608 bytes, wanted", "repair"),
        "spark-c": (HOLE, "layer-1.rows: has a hole at byte 8192", "repair"),
        "spark-d": (f"rm {ROWS}/layer-14.rows", "layer-14.rows: cannot be read", "repair"),
    },
    {
        "spark-a": (f"rm -r {ROWS}; {rows('copy', 1)}", "rank is 1, wanted 0", "replace"),
        "spark-b": (f"rm -r {ROWS}; {rows('copy', 1, revision='main')}", "revision is 'main', wanted", "replace"),
        "spark-c": (f"rm -r {ROWS}; {rows('copy', 1, tp=2)}", "tp is 2, wanted 4", "replace"),
        "spark-d": (KILLED, "manifest.json: cannot be read: No such file", "resume"),
    },
]


@pytest.mark.parametrize("damages", ROUNDS, ids=["damaged", "of-another"])
def test_a_wrong_copy_is_refused_at_every_start_and_repaired_by_the_next_run(damages, expected):
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda host: on([host], damages[host][0]), HOSTS):
            pass
    for rank, host in enumerate(HOSTS):
        refused = ssh(host, rows("verify", rank, level="whole"))
        assert refused.returncode == 1
        assert damages[host][1] in refused.stderr
    results = done(play("engram", "-e", "engram_rows_level=whole"))
    assert {host: results[host]["action"] for host in HOSTS} == {host: damages[host][2] for host in HOSTS}
    assert all_packs() == expected
    if damages["spark-a"][0] == FLIP:
        assert (results["spark-a"]["repaired_blocks"], results["spark-a"]["copied_bytes"]) == (3, 0)
        assert (results["spark-c"]["repaired_blocks"], results["spark-c"]["copied_bytes"]) == (1, 0)


@pytest.fixture
def small_disk():
    """A file system on spark-c that is smaller than its rows."""
    disk = "/run/gb10-engram-disk"
    on(["spark-c"], f"mkdir -p {disk} && mount -t tmpfs -o size=12M tmpfs {disk}")
    yield disk
    on(["spark-c"], f"umount {disk} && rmdir {disk}")


def test_a_full_disk_is_refused_before_and_harmless_in_mid_copy(small_disk, expected):
    directory = f"{small_disk}/engram"
    limited = ["--limit", "spark-c", "-e", f"engram_rows_directory={directory}", "-e", "engram_rows_margin_gb=0"]
    refused = play("engram", *limited)
    assert refused.returncode != 0
    assert re.search(r"GB\s+\(\S+ GiB\)\s+missing", refused.stdout), refused.stdout
    on(["spark-c"], f"! ls {directory}/*.rows {directory}/manifest.json")
    fill = f"""mount -o remount,size=30M {small_disk}
{rows("copy", 2, directory=directory, **{"mb-per-s": 10})} & copy=$!
until [ $(cat {directory}/*.journal | wc -l) -gt 2 ]; do sleep 0.1; done
! dd if=/dev/zero of={small_disk}/others bs=1M status=none; df {small_disk}; ! wait $copy"""
    (full,) = on(["spark-c"], f"exec 2>&1; {fill}")
    assert "100%" in full
    assert "its file system became full, 0.00 GB (0.00 GiB) free; free some and run again" in full
    on(["spark-c"], f"! test -e {directory}/manifest.json && rm {small_disk}/others")
    assert on(["spark-c"], rows("copy", 2, directory=directory))[0].startswith("resume Outcome(copied_bytes=0,")
    assert packs_of("spark-c", directory) == expected[2]


def test_a_source_that_changes_while_it_is_copied_gives_no_copy(expected):
    scratch = "/var/tmp/gb10-engram"
    slow = rows("copy", 1, directory=scratch, **{"mb-per-s": 4})
    with ThreadPoolExecutor() as pool:
        copying = pool.submit(ssh, "spark-b", slow)
        time.sleep(2)
        on(["spark-a"], f"touch {STORE}/model-00003-of-00003.safetensors")
        refused = copying.result()
    assert refused.returncode == 1
    assert "changed while it was copied; the copy was discarded: run it again" in refused.stderr
    assert on(["spark-b"], f"ls {scratch}") == [""]
    on(["spark-b"], rows("copy", 1, directory=scratch))
    assert packs_of("spark-b", scratch) == expected[1]
    on(["spark-b"], f"rm -r {scratch}")


def test_a_head_that_is_away_for_a_minute_in_mid_copy_is_survived(expected):
    on(WORKERS, f"rm -r {ROWS}")
    with ThreadPoolExecutor() as pool:
        copying = pool.submit(play, "engram", "-e", "engram_rows_max_mb_per_s=2", "--limit", "workers")
        on(WORKERS, f"while ! [ -s {ROWS}/layer-1.rows.partial ]; do sleep 0.2; done")
        on(["spark-a"], "systemctl stop nfs-server")
        gone = time.monotonic()
        try:
            assert timed(["ssh", "-F", ".embedded/ssh_config", "spark-b", "df"]) < 10
            # What setup takes anyway, on hosts that share two cores, is measured beside it on the head.
            facts = [
                pool.submit(timed, ["ansible", host, "-m", "ansible.builtin.setup"]) for host in ("spark-a", "spark-c")
            ]
            there, away = (result.result() for result in facts)
            assert away - there < 10
            assert not copying.done()
            on(WORKERS, f"! ls {ROWS}/manifest.json")
            time.sleep(max(0, 60 - (time.monotonic() - gone)))
        finally:
            on(["spark-a"], "systemctl start nfs-server")
        back = time.monotonic()
        on(WORKERS, f"until timeout 20 head -c 1 {STORE}/config.json; do sleep 0.5; done")
        assert time.monotonic() - back < 60
        results = done(copying.result())
    assert {results[host]["action"] for host in WORKERS} == {"copy"}
    assert all_packs() == expected


def timed(command: list[str]) -> float:
    begun = time.monotonic()
    subprocess.run(command, cwd=PROJECT, capture_output=True, check=False, timeout=60)
    return time.monotonic() - begun


def test_a_checkpoint_that_is_not_whole_is_named_file_by_file():
    small, shard = (f"{STORE}/model-0000{number}-of-00003.safetensors" for number in (1, 3))
    on(["spark-a"], f"mv {shard} {shard}.incomplete && cp {small} /run/small && truncate -s 1000 {small}")
    try:
        refused = " ".join(play("storage", "--limit", "head").stdout.split())
    finally:
        on(["spark-a"], f"mv {shard}.incomplete {shard} && mv /run/small {small}")
    assert f"{small}: truncated: 1000 bytes" in refused
    assert f"{shard}: No such file or directory" in refused
    assert f"{shard}.incomplete: a download that never ended" in refused


def test_copies_instead_of_the_mount_are_equal_to_the_heads(checkpoint):
    listing = "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(checkpoint.iterdir())
    )
    copies = ["-e", "model_store_mode=copy"]
    check = f"! grep -q 'srv/models nfs' /proc/self/mounts && cd {STORE} && sha256sum --quiet -c <<'END'\n{listing}END"
    try:
        done(play("storage", *copies))
        on(HOSTS, check)
        on(["spark-b"], f"echo x >> {STORE}/config.json")
        on(
            ["spark-c"],
            f"printf x | dd of={STORE}/model-00002-of-00003.safetensors bs=1 seek=54321 conv=notrunc status=none",
        )
        results = done(play("storage", *copies, "-e", "model_store_verify=whole"))
        on(HOSTS, check)
        assert "config.json: too long" in results["spark-b"]["repaired"][0]
        assert "model-00002-of-00003.safetensors: sha256 is" in results["spark-c"]["repaired"][0]
        assert results["spark-d"]["repaired"] == []
    finally:
        on(WORKERS, f"rm -rf {STORE} {STORE}.manifest.json")
        back = play("storage")
    done(back)
    on(WORKERS, f"grep -q 'srv/models nfs4' /proc/self/mounts && test -e {STORE}/config.json")
