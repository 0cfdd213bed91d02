#!/usr/bin/python
"""Bring a pinned container image to this host and make it the current release."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gb10_container_image
short_description: Bring an image pinned by digest to this host and make it the current release
description:
  - Looks for the image by its digest, pulls it or loads it from an archive when it is missing, and switches to it in one step,
    beside the releases of a patched engine.
  - While it pulls, its action shows each host's bytes, percentage and time left every few seconds.
  - The image before stays on the host, and its digest switches back to it without another pull.
options:
  image: {description: Repository of the image without tag and digest., type: str, required: true}
  digest: {description: "Digest of its manifest, or its image ID, as sha256 and 64 hexadecimal digits.", type: str, required: true}
  archive: {description: Archive on this host to load it from instead of pulling., type: path}
  gpu: {description: Refuse a host whose GPU podman could not hand to a container., type: bool, default: true}
  releases: {description: Directory that holds the releases., type: path, required: true}
  progress: {description: File that says how many bytes of a pull have come; gone with its end., type: path, default: /run/gb10/progress/image.json}
  link: {description: Link that names the current release., type: path, required: true}
author: [gb10-fleet maintainers (@gb10-fleet)]
"""

EXAMPLES = r"""
- name: Make the image current
  gb10_container_image:
    image: docker.io/example/vllm
    digest: sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
    releases: /opt/gb10/releases
    link: /opt/gb10/current
"""

RETURN = r"""
image_id: {description: ID of the image; empty in check mode while this host has none., returned: always, type: str}
release: {description: Name of the current release., returned: always, type: str}
previous: {description: Name of the release before it., returned: always, type: str}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import container, release
from ansible.module_utils.gb10.files import read_json, write_json


def argument_spec() -> dict:
    text, path = {"type": "str", "required": True}, {"type": "path", "required": True}
    return {
        "image": text,
        "digest": text,
        "archive": {"type": "path"},
        "gpu": {"type": "bool", "default": True},
        "releases": path,
        "progress": {"type": "path", "default": "/run/gb10/progress/image.json"},
        "link": path,
    }


def refuse(params: dict) -> None:
    faults = container.gpu_faults() if params["gpu"] else []
    if not container.PIN.fullmatch(params["digest"]):
        faults.append(
            f"digest of {params['image']} is {params['digest']!r}, wanted sha256: and 64 hexadecimal digits; "
            "set vllm_image_digest"
        )
    if faults:
        raise container.ContainerError("\n".join(faults))


def apply(params: dict, check: bool) -> dict:
    """Bring the image and make its release current."""
    releases, link = Path(params["releases"]), Path(params["link"])
    try:
        image = container.find(container.images(), params["digest"])
    except container.ContainerError:
        if not check or Path(container.PODMAN).exists():
            raise
        image = ""  # podman is installed before, outside check mode
    now, previous = release.current(link), release.current(releases / "previous")
    result = {"image_id": image, "previous": previous, "changed": not image}
    if not image and not check:
        progress = Path(params["progress"])
        image = result["image_id"] = container.fetch(
            params["image"], params["digest"], params["archive"] or "", progress
        )
    if not image:
        return result | {"release": params["digest"]}
    folder = releases / container.release_name(image)
    record = container.release_record(folder, params["image"], params["digest"], image)
    standing = read_json(folder / release.RECORD) == record
    result["changed"] |= now != folder.name or not standing
    if result["changed"] and not check:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / release.RECORD, record)
        if now and now != folder.name:
            release.switch(releases / "previous", releases / now)
            result["previous"] = now
        release.switch(link, folder)
    return result | {"release": folder.name}


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params, link = module.params, Path(module.params["link"])
    before = release.current(link)
    try:
        refuse(params)
        result = apply(params, module.check_mode)
    except (container.ContainerError, OSError, ValueError) as error:
        module.fail_json(msg=str(error), image_id="")
    states = {"before": f"{before or 'no release'}\n", "after": f"{result['release']}\n"}
    module.exit_json(diff=states | {"before_header": str(link), "after_header": str(link)}, **result)


if __name__ == "__main__":
    main()
