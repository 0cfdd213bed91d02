"""Profiles as filters: read, argv, capture sizes, memory budget; the rules are in module_utils/gb10/profile.py."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ansible.module_utils
from ansible.errors import AnsibleFilterError

PROJECT = Path(__file__).resolve().parent.parent
# Modules get the project's module_utils from Ansible; plugins, which run on the controller, do not.
if str(PROJECT / "module_utils") not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(str(PROJECT / "module_utils"))

from ansible.module_utils.gb10 import profile as profiles  # noqa: E402 the path above


# Variables are lazy: each use of gb10_profile in a task comes here anew.
@functools.cache
def _load(name: str) -> dict[str, Any]:
    return profiles.load(PROJECT / "profiles", name, PROJECT / "files" / "patches")


def gb10_profile(name: str) -> dict[str, Any]:
    """The profile NAME as data. Raises AnsibleFilterError naming the profiles there are, or all that is wrong in it."""
    try:
        return copy.deepcopy(_load(str(name)))
    except profiles.ProfileError as error:
        raise AnsibleFilterError(str(error)) from error


def gb10_argv(profile: Mapping[str, Any], **rank: Any) -> list[str]:
    """Words of `vllm` for one rank: rank, model, head_address, api_address, api_port."""
    return profiles.argv(profile, **rank)


def gb10_capture_sizes(speculative_tokens: int, max_num_seqs: int, method: str = "dspark") -> list[int]:
    """`5 | gb10_capture_sizes(6)`: the batch sizes that leave no decode batch padded."""
    return profiles.capture_sizes(int(speculative_tokens), int(max_num_seqs), str(method))


def gb10_memory_budget(
    profile: Mapping[str, Any], hosts: Mapping[str, Mapping[str, float]], guard_gib: float = 5.0
) -> dict[str, list[Any]]:
    """`gb10_profile | gb10_memory_budget({host: {total_mib, available_mib}})`: `rows` and `faults`."""
    return profiles.memory_budget(profile, hosts, float(guard_gib))


def gb10_memory_faults(
    profile: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]], guard_gib: float = 5.0
) -> list[str]:
    """What of the budget does not fit, by each host's result of gb10_rank_info; a rank that runs holds its memory."""
    states = {host: result.get("rank") or {} for host, result in results.items()}
    hosts = {
        host: {
            "total_mib": state["memory_total_mib"],
            "available_mib": None if state["active"] else state["memory_available_mib"],
        }
        for host, state in states.items()
        if state  # a host that is away is a fault of its own
    }
    return profiles.memory_budget(profile, hosts, float(guard_gib))["faults"]


class FilterModule:
    """Filters by name."""

    def filters(self) -> dict[str, Any]:
        functions = (
            gb10_profile,
            gb10_argv,
            gb10_capture_sizes,
            gb10_memory_budget,
            gb10_memory_faults,
        )
        return {function.__name__: function for function in functions}
