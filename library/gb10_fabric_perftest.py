#!/usr/bin/python
"""Measure RDMA bandwidth and latency between this host and every other."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gb10_fabric_perftest
short_description: Measure RDMA bandwidth and latency to every other host
description:
  - Runs C(ib_write_bw) and C(ib_write_lat) with every other host, both ways, with the GID index looked up. All hosts
    must run it at the same time, and nothing else should use the fabric.
  - A result is remembered under O(key), for M(gb10_fabric_link) to return. Check mode measures but remembers nothing.
author: gb10-fleet
options:
  host:
    description: This host's name in O(addresses).
    type: str
    required: true
  addresses:
    description: Fabric address of every host, this one included. Must be the same on all hosts.
    type: dict
    required: true
  own:
    description: This host's C(fabric) as M(gb10_fabric_link) returned it, with an RDMA port.
    type: dict
    required: true
  key:
    description: What a remembered result stands for.
    type: str
    required: true
  seconds:
    description: Length of one bandwidth test.
    type: int
    default: 2
  wait:
    description: Seconds that one test may wait for its other side.
    type: float
    default: 60
  memory:
    description: Where the result is kept.
    type: path
    default: /var/lib/gb10/fabric-perftest.json
attributes:
  check_mode: {support: full}
"""

EXAMPLES = r"""
- name: Measure RDMA between all hosts
  gb10_fabric_perftest:
    host: spark-a
    addresses: {spark-a: 192.168.192.1, spark-b: 192.168.192.2}
    own: "{{ fabric_link.fabric }}"
    key: "{{ fabric_hosts | gb10_fabric_key }}"
"""

RETURN = r"""
measured:
  description:
    - C(results), what this host measured as the writing side, and C(bound), what the slower of link and PCIe slot carries
      in Gbit/s and which of the two that is.
  returned: success
  type: dict
  sample:
    results: [{to: spark-b, gbps: 98.1, latency_us: 2.1}]
    bound: [126.0, PCIe 32.0 GT/s x4]
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import fabric_path, fabric_perftest


def argument_spec() -> dict:
    return {
        "host": {"type": "str", "required": True},
        "addresses": {"type": "dict", "required": True},
        "own": {"type": "dict", "required": True},
        "key": {"type": "str", "required": True},
        "seconds": {"type": "int", "default": 2},
        "wait": {"type": "float", "default": 60},
        "memory": {"type": "path", "default": "/var/lib/gb10/fabric-perftest.json"},
    }


def main() -> None:
    module = AnsibleModule(argument_spec(), supports_check_mode=True)
    params, memory = module.params, Path(module.params["memory"])
    rdma = params["own"]["rdma"]
    bound = fabric_perftest.read_bound(rdma["hca"], float(rdma["rate_gbps"]))
    try:
        results = fabric_perftest.measure(
            params["host"], params["addresses"], rdma, seconds=params["seconds"], wait_s=params["wait"]
        )
    except fabric_perftest.PerftestError as error:
        module.fail_json(msg=str(error))
    measured = {"results": results, "bound": bound}
    if not module.check_mode:
        fabric_path.remember(memory, params["key"], measured)
    module.exit_json(changed=True, measured=measured)


if __name__ == "__main__":
    main()
