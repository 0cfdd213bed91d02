"""Two QEMU guests with soft-RoCE: a real kernel's GID table, which the User-Mode Linux hosts lack.

``python3 -m embedded.guests up`` builds the image once, starts both and waits for ssh; ``down`` removes everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# The bridges' names and addresses are the machine's, so the record of who uses them is too.
GUEST_STATE = Path("/run/gb10-guests")
KNOWN_HOSTS = GUEST_STATE / "known_hosts"
# RFC 2544's benchmarking range, beside the embedded fleet's networks.
MANAGEMENT_BRIDGE, MANAGEMENT_PREFIX = "gb10q0", "198.18.8"
FABRIC_BRIDGE, FABRIC_PREFIX = "gb10q1", "198.18.9"
GATEWAY = f"{MANAGEMENT_PREFIX}.1"
FABRIC_MTU = 9000
# The names that a GB10 gives its first cabled port.
FABRIC_INTERFACE, HCA = "enp1s0f0np0", "rocep1s0f0"
MEMORY_MIB = 768


@dataclass(frozen=True)
class Guest:
    name: str
    number: int

    @property
    def management_address(self) -> str:
        return f"{MANAGEMENT_PREFIX}.{10 + self.number}"

    @property
    def fabric_address(self) -> str:
        return f"{FABRIC_PREFIX}.{10 + self.number}"

    @property
    def taps(self) -> tuple[str, str]:
        return f"{MANAGEMENT_BRIDGE}t{self.number}", f"{FABRIC_BRIDGE}t{self.number}"

    @property
    def macs(self) -> tuple[str, str]:
        return f"02:00:c6:12:08:{10 + self.number:02x}", f"02:00:c6:12:09:{10 + self.number:02x}"

    @property
    def pidfile(self) -> Path:
        return GUEST_STATE / f"{self.name}.pid"

    @property
    def console(self) -> Path:
        return GUEST_STATE / f"{self.name}.console"


GUESTS = (Guest("roce1", 1), Guest("roce2", 2))
