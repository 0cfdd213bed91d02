"""What tests on the embedded hosts share: their names, and commands as an operator types them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
HOSTS = ["spark-a", "spark-b", "spark-c", "spark-d"]


def run(*arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[str]:
    """A command in the project's folder, its output as text."""
    done = subprocess.run(arguments, cwd=PROJECT, input=data, capture_output=True, check=False)
    return subprocess.CompletedProcess(arguments, done.returncode, done.stdout.decode(), done.stderr.decode())


def ssh(host: str, script: str, data: bytes = b"", options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Straight through ssh: an ad-hoc ansible run would cost more than the run under test."""
    return run("timeout", "600", "ssh", "-F", ".embedded/ssh_config", *options, host, script, data=data)


def on(hosts: list[str], script: str, data: bytes = b"", options: Sequence[str] = ()) -> list[str]:
    """Output of a script that succeeds on each of these hosts, which run it at the same time."""
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda host: ssh(host, script, data, options), hosts))
    for host, result in zip(hosts, results, strict=True):
        assert result.returncode == 0, f"{host}: {result.stdout}{result.stderr}"
    return [result.stdout for result in results]


def one_line(text: str) -> str:
    """Undo what YAML output does to a long sentence: line breaks, colours around them, doubled quotes."""
    return re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text)).replace("''", "'")
