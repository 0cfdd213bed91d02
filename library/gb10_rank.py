#!/usr/bin/python
"""Stop this host's rank, start it as part of a launch, or record that the launch serves."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gb10_rank
short_description: Stop this host's rank and prove it gone, start it as part of a launch, or record that it serves
description:
  - V(stopped) ends the unit's whole control group and engine processes of O(user) outside it, each by its id, and proves that no
    process is left, that the rank's ports are free and that memory is back. What belongs to another user is named, never ended.
  - V(started) records the launch and starts the unit; a rank that already runs in that launch is left alone, one that runs in
    another is refused.
  - V(ready) records that the launch serves, and how long its phases took, for the estimate of the next one.
options:
  state: {description: Wanted state., type: str, choices: [started, stopped, ready], required: true}
  user: {description: User that the engine runs as; needed to clean up after it., type: str, default: vllm}
  issue_launch: {description: "With O(state=stopped), also issue a new launch (id and free master port).", type: bool, default: false}
  evidence:
    description: "With O(state=stopped), save what this host knows before anything is stopped; the text is the reason."
    type: str
    default: ""
  launch: {description: "The launch to join, as RV(launch) of the head returned it.", type: dict}
  timeout: {description: Seconds that systemd may take., type: float, default: 120}
author: [gb10-fleet maintainers (@gb10-fleet)]
"""

EXAMPLES = r"""
- name: Stop the rank
  gb10_rank:
    state: stopped

- name: Keep what is known, then stop the rank
  gb10_rank:
    state: stopped
    evidence: the head answers nobody
"""

RETURN = r"""
launch: {description: The launch that was issued or joined., returned: always, type: dict}
evidence: {description: The folder of the evidence on the host; empty when none was asked for., returned: always, type: str}
phases: {description: "With O(state=ready), seconds from the start to each phase.", returned: always, type: dict}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import evidence, rank
from ansible.module_utils.gb10.systemd import SystemdError, show


def argument_spec() -> dict:
    return {
        "state": {"type": "str", "choices": ["started", "stopped", "ready"], "required": True},
        "user": {"type": "str", "default": "vllm"},
        "issue_launch": {"type": "bool", "default": False},
        "evidence": {"type": "str", "default": ""},
        "launch": {"type": "dict"},
        "timeout": {"type": "float", "default": 120},
    }


def stop(params: dict, check: bool, result: dict) -> None:
    if check:
        result["changed"] = show(rank.UNIT)[rank.UNIT].active not in ("inactive", "failed")
    else:
        if params["evidence"]:
            result["evidence"] = str(evidence.save(params["evidence"]))
        result["changed"] = rank.stop(params["user"], params["timeout"])
    if params["issue_launch"]:
        launch = rank.issue_launch(rank.launch().get("master_port", 0))
        # JSON through a template may turn numbers into text; the launch is compared as text and number.
        result["launch"] = dict(launch, master_port=int(launch["master_port"]))


def act(params: dict, check: bool, result: dict) -> None:
    """Fill RESULT as far as it goes: where a stop fails, the evidence's folder is still told."""
    if params["state"] == "stopped":
        stop(params, check, result)
    elif params["state"] == "started":
        result["launch"] = dict(params["launch"], master_port=int(params["launch"]["master_port"]))
        result["changed"] = check or rank.start(result["launch"], params["timeout"])
    elif not check:
        result["phases"] = rank.record_ready()


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(), supports_check_mode=True, required_if=[("state", "started", ["launch"])]
    )
    result: dict = {"changed": False, "launch": {}, "evidence": "", "phases": {}}
    try:
        act(module.params, module.check_mode, result)
    except (rank.RankError, SystemdError, OSError, ValueError) as error:
        module.fail_json(msg=str(error), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
