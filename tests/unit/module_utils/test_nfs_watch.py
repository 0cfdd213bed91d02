"""Which connections to the NFS server count as unanswered, and when they are closed."""

from __future__ import annotations

import pytest
from ansible.module_utils.gb10 import nfs_watch

SERVER = "198.51.100.11"
# /proc/net/tcp of a client whose server left the network 1.5 s ago, captured, and rows as they are for other sockets.
HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
SILENT = "   0: 0C6433C6:9854 0B6433C6:0801 01 00000064:00000000 01:00000011 00000002     0        0 3574634\n"
LISTENER = "   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1234\n"


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([LISTENER, SILENT], {"0C6433C6:9854"}),
        ([SILENT, SILENT.replace(":9854", ":9855")], {"0C6433C6:9854", "0C6433C6:9855"}),  # nconnect
        ([SILENT.replace("00000002", "00000000")], set()),  # acknowledged, or just sent
        ([SILENT.replace("0801 01", "0801 02")], set()),  # connecting: what waits for that fails in time by itself
        ([SILENT.replace("0B6433C6", "0D6433C6")], set()),  # another server
        ([SILENT.replace(":0801", ":0016")], set()),  # another service
        ([], set()),
    ],
)
def test_only_what_was_sent_again_to_the_server_counts(rows, found):
    assert nfs_watch.unacknowledged(HEADER + "".join(rows), SERVER) == found


class Clock:
    """Time that passes only while the watch sleeps; the table of the moment; an end after 20 s."""

    def __init__(self, silent_from: float, silent_until: float) -> None:
        self.now, self.silent, self.closed = 0.0, (silent_from, silent_until), []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > 20:
            raise TimeoutError

    def read_text(self) -> str:
        return HEADER + (SILENT if self.silent[0] <= self.now < self.silent[1] else LISTENER)

    def close(self, server: str) -> None:
        assert server == SERVER
        self.closed.append(self.now)
        self.silent = (0, 0)


@pytest.mark.parametrize(
    ("silent_from", "silent_until", "closed"),
    [(5, 99, [7.0]), (5, 6.9, []), (30, 99, [])],
    ids=["silent for good", "acknowledged after 1.9 s", "never silent"],
)
def test_a_connection_is_closed_after_two_seconds_without_acknowledgement(
    monkeypatch, silent_from, silent_until, closed
):
    clock = Clock(silent_from, silent_until)
    monkeypatch.setattr(nfs_watch, "time", clock)
    monkeypatch.setattr(nfs_watch, "TCP", clock)
    monkeypatch.setattr(nfs_watch, "close", clock.close)
    with pytest.raises(TimeoutError):
        nfs_watch.watch(SERVER)
    assert clock.closed == closed


def test_every_transport_to_the_server_connects_anew_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(nfs_watch, "TRANSPORTS", tmp_path)
    written = {}
    monkeypatch.setattr(nfs_watch.Path, "write_text", lambda path, text: written.setdefault(path.parent.name, text))
    for name, address in {"1-tcp": SERVER, "2-tcp": SERVER, "3-tcp": "198.51.100.13", "4-rdma": SERVER}.items():
        transport = tmp_path / f"switch-0/xprt-{name}"
        transport.mkdir(parents=True)
        (transport / "dstaddr").write_bytes(f"{address}\n".encode())
    nfs_watch.close(SERVER)
    assert written == {"xprt-1-tcp": SERVER, "xprt-2-tcp": SERVER}
