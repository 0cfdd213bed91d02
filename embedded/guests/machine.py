"""Networks and power of the guests. All that is made here is found again by name or pid file, and removed by it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from .. import network
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


def ensure_networks() -> None:
    network.ensure_bridge(MANAGEMENT_BRIDGE, f"{GATEWAY}/24")
    network.ensure_bridge(FABRIC_BRIDGE)
    for guest in GUESTS:
        for tap, bridge, mtu in zip(guest.taps, BRIDGES, (1500, FABRIC_MTU), strict=True):
            network.ensure_tap(tap, bridge, mtu)


def remove_networks() -> None:
    network.delete(*(tap for guest in GUESTS for tap in guest.taps), *BRIDGES)


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
        "console=ttyS0 quiet mitigations=off cryptomgr.notests apparmor=0 "
        f"systemd.hostname={guest.name} ip={guest.management_address}::{GATEWAY}:255.255.255.0:{guest.name}:mgmt0:off"
    )
    # microvm would start faster still, but has no clock that a kernel could measure an emulated processor's against.
    machine = "q35,sata=off,smbus=off,usb=off,vmport=off,i8042=off"
    command = [QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-machine", machine]
    # Emulation only: it is the same everywhere, and nested virtualisation is rarely there.
    command += ["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "1", "-m", str(MEMORY_MIB)]
    command += ["-kernel", str(image.kernel), "-initrd", str(image.initrd), "-append", append]
    # Writes go to a temporary file that dies with the process: every start is a factory reset, a reboot is not.
    command += ["-drive", f"id=disk,file={image.disk},format=raw,if=none,snapshot=on,cache=unsafe"]
    command += ["-device", "virtio-blk-pci,drive=disk", "-serial", f"file:{guest.console}"]
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
