"""What a host's fabric interface looks like now, and what it will look like after the next boot.

Persistence is judged from what the network services read at boot: systemd-networkd, NetworkManager, ifupdown, the
kernel command line, and netplan by letting it generate into an empty root. Files below /run do not survive.
Sources: systemd.network(5), nm-settings-keyfile(5), interfaces(5), netplan-generate(8).
"""

from __future__ import annotations

import fnmatch
import ipaddress
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import roce

Sections = list[tuple[str, list[tuple[str, str]]]]


@dataclass(frozen=True)
class Configured:
    """What one configuration file gives the interface; ``mtu`` 0 where it names none."""

    file: str
    addresses: tuple[str, ...]
    mtu: int


def ini_sections(text: str) -> Sections:
    """Sections in order with their keys; both may repeat, as systemd and NetworkManager allow."""
    sections: Sections = []
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("[") and line.endswith("]"):
            sections.append((line[1:-1], []))
        elif sections and "=" in line and line[0] not in "#;":
            key, _, value = line.partition("=")
            sections[-1][1].append((key.strip(), value.strip()))
    return sections


def _values(sections: Sections, section: str, key: str) -> list[str]:
    return [v for name, pairs in sections if name == section for k, v in pairs if k == key]


def _number(values: Sequence[str]) -> int:
    """The last value as bytes; systemd allows a K suffix."""
    match = re.fullmatch(r"(\d+)(K?)", values[-1]) if values else None
    return int(match[1]) * (1024 if match[2] else 1) if match else 0


def _matches(sections: Sections, netdev: roce.Netdev) -> bool:
    names = " ".join(_values(sections, "Match", "Name") + _values(sections, "Match", "OriginalName")).split()
    macs = " ".join(
        _values(sections, "Match", "MACAddress") + _values(sections, "Match", "PermanentMACAddress")
    ).split()
    if not names and not macs:
        return False
    by_name = not names or any(fnmatch.fnmatchcase(netdev.name, n) for n in names if not n.startswith("!"))
    return by_name and (not macs or netdev.mac.lower() in (m.lower() for m in macs))


def _systemd_files(roots: Sequence[tuple[str, Path]], suffix: str) -> Iterator[tuple[str, Sections]]:
    """Files in the order systemd reads them: sorted by name, an earlier root shadows a later one of the same name."""
    chosen: dict[str, tuple[str, Path]] = {}
    for label, directory in roots:
        for file in sorted(directory.glob(f"*{suffix}")):
            chosen.setdefault(file.name, (label, file))
    for name in sorted(chosen):
        label, file = chosen[name]
        text = file.read_text(encoding="utf-8", errors="replace")
        for _, directory in reversed(roots):
            for extra in sorted((directory / f"{name}.d").glob("*.conf")):
                text += "\n" + extra.read_text(encoding="utf-8", errors="replace")
        yield f"{label}/{name}", ini_sections(text)


def networkd(roots: Sequence[tuple[str, Path]], netdev: roce.Netdev) -> Configured | None:
    """What systemd-networkd gives the interface: the first matching .network file, MTU also from a .link file."""
    links = (s for _, s in _systemd_files(roots, ".link") if _matches(s, netdev))
    link_mtu = next((_number(_values(s, "Link", "MTUBytes")) for s in links), 0)
    for name, sections in _systemd_files(roots, ".network"):
        if _matches(sections, netdev):
            addresses = _values(sections, "Network", "Address") + _values(sections, "Address", "Address")
            return Configured(name, tuple(addresses), _number(_values(sections, "Link", "MTUBytes")) or link_mtu)
    return None


def network_manager(roots: Sequence[tuple[str, Path]], netdev: roce.Netdev) -> list[Configured]:
    """Keyfile profiles bound to the interface by name or MAC address."""
    found = []
    for label, directory in roots:
        for file in sorted(directory.glob("*.nmconnection")):
            try:
                sections = ini_sections(file.read_text(encoding="utf-8", errors="replace"))
            except PermissionError:
                continue
            names = _values(sections, "connection", "interface-name") + _values(sections, "match", "interface-name")
            macs = [v for s in ("ethernet", "802-3-ethernet") for v in _values(sections, s, "mac-address")]
            if netdev.name not in names and netdev.mac.lower() not in (m.lower() for m in macs):
                continue
            addresses = [
                value.split(",")[0].rstrip(";")
                for section, pairs in sections
                if section in ("ipv4", "ipv6")
                for key, value in pairs
                if re.fullmatch(r"address(es)?\d*", key)
            ]
            mtu = [v for s in ("ethernet", "802-3-ethernet") for v in _values(sections, s, "mtu")]
            found.append(Configured(f"{label}/{file.name}", tuple(addresses), _number(mtu)))
    return found


def ifupdown(root: Path, netdev: roce.Netdev) -> list[Configured]:
    """Static stanzas of /etc/network/interfaces and interfaces.d."""
    found = []
    files = [root / "etc/network/interfaces", *sorted((root / "etc/network/interfaces.d").glob("*"))]
    for file in (f for f in files if f.is_file()):
        stanza = ""
        options: dict[str, str] = {}
        for raw in [*file.read_text(encoding="utf-8", errors="replace").splitlines(), "iface"]:
            words = raw.split()
            if not words or words[0].startswith("#"):
                continue
            if words[0] in ("iface", "auto", "allow-hotplug", "source", "source-directory", "mapping"):
                if stanza == netdev.name and "address" in options:
                    address = options["address"]
                    if "/" not in address and "netmask" in options:
                        address = str(ipaddress.ip_interface(f"{address}/{options['netmask']}"))
                    mtu = int(options["mtu"]) if options.get("mtu", "").isdigit() else 0
                    found.append(Configured(f"/{file.relative_to(root)}", (address,), mtu))
                stanza, options = (words[1] if words[0] == "iface" and len(words) > 1 else ""), {}
            elif len(words) > 1:
                options[words[0]] = words[1]
    return found


def kernel_command_line(text: str, netdev: roce.Netdev) -> Configured | None:
    """``ip=ADDR::GW:MASK:HOST:IFACE:off[:...:MTU]``, which systemd-network-generator applies at each boot."""
    for word in text.split():
        if word.startswith("ip="):
            fields = word[3:].split(":")
            if len(fields) >= 7 and fields[5] == netdev.name and fields[0]:
                address = str(ipaddress.ip_interface(f"{fields[0]}/{fields[3] or '32'}"))
                return Configured("the kernel command line", (address,), 0)
    return None


def netplan_generate(root: Path, into: Path) -> bool:
    """Let netplan write what it would at the next boot into ``into``; False where it is not in use."""
    sources = sorted((root / "etc/netplan").glob("*.yaml"))
    if not sources or not shutil.which("netplan"):
        return False
    (into / "etc/netplan").mkdir(parents=True)
    for source in sources:
        shutil.copy(source, into / "etc/netplan")
    done = subprocess.run(
        ["netplan", "generate", "--root-dir", str(into)], capture_output=True, text=True, check=False, timeout=30
    )
    return done.returncode == 0


def persistence(
    netdev: roce.Netdev,
    address: roce.Address,
    root: Path = Path("/"),
    generate: Callable[[Path, Path], bool] = netplan_generate,
) -> dict[str, Any]:
    """Which file gives the interface its address and MTU at the next boot.

    Returns ``file`` ('' where none gives the address), ``mtu`` (0 where that file names none) and ``volatile``:
    files below /run that give it now and are gone after a reboot.
    """
    with tempfile.TemporaryDirectory(prefix="gb10-netplan-") as scratch:
        into = Path(scratch)
        generate(root, into)
        sources = [
            networkd(
                [
                    ("/etc/systemd/network", root / "etc/systemd/network"),
                    ("/etc/netplan -> run/systemd/network", into / "run/systemd/network"),
                    ("/usr/lib/systemd/network", root / "usr/lib/systemd/network"),
                ],
                netdev,
            ),
            *network_manager(
                [
                    ("/etc/NetworkManager/system-connections", root / "etc/NetworkManager/system-connections"),
                    ("/etc/netplan -> run/NetworkManager", into / "run/NetworkManager/system-connections"),
                ],
                netdev,
            ),
            *ifupdown(root, netdev),
            kernel_command_line(_text(root / "proc/cmdline"), netdev),
        ]
    lasting = [s for s in sources if s and _gives(s, address)]
    profiles = "/run/NetworkManager/system-connections"
    fleeting = [
        networkd([("/run/systemd/network", root / "run/systemd/network")], netdev),
        *network_manager([(profiles, root / profiles.lstrip("/"))], netdev),
    ]
    return {
        "file": lasting[0].file if lasting else "",
        "mtu": max((s.mtu for s in lasting), default=0),
        "volatile": [] if lasting else [s.file for s in fleeting if s and _gives(s, address)],
    }


def _gives(source: Configured, address: roce.Address) -> bool:
    return any(text.partition("/")[0] == str(address) for text in source.addresses)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def facts(
    fabric_address: str,
    subnet: str,
    *,
    require_rdma: bool,
    hca: str | None = None,
    gid_index: int | None = None,
    sysfs: Path = Path("/sys"),
    root: Path = Path("/"),
    netdevs: Callable[[], list[roce.Netdev]] = roce.read_netdevs,
    generate: Callable[[Path, Path], bool] = netplan_generate,
    known_persistence: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything about this host's side of the fabric; ``fault`` and ``next_step`` are '' where it can be used."""
    found: dict[str, Any] = {
        "address": fabric_address,
        "interface": "",
        "boot_id": _text(root / "proc/sys/kernel/random/boot_id").strip(),
        "fault": "",
        "next_step": "",
        "rdma": None,
        "firmware": "",
    }
    try:
        interfaces = netdevs()
        found["addresses"] = {str(a.ip): n.name for n in interfaces for a in n.addresses if not a.ip.is_link_local}
        address = ipaddress.ip_address(fabric_address)
        netdev = roce.carrier(interfaces, address, sysfs)
        network = ipaddress.ip_network(subnet)
        found |= {
            "interface": netdev.name,
            "mac": netdev.mac,
            "mtu": netdev.mtu,
            "rdma_mtu": roce.rdma_mtu(netdev.mtu),
            "operstate": netdev.operstate,
            "prefix": next(a.network.prefixlen for a in netdev.addresses if a.ip == address),
            "also_in_subnet": sorted(
                n.name for n in interfaces if n.name != netdev.name and any(a.ip in network for a in n.addresses)
            ),
            "persistence": known_persistence or persistence(netdev, address, root, generate),
        }
        fabric = roce.resolve(
            fabric_address,
            require_rdma=require_rdma,
            sysfs=sysfs,
            hca=hca,
            gid_index=gid_index,
            netdevs=lambda: interfaces,
        )
        found |= {"notes": fabric.report["notes"], "gid_table": fabric.report["gid_table"]}
        if fabric.report["rdma"]:
            names = ("hca", "port", "gid_index", "state", "phys_state", "rate_gbps")
            found["rdma"] = {name: fabric.report[name] for name in names}
            found["firmware"] = fabric.report["firmware"]
    except roce.RoceError as error:
        found |= {"fault": error.finding, "next_step": error.next_step, "gid_table": error.table.splitlines()}
    return found
