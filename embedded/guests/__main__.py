"""``python3 -m embedded.guests up|down|status``."""

from __future__ import annotations

import argparse
import shutil
import sys
import time

from ..settings import EmbeddedError
from . import GUEST_STATE, GUESTS, KNOWN_HOSTS
from .image import ensure_image
from .machine import ensure_networks, pid_of, power_off, power_on, remove_networks, wait_for_ssh


def up() -> None:
    start = time.monotonic()
    image = ensure_image()
    ensure_networks()
    # Every start is a factory reset with new host keys.
    if not any(pid_of(guest) for guest in GUESTS):
        KNOWN_HOSTS.unlink(missing_ok=True)
    for guest in GUESTS:
        power_on(guest, image)
    for guest in GUESTS:
        wait_for_ssh(guest, 180)
        print(f"{guest.name} answers at {guest.management_address} after {time.monotonic() - start:.0f} s", flush=True)


def down() -> None:
    for guest in GUESTS:
        power_off(guest)
    remove_networks()
    shutil.rmtree(GUEST_STATE, ignore_errors=True)


def status() -> None:
    for guest in GUESTS:
        pid = pid_of(guest)
        print(f"{guest.name} {guest.management_address} {f'on, pid {pid}' if pid else 'off'}")


def main() -> int:
    verbs = {"up": up, "down": down, "status": status}
    parser = argparse.ArgumentParser(prog="python3 -m embedded.guests", description=__doc__)
    parser.add_argument("verb", choices=verbs)
    try:
        verbs[parser.parse_args().verb]()
    except EmbeddedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
