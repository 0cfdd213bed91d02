"""The API key of an engine in a container: it is asked for, and podman never knows it."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.embedded_hosts import ssh

KEY = (Path(__file__).resolve().parents[1] / "files/key").read_text().removesuffix("\n")
# Names every place on the head that holds the key; the script takes it from its file, so that it is in no argument.
SEARCH = r"""
import pathlib, pwd, subprocess
key = pathlib.Path("/etc/gb10/api-key").read_bytes().rstrip(b"\n")
forms = (key, key.replace(b"\\", b"\\\\").replace(b'"', b'\\"'))
def told(*words):
    return subprocess.run(words, capture_output=True).stdout
places = {
    "podman inspect": told("podman", "inspect", "vllm-rank"),
    "journal": told("journalctl", "--no-pager", "-b", "-o", "cat"),
    "unit": told("systemctl", "cat", "vllm-rank") + told("systemctl", "show", "vllm-rank"),
}
assert b"vllm-rank" in places["podman inspect"] and len(places["journal"]) > 1000
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        places[f"arguments of {folder.name}"] = (folder / "cmdline").read_bytes()
        owner = pwd.getpwuid(folder.stat().st_uid).pw_name
        place = f"environment of {owner}"
        places[place] = places.get(place, b"") + (folder / "environ").read_bytes()
    except OSError:
        pass
for top in ("/etc", "/run/gb10", "/run/containers", "/run/crun", "/run/libpod", "/var/lib/gb10", "/tmp", "/var/tmp",
            "/var/lib/containers/storage/overlay-containers", "/var/lib/containers/storage/secrets"):
    for path in pathlib.Path(top).rglob("*"):
        try:
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20:
                places[str(path)] = path.read_bytes()
        except OSError:
            pass
print(*sorted(name for name, content in places.items() if any(form in content for form in forms)), sep="\n")
"""


def ask(key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request("http://198.18.0.11:8000/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(("key", "status"), [("", 401), (KEY + "x", 401), (KEY, 200)])
def test_key_is_asked_for(key, status):
    assert ask(key) == status


def test_only_the_engine_and_root_know_the_key():
    found = ssh("spark-a", "python3 -", SEARCH.encode())
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["/etc/gb10/api-key", "environment of vllm"]
