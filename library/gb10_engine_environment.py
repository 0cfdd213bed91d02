#!/usr/bin/python
"""Install an engine's pinned wheels into an environment of their own."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gb10_engine_environment
short_description: Unpack an engine's locked wheels into one directory that nobody changes afterwards
description:
  - Installs with pip, wheels only, hashes required, for the Python and processor of the hosts and not of the machine that runs it.
  - The directory is named by its content and complete when it exists; a run that was killed starts over beside it.
  - One host installs and leaves an archive; the others unpack that archive and refuse another one.
options:
  root: {description: Directory that holds environments., type: path, required: true}
  engine: {description: "Engine name, as in files/patches/.", type: str, required: true}
  python: {description: "Python version of the hosts, such as 3.11.", type: str, required: true}
  machine: {description: "Processor of the hosts as uname -m names it.", type: str, required: true}
  lock: {description: Text of requirements.txt with hashes., type: str, required: true}
  source: {description: Whether to install packages or to unpack the archive., type: str, choices: [packages, archive], default: packages}
  archive: {description: Archive to write after installing from packages or to unpack., type: path}
  export: {description: "NFS export, as host:path, that has the archive where the host itself has it not; mounted while it is read.", type: str}
  sha256: {description: Digest of the archive as the host that wrote it reported it., type: str}
  progress: {description: File that says how many bytes are packed or unpacked., type: path, default: /run/gb10/progress/engine.json}
author: [gb10-fleet maintainers (@gb10-fleet)]
"""

EXAMPLES = r"""
- name: Install the pinned wheels
  gb10_engine_environment:
    root: /opt/gb10/environments
    engine: vllm-0.33.0
    python: "3.12"
    machine: aarch64
    lock: "{{ lookup('ansible.builtin.file', 'files/patches/vllm-0.33.0/requirements.txt') }}"
    archive: /srv/models/.gb10-engines/vllm-0.33.0-aarch64.tar
"""

RETURN = r"""
identity: {description: Name of the environment's directory., returned: always, type: str}
sha256: {description: Digest of the archive., returned: with an archive and not in check mode, type: str}
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import environment, nfs
from ansible.module_utils.gb10.environment import Engine, EnvironmentFault

MOUNT = Path("/run/gb10/engine-store")


def argument_spec() -> dict:
    text = {"type": "str", "required": True}
    return {
        "root": {"type": "path", "required": True},
        "engine": text,
        "python": text,
        "machine": text,
        "lock": text,
        "source": {"type": "str", "choices": ["packages", "archive"], "default": "packages"},
        "archive": {"type": "path"},
        "export": {"type": "str"},
        "sha256": {"type": "str"},
        "progress": {"type": "path", "default": "/run/gb10/progress/engine.json"},
    }


@contextlib.contextmanager
def reachable(archive: Path, export: str | None) -> Iterator[Path]:
    """The archive's path, with EXPORT mounted where this host does not have it: a host may keep its own checkpoint."""
    root = Path((export or "").partition(":")[2])
    if archive.is_file() or not export or not archive.is_relative_to(root):
        yield archive
        return
    with nfs.mounted(export, MOUNT, ["ro", "softerr", "timeo=20", "retrans=1", "nodev", "nosuid"]) as store:
        yield store / archive.relative_to(root)


def apply(params: dict, engine: Engine) -> dict:
    """Install or unpack, and pack where that is wanted."""
    root, progress = Path(params["root"]), Path(params["progress"])
    archive = Path(params["archive"]) if params["archive"] else None
    if params["source"] == "archive":
        with reachable(archive, params["export"]) as source:
            changed = environment.unpack(root, engine, source, params["sha256"], progress)
        return {"changed": changed, "sha256": params["sha256"]}
    changed = environment.install(root, engine)
    return {"changed": changed, "sha256": environment.pack(root, engine, archive, progress) if archive else ""}


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        supports_check_mode=True,
        required_if=[("source", "archive", ["archive", "sha256"])],
    )
    engine = Engine(*(module.params[key] for key in ("engine", "python", "machine", "lock")))
    try:
        absent = environment.read(Path(module.params["root"]), engine) is None
        result = {"changed": absent} if module.check_mode else apply(module.params, engine)
    except (EnvironmentFault, nfs.NfsError, OSError, ValueError) as error:
        module.fail_json(msg=str(error), identity=engine.identity)
    states = {"before": "absent\n" if absent else f"{engine.identity}\n", "after": f"{engine.identity}\n"}
    headers = dict.fromkeys(("before_header", "after_header"), module.params["root"])
    module.exit_json(identity=engine.identity, diff=states | headers, **result)


if __name__ == "__main__":
    main()
