"""Which ufw rules a host of the fleet needs, and the ufw commands that bring it there.

Rules of ours carry a comment that begins with `gb10:`; all others are the operator's and stay. ufw(8) of Debian 12 and
Ubuntu 24.04 (0.36.2) prints rules in one canonical form, which is the form that rules are compared in.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .files import write_json

UFW_DEFAULTS = Path("/etc/default/ufw")
RECORD = Path("/var/lib/gb10/firewall.json")
ROLLBACK_UNIT = "gb10-firewall-rollback"
MARK = "gb10: "
TRANSIENT = Path("/run/systemd/transient")
PROC = Path("/proc")


class FirewallError(Exception):
    """What keeps the firewall from its wanted state, and the next step."""


def network(text: str) -> str:
    """'any' or an address range as ufw prints it: a single address without its prefix length."""
    if text == "any":
        return text
    try:
        parsed = ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise FirewallError(f"{text!r} is neither 'any' nor an address or a range in CIDR form: {error}") from error
    return str(parsed.network_address) if parsed.num_addresses == 1 else str(parsed)


@dataclass(frozen=True)
class Rule:
    """An allowed way in. Without ports every protocol and port is meant, with them TCP."""

    name: str
    source: str = "any"
    destination: str = "any"
    ports: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """The rule as `ufw show added` prints it."""
        ports = ",".join(str(port) for port in sorted(set(self.ports)))
        if self.source == self.destination == "any":
            return f"allow {ports}/tcp"
        tail = f" port {ports} proto tcp" if ports else ""
        return f"allow from {self.source} to {self.destination}{tail}"

    @property
    def comment(self) -> str:
        return MARK + self.name


def wanted_rules(
    fabric: Iterable[str],
    ssh_ports: Iterable[int],
    ssh_from: Iterable[str],
    api_ports: Iterable[int],
    api_clients: Iterable[str],
) -> list[Rule]:
    """Rules of one host, ssh first. Ranks use ephemeral ports, so the fabric may reach all of its own addresses."""
    rules = [Rule("ssh", network(source), ports=tuple(ssh_ports)) for source in ssh_from]
    for subnet in map(network, fabric):
        rules.append(Rule("fabric", subnet, subnet))
    ports = tuple(api_ports)
    if ports:
        rules += [Rule("api", network(client), ports=ports) for client in api_clients]
    return rules


@dataclass
class State:
    """What ufw is now. `ours` and `others` are rules in ufw's words."""

    active: bool = False
    input_policy: str = ""
    ipv6: bool = True
    ours: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    record: dict[str, object] | None = None

    @property
    def text(self) -> str:
        lines = [
            f"{'active' if self.active else 'inactive'}, incoming by default: {self.input_policy}",
            f"IPv6 {'filtered' if self.ipv6 else 'not filtered'}",
        ]
        return "\n".join([*lines, *self.ours]) + "\n"


_ADDED = re.compile(r"^ufw (?P<words>.+?)(?: comment '(?P<comment>.*)')?$")


def parse_added(text: str) -> tuple[list[str], list[str]]:
    """Our rules and the others of `ufw show added`."""
    ours: list[str] = []
    others: list[str] = []
    for line in text.splitlines():
        found = _ADDED.match(line.strip())
        if found:
            (ours if (found["comment"] or "").startswith(MARK) else others).append(found["words"])
    return ours, others


def parse_defaults(text: str) -> tuple[str, bool]:
    """Input policy in ufw's words and whether IPv6 is filtered, of /etc/default/ufw."""
    values = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    policies = {"DROP": "deny", "REJECT": "reject", "ACCEPT": "allow"}
    return policies.get(values.get("DEFAULT_INPUT_POLICY", ""), "unknown"), values.get("IPV6", "no") == "yes"


Step = tuple[str, ...]


def plan(state: State, rules: Sequence[Rule], rollback_s: int) -> list[Step]:
    """Commands, ssh first and enabling last; a way back is armed before the first one that can lock anybody out."""
    if state.active and not state.ipv6:
        raise FirewallError(
            f"ufw is active and {UFW_DEFAULTS} says IPV6=no, so every port is open over IPv6: set it to yes, "
            "allow what you need there, and run ufw reload"
        )
    steps: list[Step] = []
    if not state.ipv6:
        steps.append(("sed", "-i", "s/^IPV6=.*/IPV6=yes/", str(UFW_DEFAULTS)))
    wanted = {rule.words: rule for rule in rules}
    for words, rule in wanted.items():
        if words not in state.ours:
            # An operator's earlier "deny" would win over an appended rule.
            verb = ["prepend"] if rule.name == "ssh" else []
            steps.append(("ufw", *verb, *words.split(), "comment", rule.comment))
    if not state.active or state.input_policy != "deny":
        undo = "ufw --force disable" if not state.active else f"ufw default {state.input_policy} incoming"
        timer = (f"--on-active={rollback_s}", f"--unit={ROLLBACK_UNIT}", "--collect", "--quiet")
        steps.append(("systemd-run", *timer, "sh", "-c", undo))
    if state.input_policy != "deny":
        steps.append(("ufw", "default", "deny", "incoming"))
    steps += [("ufw", "delete", *words.split()) for words in state.ours if words not in wanted]
    if not state.active:
        steps.append(("ufw", "--force", "enable"))
    return steps


def plan_absent(state: State) -> list[Step]:
    """Commands that give back what was there before the first run, the operator's later rules included."""
    steps: list[Step] = []
    before = state.record or {}
    if before and not before["active"] and state.active:
        steps.append(("ufw", "--force", "disable"))
    if before and before["input_policy"] in ("allow", "reject") and state.input_policy == "deny":
        steps.append(("ufw", "default", str(before["input_policy"]), "incoming"))
    return steps + [("ufw", "delete", *words.split()) for words in state.ours]


# --------------------------------------------------------------------------------------------- the host


def _run(command: Sequence[str]) -> str:
    environment = os.environ | {"LC_ALL": "C"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    said = (result.stdout + result.stderr).strip()
    if result.returncode != 0 or "problem running" in said:
        hint = ""
        if "nf_tables" in said:
            hint = (
                "; this kernel has no nf_tables: update-alternatives --set iptables /usr/sbin/iptables-legacy, "
                "the same for ip6tables"
            )
        raise FirewallError(f"{shlex.join(command)} failed with {result.returncode}: {said[-600:]}{hint}")
    return result.stdout


def read_state() -> State:
    """ufw's state on this host; an empty one where it is not installed."""
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else None
    if not shutil.which("ufw"):
        return State(input_policy="allow", record=record)
    ours, others = parse_added(_run(["ufw", "show", "added"]))
    policy, ipv6 = parse_defaults(UFW_DEFAULTS.read_text())
    active = "Status: active" in _run(["ufw", "status"])
    return State(active, policy, ipv6, ours, others, record)


def connection(proc: Path = PROC) -> tuple[str, int] | None:
    """Peer address and local port of the ssh connection that this process belongs to, None where there is none.

    sudo drops SSH_CONNECTION from the environment, so the processes above are asked too.
    """
    pid = os.getpid()
    while pid > 1:
        try:
            environment = (proc / str(pid) / "environ").read_bytes()
            status = (proc / str(pid) / "stat").read_text()
        except OSError:
            return None
        for entry in environment.split(b"\0"):
            if entry.startswith(b"SSH_CONNECTION="):
                words = entry.decode().partition("=")[2].split()
                return words[0].partition("%")[0], int(words[3])
        pid = int(status.rpartition(")")[2].split()[1])
    return None


def ssh_ports(here: tuple[str, int] | None) -> list[int]:
    """Ports of this host's ssh server: those of its configuration and the one that this run came through."""
    ports = {here[1]} if here else set()
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if sshd:
        result = subprocess.run([sshd, "-T"], capture_output=True, text=True, check=False, timeout=30)
        ports |= {int(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("port ")}
    return sorted(ports or {22})


def check_ssh_source(here: tuple[str, int] | None, ssh_from: Sequence[str]) -> None:
    """Refuse rules that would lock out the very connection that brings them."""
    if not ssh_from:
        raise FirewallError("host_firewall_ssh_from is empty: nobody could log in; give networks or any")
    if here is None or "any" in ssh_from:
        return
    peer = ipaddress.ip_address(here[0])
    if not any(peer in ipaddress.ip_network(network(source), strict=False) for source in ssh_from):
        raise FirewallError(
            f"this run came over ssh from {peer}, which host_firewall_ssh_from ({', '.join(ssh_from)}) leaves out: "
            "add it"
        )


def apply(state: State, steps: Sequence[Step], *, present: bool) -> None:
    """Run STEPS; what was there before is recorded first and forgotten last."""
    if present and state.record is None:
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        write_json(RECORD, {"active": state.active, "input_policy": state.input_policy})
    for step in steps:
        _run(step)
    if not present:
        RECORD.unlink(missing_ok=True)


def armed() -> bool:
    """Whether the firewall will be switched off again: this run's timer, or that of a run that was killed."""
    return (TRANSIENT / f"{ROLLBACK_UNIT}.timer").exists()


def confirm() -> bool:
    """Call the way back off; whether one was armed. Called over a fresh connection: that there is one is the proof."""
    if not armed():
        return False
    _run(["systemctl", "stop", f"{ROLLBACK_UNIT}.timer"])
    return True
