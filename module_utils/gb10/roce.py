"""Find the RDMA device, port and GID index that carry this host's fabric address.

GID indexes differ between hosts and move when a link flaps or an address is added, so nothing here is ever
written down: the answer is read from the kernel's own table (/sys/class/infiniband) at each start of a rank.

Sources: Documentation/ABI/stable/sysfs-class-infiniband of the kernel for the files and their units,
include/rdma/ib_addr.h (iboe_get_mtu) for the RDMA MTU, NVIDIA's NCCL guide for the variables.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

ROCE_V2 = "RoCE v2"
# Bytes of GRH, UDP, BTH, XRC, AtomicETH and ICRC headers that the kernel takes off a netdev's MTU.
ROCE_OVERHEAD = 96
RDMA_MTUS = (4096, 2048, 1024, 512, 256)


class RoceError(Exception):
    """The fabric cannot be used: what was found, what to do, and the whole GID table.

    ``transient`` marks a state that a booting host passes through (address not there yet, link still
    training); a wait may cure it.
    """

    def __init__(self, finding: str, next_step: str, *, table: str = "", transient: bool = False) -> None:
        self.finding = finding
        self.next_step = next_step
        self.table = table
        self.transient = transient
        super().__init__(f"{finding}. Next: {next_step}" + (f"\n{table}" if table else ""))


@dataclass(frozen=True)
class Gid:
    """One row of a port's GID table; ``type`` and ``netdev`` are None where the kernel answers EINVAL."""

    index: int
    value: ipaddress.IPv6Address
    type: str | None
    netdev: str | None

    @property
    def address(self) -> Address:
        return self.value.ipv4_mapped or self.value


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device; ``rate_gbps`` is 0.0 and texts are '' where the file is unreadable."""

    hca: str
    number: int
    link_layer: str
    state: str
    phys_state: str
    rate_gbps: float
    firmware: str
    netdevs: tuple[str, ...]
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        return f"{self.hca} port {self.number}"


@dataclass(frozen=True)
class Netdev:
    """A network interface as ``ip -json address`` describes it; ``mtu`` in bytes."""

    name: str
    mtu: int
    operstate: str
    mac: str
    addresses: tuple[ipaddress.IPv4Interface | ipaddress.IPv6Interface, ...]
    kind: str = ""


@dataclass(frozen=True)
class Rail:
    """Where RDMA traffic of the fabric address leaves the host; MTUs in bytes, rate in Gbit/s."""

    hca: str
    port: int
    netdev: str
    gid_index: int
    gid: str
    state: str
    phys_state: str
    rate_gbps: float
    netdev_mtu: int
    rdma_mtu: int
    firmware: str


@dataclass(frozen=True)
class FabricEnvironment:
    """``environment`` is what a rank gets, ``report`` is what is kept as evidence (JSON types only)."""

    environment: dict[str, str]
    report: dict[str, Any]


# --- reading ---------------------------------------------------------------------------------------


def _read(path: Path) -> str | None:
    """The text of a sysfs attribute, or None: an unused slot's type and ndev files fail with EINVAL."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _numbered(directory: Path) -> list[Path]:
    try:
        return sorted((p for p in directory.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    except OSError:
        return []


def _names(directory: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(p.name for p in directory.iterdir()))
    except OSError:
        return ()


def _after_colon(text: str | None) -> str:
    """``4: ACTIVE`` -> ``ACTIVE``."""
    return (text or "").rpartition(":")[2].strip()


def _gids(port: Path) -> tuple[Gid, ...]:
    found = []
    for slot in _numbered(port / "gids"):
        try:
            value = ipaddress.IPv6Address(_read(slot) or "::")
        except ValueError:
            continue
        if int(value) == 0:
            continue
        attributes = port / "gid_attrs"
        found.append(
            Gid(
                index=int(slot.name),
                value=value,
                type=_read(attributes / "types" / slot.name) or None,
                netdev=_read(attributes / "ndevs" / slot.name) or None,
            )
        )
    return tuple(found)


def read_ports(sysfs: Path = Path("/sys")) -> list[Port]:
    """Every port of every RDMA device, zero GIDs left out; an empty list where there is no device."""
    ports = []
    for hca in _names(sysfs / "class/infiniband"):
        device = sysfs / "class/infiniband" / hca
        for port in _numbered(device / "ports"):
            rate = re.match(r"([\d.]+) Gb/sec", _read(port / "rate") or "")
            ports.append(
                Port(
                    hca=hca,
                    number=int(port.name),
                    link_layer=_read(port / "link_layer") or "",
                    state=_after_colon(_read(port / "state")),
                    phys_state=_after_colon(_read(port / "phys_state")),
                    rate_gbps=float(rate[1]) if rate else 0.0,
                    firmware=_read(device / "fw_ver") or "",
                    # Soft-RoCE has no PCI device; it names its interface in `parent`.
                    netdevs=_names(device / "device/net") or tuple((_read(device / "parent") or "").split()),
                    gids=_gids(port),
                )
            )
    return ports


def parse_netdevs(text: str) -> list[Netdev]:
    """Interfaces from the output of ``ip -json -details address show``."""
    return [
        Netdev(
            name=row["ifname"],
            mtu=int(row.get("mtu", 0)),
            operstate=str(row.get("operstate", "UNKNOWN")),
            mac=str(row.get("address", "")),
            addresses=tuple(
                ipaddress.ip_interface(f"{a['local']}/{a['prefixlen']}")
                for a in row.get("addr_info", [])
                if "local" in a and not a.get("tentative")
            ),
            kind=str(row.get("linkinfo", {}).get("info_kind", "")),
        )
        for row in json.loads(text or "[]")
        if row.get("ifname")
    ]


def read_netdevs() -> list[Netdev]:
    """The interfaces of this host, from iproute2."""
    done = subprocess.run(
        ["ip", "-json", "-details", "address", "show"], capture_output=True, text=True, check=False, timeout=10
    )
    if done.returncode != 0:
        raise RoceError(f"ip address failed: {done.stderr.strip()}", "check that iproute2 is installed")
    return parse_netdevs(done.stdout)


# --- judging ---------------------------------------------------------------------------------------


def rdma_mtu(netdev_mtu: int) -> int:
    """The active RDMA MTU that the kernel derives from an Ethernet interface's MTU (iboe_get_mtu); 0: none fits."""
    return next((mtu for mtu in RDMA_MTUS if netdev_mtu - ROCE_OVERHEAD >= mtu), 0)


def gid_table(ports: Iterable[Port]) -> str:
    """All non-zero GIDs as text, one line each, under a line for each port."""
    lines = []
    for port in ports:
        rate = f"{port.rate_gbps:g} Gb/s"
        lines.append(f"{port.name}: {port.state or '?'}/{port.phys_state or '?'}, {rate}, {port.link_layer or '?'}")
        lines += [f"  gid {g.index}: {g.address}  {g.type or 'type unreadable'}  {g.netdev or '-'}" for g in port.gids]
        if not port.gids:
            lines.append("  no GID: every slot is zero")
    return "\n".join(lines) or "no RDMA device"


def _interfaces(netdevs: Iterable[Netdev]) -> str:
    return "; ".join(_interface(netdev) for netdev in netdevs) or "none"


def _interface(netdev: Netdev) -> str:
    state = " (link is down)" if netdev.operstate == "DOWN" else ""
    return f"{netdev.name}{state} {' '.join(map(str, netdev.addresses)) or 'no address'}"


def refused_kind(netdev: Netdev, sysfs: Path = Path("/sys")) -> str:
    """Why this interface can never be the fabric ('Wi-Fi', 'a bridge', 'the loopback'), or ''."""
    device = sysfs / "class/net" / netdev.name
    if netdev.name == "lo":
        return "the loopback"
    if netdev.name.startswith("wl") or (device / "phy80211").exists():
        return "Wi-Fi"
    if netdev.kind == "bridge" or netdev.name.startswith("docker") or (device / "bridge").exists():
        return "a bridge"
    return ""


def carrier(netdevs: Sequence[Netdev], address: Address, sysfs: Path = Path("/sys")) -> Netdev:
    """The one interface that carries ``address`` and may serve as the fabric."""
    found = [n for n in netdevs if any(a.ip == address for a in n.addresses)]
    if not found:
        raise RoceError(
            f"no interface carries the fabric address {address}: found {_interfaces(netdevs)}",
            "bring the fabric link up and give it this address in the network configuration, "
            "or correct fabric_address in the inventory",
            transient=True,
        )
    if len(found) > 1:
        raise RoceError(
            f"{', '.join(n.name for n in found)}: all carry the fabric address {address}; wanted one interface",
            "remove it from all but the fabric interface",
        )
    refused = refused_kind(found[0], sysfs)
    if refused:
        raise RoceError(
            f"{found[0].name}: the fabric address {address} is on {refused}; wanted the RoCE Ethernet port",
            "move the address to the fabric interface in the network configuration",
        )
    return found[0]


def _parse_hca(hca: str) -> tuple[str, int | None]:
    """``rocep1s0f0`` or ``rocep1s0f0:1`` -> name and port."""
    name, _, port = hca.partition(":")
    if not name or (port and not port.isdigit()):
        raise RoceError(
            f"the HCA override is {hca!r}; wanted a device name such as rocep1s0f0 or rocep1s0f0:1",
            "remove the override or name a device under /sys/class/infiniband",
        )
    return name, int(port) if port else None


def _no_match(ports: Sequence[Port], netdev: Netdev, address: Address) -> RoceError:
    """Why no RoCE v2 entry holds the address: the likeliest cause first."""
    table = gid_table(ports)
    own = [p for p in ports if netdev.name in p.netdevs or any(g.netdev == netdev.name for g in p.gids)]
    v1 = [(p, g) for p in ports for g in p.gids if g.address == address]
    if v1:
        types = ", ".join(f"{p.hca} gid {g.index} {g.type or 'type unreadable'}" for p, g in v1)
        return RoceError(
            f"{netdev.name}: the GIDs of {address} are {types}; wanted one of type {ROCE_V2}",
            "wait for the kernel to fill the table or set the link down and up; "
            "check that RoCE v2 is enabled on the adapter",
            table=table,
            transient=True,
        )
    if not own:
        return RoceError(
            f"{netdev.name} carries {address}, but no RDMA port belongs to it; wanted the interface of "
            + ", ".join(p.name for p in ports),
            "move the fabric address to the interface of the cabled RDMA port",
            table=table,
            transient=True,
        )
    where = ", ".join(f"{p.name} {p.state}/{p.phys_state}" for p in own)
    gids = [g for p in own for g in p.gids]
    seen = (
        "no GID at all"
        if not gids
        else "only link-local GIDs"
        if all(g.value.is_link_local for g in gids)
        else "no GID"
    )
    return RoceError(
        f"{netdev.name}: {seen} for {address} on {where}; wanted a {ROCE_V2} entry for it",
        "check that the address stands on the RDMA port's own interface and that its cable and switch port are up, "
        "then set the link down and up",
        table=table,
        transient=True,
    )


def lookup(
    ports: Sequence[Port], netdev: Netdev, address: Address, *, hca: str | None = None, gid_index: int | None = None
) -> Rail:
    """The port and RoCE v2 GID index of ``address`` on ``netdev``; overrides are checked against the table.

    Raises RoceError with the whole GID table for everything that is not exactly one usable answer.
    """
    table = gid_table(ports)
    if not ports:
        raise RoceError(
            f"no RDMA device under /sys/class/infiniband; wanted the one that carries {address} ({netdev.name})",
            "load the driver (modprobe mlx5_ib) and check lspci for the ConnectX-7",
            transient=True,
        )
    usable = [p for p in ports if p.link_layer != "InfiniBand"]
    if hca is not None:
        name, number = _parse_hca(hca)
        usable = [p for p in usable if p.hca == name and number in (None, p.number)]
        if not usable:
            raise RoceError(
                f"the HCA override {hca} is not a RoCE port of this host: found "
                + ", ".join(f"{p.hca}:{p.number} ({p.link_layer})" for p in ports),
                "correct or remove the override",
                table=table,
            )
    found = [(p, g) for p in usable for g in p.gids if g.type == ROCE_V2 and g.address == address]
    if not found:
        raise _no_match(usable or ports, netdev, address)
    # The same address can stand in the table twice: a VLAN beside its parent, both ports of a bond.
    on_netdev = [(p, g) for p, g in found if g.netdev in (netdev.name, None)]
    if not on_netdev:
        where = ", ".join(f"{p.hca} gid {g.index} on {g.netdev}" for p, g in found)
        raise RoceError(
            f"{netdev.name} carries {address}, but its GID belongs to another interface: {where}",
            "remove the second copy of the address, then set the link down and up",
            table=table,
            transient=True,
        )
    active = [(p, g) for p, g in on_netdev if p.state == "ACTIVE"]
    if not active:
        port = on_netdev[0][0]
        raise RoceError(
            f"{netdev.name}: {port.name} is {port.state or '?'}/{port.phys_state or '?'}; wanted ACTIVE/LinkUp",
            "check cable, switch port and `ip link set dev " + netdev.name + " up`",
            table=table,
            transient=True,
        )
    if len({(p.hca, p.number) for p, _ in active}) > 1:
        where = ", ".join(f"{p.hca}:{p.number} gid {g.index}" for p, g in active)
        raise RoceError(
            f"{netdev.name}: {address} is on several active RDMA ports ({where}); wanted one",
            "choose one with the HCA override",
            table=table,
        )
    port, gid = active[0]
    if gid_index is not None and gid_index not in [g.index for _, g in active]:
        held = next((g for g in port.gids if g.index == gid_index), None)
        seen = (
            f"holds {held.address} {held.type or 'type unreadable'} {held.netdev or ''}".strip() if held else "is empty"
        )
        raise RoceError(
            f"{netdev.name}: the override GID index {gid_index} of {port.hca} {seen}; "
            f"wanted {address} {ROCE_V2}, which is at index {gid.index}",
            "remove the override: the index is looked up at every start",
            table=table,
        )
    return Rail(
        hca=port.hca,
        port=port.number,
        netdev=netdev.name,
        gid_index=gid.index if gid_index is None else gid_index,
        gid=str(gid.address),
        state=port.state,
        phys_state=port.phys_state,
        rate_gbps=port.rate_gbps,
        netdev_mtu=netdev.mtu,
        rdma_mtu=rdma_mtu(netdev.mtu),
        firmware=port.firmware,
    )


def check_mtu(netdev: Netdev, wanted: int) -> str:
    """'' when equal, a note when only the RDMA MTU is equal; RoceError when the RDMA MTU differs too.

    Ranks with unequal RDMA MTUs hang or fail with a length error; one Ethernet MTU of 4200 beside 9000 does not.
    """
    if netdev.mtu == wanted:
        return ""
    text = f"{netdev.name}: MTU {netdev.mtu} (RoCE {rdma_mtu(netdev.mtu)}), wanted {wanted} ({rdma_mtu(wanted)})"
    if rdma_mtu(netdev.mtu) == rdma_mtu(wanted):
        return text
    raise RoceError(
        text, f"set mtu {wanted} for {netdev.name} in the network configuration; a firmware update can reset it to 1500"
    )


def environment(netdev: Netdev, address: Address, rail: Rail | None) -> dict[str, str]:
    """The variables that pin a rank's traffic to the fabric; without ``rail`` only those of sockets.

    NCCL takes HCA and interface names as prefixes (mlx5_1 would match mlx5_10) unless '=' stands before them.
    """
    family = f"AF_INET{'6' if address.version == 6 else ''}"
    values = {
        "VLLM_HOST_IP": str(address),
        "GLOO_SOCKET_IFNAME": netdev.name,
        "TP_SOCKET_IFNAME": netdev.name,
        "NCCL_SOCKET_IFNAME": f"={netdev.name}",
        "NCCL_SOCKET_FAMILY": family,
    }
    if rail is not None:
        network = next(a.network for a in netdev.addresses if a.ip == address)
        values |= {
            # With NET named, a rank whose RDMA fails stops; without it, NCCL falls back to sockets in silence.
            "NCCL_NET": "IB",
            "NCCL_IB_DISABLE": "0",
            "NCCL_IB_HCA": f"={rail.hca}:{rail.port}",
            "NCCL_IB_GID_INDEX": str(rail.gid_index),
            "NCCL_IB_ROCE_VERSION_NUM": "2",
            "NCCL_IB_ADDR_FAMILY": family,
            "NCCL_IB_ADDR_RANGE": str(network),
        }
    empty = [name for name, value in values.items() if not value]
    if empty:
        raise RoceError(f"no value for {', '.join(empty)}", "report this: an empty variable is never passed on")
    return values


# --- at each start ---------------------------------------------------------------------------------


def _once(
    address: Address,
    netdevs: Sequence[Netdev],
    *,
    require_rdma: bool,
    sysfs: Path,
    hca: str | None,
    gid_index: int | None,
    mtu: int | None,
    last: bool,
) -> FabricEnvironment:
    """One attempt; ``last`` says that no other follows, so that what RDMA is optional for may be given up."""
    ports = read_ports(sysfs)
    try:
        netdev = carrier(netdevs, address, sysfs)
    except RoceError as error:
        raise RoceError(error.finding, error.next_step, table=gid_table(ports), transient=error.transient) from error
    note = check_mtu(netdev, mtu) if mtu is not None else ""
    notes = [note] if note else []
    rail = None
    try:
        rail = lookup(ports, netdev, address, hca=hca, gid_index=gid_index)
    except RoceError as error:
        # A wrong override stops the start even where RDMA is optional: somebody meant it.
        if require_rdma or hca is not None or gid_index is not None:
            raise
        # A device whose table is still filling is worth the wait; a host without one is not.
        if ports and error.transient and not last:
            raise
        notes.append(f"RDMA not used: {error.finding}" if ports else "no RDMA device")
    report = {
        "rdma": rail is not None,
        "address": str(address),
        "netdev": netdev.name,
        "netdev_mtu": netdev.mtu,
        **({k: v for k, v in asdict(rail).items() if k not in ("netdev", "netdev_mtu")} if rail else {}),
        "notes": notes,
        "gid_table": gid_table(ports).splitlines(),
    }
    return FabricEnvironment(environment(netdev, address, rail), report)


def resolve(
    fabric_address: str,
    *,
    require_rdma: bool,
    sysfs: Path = Path("/sys"),
    hca: str | None = None,
    gid_index: int | None = None,
    mtu: int | None = None,
    wait_s: float = 0.0,
    netdevs: Callable[[], list[Netdev]] = read_netdevs,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> FabricEnvironment:
    """The fabric environment of a rank on this host, read now.

    fabric_address: this host's address on the fabric, without prefix length.
    require_rdma: False accepts a host without a usable RDMA port and returns the socket variables alone.
    hca, gid_index: the operator's override, checked against the table.
    mtu: the fabric's wanted Ethernet MTU in bytes; None skips the check.
    wait_s: how long a state that a booting host passes through is waited out, seconds.
    Raises RoceError.
    """
    try:
        address = ipaddress.ip_address(fabric_address)
    except ValueError as error:
        raise RoceError(
            f"fabric_address is {fabric_address!r}; wanted an IPv4 or IPv6 address without prefix length",
            "correct fabric_address in the inventory",
        ) from error
    deadline = clock() + wait_s
    while True:
        last = clock() >= deadline
        try:
            return _once(
                address,
                netdevs(),
                require_rdma=require_rdma,
                sysfs=sysfs,
                hca=hca,
                gid_index=gid_index,
                mtu=mtu,
                last=last,
            )
        except RoceError as error:
            if not error.transient:
                raise
            if last:
                waited = f" (waited {wait_s:g} s)" if wait_s else ""
                raise RoceError(error.finding + waited, error.next_step, table=error.table) from error
        sleep(0.5)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the environment of this host's rank, or write it as an EnvironmentFile of systemd."""
    parser = argparse.ArgumentParser(prog="gb10.roce", description="Resolve the fabric environment of this host.")
    parser.add_argument("address", help="fabric address of this host")
    parser.add_argument("--optional-rdma", action="store_true", help="accept a host without an RDMA device")
    parser.add_argument("--hca")
    parser.add_argument("--gid-index", type=int)
    parser.add_argument("--mtu", type=int)
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--sysfs", type=Path, default=Path("/sys"))
    parser.add_argument("--environment-file", type=Path, help="write here, atomically, instead of printing")
    args = parser.parse_args(argv)
    try:
        fabric = resolve(
            args.address,
            require_rdma=not args.optional_rdma,
            sysfs=args.sysfs,
            hca=args.hca,
            gid_index=args.gid_index,
            mtu=args.mtu,
            wait_s=args.wait,
        )
    except RoceError as error:
        print(error, file=sys.stderr)
        return 1
    text = "".join(f"{name}={value}\n" for name, value in fabric.environment.items())
    if args.environment_file is None:
        print(text, end="")
    else:
        partial = args.environment_file.with_suffix(".partial")
        partial.write_text(text, encoding="ascii")
        partial.replace(args.environment_file)
    for note in fabric.report["notes"]:
        print(note, file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
