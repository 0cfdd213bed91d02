"""Prove the paths between hosts: full-size pings that may not be fragmented, TCP between ephemeral ports, one owner
of every address. All peers of a host in one call; a result is remembered until something behind it changes.

Sources: ping(8) of iputils for its output, RFC 826 and RFC 5227 for the ARP probe.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .files import read_json, sha256_document, write_json

# Inside Linux's and NVIDIA DGX OS's default ephemeral range, 32768-60999, where the ranks' own ports are.
PORT = 47610
HEADERS = {4: 28, 6: 48}  # IP and ICMP bytes that a ping's payload size leaves out
GREETING = b"gb10"
# Each host keeps its results of these tests in fabric-TEST.json.
TESTS = ("path", "perftest")


class PathError(Exception):
    """The test itself could not be made: what was found and the next step."""


@dataclass(frozen=True)
class Peer:
    """Another host of this run as the fabric's facts describe it."""

    host: str
    address: str
    mtu: int
    mac: str


@dataclass(frozen=True)
class Outcome:
    """What one direction gave. ``small`` and ``full``: replies of 3; ``tcp``: open, refused, timeout or unreachable.

    ``answered_by``: MAC addresses that answer for the peer's address; ``route``: interface the kernel would use.
    """

    host: str
    address: str
    bytes: int
    small: int
    full: int
    detail: str
    tcp: str
    answered_by: tuple[str, ...]
    route: str


def ping_command(address: str, interface: str, size: int) -> list[str]:
    """Three pings of ``size`` bytes on the wire that may not be fragmented, out of ``interface`` only."""
    version = ipaddress.ip_address(address).version
    payload = size - HEADERS[version]
    options = f"-{version} -n -c 3 -i 0.2 -W 1 -M do -s {payload} -I {interface}"
    return ["ping", *options.split(), address]


def parse_ping(text: str) -> tuple[int, str]:
    """Replies received, and ping's own reason when it gave one."""
    counts = re.search(r"(\d+) packets transmitted, (\d+) received", text)
    reason = re.search(
        r"(message too long, mtu[=:] ?\d+|[Ff]rag needed[^\n]*|Destination [A-Za-z ]+|unreachable)", text
    )
    return int(counts[2]) if counts else 0, reason[1].strip() if reason else ""


def _ping_all(peers: Sequence[Peer], interface: str, mtu: int) -> dict[str, tuple[int, int, str]]:
    """host -> replies to small pings, replies to full ones, reason; all pings run at once."""
    running = {
        (peer.host, full): subprocess.Popen(
            ping_command(peer.address, interface, min(mtu, peer.mtu) if full else 84),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for peer in peers
        for full in (False, True)
    }
    replies: dict[tuple[str, bool], tuple[int, str]] = {}
    for key, process in running.items():
        try:
            replies[key] = parse_ping(process.communicate(timeout=15)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            replies[key] = (0, "ping did not end within 15 s")
    return {p.host: (replies[p.host, False][0], *replies[p.host, True]) for p in peers}


def route_interface(address: str, run: Callable[[list[str]], str]) -> str:
    """The interface that the kernel would send to ``address`` from."""
    try:
        rows = json.loads(run(["ip", "-json", "route", "get", address]) or "[]")
    except ValueError:
        rows = []
    return str(rows[0].get("dev", "")) if rows else ""


def arp_probe(interface: str, mac: str, address: str) -> bytes:
    """An Ethernet frame asking who has ``address``, with no sender address, so that no cache learns from it."""
    sender = bytes.fromhex(mac.replace(":", ""))
    head = b"\xff" * 6 + sender + struct.pack("!H", 0x0806)
    return head + struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + sender + bytes(4) + bytes(6) + socket.inet_aton(address)


def parse_arp_reply(frame: bytes) -> tuple[str, str] | None:
    """(address, MAC) of an ARP reply, None for any other frame."""
    if len(frame) < 42 or frame[12:14] != b"\x08\x06" or frame[20:22] != b"\x00\x02":
        return None
    return socket.inet_ntoa(frame[28:32]), frame[22:28].hex(":")


def owners(interface: str, mac: str, addresses: Sequence[str], seconds: float = 1.0) -> dict[str, set[str]]:
    """IPv4 address -> every MAC address on the link that answers for it (this host's own does not)."""
    found: dict[str, set[str]] = {address: set() for address in addresses}
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806)) as link:
        link.bind((interface, 0x0806))
        for address in addresses:
            link.send(arp_probe(interface, mac, address))
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            link.settimeout(left)
            try:
                reply = parse_arp_reply(link.recv(2048))
            except TimeoutError:
                break
            if reply and reply[0] in found:
                found[reply[0]].add(reply[1])
    return found


class _Listener:
    """Accepts peers on this host's fabric address until closed, and remembers who came."""

    def __init__(self, address: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((address, port))
        except OSError as error:
            self.socket.close()
            raise PathError(f"cannot listen on {address} port {port}: {error.strerror}; free it") from error
        self.socket.listen()
        self.socket.settimeout(0.2)
        self.seen: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                connection, source = self.socket.accept()
            except OSError:
                continue
            with connection:
                self.seen.add(str(source[0]))
                connection.settimeout(1)
                try:
                    connection.sendall(GREETING)
                except OSError:
                    continue

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.socket.close()


def connect(source: str, peer: Peer, port: int, seconds: float) -> str:
    """``open``, or why not after ``seconds``; a peer whose test has not begun yet refuses for a while."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((peer.address, port), timeout=2, source_address=(source, 0)) as link:
                if link.recv(len(GREETING)) == GREETING:
                    return "open"
                outcome = "refused"
        except ConnectionRefusedError:
            outcome = "refused"
        except TimeoutError:
            outcome = "timeout"
        except OSError as error:
            outcome = f"unreachable ({error.strerror})"
        if time.monotonic() >= deadline:
            return outcome
        time.sleep(0.3)


def probe_paths(
    address: str, interface: str, mac: str, mtu: int, peers: Sequence[Peer], *, port: int = PORT, wait_s: float = 20.0
) -> list[Outcome]:
    """Test every direction from this host. ``wait_s``: how long the peers' own calls may take to begin."""
    listener = _Listener(address, port)
    try:
        tcp: dict[str, str] = {}

        def reach(peer: Peer) -> None:
            tcp[peer.host] = connect(address, peer, port, wait_s)

        threads = [threading.Thread(target=reach, args=(peer,), daemon=True) for peer in peers]
        for thread in threads:
            thread.start()
        answered = owners(interface, mac, [address, *(p.address for p in peers)]) if "." in address else {}
        pings = _ping_all(peers, interface, mtu)
        for thread in threads:
            thread.join()
        # Stay until every peer has been here too, or it would read this host's early end as a refusal.
        deadline = time.monotonic() + wait_s
        expected = {p.address for p in peers if tcp[p.host] == "open"}
        while not expected <= listener.seen and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        listener.close()
    outcomes = [
        Outcome(
            host=peer.host,
            address=peer.address,
            bytes=min(mtu, peer.mtu),
            small=pings[peer.host][0],
            full=pings[peer.host][1],
            detail=pings[peer.host][2],
            tcp=tcp[peer.host],
            answered_by=tuple(sorted(answered.get(peer.address, ()))),
            route=route_interface(peer.address, _output),
        )
        for peer in peers
    ]
    foreign = tuple(sorted(answered.get(address, set()) - {mac.lower()}))
    return outcomes + ([Outcome("", address, 0, 0, 0, "", "", foreign, interface)] if foreign else [])


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout


# --- memory ----------------------------------------------------------------------------------------


def key(hosts: Mapping[str, Mapping[str, Any]]) -> str:
    """What a result over these hosts (name -> facts) stands for: when one of these changes, it is worthless."""
    names = ("address", "interface", "mac", "mtu", "boot_id", "firmware")
    return sha256_document([[host, *(found.get(name) for name in names)] for host, found in sorted(hosts.items())])


def recall(file: Path) -> dict[str, Any] | None:
    """``key`` and ``result`` as they were remembered; None where there is nothing readable."""
    try:
        stored = read_json(file)
        return {"key": str(stored["key"]), "result": stored["result"]} if stored else None
    except (ValueError, KeyError, TypeError):
        # A damaged memory is no memory: the test is run again and the file replaced.
        return None


def remember(file: Path, wanted: str, result: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"key": wanted, "result": result})


def remembered(hosts: Mapping[str, Mapping[str, Any]], test: str) -> dict[str, Any]:
    """host -> result of ``path`` or ``perftest``, empty unless every host holds one under the present key.

    A test needs all hosts at the same time, so one that has forgotten makes all of them test again.
    """
    stored = {host: found["remembered"][test] for host, found in hosts.items()}
    now = key(hosts)
    return {h: s["result"] for h, s in stored.items()} if all(s and s["key"] == now for s in stored.values()) else {}


def good(outcomes: Sequence[Mapping[str, Any]], peers: Sequence[Peer]) -> bool:
    """Whether nothing in these outcomes needs another look: only such a result is worth remembering."""
    macs = {p.host: p.mac.lower() for p in peers}
    return len(outcomes) == len(peers) and all(
        o["small"] and o["full"] and o["tcp"] == "open" and set(o["answered_by"]) <= {macs[o["host"]]} for o in outcomes
    )


def as_dicts(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [asdict(o) | {"answered_by": list(o.answered_by)} for o in outcomes]
