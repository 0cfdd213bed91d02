"""Pure functions of the inventory and the patch series, for playbooks and roles."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleFilterError
from ansible.module_utils.gb10 import profile as profiles
from ansible.module_utils.gb10.completion import key_fault
from ansible.module_utils.gb10.environment import Engine

PROJECT = Path(__file__).resolve().parent.parent
PROFILES = PROJECT / "profiles"
PATCHES = PROJECT / "files" / "patches"


# --------------------------------------------------------------------------------------------- inventory


def gb10_by_rank(hosts: Iterable[str], hostvars: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Hosts by ascending rank, the head first."""
    return sorted(hosts, key=lambda host: int(hostvars[host]["rank"]))


def _rank_faults(fleet: list[str], ranks: Mapping[str, Any]) -> list[str]:
    faults = []
    for host in fleet:
        value = ranks[host]
        if value is None:
            faults.append(f"{host}: rank is not set; give each host of group fleet a rank from 0 to {len(fleet) - 1}")
        elif isinstance(value, bool) or not str(value).isdigit() or int(value) >= len(fleet):
            faults.append(f"{host}: rank is {value!r}, wanted a number from 0 to {len(fleet) - 1}")
    by_rank: dict[int, list[str]] = {}
    for host in fleet:
        if str(ranks[host]).isdigit():
            by_rank.setdefault(int(ranks[host]), []).append(host)
    for rank, hosts in sorted(by_rank.items()):
        if len(hosts) > 1:
            faults.append(f"{', '.join(hosts)}: rank is {rank} on each of them, wanted one host a rank")
    for rank in range(len(fleet)):
        if rank not in by_rank:
            faults.append(f"rank {rank} is missing; give it to one of {', '.join(fleet)}")
    return faults


def _address_faults(fleet: list[str], addresses: Mapping[str, Any], subnet: Any) -> list[str]:
    if not subnet:
        return ["fabric_subnet is not set; give the fabric's address range in CIDR form in group_vars"]
    try:
        network = ipaddress.ip_network(str(subnet))
    except ValueError as error:
        return [f"fabric_subnet is {subnet!r}: {error}"]
    faults = []
    seen: dict[Any, str] = {}
    for host in fleet:
        value = addresses[host]
        try:
            address = ipaddress.ip_address(str(value))
        except ValueError:
            faults.append(f"{host}: fabric_address is {value!r}, wanted an address of {network} without prefix length")
            continue
        if address not in network:
            faults.append(f"{host}: fabric_address {address} is outside fabric_subnet {network}; ranks need one subnet")
        if address in seen:
            faults.append(f"{host}: fabric_address {address} is also that of {seen[address]}")
        seen.setdefault(address, host)
    return faults


def gb10_inventory_faults(groups: Mapping[str, list[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Everything wrong with the inventory and its profile, in one list; touches no host."""
    fleet = list(groups.get("fleet", []))
    if not fleet:
        return ["group fleet has no hosts; list every host of the fleet below head or workers"]

    def of(key: str) -> dict[str, Any]:
        return {host: hostvars[host].get(key) for host in fleet}

    faults = []
    head, workers = groups.get("head", []), groups.get("workers", [])
    if len(head) != 1:
        faults.append(f"group head has {len(head)} hosts ({', '.join(head) or 'none'}), wanted exactly one")
    for host in fleet:
        if (host in head) == (host in workers):
            where = "both head and workers" if host in head else "neither head nor workers"
            faults.append(f"{host}: is in {where}, wanted exactly one of the two groups")
    ranks = of("rank")
    faults += _rank_faults(fleet, ranks)
    if len(head) == 1 and str(ranks[head[0]]).isdigit() and int(ranks[head[0]]) != 0:
        faults.append(f"{head[0]}: is the head and has rank {ranks[head[0]]}, wanted rank 0")
    faults += _address_faults(fleet, of("fabric_address"), hostvars[fleet[0]].get("fabric_subnet"))
    names = sorted({str(name) for name in of("profile").values()})
    if len(names) != 1:
        return [*faults, f"profile differs between hosts ({', '.join(names)}), wanted one for the fleet"]
    try:
        profile = profiles.load(PROFILES, names[0], PATCHES)
    except profiles.ProfileError as error:
        return [*faults, *error.faults]
    faults += profiles.digest_faults(profile, hostvars[fleet[0]].get("vllm_image_digest"))
    read_from = (profile["arguments"].get("engram-config") or {}).get("disk_path")
    kept_in = hostvars[fleet[0]].get("engram_rows_directory", "/var/lib/gb10/engram")
    if read_from and read_from != kept_in:
        faults.append(
            f"engram_rows_directory is {kept_in}, profile {names[0]} reads rows from {read_from}: make them equal"
        )
    size = profile["tensor_parallel_size"]
    if size != len(fleet):
        faults.append(f"profile {names[0]} is for {size} hosts (tensor_parallel_size), group fleet has {len(fleet)}")
    return faults


def gb10_reachability_faults(fleet: list[str], results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a first look at all hosts found wrong; RESULTS maps a host to its result of gb10_rank_info."""
    away = [host for host in fleet if results[host].get("unreachable") or "rank" not in results[host]]
    there = [host for host in fleet if host not in away]
    faults = [
        f"{host}: does not answer ({str(results[host].get('msg', 'no result')).strip()[:300]}); "
        f"check its power and the management network; reachable are {', '.join(there) or 'no hosts'}"
        for host in away
    ]
    return faults + [f"{host}: {fault}" for host in there if (fault := results[host].get("checkpoint_fault"))]


# --------------------------------------------------------------------------------------------- launches


def gb10_launch_reasons(
    states: Mapping[str, Mapping[str, Any]], head: str = "", completion: Mapping[str, str] | None = None
) -> list[str]:
    """Why the group has to be started (stop all, start all); an empty list means that it serves.

    STATES maps a host to the `rank` of gb10_rank_info, COMPLETION is what HEAD answered where it was asked. Drift is no
    reason: a restart for it is the operator's word.
    """
    reasons = [f"{host}: the rank is {state['unit']}" for host, state in sorted(states.items()) if not state["active"]]
    launches = {state["launch_id"] for state in states.values() if state["active"]}
    if not reasons and len(launches) != 1:
        joined = ", ".join(f"{host} {state['launch_id'] or 'none'}" for host, state in sorted(states.items()))
        reasons.append(f"ranks of several launches run ({joined})")
    if not reasons and completion and completion.get("fault"):
        reasons.append(f"{head}: {completion['fault']}")
    return reasons


def gb10_verify_faults(states: Mapping[str, Mapping[str, Any]], head: str, completion: Mapping[str, str]) -> list[str]:
    """What a served model still lacks: units, one launch, the reviewed tree, no drift, nothing unknown, a token."""
    faults = gb10_launch_reasons(states, head, completion)
    if not faults and not completion.get("text"):
        faults.append(f"{head}: was not asked for a token")
    for host, state in sorted(states.items()):
        faults += [f"{host}: {fault}" for fault in state["release_faults"]]
        if state["drift"]:
            faults.append(f"{host}: {state['drift']}; group restart needed: ansible-playbook playbooks/serve.yml")
        faults += [
            f"{host}: the journal of the start lacks {line!r}: the engine took a slower path than the profile expects"
            for line in state["log_missing"]
        ]
        if state["needs_reload"]:
            faults.append(f"{host}: the unit's file is newer than what systemd has read: rerun playbooks/serve.yml")
        if state["active"] and state["process"].get("unknown"):
            faults.append(f"{host}: what its rank was started with is unknown: {state['process']['unknown']}")
    releases = {state["release"] for state in states.values()}
    if len(releases) > 1:
        listed = ", ".join(f"{host} {state['release'] or 'none'}" for host, state in sorted(states.items()))
        faults.append(f"hosts have different releases ({listed}): rerun playbooks/engine.yml")
    return faults


def gb10_ready_lines(hosts: list[str], hostvars: Mapping[str, Mapping[str, Any]], variable: str) -> list[str]:
    """When each phase of a launch began on each host, from gb10_rank's registered results; the last is readiness."""
    lines = []
    for host in hosts:
        phases = sorted(hostvars[host][variable]["phases"].items(), key=lambda entry: entry[1])
        lines.append(f"{host}: " + ", ".join(f"{name} after {seconds:.0f} s" for name, seconds in phases))
    return lines


def gb10_api_key(text: str) -> str:
    """The key of a file's TEXT as one line. AnsibleFilterError, without the key, where no client could send it."""
    key = text.removesuffix("\n").removesuffix("\r")
    fault = "it is empty" if not key else key_fault(key)
    if fault:
        raise AnsibleFilterError(f"vllm_rank_api_key_file: the API key is of no use: {fault}")
    return key + "\n"


def gb10_table(rows: list[Mapping[str, Any]], columns: list[str]) -> list[str]:
    """Aligned lines of text, a header first; a value that is missing reads `unknown`."""
    cells = [columns] + [[str(row.get(column, "")) or "unknown" for column in columns] for row in rows]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _actual(state: Mapping[str, Any], fact: str) -> str:
    """Whether what runs is what is configured, as far as it can be told."""
    if not state["active"]:
        return "down"
    if fact == "release":
        running = state["running_release"]
        if not running:
            return "unknown"
        return running if running == state["release"] else f"{running}, configured {state['release'] or 'none'}"
    process = state["process"]
    if not process.get("argv") or (fact == "environment" and not process.get("environment")):
        return "unknown"
    return "differs" if state["differs"][fact] else "same"


def gb10_status_table(hosts: list[str], hostvars: Mapping[str, Mapping[str, Any]], variable: str) -> list[str]:
    """The table of playbooks/status.yml from each host's result of gb10_rank_info, and a line a difference."""
    rows: list[dict[str, Any]] = []
    below: list[str] = []
    for host in hosts:
        result = hostvars[host].get(variable) or {}
        row: dict[str, Any] = {"host": host, "rank": hostvars[host].get("rank")}
        if state := result.get("rank"):
            row |= {
                "unit": state["unit"],
                "launch": state["launch_id"] or "none",
                "phase": state["phase"],
                "memory free": f"{state['memory_available_mib'] / 1024:.1f} GiB",
                "mount": result.get("mount"),
                "release": _actual(state, "release") if state["active"] else state["release"] or "none",
                "patches": "reviewed" if not state["release_faults"] else "not as reviewed",
                "arguments": _actual(state, "arguments"),
                "environment": _actual(state, "environment"),
            }
            below += [f"{host}: {fault}" for fault in state["release_faults"]]
            below += [f"{host}: {state['drift']}"] if state["drift"] else []
            below += [f"{host}: the journal of the start lacks {line!r}" for line in state["log_missing"]]
            below += [f"{host}: systemd has not read the unit's present file"] if state["needs_reload"] else []
            if state["active"] and state["process"].get("unknown"):
                below.append(f"{host}: {state['process']['unknown']}")
            below += [f"{host}: {state['guard']}"] if state["guard"] else []
            if state["cause"]:
                below.append(f"{host}: likely cause of its end: {state['cause']}")
        else:
            below.append(f"{host}: {str(result.get('msg', 'gave no result')).strip()[:300]}")
        rows.append(row)
    columns = ["host", "rank", "unit", "launch", "phase", "memory free", "mount", "release", "patches"]
    return [*gb10_table(rows, [*columns, "arguments", "environment"]), *below]


# --------------------------------------------------------------------------------------------- patches


def gb10_patch_series(engine: str) -> dict[str, Any]:
    """The patch series of files/patches/ENGINE with the patches' text, checked as far as a controller can.

    Raises AnsibleFilterError for a missing file, an unknown key, a malformed digest or a carriage return.
    """
    directory = PATCHES / engine
    path = directory / "series.yml"
    if not path.is_file():
        raise AnsibleFilterError(f"{path} is missing: engine {engine!r} has no patch series")
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    unknown = set(document) - {"engine", "patches", "files", "build"}
    if unknown:
        raise AnsibleFilterError(f"{path}: unknown keys {sorted(unknown)}")
    patches = []
    for entry in document["patches"]:
        raw = (directory / entry["file"]).read_bytes()
        if b"\r" in raw:
            raise AnsibleFilterError(
                f"{directory / entry['file']} has carriage returns: check out the project with core.autocrlf=false"
            )
        patches.append({"file": entry["file"], "text": raw.decode("utf-8")})
    for name, digests in document["files"].items():
        for key in ("before", "after"):
            digest = digests[key]
            if digest is None and key == "before":
                continue
            if not isinstance(digest, str) or len(digest) != 64:
                raise AnsibleFilterError(f"{path}: {name}: {key} is {digest!r}, wanted a SHA-256 in hex")
    return {
        "engine": engine,
        "package": document["engine"]["package"],
        "version": str(document["engine"]["version"]),
        "files": document["files"],
        "patches": patches,
        "build": document.get("build") or [],
    }


def gb10_engine_lock(engine: str) -> str:
    """Text of the engine's requirements.txt."""
    path = PATCHES / engine / "requirements.txt"
    if not path.is_file():
        raise AnsibleFilterError(f"{path} is missing: engine {engine!r} has no lock file")
    return path.read_text(encoding="utf-8")


def gb10_environment_identity(engine: str, python: str, machine: str) -> str:
    """Name of the environment that the engine's lock makes; see module_utils/gb10/environment.py."""
    return Engine(engine, python, machine, gb10_engine_lock(engine)).identity


def gb10_host_library(prefix: str) -> list[dict[str, Any]]:
    """The package that hosts import as `gb10`, as file entries of gb10_bundle below PREFIX.

    Brief, or else the first look at a new fleet would drown every rank's own files in this source.
    """
    sources = sorted((PROJECT / "module_utils" / "gb10").glob("*.py"))
    return [
        {"path": f"{prefix}/gb10/{source.name}", "content": source.read_text(encoding="utf-8"), "brief": True}
        for source in sources
    ]


class FilterModule:
    """Filters by name."""

    def filters(self) -> dict[str, Any]:
        return {
            function.__name__: function
            for function in (
                gb10_by_rank,
                gb10_inventory_faults,
                gb10_reachability_faults,
                gb10_launch_reasons,
                gb10_verify_faults,
                gb10_status_table,
                gb10_ready_lines,
                gb10_api_key,
                gb10_patch_series,
                gb10_engine_lock,
                gb10_environment_identity,
                gb10_host_library,
            )
        }
