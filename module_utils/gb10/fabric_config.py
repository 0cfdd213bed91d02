"""Give the fabric interface its address and MTU in the network configuration that the host already uses.

netplan where it has files, else systemd-networkd. Nothing is written where another file already gives both.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import roce
from .files import write_atomic

NETWORKD_FILE = "etc/systemd/network/05-gb10-fabric.network"
NETPLAN_FILE = "etc/netplan/60-gb10-fabric.yaml"

NETWORKD = """\
[Match]
Name={interface}

[Link]
MTUBytes={mtu}

[Network]
Address={address}
LinkLocalAddressing=ipv6
"""

NETPLAN = """\
network:
  version: 2
  ethernets:
    {interface}:
      mtu: {mtu}
      addresses: ["{address}"]
"""


class ConfigError(Exception):
    """The configuration could not be written or applied: what was found and the next step."""


@dataclass(frozen=True)
class Plan:
    """``file`` is relative to the root; '' where nothing has to be written."""

    file: str
    text: str
    mode: int
    apply: tuple[tuple[str, ...], ...]


def choose_interface(
    netdevs: Sequence[roce.Netdev], ports: Sequence[roce.Port], address: roce.Address, named: str
) -> roce.Netdev:
    """The interface to configure: the one that has the address, the one named, or the only cabled RoCE port's."""
    having = [n for n in netdevs if any(a.ip == address for a in n.addresses)]
    if having:
        return roce.carrier(netdevs, address)
    by_name = {n.name: n for n in netdevs}
    if named:
        if named not in by_name:
            raise ConfigError(f"fabric_interface is {named}; found {', '.join(by_name)}. Next: correct it")
        return by_name[named]
    roce_ports = [p for p in ports if p.link_layer != "InfiniBand"]
    cabled = [p for p in roce_ports if p.phys_state == "LinkUp"] or roce_ports
    names = sorted({name for p in cabled for name in p.netdevs} & set(by_name))
    if len(names) != 1:
        raise ConfigError(
            f"no interface carries {address} and the cabled RoCE ports have {', '.join(names) or 'no interface'}; "
            "wanted exactly one. Next: name it in fabric_interface"
        )
    return by_name[names[0]]


def plan(netdev: roce.Netdev, address: str, mtu: int, persistence: dict[str, Any], root: Path = Path("/")) -> Plan:
    """What to write and which commands apply it; ``address`` with prefix length, ``persistence`` of fabric_link."""
    kept = persistence["file"] and (persistence["mtu"] or 1500) == mtu
    if (root / "etc/netplan").is_dir() and any((root / "etc/netplan").glob("*.yaml")) and shutil.which("netplan"):
        file, text, mode = NETPLAN_FILE, NETPLAN, 0o600
        apply: tuple[tuple[str, ...], ...] = (("netplan", "apply"),)
    else:
        file, text, mode = NETWORKD_FILE, NETWORKD, 0o644
        apply = (("networkctl", "reload"), ("networkctl", "reconfigure", netdev.name))
    live = netdev.mtu == mtu and any(str(a) == address for a in netdev.addresses)
    filled = text.format(interface=netdev.name, mtu=mtu, address=address)
    return Plan("" if kept else file, filled, mode, () if live and kept else apply)


def carry_out(
    plan: Plan,
    interface: str,
    address: str,
    mtu: int,
    *,
    root: Path = Path("/"),
    busy_units: Sequence[str] = (),
    wait_s: float = 20.0,
    netdevs: Callable[[], list[roce.Netdev]] = roce.read_netdevs,
    run: Callable[[Sequence[str]], subprocess.CompletedProcess[str]] | None = None,
) -> None:
    """Write, apply, and wait until the interface has both. Raises ConfigError; refuses while a busy unit runs."""
    run = run or _run
    if plan.apply:
        active = busy(busy_units, run)
        if active:
            raise ConfigError(
                f"{interface}: {', '.join(active)} is running and would lose its connections; "
                "wanted stopped. Next: playbooks/stop.yml"
            )
    if plan.file:
        write_atomic(root / plan.file, plan.text.encode(), mode=plan.mode)
    for command in plan.apply:
        done = run(command)
        if done.returncode != 0:
            raise ConfigError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()}")
    deadline = time.monotonic() + wait_s
    while plan.apply:
        found = next((n for n in netdevs() if n.name == interface), None)
        if found and found.mtu == mtu and any(str(a) == address for a in found.addresses):
            return
        if time.monotonic() > deadline:
            seen = f"MTU {found.mtu}, {' '.join(map(str, found.addresses))}" if found else "no such interface"
            raise ConfigError(
                f"{interface}: {seen} after {wait_s:g} s; wanted MTU {mtu}, {address}. "
                f"Next: journalctl -u systemd-networkd -u NetworkManager"
            )
        time.sleep(0.5)


def busy(
    units: Sequence[str], run: Callable[[Sequence[str]], subprocess.CompletedProcess[str]] | None = None
) -> list[str]:
    """Which of these units are not at rest."""
    run = run or _run
    states = run(("systemctl", "is-active", *units)).stdout.split() if units else []
    return [unit for unit, state in zip(units, states, strict=False) if state in ACTIVE]


ACTIVE = ("active", "activating", "deactivating", "reloading")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
