#!/usr/bin/python
"""Apply one concern of a host in one module run."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gb10_bundle
short_description: Packages, users, directories, files and systemd units of one concern in one run
description:
  - Compares the host with the wish and changes only what differs, in the order packages, users, directories, files, units.
  - A unit is restarted when a file named in O(units[].restart_on) is younger than the unit's last start, so a run that was
    killed half-way is completed by the next one.
  - Refuses, before it writes anything, a unit file with settings that systemd would ignore or start limits that it would
    never reach.
options:
  packages:
    description: Debian packages that have to be installed.
    type: list
    elements: str
    default: []
  users:
    description: System users that have to exist.
    type: list
    elements: dict
    default: []
    suboptions:
      name: {description: User name., type: str, required: true}
      home: {description: Home directory; not created., type: str}
      shell: {description: Login shell., type: str}
      groups: {description: Further groups; must exist., type: list, elements: str}
  directories:
    description: Directories with owner and mode.
    type: list
    elements: dict
    default: []
    suboptions:
      path: {description: Absolute path., type: path, required: true}
      owner: {description: Owner., type: str}
      group: {description: Group., type: str}
      mode: {description: Octal mode as a string; 0755 unless given., type: str}
  files:
    description: Files with their whole content; replaced atomically.
    type: list
    elements: dict
    default: []
    suboptions:
      path: {description: Absolute path., type: path, required: true}
      content: {description: Whole text., type: str}
      owner: {description: Owner., type: str}
      group: {description: Group., type: str}
      mode: {description: Octal mode as a string; 0644 unless given., type: str}
      validate: {description: "Command with %s for a candidate file; failure keeps the old file.", type: list, elements: str}
      absent: {description: Remove the file., type: bool, default: false}
      secret: {description: Keep the content out of the diff., type: bool, default: false}
      brief: {description: "Show in the diff that the file differs, not how.", type: bool, default: false}
  units:
    description: systemd units and the state wanted of them.
    type: list
    elements: dict
    default: []
    suboptions:
      name: {description: Unit name with its suffix., type: str, required: true}
      enabled: {description: Whether boot starts it; left alone unless given., type: bool}
      state: {description: State wanted now; left alone unless given., type: str, choices: [started, stopped]}
      restart_on: {description: Paths whose change restarts the unit., type: list, elements: path}
author: [gb10-fleet maintainers (@gb10-fleet)]
"""

EXAMPLES = r"""
- name: Lock the GPU clocks at every boot
  gb10_bundle:
    files:
      - path: /etc/systemd/system/gpu-clock.service
        content: "{{ lookup('ansible.builtin.template', 'gpu-clock.service.j2') }}"
    units:
      - {name: gpu-clock.service, enabled: true, state: started, restart_on: [/etc/systemd/system/gpu-clock.service]}
"""

RETURN = r"""
steps:
  description: Orders given to units, or that would be given in check mode.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10.bundle import BundleError, run
from ansible.module_utils.gb10.systemd import SystemdError


def argument_spec() -> dict:
    path = {"type": "path", "required": True}
    text = {"type": "str"}
    owner = {"owner": text, "group": text, "mode": text}
    name = {"type": "str", "required": True}
    flag = {"type": "bool", "default": False}
    words = {"type": "list", "elements": "str"}

    def entries(options: dict) -> dict:
        return {"type": "list", "elements": "dict", "default": [], "options": options}

    return {
        "packages": {"type": "list", "elements": "str", "default": []},
        "users": entries({"name": name, "home": text, "shell": text, "groups": words}),
        "directories": entries({"path": path} | owner),
        "files": entries(
            {"path": path, "content": text, "validate": words, "absent": flag, "secret": flag, "brief": flag} | owner
        ),
        "units": entries(
            {
                "name": name,
                "enabled": {"type": "bool"},
                "state": {"type": "str", "choices": ["started", "stopped"]},
                "restart_on": {"type": "list", "elements": "path"},
            }
        ),
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    for entry in module.params["files"]:
        if entry["content"] is None and not entry["absent"]:
            module.fail_json(msg=f"{entry['path']}: content is missing; give it or set absent: true")
        if entry["content"]:
            # lookups differ in whether they keep the last newline; a text file ends with exactly one
            entry["content"] = entry["content"].rstrip("\n") + "\n"
    try:
        todo, steps = run(module.params, check=module.check_mode)
    except (BundleError, SystemdError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=todo.changed,
        steps=[f"{step.verb} {step.unit}" for step in steps],
        diff=[
            {
                "before_header": key,
                "after_header": key,
                "before": todo.before[key] + "\n",
                "after": todo.after[key] + "\n",
            }
            for key in todo.before
        ],
    )


if __name__ == "__main__":
    main()
