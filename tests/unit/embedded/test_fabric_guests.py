"""The guests' bookkeeping: a stale pid file never leads to another process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from embedded import guests
from embedded.guests import machine
from embedded.settings import EmbeddedError


@pytest.fixture
def guest(tmp_path, monkeypatch) -> guests.Guest:
    monkeypatch.setattr(guests, "GUEST_STATE", tmp_path)
    return guests.Guest("roce1", 1)


@pytest.mark.parametrize("content", ["", "nonsense", "999999999", str(os.getpid())])
def test_pid_file_that_names_no_guest_of_ours_is_off(guest, content):
    guest.pidfile.write_text(content)

    assert machine.pid_of(guest) == 0
    machine.power_off(guest)
    assert not guest.pidfile.exists()


def test_plug_is_pulled_by_pid(guest):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "-pidfile", str(guest.pidfile)])
    guest.pidfile.write_text(str(process.pid))
    # Popen comes back in the middle of exec, when the command line may still be empty.
    deadline = time.monotonic() + 10
    while not machine.pid_of(guest) and time.monotonic() < deadline:
        time.sleep(0.01)

    assert machine.pid_of(guest) == process.pid
    # The zombie keeps no command line, so it no longer counts as the guest.
    machine.power_off(guest)
    assert process.wait(10) == -9


def test_missing_qemu_is_named_with_its_package(guest, monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)

    with pytest.raises(EmbeddedError, match="apt-get install --no-install-recommends qemu-system-x86"):
        machine.power_on(guest, None)


def test_names_fit_the_kernel_and_differ():
    taps = [tap for guest in guests.GUESTS for tap in guest.taps]
    macs = [mac for guest in guests.GUESTS for mac in guest.macs]

    assert max(map(len, taps)) <= 15
    assert len({*taps, *macs}) == 8
