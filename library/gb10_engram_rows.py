#!/usr/bin/python
"""Keep one rank's Engram rows on the host's own disk."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gb10_engram_rows
short_description: Keep one rank's Engram rows on the host's own disk
description:
  - Copies the rows that a tensor-parallel rank owns from a checkpoint into row packs, compares every byte with its
    source, and writes a manifest last. Format and guarantees are in docs/engram.md.
  - Takes up a copy that was interrupted, repairs damaged blocks, and replaces rows of another rank, size or revision.
  - A copy that is intact at O(level) is not touched. With O(config) the source is not read either.
options:
  state:
    description:
      - C(present) makes or repairs the copy. C(verified) only judges it, and fails with every fault. C(absent) removes it.
    type: str
    choices: [present, verified, absent]
    default: present
  directory:
    description: Where the copy lies; on a disk of this host.
    type: path
    required: true
  source:
    description: The checkpoint to copy from, local or mounted. Required to make a copy.
    type: path
  config:
    description:
      - The C(engram_*) keys of the model's config.json, from the profile. The checkpoint's own must equal them.
      - Without it, they are read from O(source).
    type: dict
  model: {description: Name of the model., type: str, default: ""}
  revision: {description: Revision of the checkpoint that O(source) holds. Required unless absent., type: str}
  tp: {description: Tensor-parallel size. Required unless absent., type: int}
  rank: {description: Rank of this host. Required unless absent., type: int}
  level:
    description:
      - How much of an existing copy is verified. C(manifest) reads sizes and extents, C(sampled) also hashes 64 segments of
        8 MiB a layer, C(whole) hashes every byte.
    type: str
    choices: [manifest, sampled, whole]
    default: manifest
  max_mb_per_s:
    description: Bytes read a second, in MB, so that a live engine is not starved; 0 for as fast as it goes.
    type: int
    default: 0
  workers: {description: Threads; each takes 17 MiB., type: int, default: 6}
  margin_gb: {description: Space in GB to leave free., type: float, default: 1}
  progress:
    description: A JSON file with C(done_bytes), C(total_bytes) and C(started), rewritten every second.
    type: path
    default: /run/gb10/progress/engram.json
  unit:
    description:
      - With C(verified), a running unit whose journal must say that it reads exactly these rows from this copy.
    type: str
  timeout: {description: Seconds to wait for the source to answer at all., type: float, default: 10}
  patience:
    description: Seconds to wait for a server of the source that goes away in mid-copy, before what is copied is left to
      the next run.
    type: float
    default: 120
author: [gb10-fleet maintainers (@gb10-fleet)]
"""

EXAMPLES = r"""
- name: Keep this rank's rows
  gb10_engram_rows:
    directory: /var/lib/gb10/engram
    source: /srv/models/DeepSeek-V4.1-Flash
    revision: dba1be0a40aa45a94ad051997016db3960a90277
    tp: 4
    rank: 1
    max_mb_per_s: 600

- name: Hash every byte of the copy
  gb10_engram_rows:
    state: verified
    directory: /var/lib/gb10/engram
    source: /srv/models/DeepSeek-V4.1-Flash
    revision: dba1be0a40aa45a94ad051997016db3960a90277
    tp: 4
    rank: 1
    level: whole
"""

RETURN = r"""
action:
  description: C(keep), C(copy), C(resume), C(repair), C(replace) or C(remove); in check mode what would be done.
  returned: always
  type: str
faults: {description: What was wrong with the copy that was found., returned: always, type: list, elements: str}
ranges:
  description: Layer to the half-open row range of this rank.
  returned: unless absent
  type: dict
  sample: {"1": [96000564, 192001740], "14": [96003054, 192007016]}
bytes: {description: Bytes of the whole copy., returned: unless absent, type: int}
copied_bytes: {description: Bytes of the copy written from the source., returned: always, type: int}
kept_bytes: {description: Bytes that an earlier run had copied., returned: always, type: int}
repaired_blocks: {description: Blocks of 4 KiB that had other bytes than their source., returned: always, type: int}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gb10 import engram_rows
from ansible.module_utils.gb10.engram_layout import EngramLayoutError, parse_config, rank_ranges, rank_rows, read_config
from ansible.module_utils.gb10.engram_pack import pack_bytes
from ansible.module_utils.gb10.engram_rows import EngramRowsError, Identity, Options, Outcome, Plan
from ansible.module_utils.gb10.host_command import CommandError, run_bounded
from ansible.module_utils.gb10.nfs import bounded, read_one_byte
from ansible.module_utils.gb10.systemd import SystemdError, show


def argument_spec() -> dict:
    return {
        "state": {"type": "str", "choices": ["present", "verified", "absent"], "default": "present"},
        "directory": {"type": "path", "required": True},
        "source": {"type": "path"},
        "config": {"type": "dict"},
        "model": {"type": "str", "default": ""},
        "revision": {"type": "str"},
        "tp": {"type": "int"},
        "rank": {"type": "int"},
        "level": {"type": "str", "choices": list(engram_rows.LEVELS), "default": "manifest"},
        "max_mb_per_s": {"type": "int", "default": 0},
        "workers": {"type": "int", "default": 6},
        "margin_gb": {"type": "float", "default": 1},
        "progress": {"type": "path", "default": "/run/gb10/progress/engram.json"},
        "unit": {"type": "str"},
        "timeout": {"type": "float", "default": 10},
        "patience": {"type": "float", "default": 120},
    }


def read_ranges(params: dict) -> dict[int, tuple[int, int]]:
    """The rows that this rank must have; reads the source only when there is no config."""
    config = parse_config(params["config"]) if params["config"] else read_config(Path(params["source"]))
    ranges = rank_ranges(config, params["tp"], params["rank"])
    empty = [f"layer {layer}" for layer, (start, end) in ranges.items() if start == end]
    if empty:
        raise EngramRowsError(
            f"rank {params['rank']} of {params['tp']} owns no rows of {', '.join(empty)}: {config.columns} hash columns"
            " leave none for it; choose another tensor-parallel size"
        )
    return ranges


def require_source(params: dict) -> None:
    """Fail within the timeout when the source does not answer, which a dead NFS server never does by itself."""
    probe = bounded(read_one_byte(Path(params["source"]) / "config.json"), params["timeout"])
    if probe.fault:
        raise EngramRowsError(f"source {params['source']}: {probe.fault}; bring the model store up, then run again")


def read_rows(params: dict) -> list:
    """Where the rows lie in the source, proven to be the checkpoint that the profile describes."""
    source = Path(params["source"])
    if params["config"] and parse_config(params["config"]) != read_config(source):
        raise EngramRowsError(f"{source}/config.json: its engram_* keys are not the profile's; it is another model")
    return rank_rows(source, params["tp"], params["rank"])


def read_journal(unit: str) -> str:
    """What the unit's running invocation has written."""
    state = show(unit)[unit]
    if state.active != "active":
        raise EngramRowsError(f"{unit}: is {state.active}, wanted active: start the group with playbooks/serve.yml")
    argv = ["journalctl", "--no-pager", "--output=cat", f"_SYSTEMD_INVOCATION_ID={state.invocation}"]
    status, text = run_bounded(argv, 60)
    if status:
        raise EngramRowsError(f"journalctl failed with {status}: {text.strip()}")
    return text


def apply(params: dict, result: dict, check: bool) -> None:
    """Bring the copy to ``state``; fills ``result`` as far as it comes."""
    directory = Path(params["directory"])
    if params["state"] == "absent":
        there = bool(engram_rows.present(directory)) if check else engram_rows.remove(directory)
        result.update(action="remove" if there else "keep", changed=there)
        return
    if not params["revision"]:
        raise EngramRowsError("revision is empty: pin the checkpoint's revision in the profile")
    if not params["config"]:
        require_source(params)
    ranges = read_ranges(params)
    result.update(ranges=ranges, bytes=sum(pack_bytes(end - start) for start, end in ranges.values()))
    rate, margin = params["max_mb_per_s"] * 10**6, int(params["margin_gb"] * 1e9)
    options = Options(params["workers"], rate, margin, params["patience"], Path(params["progress"]))
    level = params["level"]
    result["faults"] = engram_rows.verify(
        directory, params["rank"], params["tp"], params["revision"], ranges, level, options
    )
    if params["state"] == "verified":
        if params["unit"]:
            result["faults"] += engram_rows.check_journal(read_journal(params["unit"]), directory, ranges)
        if result["faults"]:
            raise EngramRowsError("\n".join(result["faults"]))
    if not result["faults"]:
        return
    engram_rows.check_local(directory)
    try:
        require_source(params)
    except EngramRowsError:
        if not check:
            raise
        # On a fresh host, check mode has mounted nothing.
        engram_rows.check_space(directory, result["bytes"], Plan("copy", []), options.margin_bytes)
        result["faults"].append(f"{params['source']} cannot be read yet: check mode mounts nothing")
        result.update(action="copy", changed=True)
        return
    rows = read_rows(params)
    identity = Identity(*(params[key] for key in ("model", "revision", "tp", "rank")))
    todo = engram_rows.plan(directory, identity, rows, result["faults"])
    engram_rows.check_space(directory, result["bytes"], todo, options.margin_bytes)
    result.update(action=todo.action, changed=True)
    if not check:
        result.update(vars(engram_rows.make_present(directory, Path(params["source"]), identity, rows, todo, options)))


def difference(params: dict, result: dict, found: list[Path]) -> dict:
    """What was wrong with the copy, whose files were FOUND, against what it is now or would be."""
    directory = params["directory"]
    before = [*result["faults"]] if found or not result["changed"] else ["no copy", *result["faults"][1:]]
    after = before
    if result["changed"] and result["action"] == "remove":
        before, after = [str(path) for path in found], []
    elif result["changed"]:
        ranges = result["ranges"].items()
        after = [f"{result['bytes'] / 1e9:.1f} GB of {params['source']} ({result['action']})"]
        after += [f"layer {layer} rows [{start}, {end})" for layer, (start, end) in ranges]
    states = {"before": before, "after": after}
    headers = {f"{when}_header": directory for when in states}
    return {when: "".join(f"{line}\n" for line in lines) for when, lines in states.items()} | headers


def main() -> None:
    module = AnsibleModule(
        argument_spec(),
        supports_check_mode=True,
        required_if=[
            ("state", "present", ["source", "revision", "tp", "rank"]),
            ("state", "verified", ["revision", "tp", "rank"]),
            ("state", "verified", ["source", "config"], True),
        ],
    )
    result = {"changed": False, "action": "keep", "faults": [], **vars(Outcome())}
    found = engram_rows.present(Path(module.params["directory"]))
    try:
        apply(module.params, result, module.check_mode)
    except (EngramLayoutError, EngramRowsError, SystemdError, CommandError) as error:
        module.fail_json(msg=str(error), **result)
    module.exit_json(diff=difference(module.params, result, found), **result)


if __name__ == "__main__":
    main()
