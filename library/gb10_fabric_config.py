#!/usr/bin/python
"""Give the fabric interface its address and MTU, persistently."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gb10_fabric_config
short_description: Give the fabric interface its address and MTU, persistently
description:
  - Writes a netplan file where the host uses netplan, else a file for systemd-networkd, applies it and waits until the
    interface has both.
  - Changes nothing where another configuration file already gives both and both are live.
author: gb10-fleet
options:
  address:
    description: The host's fabric address without prefix length.
    type: str
    required: true
  subnet:
    description: The fabric, in CIDR form; gives the prefix length.
    type: str
    required: true
  mtu:
    description: Ethernet MTU in bytes.
    type: int
    required: true
  interface:
    description: The interface, for hosts on which the only cabled RoCE port does not tell. Empty looks it up.
    type: str
    default: ""
  busy_units:
    description: Units that must not run while the interface is reconfigured.
    type: list
    elements: str
    default: [vllm-rank.service]
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
"""

EXAMPLES = r"""
- name: Configure the fabric interface
  gb10_fabric_config:
    address: 192.168.192.1
    subnet: 192.168.192.0/24
    mtu: 9000
"""

RETURN = r"""
interface:
  description: The interface that was chosen.
  returned: success
  type: str
file:
  description: The file that was written, empty where none had to be.
  returned: success
  type: str
"""

import ipaddress
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import fabric_config, fabric_link, roce


def argument_spec() -> dict:
    return {
        "address": {"type": "str", "required": True},
        "subnet": {"type": "str", "required": True},
        "mtu": {"type": "int", "required": True},
        "interface": {"type": "str", "default": ""},
        "busy_units": {"type": "list", "elements": "str", "default": ["vllm-rank.service"]},
    }


def main() -> None:
    module = AnsibleModule(argument_spec(), supports_check_mode=True)
    wanted = module.params
    address = f"{wanted['address']}/{ipaddress.ip_network(wanted['subnet']).prefixlen}"
    try:
        ip = ipaddress.ip_address(wanted["address"])
        netdev = fabric_config.choose_interface(roce.read_netdevs(), roce.read_ports(), ip, wanted["interface"])
        plan = fabric_config.plan(netdev, address, wanted["mtu"], fabric_link.persistence(netdev, ip))
        file = Path("/") / plan.file
        text = file.read_text() if plan.file and file.exists() else ""
        before = {"file": text if plan.file else "", "mtu": netdev.mtu, "addresses": sorted(map(str, netdev.addresses))}
        after = {
            "file": plan.text if plan.file else "",
            "mtu": wanted["mtu"],
            "addresses": sorted({*before["addresses"], address}),
        }
        if before != after and not module.check_mode:
            fabric_config.carry_out(plan, netdev.name, address, wanted["mtu"], busy_units=wanted["busy_units"])
    except (fabric_config.ConfigError, roce.RoceError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=before != after,
        interface=netdev.name,
        file=str(file) if plan.file else "",
        diff={"before": before, "after": after},
    )


if __name__ == "__main__":
    main()
