#!/usr/bin/python
"""Run this host's part of the all-reduce probe."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gb10_fabric_allreduce
short_description: Run this host's part of the all-reduce probe
description:
  - Runs the probe with the engine, the variables and the fabric lookup of the rank that is installed on this host, and
    returns figures and the transport that NCCL's log names. All hosts must run it at the same time, without an engine.
  - The probe's own failure is returned in the result, so that all ranks are judged together.
author: gb10-fleet
options:
  configuration:
    description: The rank that is wanted of this host, as M(gb10_rank) wrote it.
    type: path
    default: /etc/gb10/rank.json
  package:
    description: Folder with the installed C(gb10) package.
    type: path
    default: /usr/local/lib/gb10-fleet
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
    world: 4
    master_address: 192.168.192.1
"""

RETURN = r"""
result:
  description: C(sizes), C(step_ms), C(wrong_sums), C(backend), C(transport) and more, or C(error), or C(skipped).
  returned: always
  type: dict
hca:
  description: The RDMA device and port that NCCL was told to use, empty without RDMA.
  returned: always
  type: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import allreduce, roce
from ansible.module_utils.gb10.files import read_json


def argument_spec() -> dict:
    return {
        "configuration": {"type": "path", "default": "/etc/gb10/rank.json"},
        "package": {"type": "path", "default": "/usr/local/lib/gb10-fleet"},
        "world": {"type": "int", "required": True},
        "master_address": {"type": "str", "required": True},
        "master_port": {"type": "int", "default": 47620},
        "iterations": {"type": "int", "default": 200},
        "timeout": {"type": "float", "default": 180},
    }


def measure(params: dict, rank: dict) -> tuple[dict, str]:
    """The probe's result and the RDMA port that NCCL was told to use."""
    wanted = rank["fabric"]
    fabric = roce.resolve(
        wanted["address"],
        require_rdma=wanted["require_rdma"],
        hca=wanted["hca"] or None,
        gid_index=wanted["gid_index"],
    )
    environment = {name: str(value) for name, value in rank["environment"].items()} | fabric.environment
    environment["PYTHONPATH"] = ":".join([params["package"], *rank["python_path"]])
    result = allreduce.run_probe(
        rank["python"],
        rank=int(rank["rank"]),
        world=params["world"],
        master=(params["master_address"], params["master_port"]),
        iterations=params["iterations"],
        timeout_s=params["timeout"],
        environment=environment,
    )
    return result, fabric.environment.get("NCCL_IB_HCA", "").lstrip("=")


def main() -> None:
    module = AnsibleModule(argument_spec(), supports_check_mode=True)
    rank = read_json(Path(module.params["configuration"]))
    hca = ""
    if not rank:
        result = {"skipped": "no rank is installed: run playbooks/serve.yml first"}
    elif rank.get("container"):
        result = {"skipped": "the engine is a container image, and the probe runs only with one on the host"}
    else:
        try:
            result, hca = measure(module.params, rank)
        except (roce.RoceError, allreduce.AllreduceError) as error:
            result = {"error": str(error)}
    module.exit_json(changed=False, result=result, hca=hca)


if __name__ == "__main__":
    main()
