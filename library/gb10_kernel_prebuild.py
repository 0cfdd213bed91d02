#!/usr/bin/python
"""Compile the engine's kernels before it serves."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gb10_kernel_prebuild
short_description: Compile the engine's kernels while nothing is served, and offer them to the release
description:
  - Builds the FlashInfer modules that the release lacks, two compilers at a time, and runs DeepGEMM's shapes once.
  - From then on FlashInfer refuses to compile a module that was not built.
  - Refuses while a unit serves, below the memory floor and on a network file system; says so on a host without a GPU.
options:
  release: {description: Link to the current release., type: path, required: true}
  python: {description: Interpreter that runs the engine., type: path, required: true}
  python_path: {description: The engine's module path., type: list, elements: path, required: true}
  cache: {description: Folder of the engine's compilers on this host's disk., type: path, required: true}
  environment: {description: The engine's environment., type: dict, default: {}}
  user: {description: User that the engine runs as., type: str, required: true}
  modules: {description: "FlashInfer's modules as C(package.module:function).", type: list, elements: str, required: true}
  config: {description: The checkpoint's config.json; DeepGEMM's shapes are read from it., type: path}
  arguments: {description: Arguments of vLLM that size those shapes., type: dict, default: {}}
  floor_gib: {description: Least memory to have available in GiB., type: float, default: 24}
  units: {description: Units that must not run meanwhile., type: list, elements: str, default: [vllm-rank.service]}
  device: {description: File that is there where an NVIDIA GPU is., type: path, default: /dev/nvidiactl}
  progress: {description: File that says how many builds are done., type: path, default: /run/gb10/progress/kernels.json}
author: [gb10-fleet maintainers (@gb10-fleet)]
"""

EXAMPLES = r"""
- name: Build the kernels of the current release
  gb10_kernel_prebuild:
    release: /opt/gb10/current
    python: /usr/bin/python3
    python_path: [/opt/gb10/current/site, /opt/gb10/environments/vllm-0.33.0-0123456789ab]
    cache: /var/cache/gb10/vllm
    environment: {FLASHINFER_CUDA_ARCH_LIST: 12.1a}
    user: vllm
    modules: ["flashinfer.jit.mla:gen_sparse_mla_sm120_module"]
"""

RETURN = r"""
skipped_reason: {description: Why nothing is to be built here; empty otherwise., returned: always, type: str}
kernels: {description: Module to C(built) or C(kept)., returned: when something was built, type: dict}
"""

import json
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import kernel_prebuild, nfs
from ansible.module_utils.gb10.kernel_prebuild import KernelPrebuildError, Wish


def argument_spec() -> dict:
    path = {"type": "path", "required": True}
    return {
        "release": path,
        "python": path,
        "python_path": {"type": "list", "elements": "path", "required": True},
        "cache": path,
        "environment": {"type": "dict", "default": {}},
        "user": {"type": "str", "required": True},
        "modules": {"type": "list", "elements": "str", "required": True},
        "config": {"type": "path"},
        "arguments": {"type": "dict", "default": {}},
        "floor_gib": {"type": "float", "default": kernel_prebuild.FLOOR_GIB},
        "units": {"type": "list", "elements": "str", "default": ["vllm-rank.service"]},
        "device": {"type": "path", "default": "/dev/nvidiactl"},
        "progress": {"type": "path", "default": "/run/gb10/progress/kernels.json"},
    }


def wish(params: dict) -> Wish:
    """What the parameters ask for; reads the checkpoint's configuration where one is given."""
    shapes = None
    if params["config"]:
        config = json.loads(Path(params["config"]).read_text())
        shapes = kernel_prebuild.deep_gemm_shapes(config, params["arguments"])
    return Wish(
        release=Path(params["release"]),
        python=params["python"],
        python_path=tuple(params["python_path"]),
        cache=Path(params["cache"]),
        environment={key: str(value) for key, value in params["environment"].items()},
        user=params["user"],
        modules=tuple(params["modules"]),
        deep_gemm=shapes,
    )


def apply(params: dict, check: bool) -> dict:
    """Build what is missing, or say why there is nothing to build."""
    if not Path(params["device"]).exists():
        return {"changed": False, "skipped_reason": f"no NVIDIA GPU on this host ({params['device']} is missing)"}
    if check and params["config"] and not Path(params["config"]).exists():
        return {"changed": True, "skipped_reason": ""}  # on a fresh host, check mode has mounted nothing
    wanted = wish(params)
    if kernel_prebuild.standing(wanted):
        return {"changed": False, "skipped_reason": ""}
    mounts = nfs.parse_mounts(nfs.MOUNTS.read_text())
    meminfo = Path("/proc/meminfo").read_text()
    units = kernel_prebuild.active(params["units"])
    if found := kernel_prebuild.refusals(meminfo, params["floor_gib"], units, wanted.cache, mounts):
        raise KernelPrebuildError("\n".join(found))
    if check:
        return {"changed": True, "skipped_reason": ""}
    built = kernel_prebuild.prebuild(wanted, lambda text: None, Path(params["progress"]))
    return {"changed": True, "skipped_reason": "", "kernels": built}


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    try:
        result = apply(module.params, module.check_mode)
    except (KernelPrebuildError, OSError, ValueError, KeyError) as error:
        module.fail_json(msg=str(error), skipped_reason="")
    wanted = "".join(f"{name}\n" for name in module.params["modules"])
    states = {"before": "" if result["changed"] else wanted, "after": wanted}
    reason = result["skipped_reason"]
    module.exit_json(msg=reason, skipped=bool(reason), diff=states, **result)


if __name__ == "__main__":
    main()
