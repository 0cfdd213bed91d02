#!/usr/bin/python
"""Verify the GPU's clock lock, and on request prove the GPU under load."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gb10_gpu_verify
short_description: Verify that the GPU runs at the clocks it should
description:
  - Without O(prove) asks the driver only. The driver has no read-back of a clock lock, so this finds what contradicts the
    lock (persistence mode off, a clock above the cap) and cannot confirm it.
  - With O(prove) measures a burn, a decode-shaped GEMV and a copy, samples clock and power meanwhile, and judges the GPU
    healthy, latched, throttled or weak, and its memory fast, mixed or slow. Refuses while an engine holds the GPU.
  - Changes nothing, so check mode does the same work.
author: gb10-fleet
options:
  lock:
    description: Wanted clock lock as MIN,MAX in MHz; empty for the driver's default.
    type: str
    default: ''
  prove:
    description: Whether to put the GPU under load.
    type: bool
    default: false
  python:
    description: Python that runs the engine; required with O(prove).
    type: path
  package:
    description: Folder with the project's own package C(gb10) on the host.
    type: path
    default: /usr/local/lib/gb10-fleet
  python_path:
    description: Folders for its C(PYTHONPATH) after O(package); torch is in one of them.
    type: list
    elements: path
    default: []
  burn_seconds: {description: Length of the burn., type: float, default: 10}
  gemv_seconds: {description: Length of the GEMV probe., type: float, default: 20}
  floor_tflops: {description: Least TFLOPS of the burn., type: float, default: 50}
  floor_sm_mhz: {description: Least median SM clock of the burn., type: float, default: 1500}
  gemv_fast: {description: GB/s from which the GEMV counts as fast., type: float, default: 150}
  gemv_slow: {description: GB/s up to which the GEMV counts as slow., type: float, default: 110}
  engine_unit: {description: The engine's unit., type: str, default: vllm-rank.service}
attributes:
  check_mode: {support: full}
"""

EXAMPLES = r"""
- name: Prove the GPU under load
  gb10_gpu_verify:
    lock: 0,2200
    prove: true
    python: /usr/bin/python3
    python_path: [/opt/gb10/current/site]
"""

RETURN = r"""
state: {description: healthy, latched, throttled, weak or unknown., type: str, returned: always}
memory: {description: fast, mixed, slow or unknown., type: str, returned: always}
figures: {description: What was measured., type: dict, returned: always}
faults: {description: What keeps the GPU from serving., type: list, elements: str, returned: always}
notes: {description: What is worth knowing., type: list, elements: str, returned: always}
timeline:
  description: Unix second and GB/s of the GEMV, for laying hosts side by side.
  type: list
  elements: list
  returned: always
"""

import json
import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10.gpu_smi import query_status
from ansible.module_utils.gb10.gpu_verdict import UNKNOWN, Floors, Verdict, check_lock, judge, lock_limits
from ansible.module_utils.gb10.host_command import CommandError, run_bounded
from ansible.module_utils.gb10.host_info import Settings, services

START_S = 120.0  # importing torch takes a minute on a cold page cache


def measure(params: dict) -> dict:
    """What gpu_probe measured in the engine's Python; the object it prints, or one with refused or error."""
    pids = services(Settings(engine_unit=params["engine_unit"]))["engine_pids"].value
    if pids:
        holders = [f"{params['engine_unit']} (pid {pid})" for pid in pids]
        return {"refused": "a process holds the GPU; stop the engine first", "processes": holders}
    probe = Path(params["package"], "gb10/gpu_probe.py")
    if not probe.exists():
        return {"error": f"{probe} is missing; run playbooks/hosts.yml first"}
    os.environ["PYTHONPATH"] = ":".join([params["package"], *params["python_path"]])
    burn, gemv = params["burn_seconds"], params["gemv_seconds"]
    argv = [params["python"], "-m", "gb10.gpu_probe", "--json", f"--burn-seconds={burn}", f"--gemv-seconds={gemv}"]
    try:
        exit_status, output = run_bounded(argv, burn + gemv + START_S)
    except CommandError as error:
        return {"error": str(error)}
    # Warnings of torch may stand before and behind the one object.
    answers = [line for line in output.splitlines() if line.startswith("{")]
    if not answers:
        return {"error": f"{params['python']} ended with {exit_status}: {output.strip()[-500:] or 'no output'}"}
    return json.loads(answers[-1])


def argument_spec() -> dict:
    floors = Floors()
    return {
        "lock": {"type": "str", "default": ""},
        "prove": {"type": "bool", "default": False},
        "python": {"type": "path"},
        "package": {"type": "path", "default": "/usr/local/lib/gb10-fleet"},
        "python_path": {"type": "list", "elements": "path", "default": []},
        "burn_seconds": {"type": "float", "default": 10},
        "gemv_seconds": {"type": "float", "default": 20},
        "floor_tflops": {"type": "float", "default": floors.tflops},
        "floor_sm_mhz": {"type": "float", "default": floors.sm_mhz},
        "gemv_fast": {"type": "float", "default": floors.gemv_fast},
        "gemv_slow": {"type": "float", "default": floors.gemv_slow},
        "engine_unit": {"type": "str", "default": "vllm-rank.service"},
    }


def main() -> None:
    module = AnsibleModule(argument_spec(), supports_check_mode=True, required_if=[("prove", True, ["python"])])
    params = module.params
    try:
        lock_limits(params["lock"])
    except ValueError as error:
        module.fail_json(msg=str(error))
    verdict = Verdict(UNKNOWN, UNKNOWN, {})
    faults = check_lock(query_status(10.0), params["lock"])
    if params["prove"]:
        floors = Floors(params["floor_tflops"], params["floor_sm_mhz"], params["gemv_fast"], params["gemv_slow"])
        verdict = judge(measure(params), floors, params["lock"])
        faults += [fault for fault in verdict.faults if fault not in faults]
    result = {**vars(verdict), "faults": faults, "changed": False}
    if faults:
        module.fail_json(msg="\n".join(faults), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
