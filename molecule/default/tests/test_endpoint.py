"""The fleet as one: its launch and its endpoint, seen from the machine that runs Ansible."""

from __future__ import annotations

import json
import urllib.request

import testinfra

testinfra_hosts = ["ssh://spark-a"]
ENDPOINT = "http://198.18.0.11:8000"


def test_head_exports_to_the_fabric_alone(host):
    exports = host.file("/var/lib/nfs/etab").content_string.splitlines()
    assert [line.split("(")[0] for line in exports] == ["/srv/models\t198.18.1.0/24"]
    assert "ro," in exports[0]


def test_nfs_server_has_its_threads(host):
    assert host.file("/proc/fs/nfsd/threads").content_string.strip() == "32"


def test_all_ranks_are_in_one_launch(host):
    script = "sha256sum < /etc/gb10/launch.json"
    names = ["spark-a", "spark-b", "spark-c", "spark-d"]
    config = host.backend.ssh_config
    launches = {testinfra.get_host(f"ssh://{name}", ssh_config=config).run(script).stdout for name in names}
    assert len(launches) == 1


def test_completion_from_the_machine():
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 6, "temperature": 0}).encode()
    request = urllib.request.Request(f"{ENDPOINT}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        text = json.load(response)["choices"][0]["text"]
    assert text
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz ")
