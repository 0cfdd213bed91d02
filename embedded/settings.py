"""Where the embedded fleet lives and what it looks like. Every constant that two files need stands here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent

# Shared by all clones of the project on a machine; everything in it is named by the content it was made from.
CACHE = Path(os.environ.get("GB10_CACHE", "/var/cache/gb10-fleet"))
IMAGES = CACHE / "images"
ENVIRONMENTS = CACHE / "environments"
SSH_KEY = CACHE / "id_ed25519"

# One fleet's disks, logs and pid records.
STATE = Path(os.environ.get("GB10_EMBEDDED_STATE", str(PROJECT / ".embedded")))
KNOWN_HOSTS = STATE / "known_hosts"
SSH_CONFIG = STATE / "ssh_config"
# Names the clone that owns the bridges, so that another one refuses instead of taking them over.
OWNER = Path("/run/gb10-embedded.owner")

# RFC 2544's benchmarking range: never routed, seldom in use.
MANAGEMENT_BRIDGE, MANAGEMENT_PREFIX = "gb10m0", "198.18.0"
FABRIC_BRIDGE, FABRIC_PREFIX = "gb10f0", "198.18.1"
GATEWAY = f"{MANAGEMENT_PREFIX}.1"

GUEST_ENVIRONMENTS = "/opt/gb10/environments"
GUEST_MODELS = "/srv/models"
CHECKPOINT = "tiny-llama"

HOST_MEMORY_MIB = 3000
# Measured with the tiny model at TP4: 1.3 GiB in the head, 0.9 GiB in a worker, the rest is page cache.
NEEDED_MEMORY_MIB = 7000
# torch maps so many regions that the default 65530 kills it inside a UML host.
MAX_MAP_COUNT = 4194304


@dataclass(frozen=True)
class Host:
    """One embedded host. Numbers follow ``rank`` so that a packet dump is readable."""

    name: str
    rank: int

    @property
    def management_address(self) -> str:
        return f"{MANAGEMENT_PREFIX}.{11 + self.rank}"

    @property
    def fabric_address(self) -> str:
        return f"{FABRIC_PREFIX}.{11 + self.rank}"

    @property
    def taps(self) -> tuple[str, str]:
        return f"gb10m{11 + self.rank}", f"gb10f{11 + self.rank}"

    @property
    def macs(self) -> tuple[str, str]:
        return f"02:00:c6:12:00:{11 + self.rank:02x}", f"02:00:c6:12:01:{11 + self.rank:02x}"

    @property
    def disk(self) -> Path:
        return STATE / f"{self.name}.cow"

    @property
    def console(self) -> Path:
        return STATE / f"{self.name}.console.log"

    @property
    def pid_record(self) -> Path:
        return STATE / f"{self.name}.pid"


HOSTS = tuple(Host(f"spark-{letter}", rank) for rank, letter in enumerate("abcd"))
HEAD = HOSTS[0]


class EmbeddedError(Exception):
    """What stands in the way and what to do about it, ready to print."""
