"""Row ranges and byte offsets: the published numbers, at real geometry on sparse shards."""

from __future__ import annotations

import csv
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import engram_layout
from ansible.module_utils.gb10.engram_layout import EngramLayoutError

MODEL = Path(__file__).parents[2] / "fixtures/model"
CONFIG = json.loads((MODEL / "config_v41_flash.json").read_text())
SHARDS = json.loads((MODEL / "shards.json").read_text())["files"]
ENGRAM = engram_layout.parse_config(CONFIG)

# The published boundaries: layer 1, layer 14.
BOUNDS = {
    2: ([0, 192001740, 384006168], [0, 192007016, 384016682]),
    3: ([0, 128000880, 256002934, 384006168], [0, 128004290, 256009984, 384016682]),
    4: (
        [0, 96000564, 192001740, 288003654, 384006168],
        [0, 96003054, 192007016, 288011564, 384016682],
    ),
    8: (
        [0, 48000217, 96000564, 144001069, 192001740, 240002613, 288003654, 336004849, 384006168],
        [0, 48001463, 96003054, 144004957, 192007016, 240009215, 288011564, 336014037, 384016682],
    ),
}
PRIMES = {
    1: "057 079 081 097 121 129 133 183 189 207 211 253 277 289 307 321 339 381 393 399 403 409 447 463",
    14: "477 487 499 507 511 573 609 627 667 669 693 697 711 729 759 769 781 799 813 819 841 877 879 889",
}
BYTES_OF_RANK = [50_688_955_152, 50_689_356_432, 50_689_705_968, 50_690_014_848]


@pytest.fixture
def checkpoint(tmp_path):
    """The real shards 47 and 48: genuine headers and sizes, holes instead of 203 GB."""
    shutil.copy(MODEL / "config_v41_flash.json", tmp_path / "config.json")
    shutil.copy(MODEL / "model_index_excerpt.constructed.json", tmp_path / engram_layout.INDEX)
    for number, name in ((47, "model-00047-of-00048.safetensors"), (48, "model-00048-of-00048.safetensors")):
        shutil.copy(MODEL / f"engram_shard{number}_header.bin", tmp_path / name)
        os.truncate(tmp_path / name, SHARDS[name]["size"])
    return tmp_path


def test_primes_are_the_published_ones():
    expected = {layer: tuple(16_000_000 + int(n) for n in text.split()) for layer, text in PRIMES.items()}
    assert engram_layout.bucket_rows(ENGRAM) == expected


@pytest.mark.parametrize("tp", BOUNDS)
def test_ranges_are_the_published_ones(tp):
    expected = [[*itertools.pairwise(bounds)] for bounds in BOUNDS[tp]]
    assert [[*of_ranks] for of_ranks in engram_layout.row_ranges(ENGRAM, tp).values()] == expected


@pytest.mark.parametrize("tp", range(1, 33))
def test_ranks_cover_every_table_once(tp):
    for (_layer, of_ranks), rows in zip(
        engram_layout.row_ranges(ENGRAM, tp).items(), ENGRAM.num_embeddings, strict=True
    ):
        assert len(of_ranks) == tp
        assert of_ranks[0][0] == 0
        assert of_ranks[-1][1] == rows
        assert all(a[1] == b[0] for a, b in itertools.pairwise(of_ranks))


def test_a_rank_past_the_last_column_owns_nothing():
    assert engram_layout.rank_ranges(ENGRAM, 7, 6) == {1: (384006168, 384006168), 14: (384016682, 384016682)}


def test_offsets_are_the_published_ones(checkpoint):
    with (MODEL / "engram_layout_table.tsv").open() as table:
        rows = [
            {k: v if k == "shard" else int(v) for k, v in row.items()} for row in csv.DictReader(table, delimiter="\t")
        ]
    assert len(rows) == 8
    for row in rows:
        found = {r.table.layer: r for r in engram_layout.rank_rows(checkpoint, 4, row["rank"])}[row["layer"]]
        assert (found.start, found.end) == (row["row_lo"], row["row_hi"])
        assert found.table.file == row["shard"]
        assert (found.weight_offset, found.scale_offset) == (row["weight_off"], row["scale_off"])


def test_bytes_of_each_rank_are_the_published_ones(checkpoint):
    sums = [sum(264 * found.rows for found in engram_layout.rank_rows(checkpoint, 4, rank)) for rank in range(4)]
    assert sums == BYTES_OF_RANK


def test_headers_hash_to_the_published_digests(checkpoint):
    for table in engram_layout.find_tables(checkpoint, ENGRAM):
        assert table.header_sha256 == SHARDS[table.file]["header_prefix_sha256"]
        assert table.file_bytes == SHARDS[table.file]["size"]


CONFIG_FAULTS = [
    ({"engram_num_embeddings": [384006168, 384016683]}, r"layer 14: .* sum to 384016682 rows, .* says 384016683"),
    ({"engram_vocab_size": 16_000_100}, r"layer 1: the 24 primes from 16000121"),
    ({"engram_n_heads": 7}, r"layer 1: the 21 primes"),
    ({"engram_layer_ids": [1]}, r"does not match"),
    ({"engram_layer_ids": [1, 1]}, r"does not match"),
    ({"engram_head_dim": 128}, r"engram_head_dim is 128"),
    ({"engram_max_ngram_size": 1}, r"no hash column"),
]


@pytest.mark.parametrize(("change", "message"), CONFIG_FAULTS)
def test_a_wrong_config_is_refused(change, message):
    with pytest.raises(EngramLayoutError, match=message):
        engram_layout.parse_config({"text_config": {**CONFIG["text_config"], **change}})


def test_a_model_without_engram_is_refused():
    with pytest.raises(EngramLayoutError, match="not a model with Engram tables"):
        engram_layout.parse_config(json.loads((MODEL / "config_v4_flash.json").read_text()))


@pytest.mark.parametrize(("tp", "rank", "message"), [(4, 4, r"rank is 4, wanted one of \[0, 4\)"), (0, 0, "size is 0")])
def test_a_rank_outside_the_group_is_refused(tp, rank, message):
    with pytest.raises(EngramLayoutError, match=message):
        engram_layout.rank_ranges(ENGRAM, tp, rank)


def edit_header(checkpoint, old, new):
    path = checkpoint / "model-00048-of-00048.safetensors"
    with path.open("r+b") as file:
        raw = file.read(672)
        assert old in raw
        assert len(old) == len(new)
        file.seek(0)
        file.write(raw.replace(old, new, 1))


SHARD_FAULTS = [
    (
        lambda path: os.truncate(path / "model-00047-of-00048.safetensors", 101535150935),
        r"model-00047.*truncated: 101535150935 bytes, its header describes 101535150936",
    ),
    (lambda path: (path / "model-00048-of-00048.safetensors").unlink(), r"model-00048.*No such file"),
    (
        lambda path: edit_header(path, b'"F8_E8M0","shape":[384016682', b'"F8_E5M2","shape":[384016682'),
        r"scale is F8_E5M2 .*, wanted F8_E8M0 \[384016682, 8\]",
    ),
    (lambda path: edit_header(path, b"[384016682,256]", b"[192008341,512]"), r"weight is F8_E4M3 \[192008341, 512\]"),
    (lambda path: edit_header(path, b"layers.14.engram.embed.w", b"layers.15.engram.embed.w"), r"has no layers.14"),
    (
        lambda path: shutil.copy(MODEL / "model_index_wrong_shard.constructed.json", path / engram_layout.INDEX),
        r"model-00047.*has no layers.14.engram.embed.weight",
    ),
    (lambda path: (path / engram_layout.INDEX).write_text('{"weight_map": {}}'), r"not both in one shard"),
    (lambda path: (path / engram_layout.INDEX).write_text("[]"), r"no JSON object"),
    (lambda path: (path / "config.json").write_text("{"), r"config.json: is no JSON"),
    (lambda path: (path / "config.json").unlink(), r"config.json: cannot be read: No such file"),
]


@pytest.mark.parametrize(("damage", "message"), SHARD_FAULTS)
def test_a_wrong_checkpoint_is_refused(checkpoint, damage, message):
    damage(checkpoint)
    with pytest.raises(EngramLayoutError, match=message):
        engram_layout.rank_rows(checkpoint, 4, 1)


def test_all_faults_are_reported_together(checkpoint):
    for name in SHARDS:
        os.truncate(checkpoint / name, 1000)
    with pytest.raises(EngramLayoutError) as caught:
        engram_layout.rank_rows(checkpoint, 4, 1)
    assert len(caught.value.faults) == 2
