"""The filter over the published configuration."""

from __future__ import annotations

import json
from pathlib import Path

import gb10_engram_ranges
import pytest
from ansible.errors import AnsibleFilterError

CONFIG = json.loads((Path(__file__).parents[2] / "fixtures/model/config_v41_flash.json").read_text())


def test_ranges_are_lists_by_layer_and_rank():
    ranges = gb10_engram_ranges.FilterModule().filters()["gb10_engram_ranges"](CONFIG, 4)
    assert ranges["14"][1] == [96003054, 192007016]
    assert json.loads(json.dumps(ranges)) == ranges


def test_keys_may_stand_at_the_top():
    assert gb10_engram_ranges.gb10_engram_ranges(CONFIG["text_config"], "2")["1"] == [
        [0, 192001740],
        [192001740, 384006168],
    ]


def test_another_model_is_refused():
    with pytest.raises(AnsibleFilterError, match="not a model with Engram tables"):
        gb10_engram_ranges.gb10_engram_ranges({"model_type": "deepseek_v4"}, 4)
