"""What tests on the embedded hosts share: their names, and commands as an operator types them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
HOSTS = ["spark-a", "spark-b", "spark-c", "spark-d"]


def run(*arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[str]:
    """A command in the project's folder, its output as text."""
    done = subprocess.run(arguments, cwd=PROJECT, input=data, capture_output=True, check=False)
    return subprocess.CompletedProcess(arguments, done.returncode, done.stdout.decode(), done.stderr.decode())


def on(hosts: list[str], script: str, data: bytes = b"") -> None:
    """Straight through ssh: an ad-hoc ansible run would cost more than the run under test."""
    for host in hosts:
        result = run("ssh", "-F", ".embedded/ssh_config", host, script, data=data)
        assert result.returncode == 0, result.stdout + result.stderr


def one_line(text: str) -> str:
    """Undo what YAML output does to a long sentence: line breaks, colours around them, doubled quotes."""
    return re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text)).replace("''", "'")
