"""A checkpoint without its bytes passes for the real one wherever no tensor is read."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import checkpoint
from ansible.module_utils.gb10.checkpoint import UNKNOWN, Manifest
from ansible.module_utils.gb10.engram_layout import rank_rows

from embedded.checkpoints.hollow import main, make_hollow

MODEL = Path(__file__).parents[2] / "fixtures/model"
REAL = json.loads((MODEL / "shards.json").read_text())
FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", checkpoint.INDEX]


@pytest.fixture(scope="module")
def hollow(tmp_path_factory):
    directory = tmp_path_factory.mktemp("store") / "DeepSeek-V4.1-Flash"
    make_hollow(directory, MODEL / "config_v41_flash.json")
    return directory


@pytest.mark.parametrize("number", [47, 48])
def test_the_shards_of_the_tables_are_the_real_ones(hollow, number):
    shard = hollow / f"model-000{number}-of-00048.safetensors"
    header = (MODEL / f"engram_shard{number}_header.bin").read_bytes()
    with shard.open("rb") as file:
        assert file.read(len(header)) == header
    assert shard.stat().st_size == REAL["files"][shard.name]["size"]


def test_it_is_judged_whole_and_takes_no_space(hollow):
    shards = [path.name for path in hollow.glob("*.safetensors")]
    assert len(shards) == REAL["shards"]
    wanted = Manifest("m", "", dict.fromkeys(FILES + shards, UNKNOWN))
    assert checkpoint.judge(hollow, wanted, hollow.parent, 0) == []
    assert json.loads((hollow / checkpoint.INDEX).read_text())["metadata"]["total_size"] == REAL["index_total_size"]
    assert sum(path.stat().st_blocks * 512 for path in hollow.iterdir()) < 1 << 20


def test_rows_lie_where_they_were_published(hollow):
    with (MODEL / "engram_layout_table.tsv").open() as table:
        published = list(csv.DictReader(table, delimiter="\t"))
    for line in published:
        (found,) = [r for r in rank_rows(hollow, 4, int(line["rank"])) if r.table.layer == int(line["layer"])]
        offsets = (found.weight_offset, found.scale_offset)
        assert (found.table.file, *offsets) == (line["shard"], int(line["weight_off"]), int(line["scale_off"]))


def test_a_model_without_tables_has_any_size_in_any_number_of_shards(tmp_path):
    main([str(tmp_path), str(MODEL / "config_v4_flash.json"), "--shards", "7", "--total-bytes", "150000000001"])
    assert checkpoint.check_headers(tmp_path) == []
    assert len(list(tmp_path.glob("model-0000?-of-00007.safetensors"))) == 7
