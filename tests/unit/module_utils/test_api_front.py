from __future__ import annotations

import re
import subprocess

import pytest
from ansible.module_utils.gb10.api_front import FrontError, alternative_names, ensure_certificate, key_map, prepare


def pattern(key: bytes) -> re.Pattern[bytes]:
    """The expression as PCRE gets it: nginx takes the quotes and the tilde away."""
    found = re.fullmatch(r'"~(.*)" 1;\n', key_map(key))
    assert found
    return re.compile(found[1].encode())


KEYS = [
    b"sk-abc",
    b"a b",
    b"\"quoted\" 'too'",
    b"50%$HOME",
    b"back\\slash\\",
    "schlüssel-鍵".encode(),
    b"a.c*d(e[f{g}|h^i",
    b";}#",
]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_matches_itself_and_nothing_else(key):
    matches = pattern(key).search
    assert matches(b"Bearer " + key)
    assert matches(b"bearer " + key)
    for wrong in (
        b"",
        key,
        b"Bearer ",
        b"Bearer " + key + b"x",
        b"Bearer x" + key,
        b"Basic " + key,
        b"Bearer " + key[:-1],
    ):
        assert not matches(wrong), wrong


def test_a_keys_case_matters():
    assert not pattern(b"sk-abc").search(b"Bearer SK-ABC")


def test_a_key_means_nothing_to_nginx():
    assert re.fullmatch(r'"~\^\(\?i:bearer\) \+(\\x[0-9a-f]{2})+\$" 1;\n', key_map(b"\"'$\\;{}#"))


@pytest.mark.parametrize("key", [b"", b"one\ntwo", b"a\0b"])
def test_a_key_that_is_no_line_is_refused(key):
    with pytest.raises(FrontError, match="one line"):
        key_map(key)


def test_names_and_addresses_are_told_apart():
    assert (
        alternative_names(["spark-1", "192.0.2.1", "2001:db8::1", "spark-1"])
        == "DNS:spark-1,IP:192.0.2.1,IP:2001:db8::1"
    )


def test_a_certificate_is_made_once_and_again_for_other_names(tmp_path):
    assert ensure_certificate(tmp_path, ["spark-1", "192.0.2.1"])
    first = (tmp_path / "tls.crt").read_text()
    assert not ensure_certificate(tmp_path, ["spark-1", "192.0.2.1"])
    assert (tmp_path / "tls.crt").read_text() == first
    assert ensure_certificate(tmp_path, ["spark-2"])
    shown = subprocess.run(
        ["openssl", "x509", "-in", str(tmp_path / "tls.crt"), "-noout", "-text"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "DNS:spark-2" in shown
    assert (tmp_path / "tls.key").stat().st_mode & 0o777 == 0o600


def test_one_that_soon_ends_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr("ansible.module_utils.gb10.api_front.VALID_DAYS", 29)
    assert ensure_certificate(tmp_path, ["spark-1"])
    assert ensure_certificate(tmp_path, ["spark-1"])


@pytest.fixture
def folders(tmp_path):
    made = [tmp_path / name for name in ("credentials", "runtime", "state")]
    for folder in made:
        folder.mkdir()
    (made[0] / "api-key").write_bytes(b"sk-abc\n")
    return made


def test_without_a_certificate_the_front_gets_its_own(folders):
    credentials, runtime, state = folders
    assert prepare(credentials, runtime, state, ["spark-1"]).startswith("new self-signed certificate")
    assert (runtime / "tls.key").resolve() == state / "tls.key"
    assert (runtime / "key.conf").stat().st_mode & 0o077 == 0
    assert pattern(b"sk-abc").pattern.decode() in (runtime / "key.conf").read_text()


def test_the_inventorys_certificate_is_taken(folders):
    credentials, runtime, state = folders
    for name in ("tls.crt", "tls.key"):
        (credentials / name).write_text("pem")
    for _ in range(2):
        assert prepare(credentials, runtime, state, ["spark-1"]) == "the inventory's certificate"
    assert (runtime / "tls.crt").resolve() == credentials / "tls.crt"
    assert not list(state.iterdir())
