#!/usr/bin/python
"""Prove and repair this host's side of the model store."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gb10_model_store
short_description: Prove and repair the checkpoint, its export, a mount of it, or a copy of it
description:
  - With O(client), on the head - judges the checkpoint and exports it. With O(source), on a worker - mounts it, or with
    O(copy) keeps a copy of it whose every file has the SHA-256 of the head's.
  - Looks at the kernel's own tables, never at fstab or exports files, and bounds every look at a mount in time.
  - A mount below a running rank is never pulled away; its faults are reported.
  - What is known of a checkpoint stands in I(checkpoint).manifest.json beside it. Without one, files are held to the
    names in O(files) and to the sizes in the safetensors headers and their index.
options:
  path: {description: Directory of the store on this host., type: path, required: true}
  checkpoint: {description: Directory of the checkpoint below O(path)., type: str, required: true}
  files: {description: Files that the checkpoint has to have., type: list, elements: str, required: true}
  model: {description: "Name of the model, for the manifest.", type: str, default: ""}
  revision: {description: "Revision that the checkpoint must be of; empty for any.", type: str, default: ""}
  verify:
    description:
      - C(sizes) reads no tensors. C(whole) also hashes every file that is on this host's disk.
      - C(record) hashes them on the head and makes a new manifest of what it finds - this copy is the trusted one.
    type: str
    choices: [sizes, whole, record]
    default: sizes
  copy:
    description: The workers keep copies. The head then records a manifest unless there is one; a worker copies.
    type: bool
    default: false
  digest: {description: "Digest of the head's manifest, which a copy has to be of.", type: str, default: ""}
  workers: {description: Threads that hash or copy., type: int, default: 4}
  margin_gb: {description: Space in GB that a copy must leave free., type: float, default: 10}
  patience: {description: Seconds to wait for a head that goes away in mid-copy., type: float, default: 120}
  client: {description: Address range that the head exports to; set on the head., type: str}
  export_options: {description: Options that the export must have; set on the head., type: list, elements: str, default: []}
  threads: {description: Threads of the NFS server., type: int, default: 32}
  source: {description: "Export to mount, server:/path; set on a worker.", type: str}
  version: {description: NFS version of the mount., type: str, default: ""}
  mount_options: {description: Mount options., type: list, elements: str, default: [ro]}
  unit: {description: Name of the mount unit without its suffix; needed without O(copy)., type: str}
  timeout: {description: Seconds that a look at the mount may take., type: float, default: 10}
  state:
    description: Journal of hashed files from which an interrupted run is taken up.
    type: path
    default: /var/lib/gb10/checkpoint-verify.jsonl
  progress:
    description: A JSON file with C(done_bytes), C(total_bytes) and C(started), rewritten every second.
    type: path
    default: /run/gb10/progress/checkpoint.json
author: [gb10-fleet maintainers (@gb10-fleet)]
"""

EXAMPLES = r"""
- name: Prove the mount
  gb10_model_store:
    path: /srv/models
    checkpoint: DeepSeek-V4.1-Flash
    files: [config.json]
    source: 192.0.2.11:/srv/models
    unit: srv-models
"""

RETURN = r"""
repaired: {description: What was wrong and is right now., returned: always, type: list, elements: str}
faults: {description: What is wrong still., returned: always, type: list, elements: str}
digest: {description: "Digest of the head's manifest, empty when it has none.", returned: always, type: str}
"""

import os
from dataclasses import replace
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import checkpoint, nfs
from ansible.module_utils.gb10.checkpoint import UNKNOWN, CheckpointError, Manifest, manifest_path
from ansible.module_utils.gb10.rank import UNIT
from ansible.module_utils.gb10.systemd import SystemdError, show

MOUNT = Path("/run/gb10/store")  # the head's store while a copy is made


def argument_spec() -> dict:
    words = {"type": "list", "elements": "str"}
    return {
        "path": {"type": "path", "required": True},
        "checkpoint": {"type": "str", "required": True},
        "files": words | {"required": True},
        "model": {"type": "str", "default": ""},
        "revision": {"type": "str", "default": ""},
        "verify": {"type": "str", "choices": ["sizes", "whole", "record"], "default": "sizes"},
        "copy": {"type": "bool", "default": False},
        "digest": {"type": "str", "default": ""},
        "workers": {"type": "int", "default": 4},
        "margin_gb": {"type": "float", "default": 10},
        "patience": {"type": "float", "default": 120},
        "client": {"type": "str"},
        "export_options": words | {"default": []},
        "threads": {"type": "int", "default": 32},
        "source": {"type": "str"},
        "version": {"type": "str", "default": ""},
        "mount_options": words | {"default": ["ro"]},
        "unit": {"type": "str"},
        "timeout": {"type": "float", "default": 10},
        "state": {"type": "path", "default": "/var/lib/gb10/checkpoint-verify.jsonl"},
        "progress": {"type": "path", "default": "/run/gb10/progress/checkpoint.json"},
    }


def read_manifest(params: dict, path: Path) -> Manifest:
    """The manifest in ``path``, proven to be of this revision and to have the profile's files."""
    manifest, revision = checkpoint.read_manifest(path), params["revision"]
    faults = [
        f"{path}: has no {name}, which the profile wants" for name in params["files"] if name not in manifest.files
    ]
    if revision and manifest.revision != revision:
        faults.append(f"{path}: is of revision {manifest.revision or 'none'}, wanted {revision}")
    if faults:
        faults[-1] += "; make it anew from a trusted copy: playbooks/storage.yml -e model_store_verify=record"
        raise CheckpointError("\n".join(faults))
    return manifest


def known(params: dict, path: Path) -> Manifest:
    """What is known of the checkpoint: its manifest in ``path``, or the profile's names and revision."""
    if path.exists() and params["verify"] != "record":
        return replace(read_manifest(params, path), revision=params["revision"])
    return Manifest(params["model"], params["revision"], dict.fromkeys(params["files"], UNKNOWN))


def verify_whole(params: dict, directory: Path, manifest: Manifest) -> list[str]:
    state, progress = Path(params["state"]), Path(params["progress"])
    return checkpoint.verify_whole(directory, manifest, params["workers"], state, progress)


def record(params: dict, directory: Path) -> None:
    names = checkpoint.files_of(directory)
    state, progress = Path(params["state"]), Path(params["progress"])
    found = checkpoint.hash_files(directory, names, params["workers"], state, progress)
    state.unlink(missing_ok=True)
    checkpoint.write_manifest(manifest_path(directory), Manifest(params["model"], params["revision"], found))


def head(params: dict, check: bool) -> nfs.Outcome:
    """The checkpoint on this host's disk, and its export."""
    path = Path(params["path"])
    directory = path / params["checkpoint"]
    manifest_file = manifest_path(directory)
    manifest = known(params, manifest_file)
    faults = checkpoint.judge(directory, manifest, path, int(params["margin_gb"] * 1e9))
    recorded = []
    if not faults and (params["verify"] == "record" or (params["copy"] and not manifest_file.exists())):
        recorded = [f"{manifest_file}: made of this host's copy"]
        if not check:
            record(params, directory)
    elif not faults and params["verify"] == "whole":
        if manifest_file.exists():
            faults = verify_whole(params, directory, manifest)
        else:
            faults = [f"{manifest_file}: is missing; make it on a trusted copy with -e model_store_verify=record"]
    if faults:
        return nfs.Outcome(faults=faults)
    outcome = nfs.serve(path, params["client"], params["export_options"], params["threads"], check=check)
    outcome.repaired += recorded
    outcome.faults += nfs.search_faults(directory)
    return outcome


def mounting_worker(params: dict, check: bool) -> nfs.Outcome:
    """The mount of the head's store, and the checkpoint as it looks through it."""
    path = Path(params["path"])
    directory = path / params["checkpoint"]
    outcome = nfs.attach(
        path,
        params["source"],
        params["version"],
        params["unit"],
        f"{params['checkpoint']}/{params['files'][0]}",
        params["mount_options"],
        timeout=params["timeout"],
        in_use=show(UNIT)[UNIT].active in ("active", "activating"),
        check=check,
    )
    if not outcome.faults and not (check and outcome.repaired):
        outcome.faults += checkpoint.check_files(directory, known(params, manifest_path(directory)), path)
    return outcome


def copying_worker(params: dict, check: bool) -> nfs.Outcome:
    """A copy of the head's checkpoint on this host's disk, proven by its manifest, which is written last."""
    path = Path(params["path"])
    directory = path / params["checkpoint"]
    margin = int(params["margin_gb"] * 1e9)
    outcome = nfs.Outcome()
    mount = nfs.network_mount(path, nfs.parse_mounts(nfs.MOUNTS.read_text()))
    if mount and not check:
        outcome.faults.append(
            f"{path}: {mount.source} is mounted, wanted this host's disk: rerun playbooks/storage.yml"
        )
        return outcome
    try:
        manifest = None if mount else read_manifest(params, manifest_path(directory))
    except CheckpointError as error:
        manifest, outcome.repaired = None, [str(error)]
    if mount:
        outcome.repaired.append(f"{path}: {mount.source} is mounted, wanted a copy")
    elif manifest and params["digest"] not in ("", manifest.digest):
        outcome.repaired.append(f"{manifest_path(directory)}: is another checkpoint's than the head's manifest")
    elif manifest:
        outcome.repaired += checkpoint.judge(directory, manifest, path, margin)
        if not outcome.repaired and params["verify"] == "whole":
            outcome.repaired += verify_whole(params, directory, manifest)
            manifest = None  # where it was wrong, it vouches for nothing
    if outcome.repaired and not check:
        manifest_path(directory).unlink(missing_ok=True)
        with nfs.mounted(params["source"], MOUNT, params["mount_options"]) as store:
            there = store / params["checkpoint"]
            wanted = read_manifest(params, manifest_path(there))
            checkpoint.fetch(
                there,
                directory,
                wanted,
                params["workers"],
                Path(params["progress"]),
                known=manifest,
                margin_bytes=margin,
                patience_s=params["patience"],
            )
        outcome.faults += checkpoint.judge(directory, wanted, path, margin)
        if not outcome.faults:
            checkpoint.write_manifest(manifest_path(directory), wanted)
    return outcome


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        supports_check_mode=True,
        mutually_exclusive=[("client", "source")],
        required_one_of=[("client", "source")],
    )
    params = module.params
    os.umask(0o022)  # a copy is read by the engine's user
    work = head if params["client"] else copying_worker if params["copy"] else mounting_worker
    result = {"changed": False, "repaired": [], "faults": [], "digest": ""}
    try:
        outcome = work(params, module.check_mode)
        result.update(changed=bool(outcome.repaired), repaired=outcome.repaired, faults=outcome.faults)
        manifest_file = manifest_path(Path(params["path"], params["checkpoint"]))
        if params["client"] and manifest_file.exists():
            result["digest"] = checkpoint.read_manifest(manifest_file).digest
    except (nfs.NfsError, CheckpointError, SystemdError, OSError) as error:
        module.fail_json(msg=str(error), **{**result, "faults": [str(error)]})
    if outcome.faults and not module.check_mode:
        module.fail_json(msg="\n".join(outcome.faults), **result)
    lines = [f"{line}\n" for line in outcome.repaired]
    module.exit_json(diff={"before": "".join(lines), "after": "as wanted\n" if lines else ""}, **result)


if __name__ == "__main__":
    main()
