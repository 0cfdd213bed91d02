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
options:
  root: {description: Directory that holds environments., type: path, required: true}
  engine: {description: "Engine name, as in files/patches/.", type: str, required: true}
  python: {description: "Python version of the hosts, such as 3.11.", type: str, required: true}
  machine: {description: "Processor of the hosts as uname -m names it.", type: str, required: true}
  lock: {description: Text of requirements.txt with hashes., type: str, required: true}
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
"""

RETURN = r"""
identity: {description: Name of the environment's directory., returned: always, type: str}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10.environment import Engine, EnvironmentFault, install, read


def argument_spec() -> dict:
    text = {"type": "str", "required": True}
    return {"root": {"type": "path", "required": True}, "engine": text, "python": text, "machine": text, "lock": text}


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    root = Path(module.params["root"])
    engine = Engine(*(module.params[key] for key in ("engine", "python", "machine", "lock")))
    try:
        absent = read(root, engine) is None
        changed = absent if module.check_mode else install(root, engine)
    except (EnvironmentFault, OSError, ValueError) as error:
        module.fail_json(msg=str(error), identity=engine.identity)
    states = {"before": "absent\n" if changed else f"{engine.identity}\n", "after": f"{engine.identity}\n"}
    module.exit_json(changed=changed, identity=engine.identity, diff=states)


if __name__ == "__main__":
    main()
