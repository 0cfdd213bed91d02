#!/usr/bin/python
"""Run this host's part of the all-reduce probe."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gb10_fabric_allreduce
short_description: Run this host's part of the all-reduce probe
description:
  - Runs the probe with the engine's own Python, torch and NCCL, in the fabric environment that a rank would get, and
    returns figures and the transport that NCCL's log names. All hosts must run it at the same time, without an engine.
  - The probe's own failure is returned in the result, so that all ranks are judged together.
author: gb10-fleet
options:
  python:
    description: The engine's Python.
    type: path
    required: true
  python_path:
    description: Folders for C(PYTHONPATH), the installed C(gb10) package's among them.
    type: list
    elements: path
    default: [/usr/local/lib/gb10-fleet]
  rank:
    description: This host's rank.
    type: int
    required: true
  world:
    description: Number of ranks.
    type: int
    required: true
  master_address:
    description: Fabric address of rank 0.
    type: str
    required: true
  master_port:
    description: Port of the rendezvous on rank 0.
    type: int
    default: 47620
  address:
    description: This host's fabric address.
    type: str
    required: true
  require_rdma:
    description: Whether a host without a usable RDMA port is refused.
    type: bool
    default: true
  hca:
    description: RDMA device, empty looks it up.
    type: str
    default: ""
  gid_index:
    description: GID index, -1 looks it up.
    type: int
    default: -1
  environment:
    description: More variables, as the profile gives them to a rank.
    type: dict
    default: {}
  iterations:
    description: Operations of each size.
    type: int
    default: 200
  timeout:
    description: Seconds for the whole probe.
    type: float
    default: 180
attributes:
  check_mode: {support: full}
"""

EXAMPLES = r"""
- name: Measure all-reduces over all ranks
  gb10_fabric_allreduce:
    python: /opt/gb10/current/bin/python
    rank: "{{ rank }}"
    world: 4
    master_address: 192.168.192.1
    address: "{{ fabric_address }}"
"""

RETURN = r"""
result:
  description: C(sizes), C(step_ms), C(wrong_sums), C(backend), C(transport) and more, or C(error).
  returned: always
  type: dict
hca:
  description: The RDMA device and port that NCCL was told to use, empty without RDMA.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import allreduce, roce


def argument_spec() -> dict:
    return {
        "python": {"type": "path", "required": True},
        "python_path": {"type": "list", "elements": "path", "default": ["/usr/local/lib/gb10-fleet"]},
        "rank": {"type": "int", "required": True},
        "world": {"type": "int", "required": True},
        "master_address": {"type": "str", "required": True},
        "master_port": {"type": "int", "default": 47620},
        "address": {"type": "str", "required": True},
        "require_rdma": {"type": "bool", "default": True},
        "hca": {"type": "str", "default": ""},
        "gid_index": {"type": "int", "default": -1},
        "environment": {"type": "dict", "default": {}},
        "iterations": {"type": "int", "default": 200},
        "timeout": {"type": "float", "default": 180},
    }


def main() -> None:
    module = AnsibleModule(argument_spec(), supports_check_mode=True)
    params = module.params
    try:
        fabric = roce.resolve(
            params["address"],
            require_rdma=params["require_rdma"],
            hca=params["hca"] or None,
            gid_index=params["gid_index"] if params["gid_index"] >= 0 else None,
        )
        environment = {name: str(value) for name, value in params["environment"].items()} | fabric.environment
        environment["PYTHONPATH"] = ":".join(params["python_path"])
        result = allreduce.run_probe(
            params["python"],
            rank=params["rank"],
            world=params["world"],
            master=(params["master_address"], params["master_port"]),
            iterations=params["iterations"],
            timeout_s=params["timeout"],
            environment=environment,
        )
        hca = fabric.environment.get("NCCL_IB_HCA", "").lstrip("=")
    except (roce.RoceError, allreduce.AllreduceError) as error:
        result, hca = {"error": str(error)}, ""
    module.exit_json(changed=False, result=result, hca=hca)


if __name__ == "__main__":
    main()
