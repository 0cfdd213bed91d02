#!/usr/bin/python
"""Stop this host's rank, or start it as part of a launch."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gb10_rank
short_description: Stop this host's rank and prove it gone, or start it as part of a launch
description:
  - V(stopped) ends the unit's whole control group, proves that no process of it is left and removes what it left in shared memory.
  - V(started) records the launch and starts the unit; a rank that already runs in that launch is left alone, one that runs in
    another is refused.
options:
  state: {description: Wanted state., type: str, choices: [started, stopped], required: true}
  user: {description: User that the engine runs as; needed to clean up after it., type: str, default: vllm}
  issue_launch: {description: "With O(state=stopped), also issue a new launch (id and free master port).", type: bool, default: false}
  launch: {description: "The launch to join, as RV(launch) of the head returned it.", type: dict}
  timeout: {description: Seconds that systemd may take., type: float, default: 120}
author: [gb10-fleet maintainers (@gb10-fleet)]
"""

EXAMPLES = r"""
- name: Stop the rank
  gb10_rank:
    state: stopped
"""

RETURN = r"""
launch: {description: The launch that was issued or joined., returned: always, type: dict}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import rank
from ansible.module_utils.gb10.systemd import SystemdError, show


def argument_spec() -> dict:
    return {
        "state": {"type": "str", "choices": ["started", "stopped"], "required": True},
        "user": {"type": "str", "default": "vllm"},
        "issue_launch": {"type": "bool", "default": False},
        "launch": {"type": "dict"},
        "timeout": {"type": "float", "default": 120},
    }


def act(params: dict, check: bool) -> dict:
    if params["state"] == "started":
        if check:
            return {"changed": True, "launch": params["launch"]}
        return {"changed": rank.start(params["launch"], params["timeout"]), "launch": params["launch"]}
    if check:
        changed = show(rank.UNIT)[rank.UNIT].active not in ("inactive", "failed")
    else:
        changed = rank.stop(params["user"], params["timeout"])
    launch = rank.issue_launch(rank.launch().get("master_port", 0)) if params["issue_launch"] else {}
    return {"changed": changed, "launch": launch}


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(), supports_check_mode=True, required_if=[("state", "started", ["launch"])]
    )
    try:
        result = act(module.params, module.check_mode)
    except (rank.RankError, SystemdError, OSError, ValueError) as error:
        module.fail_json(msg=str(error), launch={})
    if result["launch"]:
        # JSON through a template may turn numbers into text; the launch is compared as text and number.
        result["launch"] = dict(result["launch"], master_port=int(result["launch"]["master_port"]))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
