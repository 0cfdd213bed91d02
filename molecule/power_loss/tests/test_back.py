"""After the outages: every rank serves again, in one launch, on its own mounts."""

from __future__ import annotations

import json
import urllib.request

testinfra_hosts = ["ssh://spark-a", "ssh://spark-b", "ssh://spark-c", "ssh://spark-d"]


def test_rank_is_up_again(host):
    assert host.service("vllm-rank.service").is_running


def test_rank_was_started_after_the_outage(host):
    active = int(host.run("systemctl show -P ActiveEnterTimestampMonotonic vllm-rank.service").stdout)
    assert active > 0
    assert json.loads(host.file("/run/gb10/rank.json").content_string)["launch_id"]


def test_boot_left_no_failed_unit(host):
    assert host.run("systemctl --failed --no-legend --plain").stdout == ""


def test_no_shared_memory_of_an_old_rank_is_left(host):
    pid = host.run("systemctl show -P MainPID vllm-rank.service").stdout.strip()
    started = int(host.run(f"stat -c %Y /proc/{pid}").stdout)
    oldest = host.run("find /dev/shm -user vllm -printf '%T@\\n' | sort -n | head -1").stdout.strip() or "inf"
    assert float(oldest) >= started - 5


def test_model_answers():
    body = json.dumps({"model": "tiny", "prompt": "again", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(
        "http://198.18.0.11:8000/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 4
