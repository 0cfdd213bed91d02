"""A completion against a server that answers as real ones do, rightly and wrongly."""

from __future__ import annotations

import http.server
import json
import threading

import pytest
from ansible.module_utils.gb10.completion import complete


@pytest.fixture
def server():
    class Handler(http.server.BaseHTTPRequestHandler):
        status, body = 200, b""

        def do_POST(self) -> None:
            self.server.seen = (dict(self.headers), json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(Handler.status)
            self.end_headers()
            self.wfile.write(Handler.body)

        def log_message(self, *_: object) -> None:
            return

    httpd = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    httpd.handler = Handler
    yield httpd
    httpd.shutdown()
    httpd.server_close()


def ask(server, **options):
    address = f"http://127.0.0.1:{server.server_port}"
    return complete(address, "tiny", "hello", **({"max_tokens": 4, "timeout": 5} | options))


def answer(text: str) -> bytes:
    return json.dumps({"choices": [{"text": text}]}).encode()


def test_token_comes_back(server):
    server.handler.body = answer("abc")
    result = ask(server, pattern="^[a-z]+$", api_key="k-$%")
    assert (result.text, result.fault) == ("abc", "")
    headers, body = server.seen
    assert headers["Authorization"] == "Bearer k-$%"
    assert body == {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (200, answer(""), "generated no token"),
        (200, answer("!!!"), "which does not match"),
        (200, b"<html>", "something else than a completion"),
        (200, b'{"choices": []}', "something else than a completion"),
        (401, b"no key", "answered 401: no key"),
        (500, b"dead", "answered 500: dead"),
    ],
)
def test_anything_else_is_a_fault(server, status, body, text):
    server.handler.status, server.handler.body = status, body
    result = ask(server, pattern="^[a-z]+$")
    assert text in result.fault
    assert result.text == ""


def test_nobody_listens():
    assert "gave no completion" in complete("http://127.0.0.1:9", "m", "p", max_tokens=1, timeout=2).fault


@pytest.mark.parametrize("key", ["k%c$HOME\\n'\"`", "é x"])
def test_key_arrives_at_the_server_as_it_is(server, key):
    server.handler.body = answer("abc")
    assert ask(server, api_key=key).text == "abc"
    assert server.seen[0]["Authorization"] == f"Bearer {key}"


@pytest.mark.parametrize(("key", "why"), [("a\nb", "does not print"), ("π", "no Latin-1"), ("a ", "white space")])
def test_key_that_no_header_can_hold_is_a_fault(server, key, why):
    fault = ask(server, api_key=key).fault
    assert why in fault
    assert key not in fault or key == "π"
