"""Networks and power of the guests. All that is made here is found again by name or pid file, and removed by it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from ..settings import SSH_KEY, EmbeddedError
from . import (
    FABRIC_BRIDGE,
    FABRIC_MTU,
    GATEWAY,
    GUEST_STATE,
    GUESTS,
    KNOWN_HOSTS,
    MANAGEMENT_BRIDGE,
    MEMORY_MIB,
    Guest,
)
from .image import Image

QEMU = "qemu-system-x86_64"
BRIDGES = (MANAGEMENT_BRIDGE, FABRIC_BRIDGE)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EmbeddedError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _exists(interface: str) -> bool:
    return Path("/sys/class/net", interface).exists()


def ensure_networks() -> None:
    for bridge in BRIDGES:
        if not _exists(bridge):
            _ip("link", "add", bridge, "type", "bridge")
            # A bridge waits 30 s before it forwards on a new port unless told otherwise.
            _ip("link", "set", bridge, "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
            if bridge == MANAGEMENT_BRIDGE:
                _ip("address", "add", f"{GATEWAY}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
    for guest in GUESTS:
        for tap, bridge in zip(guest.taps, BRIDGES, strict=True):
            if not _exists(tap):
                _ip("tuntap", "add", "dev", tap, "mode", "tap")
            mtu = FABRIC_MTU if bridge == FABRIC_BRIDGE else 1500
            _ip("link", "set", tap, "mtu", str(mtu), "master", bridge, "up")
    _ip("link", "set", FABRIC_BRIDGE, "mtu", str(FABRIC_MTU))


def remove_networks() -> None:
    for interface in [tap for guest in GUESTS for tap in guest.taps] + list(BRIDGES):
        if _exists(interface):
            _ip("link", "del", interface)


def pid_of(guest: Guest) -> int:
    """The guest's QEMU process, 0 when it is off; a reused pid does not name the pid file in its command line."""
    try:
        pid = int(guest.pidfile.read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return 0
    return pid if str(guest.pidfile).encode() in command else 0


def power_on(guest: Guest, image: Image) -> None:
    if not shutil.which(QEMU):
        raise EmbeddedError(f"{QEMU} is not installed: apt-get install --no-install-recommends qemu-system-x86")
    if pid_of(guest):
        return
    GUEST_STATE.mkdir(parents=True, exist_ok=True)
    append = (
        "root=/dev/vda rw console=ttyS0 quiet mitigations=off "
        f"systemd.hostname={guest.name} ip={guest.management_address}::{GATEWAY}:255.255.255.0:{guest.name}:mgmt0:off"
    )
    command = [QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35"]
    # Emulation only: it is the same everywhere, and nested virtualisation is rarely there.
    command += ["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "1", "-m", str(MEMORY_MIB)]
    command += ["-kernel", str(image.kernel), "-initrd", str(image.initrd), "-append", append]
    # Writes go to a temporary file that dies with the process: every start is a factory reset, a reboot is not.
    command += ["-drive", f"file={image.disk},format=raw,if=virtio,snapshot=on,cache=unsafe"]
    command += ["-device", "virtio-rng-pci", "-serial", f"file:{guest.console}"]
    for index, (tap, mac) in enumerate(zip(guest.taps, guest.macs, strict=True)):
        command += ["-netdev", f"tap,id=n{index},ifname={tap},script=no,downscript=no"]
        command += ["-device", f"virtio-net-pci,netdev=n{index},mac={mac},romfile="]
    command += ["-pidfile", str(guest.pidfile), "-daemonize"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EmbeddedError(f"{guest.name} did not start: {done.stderr.strip()}")


def power_off(guest: Guest) -> None:
    """Pull the plug; raise when the process survives 10 s."""
    deadline = time.monotonic() + 10
    while pid := pid_of(guest):
        if time.monotonic() > deadline:
            raise EmbeddedError(f"{guest.name}: process {pid} survives SIGKILL for 10 s; see /proc/{pid}/stack")
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    guest.pidfile.unlink(missing_ok=True)


def ssh(guest: Guest, *command: str) -> list[str]:
    """The argument list that runs ``command`` in the guest."""
    options = [
        f"UserKnownHostsFile={KNOWN_HOSTS}",
        "StrictHostKeyChecking=accept-new",
        "BatchMode=yes",
        "ConnectTimeout=5",
        "LogLevel=ERROR",
    ]
    flags = [word for option in options for word in ("-o", option)]
    return ["ssh", "-i", str(SSH_KEY), *flags, f"root@{guest.management_address}", *command]


def wait_for_ssh(guest: Guest, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (
        subprocess.run(ssh(guest, "true"), capture_output=True, check=False, stdin=subprocess.DEVNULL).returncode != 0
    ):
        if not pid_of(guest):
            raise EmbeddedError(f"{guest.name} went off while it booted; see {guest.console}")
        if time.monotonic() > deadline:
            raise EmbeddedError(f"{guest.name} did not answer on ssh within {seconds:g} s; see {guest.console}")
        time.sleep(1)
