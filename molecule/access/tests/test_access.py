"""What a stranger, a client and a host without memory see."""

from __future__ import annotations

import contextlib
import errno
import http.client
import select
import shlex
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest

from tests.embedded_hosts import on

HOST, FABRIC = "198.18.0.14", "198.18.1.14"
CLIENT, STRANGER = "198.18.0.77", "198.18.0.1"
BRIDGE = "gb10m0"
KEY = (Path(__file__).resolve().parents[1] / "files/key").read_text().rstrip("\n")
ROUTES = ["/v1/models", "/metrics", "/health", "/ping", "/version", "/tokenize", "/pause", "/"]
UNITS = ["gb10-memory-guard", "gb10-api-front"]


def ssh(script: str, host: str = "spark-d", *options: str) -> str:
    return on([host], script, options=options)[0]


@pytest.fixture(scope="module")
def client_address():
    subprocess.run(["ip", "address", "replace", f"{CLIENT}/24", "dev", BRIDGE], check=True)
    yield CLIENT
    subprocess.run(["ip", "address", "delete", f"{CLIENT}/24", "dev", BRIDGE], check=True)


# --------------------------------------------------------------------------------------------- the network


def answering(source: str, target: str, scope: int = 0, last: int = 65535) -> dict[int, str]:
    """TCP ports 1 to LAST of TARGET that answer SOURCE within 1.5 s: open, or closed and saying so."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    tail = (0, scope) if ":" in target else ()
    answers = {}
    for start in range(1, last + 1, 4000):
        waiting = {}
        with contextlib.ExitStack() as stack, select.epoll() as poll:
            for port in range(start, min(start + 4000, last + 1)):
                link = stack.enter_context(socket.socket(family))
                link.setblocking(False)
                link.bind((source, 0, *tail))
                link.connect_ex((target, port, *tail))
                waiting[link.fileno()] = (link, port)
                poll.register(link, select.EPOLLOUT)
            deadline = time.monotonic() + 1.5
            while waiting and time.monotonic() < deadline:
                for descriptor, _ in poll.poll(0.2, 4000):
                    link, port = waiting.pop(descriptor)
                    poll.unregister(descriptor)
                    error = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if error in (0, errno.ECONNREFUSED):
                        answers[port] = "closed" if error else "open"
    return answers


def test_a_stranger_reaches_ssh_alone():
    assert answering(STRANGER, HOST) == {22: "open"}


def test_a_stranger_reaches_ssh_alone_over_ipv6():
    scope = int(Path(f"/sys/class/net/{BRIDGE}/ifindex").read_text())
    local = subprocess.run(
        ["ip", "-6", "-br", "address", "show", "dev", BRIDGE], capture_output=True, text=True, check=True
    )
    remote = ssh("ip -6 -br address show dev vec0").split()[2].partition("/")[0]
    assert answering(local.stdout.split()[2].partition("/")[0], remote, scope, 12000) == {22: "open"}


def reaches(host: str, address: str, port: int) -> bool:
    code = f"import socket; socket.create_connection(('{address}', {port}), 3)"
    return ssh(f"python3 -c {shlex.quote(code)} 2>/dev/null && echo yes || echo no", host) == "yes\n"


def test_the_other_hosts_reach_every_port_over_the_fabric_only():
    ssh(
        "systemd-run -q --collect --unit=gb10-ephemeral --property=RuntimeMaxSec=30 python3 -m http.server 40999;"
        "until ss -tln | grep -q :40999; do sleep 0.2; done"
    )
    assert reaches("spark-c", FABRIC, 40999)
    assert not reaches("spark-c", HOST, 40999)


# --------------------------------------------------------------------------------------------- the front


@pytest.fixture(scope="module")
def trust(tmp_path_factory):
    path = tmp_path_factory.mktemp("front") / "tls.crt"
    path.write_text(ssh("cat /var/lib/gb10/api-front/tls.crt"))
    return ssl.create_default_context(cafile=str(path))


def ask(trust, path, key=None, method="GET", body=None):
    link = http.client.HTTPSConnection(HOST, 8443, context=trust, source_address=(CLIENT, 0), timeout=20)
    link.request(method, path, body, {"Authorization": f"Bearer {key}"} if key else {})
    return link.getresponse()


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_wants_the_key(client_address, trust, path):
    wrong = [None, "sk", KEY + "x", KEY.upper()]
    assert [ask(trust, path, key).status for key in wrong] == [401] * len(wrong)
    assert ask(trust, path, KEY).status == 200


def test_a_stream_is_not_held_back(client_address, trust):
    answer = ask(trust, "/v1/stream", KEY)
    began, times = time.monotonic(), []
    while line := answer.readline():
        if line.startswith(b"data"):
            times.append(time.monotonic() - began)
    assert times[0] < 0.9 < times[1] < times[2]


def test_images_fit_into_a_request(client_address, trust):
    assert ask(trust, "/v1/chat/completions", KEY, "POST", b"0" * 60_000_000).status == 200


def test_the_key_stands_where_root_alone_reads():
    key = shlex.quote(KEY)
    nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups"
    # grep reads the key from a file, or its own argument would be what it finds
    ssh(f"umask 077; printf '%s\\n' {key} > /root/pattern")
    for where in ("cat /proc/[0-9]*/cmdline", "cat /proc/[0-9]*/environ", "journalctl -b --no-pager"):
        assert ssh(f"{where} 2>/dev/null | tr '\\0' ' ' | grep -a -c -F -f /root/pattern || true") == "0\n", where
    ssh("install -m 0644 /root/pattern /etc/pattern.readable")
    found = ssh(f"{nobody} grep -r -l -s -F -f /etc/pattern.readable /etc /run /var /usr/local || true").split()
    ssh("rm /root/pattern /etc/pattern.readable")
    assert found == ["/etc/pattern.readable"]


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_confined(unit):
    last = ssh(f"systemd-analyze security --no-pager {unit}.service").strip().splitlines()[-1]
    assert float(last.split(": ")[1].split()[0]) <= 3.0, last


# --------------------------------------------------------------------------------------------- memory


def until(condition: str, seconds: float) -> float:
    """Worst time in seconds of a fresh ssh connection until CONDITION holds on the host."""
    worst, deadline = 0.0, time.monotonic() + seconds
    while True:
        began = time.monotonic()
        answer = ssh(
            f"{condition} && echo yes || echo no", "spark-d", "-o", "ControlPath=none", "-o", "ControlMaster=no"
        )
        worst = max(worst, time.monotonic() - began)
        if answer == "yes\n":
            return worst
        assert time.monotonic() < deadline, condition


@pytest.fixture
def engine():
    def start(command: str) -> None:
        ssh(f"echo 'HOG={command}' > /run/gb10-hog.env; rm -f /var/lib/gb10/guard/last.json; systemctl start gb10-hog")

    yield start
    ssh("systemctl stop gb10-hog gb10-outside 2>/dev/null; systemctl reset-failed; rm -f /run/gb10-hog.env")


HOG = "python3 /usr/local/lib/access/hog.py"


def test_an_engine_that_takes_all_memory_is_ended_and_the_host_answers(engine):
    engine(HOG)
    assert until("! systemctl -q is-active gb10-hog", 120) < 5
    told = ssh("journalctl -u gb10-memory-guard -o cat --no-pager -n 1; cat /var/lib/gb10/guard/last.json")
    assert "is under the startup floor of 300 MiB: ended 1 processes of system.slice/gb10-hog.service" in told
    assert "cause: the engine's own processes grew by" in told
    assert '"phase": "startup"' in told


def test_a_program_beside_the_engine_is_named(engine):
    engine("sleep 300")
    ssh(f"systemd-run -q --collect --unit=gb10-outside --property=OOMScoreAdjust=900 {HOG}")
    assert until("! systemctl -q is-active gb10-hog", 120) < 5
    told = ssh("journalctl -u gb10-memory-guard -o cat --no-pager -n 1")
    assert "cause: something else took the memory" in told
    assert "the largest is python3" in told
    assert until("! systemctl -q is-active gb10-outside", 60) < 5  # the kernel's turn
    assert ssh("systemctl is-active gb10-memory-guard") == "active\n"
