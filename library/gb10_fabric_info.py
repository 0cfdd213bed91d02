#!/usr/bin/python
"""Read everything about one host's side of the fabric."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gb10_fabric_info
short_description: Read one host's side of the fabric
description:
  - Finds the interface that carries the fabric address, its RDMA port and GID index from the kernel's own table, link
    state, rate, MTUs, and which configuration file gives address and MTU at the next boot.
  - Sends no packet. What is wrong is returned as C(fault); the module itself does not fail for it.
author: gb10-fleet
options:
  address:
    description: The host's fabric address without prefix length.
    type: str
    required: true
  subnet:
    description: The fabric, in CIDR form.
    type: str
    required: true
  require_rdma:
    description: Whether a host without a usable RDMA port is faulty.
    type: bool
    default: true
  hca:
    description: RDMA device to use, as C(rocep1s0f0) or C(rocep1s0f0:1). Empty looks it up.
    type: str
    default: ""
  gid_index:
    description: GID index to use, checked against the table. -1 looks it up.
    type: int
    default: -1
  sysfs:
    description: Root of sysfs; another one for hosts that stand in for a GB10.
    type: path
    default: /sys
attributes:
  check_mode: {support: full}
"""

EXAMPLES = r"""
- name: Read the fabric's links
  gb10_fabric_info:
    address: "{{ fabric_address }}"
    subnet: "{{ fabric_subnet }}"
  register: fabric_info
"""

RETURN = r"""
fabric:
  description: What was found.
  returned: always
  type: dict
  sample:
    address: 192.168.192.1
    interface: enp1s0f0np0
    mtu: 9000
    rdma_mtu: 4096
    rdma: {hca: rocep1s0f0, port: 1, gid_index: 3, state: ACTIVE, phys_state: LinkUp, rate_gbps: 200}
    persistence: {file: /etc/netplan -> run/systemd/network/10-netplan-enp1s0f0np0.network, mtu: 9000, volatile: []}
    fault: ""
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import fabric_link


def argument_spec() -> dict:
    return {
        "address": {"type": "str", "required": True},
        "subnet": {"type": "str", "required": True},
        "require_rdma": {"type": "bool", "default": True},
        "hca": {"type": "str", "default": ""},
        "gid_index": {"type": "int", "default": -1},
        "sysfs": {"type": "path", "default": "/sys"},
    }


def main() -> None:
    module = AnsibleModule(argument_spec(), supports_check_mode=True)
    wanted = module.params
    found = fabric_link.facts(
        wanted["address"],
        wanted["subnet"],
        require_rdma=wanted["require_rdma"],
        hca=wanted["hca"] or None,
        gid_index=wanted["gid_index"] if wanted["gid_index"] >= 0 else None,
        sysfs=Path(wanted["sysfs"]),
    )
    module.exit_json(changed=False, fabric=found)


if __name__ == "__main__":
    main()
