"""Recorded pings, constructed ARP frames, real TCP on the loopback, and the memory of good results."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import fabric_path

ANSWERED = """\
PING 198.18.9.12 (198.18.9.12) from 198.18.9.11 enp1s0f0np0: 8972(9000) bytes of data.
8980 bytes from 198.18.9.12: icmp_seq=1 ttl=64 time=1.92 ms

--- 198.18.9.12 ping statistics ---
3 packets transmitted, 3 received, 0% packet loss, time 206ms
"""
TOO_LONG = """\
PING 198.18.9.12 (198.18.9.12) from 198.18.9.11 enp1s0f0np0: 8972(9000) bytes of data.
ping: local error: message too long, mtu=1500
ping: local error: message too long, mtu=1500

--- 198.18.9.12 ping statistics ---
3 packets transmitted, 0 received, +3 errors, 100% packet loss, time 431ms
"""
SILENT = """\
PING 198.18.9.99 (198.18.9.99) from 198.18.9.11 enp1s0f0np0: 56(84) bytes of data.
From 198.18.9.11 icmp_seq=1 Destination Host Unreachable

--- 198.18.9.99 ping statistics ---
3 packets transmitted, 0 received, +1 errors, 100% packet loss, time 411ms
"""
PEER = fabric_path.Peer("b", "127.0.0.1", 9000, "02:00:00:00:0a:02")
OWN = {
    "address": "10.10.0.11",
    "interface": "enp1s0f0np0",
    "mac": "02:00:00:00:0a:01",
    "mtu": 9000,
    "boot_id": "boot-a",
    "firmware": "28.45.4028",
}
GOOD = {"host": "b", "small": 3, "full": 3, "tcp": "open", "answered_by": ["02:00:00:00:0a:02"]}


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (ANSWERED, (3, "")),
        (TOO_LONG, (0, "message too long, mtu=1500")),
        (SILENT, (0, "Destination Host Unreachable")),
        ("ping: unknown iface enp1s0f0np0\n", (0, "")),
    ],
)
def test_ping_output(text, parsed):
    assert fabric_path.parse_ping(text) == parsed


@pytest.mark.parametrize(("address", "payload"), [("10.10.0.12", "8972"), ("2001:db8::2", "8952")])
def test_ping_fills_the_mtu_and_forbids_fragments(address, payload):
    command = fabric_path.ping_command(address, "enp1s0f0np0", 9000)

    assert command[command.index("-s") + 1] == payload
    assert command[command.index("-M") + 1] == "do"
    assert command[command.index("-I") + 1] == "enp1s0f0np0"


def test_arp_probe_teaches_nobody_an_address():
    frame = fabric_path.arp_probe("enp1s0f0np0", "02:00:00:00:0a:01", "10.10.0.12")

    assert frame[:14].hex() == "ffffffffffff" + "020000000a01" + "0806"
    assert frame[28:32] == bytes(4)
    assert frame[38:42] == socket.inet_aton("10.10.0.12")


@pytest.mark.parametrize(("operation", "reply"), [("0002", ("10.10.0.12", "02:00:00:00:0a:02")), ("0001", None)])
def test_arp_reply_names_the_owner(operation, reply):
    frame = bytes.fromhex(
        "020000000a01020000000a020806" + "000108000604" + operation + "020000000a02" + "0a0a000c" + "0" * 20
    )

    assert fabric_path.parse_arp_reply(frame) == reply
    assert fabric_path.parse_arp_reply(frame[:30]) is None


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_listening_peer_is_open_and_the_listener_sees_who_came(port):
    listener = fabric_path._Listener("127.0.0.1", port)
    try:
        assert fabric_path.connect("127.0.0.1", PEER, port, 5) == "open"
        assert listener.seen == {"127.0.0.1"}
    finally:
        listener.close()


def test_peer_that_never_listens_is_refused(port):
    assert fabric_path.connect("127.0.0.1", PEER, port, 0.5) == "refused"


def test_something_else_on_the_port_is_not_taken_for_a_peer(port):
    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(1)
        assert fabric_path.connect("127.0.0.1", PEER, port, 0) == "timeout"


def test_occupied_port_is_named(port):
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(fabric_path.PathError, match=f"port {port}: .* in use"),
    ):
        fabric_path._Listener("127.0.0.1", port)


def test_route_is_read_from_iproute2():
    answer = '[{"dst":"198.18.9.12","dev":"enp1s0f0np0","prefsrc":"198.18.9.11","flags":[],"uid":0,"cache":[]}]'

    assert fabric_path.route_interface("198.18.9.12", lambda _: answer) == "enp1s0f0np0"
    assert fabric_path.route_interface("198.18.9.12", lambda _: "RTNETLINK answers: Network is unreachable") == ""


def test_result_is_recalled_as_it_was_remembered(tmp_path):
    memory = tmp_path / "gb10/fabric-path.json"

    assert fabric_path.recall(memory) is None
    fabric_path.remember(memory, "k", [GOOD])
    assert fabric_path.recall(memory) == {"key": "k", "result": [GOOD]}


HOSTS = {"a": OWN, "b": OWN | {"address": "10.10.0.12", "mac": PEER.mac, "boot_id": "boot-b"}}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["boot_id", "address", "firmware", "mtu", "interface", "mac"])
def test_change_of_any_host_forgets(host, name):
    assert fabric_path.key(HOSTS) != fabric_path.key(HOSTS | {host: HOSTS[host] | {name: "other"}})


def test_hosts_agree_on_the_key_in_any_order():
    assert fabric_path.key(HOSTS) == fabric_path.key(dict(reversed(HOSTS.items())))
    assert fabric_path.key(HOSTS) != fabric_path.key({"a": OWN})


@pytest.mark.parametrize(
    ("of_a", "of_b", "known"),
    [
        ({"key": fabric_path.key(HOSTS), "result": [1]}, {"key": fabric_path.key(HOSTS), "result": [2]}, True),
        # Each host is the other side of the others' tests: one that has forgotten makes all test again.
        ({"key": fabric_path.key(HOSTS), "result": [1]}, None, False),
        ({"key": "old", "result": [1]}, {"key": fabric_path.key(HOSTS), "result": [2]}, False),
        (None, None, False),
    ],
)
def test_result_counts_only_when_every_host_remembers_it(of_a, of_b, known):
    hosts = {
        h: HOSTS[h] | {"remembered": {"path": stored, "perftest": None}} for h, stored in (("a", of_a), ("b", of_b))
    }

    assert fabric_path.remembered(hosts, "path") == ({"a": [1], "b": [2]} if known else {})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": "x"}'])
def test_damaged_memory_is_none(tmp_path, text):
    memory = tmp_path / "memory.json"
    memory.write_text(text)

    assert fabric_path.recall(Path(memory)) is None


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"full": 0}, False),
        ({"tcp": "refused"}, False),
        ({"answered_by": ["02:00:00:00:ff:ff"]}, False),
    ],
)
def test_only_a_good_result_is_worth_remembering(changes, good):
    assert fabric_path.good([GOOD | changes], [PEER]) is good


def test_second_owner_of_the_own_address_is_never_good():
    assert not fabric_path.good([GOOD, GOOD | {"host": ""}], [PEER])


def test_outcomes_become_json(port):
    outcome = fabric_path.Outcome("b", "10.10.0.12", 9000, 3, 3, "", "open", ("02:00:00:00:0a:02",), "enp1s0f0np0")

    assert json.loads(json.dumps(fabric_path.as_dicts([outcome])))[0]["answered_by"] == ["02:00:00:00:0a:02"]
