#!/usr/bin/python
"""Gather the facts of one GB10 host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gb10_host_info
short_description: Gather what has to be equal, or right, on a GB10 host
description:
  - Gathers operating system, kernel, driver, GPU, firmware, memory, container and NCCL versions, identities, time,
    NFS mounts and whatever competes for the GPU, in one call.
  - Every fact is a dictionary with C(value), C(source) and, where the value is null, C(unknown) with the reason.
    A tool that is missing, fails or hangs costs its own facts and nothing else.
  - Never reads a file system's statistics. NFS mounts are probed by reading one byte of one file within O(timeout).
author: gb10-fleet
options:
  timeout:
    description: Seconds to wait for each tool and each NFS mount. All of them are waited for at the same time.
    type: float
    default: 10
  roots:
    description:
      - Folders in which files such as C(/proc/meminfo) are looked for. The first that has the file wins.
      - For hosts that stand in for a GB10; a real host needs C(/) alone.
    type: list
    elements: path
    default: [/]
  engine_unit:
    description: The unit whose processes may hold the GPU.
    type: str
    default: vllm-rank.service
  competing_services:
    description: Names of services, without suffix, that compete for the GPU when they run.
    type: list
    elements: str
    default: [ollama, vllm, sglang, llama-server, llama-swap, localai, comfyui, tritonserver, text-generation-inference]
attributes:
  check_mode: {support: full}
"""

EXAMPLES = r"""
- name: Gather the GB10 facts
  gb10_host_info:

- name: Show the available memory
  ansible.builtin.debug:
    msg: "{{ ansible_facts['gb10_host']['mem_available_kib']['value'] }} KiB"
"""

RETURN = r"""
ansible_facts:
  description: The facts, under C(gb10_host).
  returned: always
  type: dict
  sample:
    gb10_host:
      kernel_release: {value: 6.17.0-1032-nvidia, source: /proc/sys/kernel/osrelease}
      firmware_ec: {value: null, source: /sys/firmware/efi/esrt, unknown: not in the ESRT}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10.host_info import COMPETING_SERVICES, ENGINE_UNIT, Settings, gather


def argument_spec() -> dict:
    return {
        "timeout": {"type": "float", "default": 10},
        "roots": {"type": "list", "elements": "path", "default": ["/"]},
        "engine_unit": {"type": "str", "default": ENGINE_UNIT},
        "competing_services": {"type": "list", "elements": "str", "default": list(COMPETING_SERVICES)},
    }


def main() -> None:
    module = AnsibleModule(argument_spec(), supports_check_mode=True)
    settings = Settings(
        roots=tuple(Path(root) for root in module.params["roots"]),
        timeout_s=module.params["timeout"],
        engine_unit=module.params["engine_unit"],
        competing_services=module.params["competing_services"],
    )
    module.exit_json(changed=False, ansible_facts={"gb10_host": gather(settings)})


if __name__ == "__main__":
    main()
