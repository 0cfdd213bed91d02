#!/usr/bin/python
"""Test the paths from one host to all others."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gb10_fabric_path
short_description: Test the paths from one host to all others
description:
  - Pings every peer at the full MTU with fragmentation forbidden, connects to an ephemeral TCP port of each, and looks
    for a second owner of every address. All hosts must run it at the same time.
  - A good result is remembered under O(key), for M(gb10_fabric_link) to return. Check mode tests but remembers nothing.
author: gb10-fleet
options:
  own:
    description: This host's C(fabric) as M(gb10_fabric_link) returned it.
    type: dict
    required: true
  peers:
    description: The other hosts.
    type: list
    elements: dict
    required: true
    options:
      host: {description: Inventory name., type: str, required: true}
      address: {description: Fabric address., type: str, required: true}
      mtu: {description: Ethernet MTU., type: int, required: true}
      mac: {description: MAC address of the fabric interface., type: str, required: true}
  key:
    description: What a remembered result stands for.
    type: str
    required: true
  wait:
    description: Seconds that the peers' own calls may take to begin.
    type: float
    default: 20
  memory:
    description: Where the result is kept.
    type: path
    default: /var/lib/gb10/fabric-path.json
attributes:
  check_mode: {support: full}
"""

EXAMPLES = r"""
- name: Prove the paths between all hosts
  gb10_fabric_path:
    own: "{{ fabric_link.fabric }}"
    peers: "{{ fabric_hosts | gb10_fabric_peers(inventory_hostname) }}"
    key: "{{ fabric_hosts | gb10_fabric_key }}"
"""

RETURN = r"""
paths:
  description: One entry for each peer; one more, with an empty host, where another machine has this host's address.
  returned: success
  type: list
  elements: dict
  sample:
    - host: spark-b
      address: 192.168.192.2
      bytes: 9000
      small: 3
      full: 3
      detail: ""
      tcp: open
      answered_by: ["02:00:00:00:0a:02"]
      route: enp1s0f0np0
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import fabric_path


def argument_spec() -> dict:
    text = {"type": "str", "required": True}
    peer = {"host": text, "address": text, "mtu": {"type": "int", "required": True}}
    return {
        "own": {"type": "dict", "required": True},
        "peers": {
            "type": "list",
            "elements": "dict",
            "required": True,
            "options": peer | {"mac": text},
        },
        "key": text,
        "wait": {"type": "float", "default": 20},
        "memory": {"type": "path", "default": "/var/lib/gb10/fabric-path.json"},
    }


def main() -> None:
    module = AnsibleModule(argument_spec(), supports_check_mode=True)
    own, memory = module.params["own"], Path(module.params["memory"])
    peers = [fabric_path.Peer(**peer) for peer in module.params["peers"]]
    try:
        outcomes = fabric_path.as_dicts(
            fabric_path.probe_paths(
                own["address"], own["interface"], own["mac"], int(own["mtu"]), peers, wait_s=module.params["wait"]
            )
        )
    except fabric_path.PathError as error:
        module.fail_json(msg=str(error))
    keep = fabric_path.good(outcomes, peers)
    if not module.check_mode:
        if keep:
            fabric_path.remember(memory, module.params["key"], outcomes)
        else:
            # What was proven earlier is no longer true.
            memory.unlink(missing_ok=True)
    module.exit_json(changed=keep, paths=outcomes)


if __name__ == "__main__":
    main()
