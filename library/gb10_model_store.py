#!/usr/bin/python
"""Prove and repair this host's side of the model store."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gb10_model_store
short_description: Prove and repair the live export of the head or the live mount of a worker
description:
  - Looks at the kernel's own tables, never at fstab or exports files, and bounds every look at a mount in time.
  - A mount below a running rank is never pulled away; its faults are reported.
options:
  path: {description: Directory of the store on this host., type: path, required: true}
  checkpoint: {description: Directory of the checkpoint below O(path)., type: str, required: true}
  files: {description: Files that the checkpoint has to have., type: list, elements: str, required: true}
  client: {description: Address range that the head exports to; set on the head., type: str}
  export_options: {description: Options that the export must have; set on the head., type: list, elements: str, default: []}
  threads: {description: Threads of the NFS server., type: int, default: 32}
  source: {description: "Export to mount, server:/path; set on a worker.", type: str}
  version: {description: NFS version of the mount., type: str, default: ""}
  unit: {description: Name of the mount unit without its suffix., type: str}
  timeout: {description: Seconds that a look at the mount may take., type: float, default: 10}
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
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import nfs
from ansible.module_utils.gb10.rank import UNIT
from ansible.module_utils.gb10.systemd import SystemdError, show


def argument_spec() -> dict:
    words = {"type": "list", "elements": "str"}
    return {
        "path": {"type": "path", "required": True},
        "checkpoint": {"type": "str", "required": True},
        "files": words | {"required": True},
        "client": {"type": "str"},
        "export_options": words | {"default": []},
        "threads": {"type": "int", "default": 32},
        "source": {"type": "str"},
        "version": {"type": "str", "default": ""},
        "unit": {"type": "str"},
        "timeout": {"type": "float", "default": 10},
    }


def head(params: dict, check: bool) -> nfs.Outcome:
    path = Path(params["path"])
    missing = nfs.checkpoint_faults(path / params["checkpoint"], params["files"])
    if missing:
        return nfs.Outcome(faults=missing)
    outcome = nfs.serve(path, params["client"], params["export_options"], params["threads"], check=check)
    outcome.faults += nfs.search_faults(path / params["checkpoint"])
    return outcome


def worker(params: dict, check: bool) -> nfs.Outcome:
    path, file = Path(params["path"]), f"{params['checkpoint']}/{params['files'][0]}"
    in_use = show(UNIT)[UNIT].active in ("active", "activating")
    outcome = nfs.attach(
        path,
        params["source"],
        params["version"],
        params["unit"],
        file,
        timeout=params["timeout"],
        in_use=in_use,
        check=check,
    )
    if not outcome.faults and not (check and outcome.repaired):
        outcome.faults += nfs.checkpoint_faults(path / params["checkpoint"], params["files"])
    return outcome


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        supports_check_mode=True,
        mutually_exclusive=[("client", "source")],
        required_one_of=[("client", "source")],
        required_by={"source": ["unit"]},
    )
    try:
        outcome = (head if module.params["client"] else worker)(module.params, module.check_mode)
    except (nfs.NfsError, SystemdError, OSError) as error:
        module.fail_json(msg=str(error), repaired=[], faults=[str(error)])
    result = {"changed": bool(outcome.repaired), "repaired": outcome.repaired, "faults": outcome.faults}
    if outcome.faults and not module.check_mode:
        module.fail_json(msg="\n".join(outcome.faults), **result)
    lines = [f"{line}\n" for line in outcome.repaired]
    module.exit_json(diff={"before": "".join(lines), "after": "as wanted\n" if lines else ""}, **result)


if __name__ == "__main__":
    main()
