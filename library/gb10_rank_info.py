#!/usr/bin/python
"""Read the state of this host's rank."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gb10_rank_info
short_description: State of this host's rank, its launch, phase, release and drift
description:
  - One call for status, readiness and drift detection. Never changes anything; a look at a mount is bounded in time.
  - With O(wait) it returns as soon as the phase is another than the one named or the rank is down.
options:
  wait: {description: Seconds to wait for another phase; 0 answers at once., type: float, default: 0}
  phase: {description: Phase that is known already., type: str, default: ""}
  phase_order: {description: Order of the phase that is known already., type: int, default: -2}
  checkpoint: {description: Directory of a checkpoint on this host's own disk that has to hold config.json., type: path}
  mount: {description: Mount to look at for at most ten seconds., type: path}
  completion:
    description: Ask the served model for a completion; set on the head. Tried only when the rank runs.
    type: dict
    options:
      base_url: {description: "http://address:port of the endpoint.", type: str, required: true}
      model: {description: Served model name., type: str, required: true}
      prompt: {description: Prompt., type: str, required: true}
      max_tokens: {description: Tokens to generate., type: int, default: 8}
      pattern: {description: Regular expression that the text must match., type: str, default: "."}
      timeout: {description: Seconds for the request., type: float, default: 60}
      warm_up:
        description: >-
          Requests before the one that counts, each with the prompt repeated so many times; the first ones after a start compile
          kernels for the lengths they meet.
        type: list
        elements: int
        default: []
      key_file: {description: File on the host that holds the API key; absent where the API has none., type: path, default: /etc/gb10/api-key}
author: [gb10-fleet maintainers (@gb10-fleet)]
"""

EXAMPLES = r"""
- name: Read the rank's state
  gb10_rank_info:
  register: rank_state
"""

RETURN = r"""
rank:
  description: State of the rank. RV(rank.phase) is its phase, RV(rank.drift) one sentence on how it differs from its configuration.
  returned: always
  type: dict
checkpoint_fault: {description: Why the checkpoint cannot be served; empty when it can., returned: always, type: str}
mount: {description: State of the mount in a word or a sentence., returned: always, type: str}
completion:
  description: Text or fault of the completion, empty unless it was asked for and the rank runs.
  returned: always
  type: dict
"""

from dataclasses import asdict
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import nfs, rank
from ansible.module_utils.gb10.completion import Completion, complete
from ansible.module_utils.gb10.systemd import SystemdError


def argument_spec() -> dict:
    text = {"type": "str", "required": True}
    completion = {
        "base_url": text,
        "model": text,
        "prompt": text,
        "max_tokens": {"type": "int", "default": 8},
        "pattern": {"type": "str", "default": "."},
        "timeout": {"type": "float", "default": 60},
        "warm_up": {"type": "list", "elements": "int", "default": []},
        "key_file": {"type": "path", "default": str(rank.API_KEY)},
    }
    return {
        "wait": {"type": "float", "default": 0},
        "phase": {"type": "str", "default": ""},
        "phase_order": {"type": "int", "default": -2},
        "checkpoint": {"type": "path"},
        "mount": {"type": "path"},
        "completion": {"type": "dict", "options": completion},
    }


def checkpoint_fault(directory: str) -> str:
    if not directory or (Path(directory) / "config.json").is_file():
        return ""
    return f"{directory} has no config.json: put the checkpoint there, or correct model_store_path or the profile"


def mount_state(path: str) -> str:
    if not path:
        return "local"
    probe = nfs.bounded(lambda: list(Path(path).iterdir()), 10)
    live = nfs.layers(nfs.parse_mounts(nfs.MOUNTS.read_text()), Path(path))
    return probe.fault or (live[-1].source if live else "not mounted")


def ask(warm_up: list, key_file: str, prompt: str, pattern: str, **options: object) -> Completion:
    """The completion that counts, after those that only have to come; the first fault ends it."""
    options["api_key"] = rank.read_api_key(Path(key_file))
    for times in warm_up:
        answer = complete(prompt=" ".join([prompt] * times), **options)
        if answer.fault:
            return Completion(fault=f"warm-up with the prompt {times} times: {answer.fault}")
    return complete(prompt=prompt, pattern=pattern, **options)


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params = module.params
    try:
        found = rank.wait(params["phase_order"], params["phase"], params["wait"]) if params["wait"] else rank.state()
    except (rank.RankError, SystemdError, OSError, ValueError) as error:
        module.fail_json(msg=str(error), rank={}, completion={})
    answer = Completion()
    if params["completion"] and found["active"]:
        answer = ask(**params["completion"])
    module.exit_json(
        changed=False,
        rank=found,
        completion=asdict(answer),
        checkpoint_fault=checkpoint_fault(params["checkpoint"]),
        mount=mount_state(params["mount"]),
    )


if __name__ == "__main__":
    main()
