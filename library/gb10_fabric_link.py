#!/usr/bin/python
"""Read one host's side of the fabric, and configure it where that is wanted."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gb10_fabric_link
short_description: Read, and where wanted configure, one host's side of the fabric
description:
  - Finds the interface that carries the fabric address, its RDMA port and GID index from the kernel's own table, link
    state, rate, MTUs, which configuration file gives address and MTU at the next boot, and what earlier tests of the
    fabric gave.
  - Sends no packet. What is wrong with the link is returned as C(fault); the module itself does not fail for it.
  - With O(configure) it first gives the interface address and MTU, persistently, in a netplan file where the host uses
    netplan, else in one for systemd-networkd. Nothing is written where another file already gives both.
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
  configure:
    description: Whether address and MTU are written to the network configuration.
    type: bool
    default: false
  mtu:
    description: Ethernet MTU in bytes, for O(configure).
    type: int
    default: 9000
  interface:
    description: The interface to configure, for hosts on which the only cabled RoCE port does not tell. Empty looks it up.
    type: str
    default: ""
  busy_units:
    description: Units that must not run while the interface is reconfigured. Those that run are returned.
    type: list
    elements: str
    default: [vllm-rank.service]
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
  memory:
    description: Folder with the results of earlier tests.
    type: path
    default: /var/lib/gb10
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
"""

EXAMPLES = r"""
- name: Read the fabric's links
  gb10_fabric_link:
    address: "{{ fabric_address }}"
    subnet: "{{ fabric_subnet }}"
  register: fabric_link
"""

RETURN = r"""
fabric:
  description: What was found.
  returned: success
  type: dict
  sample:
    address: 192.168.192.1
    interface: enp1s0f0np0
    mtu: 9000
    rdma_mtu: 4096
    rdma: {hca: rocep1s0f0, port: 1, gid_index: 3, state: ACTIVE, phys_state: LinkUp, rate_gbps: 200}
    persistence: {file: /etc/netplan -> run/systemd/network/10-netplan-enp1s0f0np0.network, mtu: 9000, volatile: []}
    busy: []
    remembered: {path: null, perftest: null}
    fault: ""
"""

import ipaddress
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import fabric_config, fabric_link, fabric_path, roce


def argument_spec() -> dict:
    return {
        "address": {"type": "str", "required": True},
        "subnet": {"type": "str", "required": True},
        "configure": {"type": "bool", "default": False},
        "mtu": {"type": "int", "default": 9000},
        "interface": {"type": "str", "default": ""},
        "busy_units": {"type": "list", "elements": "str", "default": ["vllm-rank.service"]},
        "require_rdma": {"type": "bool", "default": True},
        "hca": {"type": "str", "default": ""},
        "gid_index": {"type": "int", "default": -1},
        "sysfs": {"type": "path", "default": "/sys"},
        "memory": {"type": "path", "default": "/var/lib/gb10"},
    }


def configure(wanted: dict, check_mode: bool) -> tuple[dict, dict | None]:
    """Give the interface address and MTU; returns ``changed`` and ``diff``, and the persistence that is still true."""
    address = f"{wanted['address']}/{ipaddress.ip_network(wanted['subnet']).prefixlen}"
    ip = ipaddress.ip_address(wanted["address"])
    netdev = fabric_config.choose_interface(roce.read_netdevs(), roce.read_ports(), ip, wanted["interface"])
    persistence = fabric_link.persistence(netdev, ip)
    plan = fabric_config.plan(netdev, address, wanted["mtu"], persistence)
    file = Path("/") / plan.file
    before = {
        "file": file.read_text() if plan.file and file.exists() else "",
        "mtu": netdev.mtu,
        "addresses": sorted(map(str, netdev.addresses)),
    }
    after = {
        "file": plan.text if plan.file else "",
        "mtu": wanted["mtu"],
        "addresses": sorted({*before["addresses"], address}),
    }
    if before != after and not check_mode:
        fabric_config.carry_out(plan, netdev.name, address, wanted["mtu"], busy_units=wanted["busy_units"])
    changed = {"changed": before != after, "diff": {"before": before, "after": after}}
    return changed, None if before != after else persistence


def main() -> None:
    module = AnsibleModule(argument_spec(), supports_check_mode=True)
    wanted = module.params
    changed, persistence = {"changed": False}, None
    if wanted["configure"]:
        try:
            changed, persistence = configure(wanted, module.check_mode)
        except (fabric_config.ConfigError, roce.RoceError) as error:
            module.fail_json(msg=str(error))
    found = fabric_link.facts(
        wanted["address"],
        wanted["subnet"],
        require_rdma=wanted["require_rdma"],
        hca=wanted["hca"] or None,
        gid_index=wanted["gid_index"] if wanted["gid_index"] >= 0 else None,
        sysfs=Path(wanted["sysfs"]),
        known_persistence=persistence,
    )
    found["busy"] = fabric_config.busy(wanted["busy_units"])
    memory = Path(wanted["memory"])
    found["remembered"] = {test: fabric_path.recall(memory / f"fabric-{test}.json") for test in fabric_path.TESTS}
    module.exit_json(**changed, fabric=found)


if __name__ == "__main__":
    main()
