"""Judge the fabric over all hosts: one sentence for every fault, naming host, interface, found and wanted."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from .roce import rdma_mtu

Facts = Mapping[str, Any]
Verdict = dict[str, list[str]]


def judge_links(
    hosts: Mapping[str, Facts],
    *,
    subnet: str,
    mtu: int,
    rate_gbps: float,
    require_rdma: bool,
    require_persistent: bool,
) -> Verdict:
    """Faults and notes of every host's own interface.

    hosts: inventory name -> what fabric_link.facts found. subnet: the fabric, CIDR. mtu: bytes wanted.
    rate_gbps: least accepted rate of an RDMA port. require_persistent: a value lost at reboot is a fault, not a note.
    """
    network = ipaddress.ip_network(subnet)
    faults: list[str] = []
    notes: list[str] = []
    others_right = sum(f.get("mtu") == mtu for f in hosts.values())
    for host, found in hosts.items():
        where = f"{host} {found['interface']}".rstrip()
        if ipaddress.ip_address(found["address"]) not in network:
            faults.append(f"{where}: fabric address {found['address']}; wanted one in {subnet}")
        if found["fault"]:
            sentence = found["fault"]
            # The lookup's sentences begin with the interface wherever one is known.
            named = found["interface"] and sentence.startswith(found["interface"])
            faults.append(f"{host}{' ' if named else ': '}{sentence}. Next: {found['next_step']}")
        if not found["interface"]:
            continue
        if found["prefix"] != network.prefixlen:
            faults.append(f"{where}: prefix length /{found['prefix']}; wanted /{network.prefixlen} as in {subnet}")
        if found["mtu"] != mtu:
            wanted = "fleet" if others_right else "wanted"
            text = f"{where}: MTU {found['mtu']} (RoCE {found['rdma_mtu']}), {wanted} {mtu} ({rdma_mtu(mtu)})"
            # Equal RDMA MTUs work together, whatever the Ethernet MTUs are.
            (notes if found["rdma_mtu"] == rdma_mtu(mtu) else faults).append(text)
        rdma = found["rdma"]
        if rdma and rdma["rate_gbps"] < rate_gbps:
            faults.append(f"{where}: {rdma['hca']} runs at {rdma['rate_gbps']:g} Gb/s; wanted {rate_gbps:g} Gb/s")
        if not rdma and not require_rdma and not found["fault"]:
            notes += [f"{where}: {note}" for note in found.get("notes", [])]
        if found["also_in_subnet"]:
            notes.append(f"{where}: {', '.join(found['also_in_subnet'])} also has an address in {subnet}")
        lost = _lost_at_reboot(where, found, mtu)
        (faults if require_persistent else notes).extend(lost)
    faults += _duplicates(hosts)
    return {"faults": faults, "notes": notes}


def unfit(hosts: Mapping[str, Facts]) -> list[str]:
    """Why the fabric cannot be measured now: a link that cannot be used, or an engine that uses it."""
    faults = [f"{h}: {f['fault']}. Next: {f['next_step']}" for h, f in hosts.items() if f["fault"]]
    return faults + [
        f"{host}: {', '.join(found['busy'])} is running; wanted the fabric at rest. Next: playbooks/stop.yml"
        for host, found in hosts.items()
        if found["busy"]
    ]


def _lost_at_reboot(where: str, found: Facts, mtu: int) -> list[str]:
    kept = found["persistence"]
    wanted = "wanted in the network configuration below /etc"
    if not kept["file"]:
        place = f"only in {', '.join(kept['volatile'])}" if kept["volatile"] else "in no file that is read at boot"
        return [f"{where}: address {found['address']} is {place}; {wanted}, or the next boot loses it"]
    # 1500 is what an Ethernet interface has when nothing says otherwise.
    if found["mtu"] == mtu and (kept["mtu"] or 1500) != mtu:
        return [f"{where}: MTU {mtu} is live, but {kept['file']} gives {kept['mtu'] or 'none'}; {wanted}"]
    return []


def _duplicates(hosts: Mapping[str, Facts]) -> list[str]:
    wanted_by: dict[str, list[str]] = {}
    for host, found in hosts.items():
        wanted_by.setdefault(found["address"], []).append(host)
    faults = [
        f"{', '.join(names)}: the same fabric address {address} in the inventory; wanted one for each host"
        for address, names in wanted_by.items()
        if len(names) > 1
    ]
    for host, found in hosts.items():
        for address, interface in found.get("addresses", {}).items():
            owner = [name for name in wanted_by.get(address, []) if name != host]
            if owner and address != found["address"]:
                faults.append(f"{host} {interface}: carries {address}, which is {owner[0]}'s; wanted there alone")
    return faults


def judge_paths(hosts: Mapping[str, Facts], paths: Mapping[str, Sequence[Facts]]) -> Verdict:
    """Faults of every direction between hosts.

    hosts: as for judge_links. paths: host -> outcomes of fabric_path.probe_paths from there.
    """
    faults: list[str] = []
    for host, outcomes in paths.items():
        own = hosts[host]
        where = f"{host} {own['interface']}"
        for outcome in outcomes:
            answered = {m.lower() for m in outcome["answered_by"]}
            if not outcome["host"]:
                faults.append(
                    f"{where}: {', '.join(sorted(answered))} also answers for {own['address']}; "
                    "wanted one machine with it"
                )
                continue
            peer = outcome["host"]
            to = f"{where} -> {peer}"
            foreign = answered - {hosts[peer]["mac"].lower()} if peer in hosts else set()
            if foreign:
                faults.append(
                    f"{to}: {', '.join(sorted(foreign))} answers for {outcome['address']}; "
                    f"wanted {hosts[peer]['mac']} alone: two machines have this address"
                )
            if outcome["route"] != own["interface"]:
                faults.append(f"{to}: the route leaves by {outcome['route'] or 'nothing'}; wanted {own['interface']}")
            if not outcome["small"]:
                faults.append(f"{to}: no answer to a ping{_reason(outcome)}; wanted 3. Next: link, cable, switch port")
                continue
            if not outcome["full"]:
                faults.append(_size_fault(to, outcome, own, hosts.get(peer)))
            if outcome["tcp"] != "open":
                faults.append(
                    f"{to}: TCP to an ephemeral port: {outcome['tcp']}; wanted open. "
                    f"Next: let {own['address']} through the firewall of {peer}"
                )
    return {"faults": faults, "notes": []}


def _reason(outcome: Facts) -> str:
    return f" ({outcome['detail']})" if outcome["detail"] else ""


def _size_fault(to: str, outcome: Facts, own: Facts, peer: Facts | None) -> str:
    text = f"{to}: {outcome['bytes']}-byte don't-fragment pings are lost{_reason(outcome)}, small ones arrive"
    if peer is None:
        return f"{text}; wanted 3 answers"
    # S08: where both ends agree, what lies between does not.
    return f"{text}; the hosts agree on MTU {min(own['mtu'], peer['mtu'])}: look at the switch port and the cable"


def matrix(hosts: Mapping[str, Facts], paths: Mapping[str, Sequence[Facts]]) -> list[str]:
    """The fabric as lines of text: a line for each host, then a line for each host with its directions."""
    names = list(hosts)
    lines = ["host interface address MTU/RoCE HCA:port gid state rate"]
    for host, found in hosts.items():
        rdma = found["rdma"]
        rail = (
            f"{rdma['hca']}:{rdma['port']} {rdma['gid_index']} {rdma['state']} {rdma['rate_gbps']:g}"
            if rdma
            else "no RDMA"
        )
        mtu = f"{found.get('mtu', '-')}/{found.get('rdma_mtu', '-')}"
        lines.append(f"{host} {found['interface'] or '-'} {found['address']} {mtu} {rail}")
    lines.append("from\\to " + " ".join(names))
    for host in names:
        outcomes = {o["host"]: o for o in paths.get(host, [])}
        cells = ["-" if name == host else _cell(outcomes.get(name)) for name in names]
        lines.append(f"{host} " + " ".join(cells))
    return lines


def _cell(outcome: Facts | None) -> str:
    if outcome is None:
        return "untested"
    if not outcome["small"]:
        return "silent"
    if not outcome["full"]:
        return f"no-{outcome['bytes']}"
    return "ok" if outcome["tcp"] == "open" else "no-tcp"
