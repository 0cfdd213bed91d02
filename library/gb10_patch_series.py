#!/usr/bin/python
"""Make, prove and switch to the release that a patch series makes of an engine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gb10_patch_series
short_description: Make a patched release of an engine beside the untouched one, and switch to it
description:
  - Applies the whole series to a new release or not at all; a tree that is patched already, edited by somebody else or of
    another version is refused with the file, the SHA-256 found and the one wanted. So is a release that was edited since.
  - The previous release stays; O(rollback) switches back to it.
options:
  environments: {description: Directory that holds the environments., type: path, required: true}
  environment: {description: Name of the environment to patch., type: str, required: true}
  releases: {description: Directory that holds the releases., type: path, required: true}
  link: {description: Link that names the current release., type: path, required: true}
  python: {description: Interpreter that runs the engine on this host., type: path, required: true}
  series: {description: The series as the filter gb10_patch_series gives it., type: dict, required: true}
  whole: {description: Read every file of the series again instead of trusting sizes and times., type: bool, default: false}
  rollback: {description: Switch to the release that was current before this one., type: bool, default: false}
author: [gb10-fleet maintainers (@gb10-fleet)]
"""

EXAMPLES = r"""
- name: Make the reviewed release current
  gb10_patch_series:
    environments: /opt/gb10/environments
    environment: vllm-0.33.0-0123456789ab
    releases: /opt/gb10/releases
    link: /opt/gb10/current
    python: /usr/bin/python3
    series: "{{ 'files/patches/vllm-0.33.0' | gb10_patch_series }}"
"""

RETURN = r"""
environment_missing: {description: The environment is not on this host yet; nothing was done., returned: always, type: bool}
release: {description: Name of the current release., returned: always, type: str}
previous: {description: Name of the release before it., returned: always, type: str}
files: {description: Path to SHA-256 before and after., returned: when a release is current, type: dict}
digest: {description: Digest of the environment's distributions; equal on equal hosts., returned: always, type: str}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import environment, files, release


def argument_spec() -> dict:
    path = {"type": "path", "required": True}
    flag = {"type": "bool", "default": False}
    return {
        "environments": path,
        "environment": {"type": "str", "required": True},
        "releases": path,
        "link": path,
        "python": path,
        "series": {"type": "dict", "required": True},
        "whole": flag,
        "rollback": flag,
    }


def rollback(link: Path, releases: Path, check: bool) -> dict:
    """Switch to the previous release, which becomes the current one; a second rollback goes forward again."""
    now, target = release.current(link), release.current(releases / "previous")
    if not target:
        raise release.ReleaseFault(f"{releases}/previous is missing: no earlier release was current on this host")
    found = release.faults(releases / target, whole=True)
    if found:
        raise release.ReleaseFault("\n".join(found))
    if not check:
        release.switch(link, releases / target)
        release.switch(releases / "previous", releases / now)
    return {"changed": True, "release": target, "previous": now}


def apply(params: dict, check: bool) -> dict:
    """Make the wanted release and switch to it."""
    link, releases = Path(params["link"]), Path(params["releases"])
    source = Path(params["environments"]) / params["environment"]
    series = release.Series.from_document(params["series"])
    record = files.read_json(source / environment.RECORD)
    now, name = release.current(link), release.release_name(source.name, series)
    result = {
        "environment_missing": record is None,
        "release": name,
        "previous": release.current(releases / "previous"),
    }
    result["digest"] = (record or {}).get("digest", "")
    if record is None:
        return result | {"changed": True}
    found = release.faults(releases / name, series, whole=params["whole"])
    result["changed"] = now != name or bool(found)
    if found and not (releases / name / release.RECORD).exists():
        found = release.source_faults(source, series)  # not made yet
    if found:
        raise release.ReleaseFault("\n".join(found))
    if result["changed"] and not check:
        made = release.make(source, releases, series, params["python"])
        if now and now != name:
            release.switch(releases / "previous", releases / now)
            result["previous"] = now
        release.switch(link, made)
    result["files"] = {path: {"before": before, "after": after} for path, (before, after) in series.files.items()}
    return result


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    link = Path(module.params["link"])
    before = release.current(link)
    try:
        if module.params["rollback"]:
            result = rollback(link, Path(module.params["releases"]), module.check_mode)
        else:
            result = apply(module.params, module.check_mode)
    except (release.ReleaseFault, OSError, ValueError, KeyError) as error:
        module.fail_json(msg=str(error), environment_missing=False)
    states = {"before": f"{before or 'no release'}\n", "after": f"{result['release']}\n"}
    module.exit_json(diff=states | {"before_header": str(link), "after_header": str(link)}, **result)


if __name__ == "__main__":
    main()
