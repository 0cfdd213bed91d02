#!/usr/bin/python
"""Measure RDMA bandwidth and latency between this host and every other."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gb10_fabric_perftest
short_description: Measure RDMA bandwidth and latency to every other host
description:
  - Runs C(ib_write_bw) and C(ib_write_lat) with every other host, both ways, with the GID index looked up. All hosts
    must run it at the same time, and nothing else should use the fabric.
  - A result is remembered as M(gb10_fabric_path) remembers its own. Check mode measures but remembers nothing.
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
    description: This host's C(fabric) as M(gb10_fabric_info) returned it, with an RDMA port.
    type: dict
    required: true
  conditions:
    description: Anything that, when it changes, makes an earlier result worthless.
    type: raw
    default: []
  force:
    description: Measure again even where a result is remembered.
    type: bool
    default: false
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
    own: "{{ fabric_info.fabric }}"
"""

RETURN = r"""
results:
  description: What this host measured as the writing side.
  returned: success
  type: list
  elements: dict
  sample: [{to: spark-b, gbps: 98.1, latency_us: 2.1}]
bound:
  description: What the slower of link and PCIe slot carries, in Gbit/s, and which of the two that is.
  returned: success
  type: list
  sample: [126.0, PCIe 32.0 GT/s x4]
remembered:
  description: Whether this is an earlier result.
  returned: success
  type: bool
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import fabric_path, fabric_perftest
from ansible.module_utils.gb10.files import sha256_document


def argument_spec() -> dict:
    return {
        "host": {"type": "str", "required": True},
        "addresses": {"type": "dict", "required": True},
        "own": {"type": "dict", "required": True},
        "conditions": {"type": "raw", "default": []},
        "force": {"type": "bool", "default": False},
        "seconds": {"type": "int", "default": 2},
        "wait": {"type": "float", "default": 60},
        "memory": {"type": "path", "default": "/var/lib/gb10/fabric-perftest.json"},
    }


def main() -> None:
    module = AnsibleModule(argument_spec(), supports_check_mode=True)
    params, memory = module.params, Path(module.params["memory"])
    rdma = params["own"]["rdma"]
    bound = fabric_perftest.read_bound(rdma["hca"], float(rdma["rate_gbps"]))
    conditions = sha256_document([params["conditions"], params["addresses"], params["seconds"]])
    known = None if params["force"] else fabric_path.recall(memory, conditions)
    if known is not None:
        module.exit_json(changed=False, results=known, bound=bound, remembered=True)
    try:
        results = fabric_perftest.measure(
            params["host"], params["addresses"], rdma, seconds=params["seconds"], wait_s=params["wait"]
        )
    except fabric_perftest.PerftestError as error:
        module.fail_json(msg=str(error))
    if not module.check_mode:
        fabric_path.remember(memory, conditions, results)
    module.exit_json(changed=True, results=results, bound=bound, remembered=False)


if __name__ == "__main__":
    main()
