#!/usr/bin/python
"""Open a host to its fabric, its API's clients and ssh, through ufw."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gb10_firewall
short_description: Open a host to its fabric, its API's clients and ssh, through ufw
description:
  - Reads ufw's own list of rules and adds or deletes only those of this project, which carry a comment beginning with C(gb10:).
    The operator's rules stay.
  - The way in over ssh is opened before anything is closed, for every port of the host's ssh server and for the one that this
    run came through. A run that came from an address that O(ssh_from) leaves out is refused.
  - Before the firewall is switched on a timer is armed that switches it off again. O(state=confirmed) calls it off, over a
    connection that was made after that.
options:
  state:
    description: V(present) filters, V(absent) gives back what was there before, V(confirmed) calls the timer off.
    type: str
    choices: [present, absent, confirmed]
    default: present
  fabric:
    description: Networks between the hosts, in CIDR form; open among themselves for every protocol and port.
    type: list
    elements: str
    default: []
  api_ports:
    description: TCP ports of the API.
    type: list
    elements: int
    default: []
  api_clients:
    description: Addresses or networks that may use the API, or C(any).
    type: list
    elements: str
    default: []
  ssh_from:
    description: Addresses or networks that may log in, or C(any).
    type: list
    elements: str
    default: [any]
  rollback:
    description: Seconds after which the firewall is switched off again unless confirmed.
    type: int
    default: 90
author: [gb10-fleet maintainers (@gb10-fleet)]
"""

EXAMPLES = r"""
- name: Let the fabric, one office and ssh in
  gb10_firewall:
    fabric: [198.51.100.0/24]
    api_ports: [8443]
    api_clients: [192.0.2.0/24]
"""

RETURN = r"""
steps:
  description: Commands that were run, or would be run in check mode.
  returned: always
  type: list
  elements: str
others:
  description: The operator's own rules, which stay.
  returned: always
  type: list
  elements: str
rollback:
  description: Whether a timer is armed that has to be called off with state=confirmed.
  returned: always
  type: bool
"""

import shlex

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import bundle, firewall
from ansible.module_utils.gb10.bundle import BundleError
from ansible.module_utils.gb10.firewall import FirewallError


def argument_spec() -> dict:
    words = {"type": "list", "elements": "str"}
    return {
        "state": {"type": "str", "choices": ["present", "absent", "confirmed"], "default": "present"},
        "fabric": words | {"default": []},
        "api_ports": {"type": "list", "elements": "int", "default": []},
        "api_clients": words | {"default": []},
        "ssh_from": words | {"default": ["any"]},
        "rollback": {"type": "int", "default": 90},
    }


def converge(params: dict, check: bool) -> dict:
    present = params["state"] == "present"
    packages = bundle.plan({"packages": ["ufw"] if present else []})
    if not check:
        bundle.apply(packages)
    state = firewall.read_state()
    if present:
        here = firewall.connection()
        firewall.check_ssh_source(here, params["ssh_from"])
        rules = firewall.wanted_rules(
            params["fabric"], firewall.ssh_ports(here), params["ssh_from"], params["api_ports"], params["api_clients"]
        )
        steps = firewall.plan(state, rules, params["rollback"])
        after = firewall.State(True, "deny", True, [rule.words for rule in rules])
    else:
        steps = firewall.plan_absent(state)
        before = state.record or {"active": state.active, "input_policy": state.input_policy}
        after = firewall.State(before["active"], before["input_policy"], state.ipv6)
    changed = packages.changed or bool(steps)
    if changed and not check:
        firewall.apply(state, steps, present=present)
    return {
        "changed": changed,
        "steps": [shlex.join(step) for step in steps],
        "others": state.others,
        "rollback": present and not check and firewall.armed(),
        "diff": {"before": state.text, "after": after.text if changed else state.text},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    try:
        if module.params["state"] == "confirmed":
            called_off = False if module.check_mode else firewall.confirm()
            module.exit_json(changed=False, steps=[], others=[], rollback=False, called_off=called_off)
        module.exit_json(**converge(module.params, module.check_mode))
    except (FirewallError, BundleError, OSError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
