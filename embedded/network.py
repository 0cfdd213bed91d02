"""The two networks of the embedded fleet: bridges and taps, made and removed by name."""

from __future__ import annotations

import ipaddress
import json
import subprocess
from pathlib import Path

from . import power
from .settings import (
    FABRIC_BRIDGE,
    FABRIC_PREFIX,
    GATEWAY,
    HOSTS,
    MANAGEMENT_BRIDGE,
    MANAGEMENT_PREFIX,
    OWNER,
    STATE,
    EmbeddedError,
)

BRIDGES = (MANAGEMENT_BRIDGE, FABRIC_BRIDGE)


def _ip(*arguments: str) -> str:
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise EmbeddedError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout


def _exists(interface: str) -> bool:
    return Path("/sys/class/net", interface).exists()


def refuse_conflicts() -> list[str]:
    """Return what keeps the networks from being made: another owner, or the address range in use."""
    faults = []
    owner = OWNER.read_text().strip() if OWNER.exists() else ""
    if owner and owner != str(STATE) and power.anyone_on(Path(owner)):
        faults.append(
            f"the bridges belong to the embedded fleet of {owner}: run `python3 -m embedded down` there first"
        )
    elif not owner:
        faults += [
            f"interface {bridge} exists and is not ours: rename or delete it (ip link del {bridge})"
            for bridge in BRIDGES
            if _exists(bridge)
        ]
    wanted = [ipaddress.ip_network(f"{prefix}.0/24") for prefix in (MANAGEMENT_PREFIX, FABRIC_PREFIX)]
    for link in json.loads(_ip("-json", "-4", "address", "show")):
        if link["ifname"] in BRIDGES:
            continue
        for address in link.get("addr_info", []):
            used = ipaddress.ip_interface(f"{address['local']}/{address['prefixlen']}").network
            faults += [
                f"{net} is in use: {link['ifname']} has {address['local']}/{address['prefixlen']}; free that range"
                for net in wanted
                if net.overlaps(used)
            ]
    return faults


def ensure_bridge(bridge: str, address: str = "") -> None:
    """Make a bridge that is missing, with this machine's address on it where one is given (CIDR form)."""
    if not _exists(bridge):
        _ip("link", "add", bridge, "type", "bridge")
        # A bridge waits 30 s before it forwards on a new port unless told otherwise.
        _ip("link", "set", bridge, "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
        if address:
            _ip("address", "add", address, "dev", bridge)
    _ip("link", "set", bridge, "up")


def ensure_tap(tap: str, bridge: str, mtu: int = 1500) -> None:
    """Make a port of a bridge that is missing. The bridge takes the smallest MTU (bytes) of its ports."""
    if not _exists(tap):
        _ip("tuntap", "add", "dev", tap, "mode", "tap")
    _ip("link", "set", tap, "mtu", str(mtu), "master", bridge, "up")


def delete(*interfaces: str) -> None:
    for interface in interfaces:
        if _exists(interface):
            _ip("link", "del", interface)


def ensure() -> None:
    """Make bridges and taps that are missing; existing ones stay, also those of a clone whose hosts are all off."""
    OWNER.write_text(f"{STATE}\n")
    ensure_bridge(MANAGEMENT_BRIDGE, f"{GATEWAY}/24")
    ensure_bridge(FABRIC_BRIDGE)
    for host in HOSTS:
        for tap, bridge in zip(host.taps, BRIDGES, strict=True):
            ensure_tap(tap, bridge)


def remove() -> None:
    """Remove every interface that `ensure` makes, unless they serve the hosts of another clone."""
    owner = OWNER.read_text().strip() if OWNER.exists() else str(STATE)
    if owner != str(STATE) and power.anyone_on(Path(owner)):
        return
    delete(*(tap for host in HOSTS for tap in host.taps), *BRIDGES)
    OWNER.unlink(missing_ok=True)
