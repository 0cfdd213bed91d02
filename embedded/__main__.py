"""Command line of the embedded fleet: python3 -m embedded up|down|status|reset|power-loss|power-on."""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import network, power, tiny_llama
from .image import ensure_image
from .settings import (
    CHECKPOINT,
    ENVIRONMENTS,
    GUEST_MODELS,
    HEAD,
    HOSTS,
    KNOWN_HOSTS,
    MAX_MAP_COUNT,
    NEEDED_MEMORY_MIB,
    SSH_CONFIG,
    SSH_KEY,
    STATE,
    EmbeddedError,
    Host,
)

NEEDED_COMMANDS = {
    "/usr/bin/linux.uml": "user-mode-linux",
    "gcc": "gcc libc6-dev",
    "mmdebstrap": "mmdebstrap",
    "mkfs.ext4": "e2fsprogs",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ssh-keyscan": "openssh-client",
}
BOOT_TIMEOUT_S = 180
MAX_MAP_COUNT_FILE = Path("/proc/sys/vm/max_map_count")


def _available_memory_mib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    raise EmbeddedError("/proc/meminfo has no MemAvailable line")


def _refuse_unfit_machine() -> None:
    """Raise one error that lists everything that keeps the fleet from starting."""
    if os.geteuid() != 0:
        raise EmbeddedError("taps, bridges and mounts need root: run it as root")
    faults = []
    if platform.machine() != "x86_64":
        faults.append(f"machine is {platform.machine()}, User-Mode Linux needs x86_64")
    missing = {package for command, package in NEEDED_COMMANDS.items() if not shutil.which(command)}
    if missing:
        faults.append(f"packages missing: apt-get install {' '.join(sorted(missing))}")
    if not Path("/dev/net/tun").exists():
        faults.append("/dev/net/tun is missing: modprobe tun")
    off = [host for host in HOSTS if not power.is_on(host)]
    needed = NEEDED_MEMORY_MIB * len(off) // len(HOSTS)
    if (available := _available_memory_mib()) < needed:
        faults.append(f"MemAvailable is {available} MiB, {len(off)} hosts need {needed} MiB: end other programs")
    if "packages" not in " ".join(faults):
        faults += network.refuse_conflicts()
    if faults:
        raise EmbeddedError("\n".join(faults))


def _answers(host: Host) -> bool:
    try:
        with socket.create_connection((host.management_address, 22), timeout=2) as connection:
            connection.settimeout(5)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _ssh(host: Host, command: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    options = [f"UserKnownHostsFile={KNOWN_HOSTS}", "BatchMode=yes", "ConnectTimeout=10"]
    arguments = ["ssh", "-i", str(SSH_KEY), *(part for option in options for part in ("-o", option))]
    return subprocess.run(
        [*arguments, f"root@{host.management_address}", command], input=stdin, capture_output=True, check=False
    )


def _wait_for(hosts: list[Host]) -> None:
    started = time.monotonic()
    waiting = list(hosts)
    while waiting:
        for host in list(waiting):
            if not power.is_on(host):
                raise EmbeddedError(f"{host.name} stopped while booting; its console: {host.console}")
            if _answers(host):
                waiting.remove(host)
                print(f"{host.name} answers after {time.monotonic() - started:.0f} s", flush=True)
        if waiting and time.monotonic() - started > BOOT_TIMEOUT_S:
            names = ", ".join(host.name for host in waiting)
            raise EmbeddedError(f"no ssh in {BOOT_TIMEOUT_S} s from {names}; consoles: {STATE}/*.console.log")
        time.sleep(0.5)
    _record_host_keys()


def _record_host_keys() -> None:
    on = [host.management_address for host in HOSTS if power.is_on(host)]
    scan = subprocess.run(
        ["ssh-keyscan", "-T", "10", "-t", "ed25519", *on], capture_output=True, text=True, check=False
    )
    lines = sorted(line for line in scan.stdout.splitlines() if not line.startswith("#"))
    if len(lines) < len(on):
        raise EmbeddedError(f"ssh-keyscan got {len(lines)} host keys of {len(on)}: {scan.stderr.strip()}")
    for path, text in ((KNOWN_HOSTS, "\n".join(lines) + "\n"), (SSH_CONFIG, _ssh_config())):
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.rename(path)


def _ssh_config() -> str:
    """For hands and tests: ssh -F .embedded/ssh_config spark-a."""
    common = [
        "User root",
        f"IdentityFile {SSH_KEY}",
        f"UserKnownHostsFile {KNOWN_HOSTS}",
        "BatchMode yes",
        "LogLevel ERROR",
        "ControlMaster auto",
        f"ControlPath {STATE}/ssh-%h",
        "ControlPersist 60",
    ]
    blocks = [["Host " + host.name, f"HostName {host.management_address}", *common] for host in HOSTS]
    return "\n".join("\n  ".join(block) for block in blocks) + "\n"


def _place_checkpoint() -> None:
    """Put the tiny checkpoint on the head's disk, as an operator puts the real one there."""
    target = f"{GUEST_MODELS}/{CHECKPOINT}"
    command = f"test -e {target}/config.json || (mkdir -p {GUEST_MODELS} && tar -x -C {GUEST_MODELS})"
    result = _ssh(HEAD, command, stdin=tiny_llama.as_tar(CHECKPOINT))
    if result.returncode != 0:
        raise EmbeddedError(
            f"{HEAD.name}: could not place the checkpoint in {target}: {result.stderr.decode().strip()}"
        )


def _power_on(hosts: list[Host]) -> None:
    image = ensure_image()
    # Read by the guests through hostfs, whoever fills it later.
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    (STATE / "uml").mkdir(exist_ok=True)
    before = MAX_MAP_COUNT_FILE.read_text().strip()
    if int(before) < MAX_MAP_COUNT:
        (STATE / "max_map_count.before").write_text(before)
        MAX_MAP_COUNT_FILE.write_text(str(MAX_MAP_COUNT))
    network.ensure()
    for host in hosts:
        power.power_on(host, image)
    _wait_for(hosts)
    if HEAD in hosts:
        _place_checkpoint()


def up() -> None:
    _refuse_unfit_machine()
    _power_on([host for host in HOSTS if not power.is_on(host)] or list(HOSTS))
    status()


def down() -> None:
    """Remove hosts, disks and networks; what a crash left behind too."""
    for host in HOSTS:
        power.power_loss(host)
    network.remove()
    before = STATE / "max_map_count.before"
    if before.exists():
        MAX_MAP_COUNT_FILE.write_text(before.read_text())
    for path in STATE.glob("*"):
        if path.name == "lock":
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def status() -> None:
    for host in HOSTS:
        session = power.session_of(host)
        state = f"on (pid {session}), {'answers' if _answers(host) else 'no ssh yet'}" if session else "off"
        print(f"{host.name}  rank {host.rank}  {host.management_address}  fabric {host.fabric_address}  {state}")


def reset(hosts: list[Host]) -> None:
    """Power loss, then a factory-new disk, then power on."""
    for host in hosts:
        power.power_loss(host)
        host.disk.unlink(missing_ok=True)
    _power_on(hosts)


@contextmanager
def _lock() -> Iterator[None]:
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m embedded", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("up", help="boot the hosts that are off and wait until all answer")
    verbs.add_parser("down", help="power off and remove disks, taps and bridges")
    verbs.add_parser("status", help="one line a host")
    for verb, text in (
        ("reset", "give hosts a factory-new disk"),
        ("power-loss", "cut the power of hosts; disks stay"),
        ("power-on", "boot hosts again"),
    ):
        verbs.add_parser(verb, help=text).add_argument(
            "hosts", nargs="+", choices=[*(host.name for host in HOSTS), "all"], metavar="HOST"
        )
    arguments = parser.parse_args()
    chosen = [host for host in HOSTS if {host.name, "all"} & set(getattr(arguments, "hosts", []))]
    try:
        if arguments.verb != "status" and os.geteuid() != 0:
            raise EmbeddedError("taps, bridges and mounts need root: run it as root")
        with _lock():
            if arguments.verb == "up":
                up()
            elif arguments.verb == "down":
                down()
            elif arguments.verb == "status":
                status()
            elif arguments.verb == "reset":
                reset(chosen)
            elif arguments.verb == "power-loss":
                for host in chosen:
                    power.power_loss(host)
            else:
                _refuse_unfit_machine()
                _power_on(chosen)
    except EmbeddedError as error:
        for line in str(error).splitlines():
            print(f"embedded: {line}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
