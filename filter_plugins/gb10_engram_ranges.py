"""Engram row ranges, as a filter over a model's config.json or the same keys in a profile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ansible.module_utils
from ansible.errors import AnsibleFilterError

# Modules get the project's module_utils from Ansible; plugins, which run on the controller, do not.
MODULE_UTILS = str(Path(__file__).resolve().parent.parent / "module_utils")
if MODULE_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(MODULE_UTILS)

from ansible.module_utils.gb10.engram_layout import EngramLayoutError, parse_config, row_ranges  # noqa: E402 the path above

DOCUMENTATION = r"""
name: gb10_engram_ranges
author: gb10-fleet
short_description: Engram row ranges of every rank
description: Turns the C(engram_*) keys of a model's config.json into the half-open row range of every rank and layer.
positional: tp
options:
  _input:
    description: The configuration; the keys may stand at its top or under C(text_config).
    type: dict
    required: true
  tp:
    description: The tensor-parallel size.
    type: int
    required: true
"""

EXAMPLES = r"""
rows_of_rank_1_in_layer_14: "{{ (gb10_profile.engram | gb10_engram_ranges(4))['14'][1] }}"  # [96003054, 192007016]
"""

RETURN = r"""
_value:
  description: Layer, as a string, to a list of [start, end) by rank.
  type: dict
"""


def gb10_engram_ranges(config: Mapping[str, Any], tp: int) -> dict[str, list[list[int]]]:
    try:
        ranges = row_ranges(parse_config(config), int(tp))
    except EngramLayoutError as error:
        raise AnsibleFilterError(str(error)) from error
    return {str(layer): [list(pair) for pair in of_ranks] for layer, of_ranks in ranges.items()}


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"gb10_engram_ranges": gb10_engram_ranges}
