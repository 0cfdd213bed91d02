"""Compare the hosts of a fleet with each other, with a declared baseline and with what is known to be bad.

A pure function of the facts that :mod:`host_info` gathered. One fault gives one finding: a host that a
known-bad rule explains is left out of the comparison of the facts that the rule names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .known_bad import JOINT, REPORT, Facts, Hit, Rule, find, parse_rules, uses, value_of


class ParityError(Exception):
    """The operator's baseline or waivers are wrong."""


@dataclass(frozen=True)
class Property:
    """A fact that has to be equal: on all hosts, or on those that share the fact ``within`` (a vendor's firmware)."""

    fact: str
    title: str
    remedy: str
    within: str = ""
    tolerance: float = 0.0


_UPDATE = "bring the host to {wanted} and reboot it"
_FIRMWARE = "update the firmware to {wanted} with fwupdmgr, then reboot; never while the engine serves"

PROPERTIES = (
    Property("os_version", "OS release", _UPDATE),
    Property("dgx_release", "DGX OS release", _UPDATE),
    Property("architecture", "architecture", "replace the host; a fleet has one architecture"),
    Property("kernel_release", "kernel", "install and boot {wanted}; host_parity_kernel_pin keeps it"),
    Property("kernel_command_line", "kernel command line", "make GRUB_CMDLINE_LINUX equal, update-grub, reboot"),
    Property("page_size", "page size", "boot a kernel with {wanted}-byte pages"),
    Property("hugepages_total", "reserved huge pages", "remove hugepages= and vm.nr_hugepages, or set them everywhere"),
    Property("gpu_name", "GPU", "take the host out of the inventory"),
    Property("gpu_driver", "driver", "install driver {wanted} and reboot; two levels cost one fleet half its prefill"),
    Property("gpu_vbios", "VBIOS", _FIRMWARE, within="product_name"),
    Property("firmware_uefi", "UEFI firmware", _FIRMWARE, within="product_name"),
    Property("firmware_soc", "SoC firmware", _FIRMWARE, within="product_name"),
    Property("firmware_ec", "EC firmware", _FIRMWARE, within="product_name"),
    Property("firmware_pd", "PD firmware", _FIRMWARE, within="product_name"),
    Property("firmware_connectx", "ConnectX firmware", "bring the ConnectX-7 to {wanted} with its vendor's package"),
    Property("firmware_nvme", "NVMe firmware", "update the drive to {wanted} with fwupdmgr", within="nvme_model"),
    Property("mem_total_kib", "memory", "compare UEFI settings and firmware; they set memory aside", tolerance=0.01),
    Property("cpu_governor", "CPU governor", "set the governor to {wanted} on all cores"),
    Property("container_runtime", "container runtime", "install {wanted}"),
    Property("container_toolkit", "NVIDIA container toolkit", "install {wanted}"),
    Property("nccl_libraries", "NCCL library", "install the same NCCL build; equal version numbers are not enough"),
)
REACHED, MOUNTS, PIN, KERNEL = "reached", "nfs_mounts", "kernel_pin", "kernel_release"


@dataclass(frozen=True)
class Finding:
    """One fault. ``name`` is what a waiver names: a fact, or a rule's id."""

    name: str
    host: str
    title: str
    value: str
    wanted: str
    remedy: str
    source: str = ""
    waived: str = ""

    def sentence(self) -> str:
        """The line an operator reads."""
        wanted = f", want {self.wanted}" if self.wanted else ""
        waiver = f" [waived: {self.waived}]" if self.waived else ""
        return f"{self.host}: {self.title} {self.value}{wanted}; {self.remedy}{waiver}"


@dataclass(frozen=True)
class Row:
    """One line of the table: what a host has of a property on which the hosts, or a host and its rules, disagree."""

    title: str
    host: str
    value: str
    odd: bool


@dataclass(frozen=True)
class Verdict:
    """What the gate decides on; ``findings`` stop the play, ``waived`` and ``notes`` are shown."""

    findings: tuple[Finding, ...] = ()
    waived: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()
    table: tuple[Row, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain types for Ansible, with the report as text."""
        return {**asdict(self), "report": self.report()}

    def report(self) -> str:
        """All of it as text: findings first, the table last."""
        parts = [
            _section(f"{len(self.findings)} finding(s)", self.findings),
            _section("waived by the inventory", self.waived),
            _section("to know", self.notes),
            _table(self.table),
        ]
        return "\n\n".join(part for part in parts if part) or "all hosts are alike"


def _section(title: str, findings: Sequence[Finding]) -> str:
    return "\n".join([f"{title}:", *(f"- {finding.sentence()}" for finding in findings)]) if findings else ""


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    cells = [("property", "host", "value", ""), *((r.title, r.host, r.value, "<- odd" if r.odd else "") for r in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return "\n".join(
        "  ".join((*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3])).rstrip()
        for line in cells
    )


def show(value: Any) -> str:
    """A fact's value as text, shortened for a line."""
    if isinstance(value, list):
        return ", ".join(show(item) for item in value) or "none"
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 300 else text[:297] + "..."


@dataclass
class _Fleet:
    """The facts of the hosts that were reached, with what the comparison needs of them."""

    hosts: Mapping[str, Facts]
    baseline: Mapping[str, Any]
    explained: dict[str, set[str]] = field(default_factory=dict)
    """Fact -> hosts that a known-bad rule speaks for."""

    def groups(self, prop: Property) -> list[tuple[str, dict[str, Facts]]]:
        """Hosts to compare with each other, with the value of ``within`` that they share."""
        groups: dict[str, dict[str, Facts]] = {}
        for host, facts in self.hosts.items():
            if host not in self.explained.get(prop.fact, ()):
                groups.setdefault(show(value_of(facts, prop.within)) if prop.within else "", {})[host] = facts
        return list(groups.items())

    def compare(self, prop: Property) -> list[Finding]:
        """Findings about one property; a value that is a mapping is compared key by key, where a host has the key."""
        found: list[Finding] = []
        for group, hosts in self.groups(prop):
            values = {host: value_of(facts, prop.fact) for host, facts in hosts.items()}
            declared = self.baseline.get(prop.fact)
            if isinstance(declared, Mapping):
                declared = declared.get(group)
            if any(isinstance(value, dict) for value in values.values()):
                parts = {key for value in values.values() for key in value or ()}
                for key in sorted(parts):
                    have = {host: value[key] for host, value in values.items() if value and key in value}
                    found += self._judge(prop, f"{prop.title} {key}", have, None)
            else:
                found += self._judge(prop, prop.title, values, declared)
        return found

    def _judge(self, prop: Property, title: str, values: Mapping[str, Any], declared: Any) -> list[Finding]:
        sets = _alike(values, prop.tolerance)
        if declared is None:
            if len(sets) + (None in values.values() and bool(sets)) < 2:
                return []
            if len(sets) > 1 and len(sets[0][1]) == len(sets[1][1]):
                return [self._tie(prop, title, sets)]
            declared = sets[0][0]
        wanted = show(declared)
        findings = []
        for host, value in values.items():
            if value is None:
                text = f"unknown ({self.hosts[host].get(prop.fact, {}).get('unknown', 'not gathered')})"
            elif _near(value, declared, prop.tolerance):
                continue
            else:
                text = show(value)
            findings.append(Finding(prop.fact, host, title, text, wanted, prop.remedy.format(wanted=wanted)))
        return findings

    @staticmethod
    def _tie(prop: Property, title: str, sets: Sequence[tuple[Any, list[str]]]) -> Finding:
        """Two against two: nobody is the odd one out, so the operator has to say which value is meant."""
        value = ", ".join(f"{show(value)} on {' and '.join(hosts)}" for value, hosts in sets)
        hosts = ", ".join(host for _, names in sets for host in names)
        remedy = f"say which is meant with host_parity_baseline: {{{prop.fact}: ...}}, then make the others equal"
        return Finding(prop.fact, hosts, title, value, "one value", remedy)

    def odd(self, host: str, fact: str) -> bool:
        """Whether ``host`` differs from what most hosts have of ``fact`` (both sides of a tie do)."""
        prop = next((prop for prop in PROPERTIES if prop.fact == fact), Property(fact, fact, ""))
        return any(host in finding.host.split(", ") for finding in self.compare(prop))


def _near(one: Any, other: Any, tolerance: float) -> bool:
    if tolerance and isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return abs(one - other) <= tolerance * max(abs(one), abs(other))
    return show(one) == show(other)


def _alike(values: Mapping[str, Any], tolerance: float) -> list[tuple[Any, list[str]]]:
    """Known values with the hosts that have them, the most frequent first."""
    sets: list[tuple[Any, list[str]]] = []
    for host, value in values.items():
        if value is None:
            continue
        hosts = next((hosts for known, hosts in sets if _near(value, known, tolerance)), None)
        if hosts is None:
            sets.append((value, [host]))
        else:
            hosts.append(host)
    return sorted(sets, key=lambda item: -len(item[1]))


def _rule_findings(hits: Sequence[Hit], hosts: Mapping[str, Facts]) -> list[Finding]:
    """One finding a rule and host; a rule about hosts among each other is one fault of them together."""
    merged: dict[tuple[str, str], list[Hit]] = {}
    for hit in hits:
        merged.setdefault((hit.rule.id, "" if uses(hit.rule.when, JOINT) else hit.host), []).append(hit)
    findings = []
    for group in merged.values():
        rule, fact = group[0].rule, group[0].fact
        values: dict[str, list[str]] = {}
        for hit in group:
            known = hosts[hit.host].get(fact, {})
            text = f"unknown ({known.get('unknown')})" if known.get("value") is None else show(known["value"])
            values.setdefault(text, []).append(hit.host)
        value = ", ".join(text if len(values) == 1 else f"{text} on {' and '.join(on)}" for text, on in values.items())
        names = ", ".join(hit.host for hit in group)
        findings.append(Finding(rule.id, names, title_of(fact), value, rule.wanted, rule.remedy, rule.source))
    return findings


def title_of(fact: str) -> str:
    """The property's title, or the fact's name in words."""
    return next((prop.title for prop in PROPERTIES if prop.fact == fact), fact.replace("_", " "))


def _not_installed(hosts: Mapping[str, Facts], kernel: str) -> list[Finding]:
    """Hosts that could not boot the pinned kernel; pinning there would leave them without updates and without it."""
    remedy = f"apt-get install linux-image-{kernel}, boot it, then pin it"
    return [
        Finding(PIN, host, "installed kernels", show(installed), f"{kernel} among them", remedy)
        for host, facts in hosts.items()
        if kernel not in (installed := value_of(facts, "kernels_installed") or [])
    ]


def _mount_findings(hosts: Mapping[str, Facts], addresses: Mapping[str, str]) -> tuple[list[Finding], list[Finding]]:
    """NFS mounts without an answer, and those that the storage stage can put right.

    A server of this fleet that was reached can be started, and a stale handle remounted, by the stage that owns
    mounts: both are notes. Anything else would hang every later stage.
    """
    findings: list[Finding] = []
    notes: list[Finding] = []
    for host, facts in hosts.items():
        # Several layers on one path are probed once, so they are one fault.
        for mount in {(one["path"], one["server"]): one for one in value_of(facts, MOUNTS) or ()}.values():
            if mount["state"] == "ok":
                continue
            server = addresses.get(mount["server"], mount["server"])
            silent = mount["state"].startswith("no answer")
            finding = Finding(
                MOUNTS,
                host,
                f"{mount['path']} from {mount['server']}",
                f"gives {mount['state']}" if silent else f"answers {mount['state']}",
                "",
                f"start the export on {server}, then remount",
            )
            (findings if silent and server not in hosts else notes).append(finding)
    return findings, notes


def judge(
    hosts: Mapping[str, Facts | None],
    rules: Sequence[Rule] = (),
    baseline: Mapping[str, Any] | None = None,
    waivers: Mapping[str, str] | None = None,
    addresses: Mapping[str, str] | None = None,
    kernel_pin: str = "",
) -> Verdict:
    """The verdict on a fleet.

    ``hosts``: facts by host, None for a host that was not reached. ``baseline``: wanted values by fact; for firmware
    a mapping from product name to value. ``waivers``: reason by fact or rule id. ``addresses``: address -> host, to
    name an NFS server. ``kernel_pin``: the kernel release that every host has to run. Raises ParityError on a
    baseline or waiver that names nothing.
    """
    baseline, waivers = dict(baseline or {}), waivers or {}
    if kernel_pin:
        baseline[KERNEL] = kernel_pin
    compared = {prop.fact for prop in PROPERTIES}
    _refuse_unknown("baseline", set(baseline) - compared, compared)
    known = compared | {rule.id for rule in rules} | {MOUNTS, REACHED, PIN}
    _refuse_unknown("waiver", set(waivers) - known, known)
    unexplained = sorted(name for name, reason in waivers.items() if not str(reason).strip())
    if unexplained:
        raise ParityError(f"waiver {', '.join(unexplained)} has no reason; write why and until when")

    reached = {host: facts for host, facts in hosts.items() if facts is not None}
    fleet = _Fleet(reached, baseline)
    found = [
        Finding(REACHED, host, "host", "not reached", "its facts", "make it answer over ssh, or remove it")
        for host in hosts
        if host not in reached
    ]
    hits = find(rules, reached, fleet.odd)
    refusing = [hit for hit in hits if hit.rule.severity != REPORT]
    found += _rule_findings(refusing, reached)
    for hit in refusing:
        for fact in hit.rule.explains if hit.rule.id not in waivers else ():
            fleet.explained.setdefault(fact, set()).add(hit.host)
    unpinned = _not_installed(reached, kernel_pin) if kernel_pin else []
    if PIN not in waivers:
        fleet.explained.setdefault(KERNEL, set()).update(finding.host for finding in unpinned)
    found += unpinned
    for prop in PROPERTIES:
        found += fleet.compare(prop)
    stuck, notes = _mount_findings(reached, addresses or {})
    found += stuck
    notes += _rule_findings([hit for hit in hits if hit.rule.severity == REPORT], reached)

    waived = _joined([replace(one, waived=str(waivers[one.name])) for one in found if one.name in waivers])
    findings = _joined([one for one in found if one.name not in waivers])
    return Verdict(tuple(findings), tuple(waived), tuple(notes), tuple(_rows(reached, found, refusing)))


def _joined(findings: Sequence[Finding]) -> list[Finding]:
    """Facts of a host that are unknown for one and the same reason are one fault."""
    joined: list[Finding] = []
    for one in findings:
        same = [i for i, two in enumerate(joined) if (two.host, two.value) == (one.host, one.value)]
        if not one.value.startswith("unknown (") or not same:
            joined.append(one)
            continue
        two = joined[same[0]]
        title, wanted = f"{two.title}, {one.title}", f"{two.wanted}, {one.wanted}"
        joined[same[0]] = replace(two, title=title, wanted=wanted)
    return joined


def _refuse_unknown(kind: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    if unknown := sorted(unknown):
        raise ParityError(f"{kind} {', '.join(unknown)} names nothing; known are {', '.join(sorted(known))}")


def _rows(hosts: Mapping[str, Facts], findings: Sequence[Finding], hits: Sequence[Hit]) -> Iterable[Row]:
    """All hosts' values of every fact that a finding is about, in the order of the findings."""
    fact_of = {hit.rule.id: hit.fact for hit in hits}
    odd: dict[str, set[str]] = {}
    for finding in findings:
        if finding.name not in (REACHED, MOUNTS, PIN):
            odd.setdefault(fact_of.get(finding.name, finding.name), set()).update(finding.host.split(", "))
    for fact, names in odd.items():
        for host, facts in hosts.items():
            value = value_of(facts, fact)
            yield Row(title_of(fact), host, "unknown" if value is None else show(value), host in names)


def judge_documents(
    hosts: Mapping[str, Facts | None],
    known_bad: Sequence[Mapping[str, Any]],
    baseline: Mapping[str, Any] | None = None,
    waivers: Mapping[str, str] | None = None,
    addresses: Mapping[str, str] | None = None,
    kernel_pin: str = "",
) -> dict[str, Any]:
    """:func:`judge` from and to plain documents. Raises ParityError or KnownBadError."""
    facts = sorted({name for one in hosts.values() if one for name in one})
    rules = parse_rules(known_bad, facts) if facts else []
    return judge(hosts, rules, baseline, waivers, addresses, kernel_pin).as_dict()
