#!/usr/bin/python
"""Prove that a host has a whole checkpoint."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gb10_checkpoint_verify
short_description: Prove that a host has a whole checkpoint
description:
  - Judges every file against a manifest made from a trusted copy, every safetensors header against the index and the
    file's length, the traces of the hub against the pinned revision, and names downloads that never ended.
  - Understands links, as a Hugging Face cache has them, and says where they lead out of what was copied or exported.
  - Changes nothing. Fails with every fault.
options:
  directory: {description: The checkpoint., type: path, required: true}
  revision: {description: The revision that it must be of., type: str, required: true}
  manifest:
    description:
      - A manifest on this host, made with C(python3 -m gb10.checkpoint manifest). It must be of O(revision).
    type: path
  files:
    description: Instead of a manifest, some files with their C(bytes) and C(sha256); other files are not judged.
    type: dict
  level:
    description: C(sizes) reads headers only; C(whole) also hashes every file.
    type: str
    choices: [sizes, whole]
    default: sizes
  root:
    description: The tree that no link may leave, such as the export or its mount point.
    type: path
  workers: {description: Threads that hash., type: int, default: 4}
  state:
    description: Journal of hashed files from which an interrupted run is taken up.
    type: path
    default: /var/lib/gb10/checkpoint-verify.jsonl
  progress:
    description: A JSON file with C(done_bytes), C(total_bytes) and C(started), rewritten every second.
    type: path
    default: /run/gb10/progress/checkpoint.json
  margin_gb: {description: Space in GB that a checkpoint that is not whole must leave free., type: float, default: 10}
  timeout: {description: Seconds to wait for the directory to answer at all., type: float, default: 10}
author: [gb10-fleet maintainers (@gb10-fleet)]
"""

EXAMPLES = r"""
- name: Prove sizes and headers
  gb10_checkpoint_verify:
    directory: /srv/models/DeepSeek-V4.1-Flash
    revision: dba1be0a40aa45a94ad051997016db3960a90277
    manifest: /etc/gb10/checkpoint.json
    root: /srv/models

- name: Hash every byte
  gb10_checkpoint_verify:
    directory: /srv/models/DeepSeek-V4.1-Flash
    revision: dba1be0a40aa45a94ad051997016db3960a90277
    manifest: /etc/gb10/checkpoint.json
    level: whole
"""

RETURN = r"""
faults: {description: Everything that is wrong., returned: always, type: list, elements: str}
files: {description: How many files were judged., returned: always, type: int}
bytes: {description: Bytes that they must have., returned: always, type: int}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import checkpoint
from ansible.module_utils.gb10.checkpoint import CheckpointError, Entry, Manifest
from ansible.module_utils.gb10.nfs import bounded, read_one_byte


def argument_spec() -> dict:
    return {
        "directory": {"type": "path", "required": True},
        "revision": {"type": "str", "required": True},
        "manifest": {"type": "path"},
        "files": {"type": "dict"},
        "level": {"type": "str", "choices": ["sizes", "whole"], "default": "sizes"},
        "root": {"type": "path"},
        "workers": {"type": "int", "default": 4},
        "state": {"type": "path", "default": "/var/lib/gb10/checkpoint-verify.jsonl"},
        "progress": {"type": "path", "default": "/run/gb10/progress/checkpoint.json"},
        "margin_gb": {"type": "float", "default": 10},
        "timeout": {"type": "float", "default": 10},
    }


def read_manifest(params: dict) -> Manifest:
    """The manifest, or what of one the caller has; raises CheckpointError."""
    if params["manifest"]:
        manifest = checkpoint.read_manifest(Path(params["manifest"]))
        if manifest.revision != params["revision"]:
            raise CheckpointError(
                f"{params['manifest']}: is of revision {manifest.revision}, wanted {params['revision']};"
                " make it from a trusted copy of this revision"
            )
        return manifest
    files = {name: Entry(int(e["bytes"]), str(e["sha256"])) for name, e in (params["files"] or {}).items()}
    return Manifest("", params["revision"], files)


def judge(params: dict, manifest: Manifest) -> list[str]:
    """All faults of the checkpoint; bytes are hashed only where everything cheaper is right."""
    directory = Path(params["directory"])
    probe = bounded(read_one_byte(directory / checkpoint.INDEX), params["timeout"])
    if probe.silent or probe.stale:
        return [f"{directory}: {probe.fault}; bring the model store up, then run again"]
    root = Path(params["root"]) if params["root"] else None
    wanted = Manifest(manifest.model, manifest.revision, {checkpoint.INDEX: checkpoint.UNKNOWN, **manifest.files})
    faults = checkpoint.judge(directory, wanted, root, int(params["margin_gb"] * 1e9))
    if faults or params["level"] != "whole":
        return faults
    return checkpoint.verify_whole(
        directory, manifest, params["workers"], Path(params["state"]), Path(params["progress"])
    )


def main() -> None:
    module = AnsibleModule(
        argument_spec(),
        supports_check_mode=True,
        mutually_exclusive=[("manifest", "files")],
        required_if=[("level", "whole", ["manifest", "files"], True)],
    )
    result = {"changed": False, "faults": [], "files": 0, "bytes": 0}
    try:
        manifest = read_manifest(module.params)
        result.update(files=len(manifest.files), bytes=manifest.total_bytes)
        result["faults"] = judge(module.params, manifest)
    except CheckpointError as error:
        result["faults"] = [str(error)]
    if result["faults"]:
        module.fail_json(msg="\n".join(result["faults"]), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
