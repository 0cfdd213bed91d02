"""What the TLS front needs before it starts: the key in nginx's words and a certificate. Run by gb10-api-front.service.

Runs as the front's own user, which can read neither /etc/gb10/api-key nor a root-only certificate: systemd hands both
over as credentials. What it writes lies in the unit's runtime folder, which no other user may enter.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

VALID_DAYS = 397  # what browsers and Apple's clients accept at most
RENEW_DAYS = 30


class FrontError(Exception):
    """What keeps the front from starting, and the next step."""


def key_map(key: bytes) -> str:
    """Line for nginx's `map $http_authorization` that matches KEY and nothing else.

    A regular expression, since plain strings of a map match in any case; every byte as \\xHH, so that no character of a
    key means anything to nginx or PCRE. The scheme's case does not matter (RFC 9110, 11.1).
    """
    if not key or b"\n" in key or b"\0" in key:
        raise FrontError(
            "the API key has to be one line that is not empty: write one into the file of api_front_key_file"
        )
    return '"~^(?i:bearer) +' + "".join(f"\\x{byte:02x}" for byte in key) + '$" 1;\n'


def alternative_names(names: Sequence[str]) -> str:
    """NAMES as a certificate's subjectAltName (openssl-x509v3_config(5))."""
    parts = []
    for name in names:
        try:
            parts.append(f"IP:{ipaddress.ip_address(name)}")
        except ValueError:
            parts.append(f"DNS:{name}")
    return ",".join(dict.fromkeys(parts))


def _openssl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False, timeout=60)


def ensure_certificate(folder: Path, names: Sequence[str]) -> bool:
    """Make a self-signed certificate for NAMES in FOLDER unless a valid one lies there; whether one was made."""
    certificate, key, record = folder / "tls.crt", folder / "tls.key", folder / "names"
    wanted = alternative_names(names)
    if certificate.is_file() and key.is_file() and record.is_file() and record.read_text() == wanted:
        seconds = str(RENEW_DAYS * 86400)
        if _openssl("x509", "-in", str(certificate), "-noout", "-checkend", seconds).returncode == 0:
            return False
    with_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(key))
    name = ("-subj", "/CN=gb10-api-front", "-addext", f"subjectAltName={wanted}")
    made = _openssl("req", "-x509", *with_key, "-out", str(certificate), "-days", str(VALID_DAYS), *name)
    if made.returncode != 0:
        raise FrontError(f"openssl made no certificate for {wanted}: {made.stderr.strip()[-400:]}")
    key.chmod(0o600)
    certificate.chmod(0o644)
    record.write_text(wanted)
    return True


def prepare(credentials: Path, runtime: Path, state: Path, names: Sequence[str]) -> str:
    """Write key.conf, tls.crt and tls.key below RUNTIME; a sentence on where the certificate is from."""
    os.umask(0o077)
    key = (credentials / "api-key").read_bytes().removesuffix(b"\n").removesuffix(b"\r")
    (runtime / "key.conf").write_text(key_map(key))
    source, said = credentials, "the inventory's certificate"
    if not (credentials / "tls.crt").is_file():
        made = ensure_certificate(state, names)
        source = state
        said = (
            f"{'new' if made else 'present'} self-signed certificate {state / 'tls.crt'} for {alternative_names(names)}"
        )
    for name in ("tls.crt", "tls.key"):
        (runtime / name).unlink(missing_ok=True)
        (runtime / name).symlink_to(source / name)
    return said


def main() -> int:
    try:
        credentials, runtime, state = (
            Path(os.environ[f"{name}_DIRECTORY"]) for name in ("CREDENTIALS", "RUNTIME", "STATE")
        )
        print(prepare(credentials, runtime, state, sys.argv[1:]), flush=True)
    except (FrontError, OSError, KeyError, subprocess.SubprocessError) as error:
        print(f"<3>the front does not start: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
