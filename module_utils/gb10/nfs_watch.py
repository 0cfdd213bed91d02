"""Close the connection to an NFS server whose host no longer acknowledges anything.

A request of NFS 4 fails after ``timeo`` only once its connection is broken (rpc_check_timeout of net/sunrpc/clnt.c),
and the kernel keeps one for 180 s without a single acknowledgement (xs_tcp_default_timeout of xprtsock.c), whatever the
mount's options say. For so long after the head lost its power, df, fact gathering and every look at the mount would
hang. Once the connection is closed, requests fail in time and the kernel connects anew until the head is back. A server
that is only slow still acknowledges, as its kernel does that, and keeps its connection.

    python3 -m gb10.nfs_watch SERVER
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

TCP = Path("/proc/net/tcp")
TRANSPORTS = Path("/sys/kernel/sunrpc/xprt-switches")  # since Linux 5.14
PORT = 2049
ESTABLISHED = "01"  # include/net/tcp_states.h
PATIENCE_S, PERIOD_S = 2.0, 1.0


def unacknowledged(table: str, server: str) -> set[str]:
    """Local ends of connections to ``server`` (IPv4) whose data was sent again and still waits, from /proc/net/tcp."""
    address = int.from_bytes(socket.inet_aton(server), sys.byteorder)
    remote = f"{address:08X}:{PORT:04X}"
    rows = (line.split() for line in table.splitlines()[1:])
    return {row[1] for row in rows if row[2:4] == [remote, ESTABLISHED] and int(row[6], 16)}


def close(server: str) -> None:
    """Make the kernel close every connection to ``server``: it does when told the address to connect to anew."""
    for address in TRANSPORTS.glob("*/xprt-*-tcp/dstaddr"):
        if address.read_text().strip() == server:
            address.write_text(server)


def watch(server: str) -> None:
    since: dict[str, float] = {}
    while True:
        now = time.monotonic()
        since = {end: since.get(end, now) for end in unacknowledged(TCP.read_text(), server)}
        if since and now - min(since.values()) >= PATIENCE_S:
            print(f"{server}: nothing acknowledged for {PATIENCE_S:.0f} s, its connections are closed", flush=True)
            close(server)
            since = {}
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    watch(sys.argv[1])
