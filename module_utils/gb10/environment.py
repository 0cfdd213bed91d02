"""The engine's environment: pinned wheels unpacked into one directory that nobody changes afterwards.

Layout: ``<root>/<engine>-<id>/`` holds site-packages and, written last, ``environment.json``. The id is taken from the
lock file and the Python version, so another lock is another directory and an old one stays for a rollback.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import exclusive, read_json, write_json

RECORD = "environment.json"
# PyTorch's CPU builds carry a local version (+cpu), which PyPI does not take.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class EnvironmentFault(Exception):
    """What is wrong with an environment or its installation, and the next step."""


@dataclass(frozen=True)
class Engine:
    """Which engine, for which Python and processor. `lock` is the text of requirements.txt, hashes included."""

    name: str
    python: str
    machine: str
    lock: str

    @property
    def identity(self) -> str:
        text = f"{self.python}\0{self.machine}\0{self.lock}"
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def read(root: Path, engine: Engine) -> dict[str, Any] | None:
    """Return the record of a complete environment, None when it is absent or was not finished."""
    record = read_json(root / engine.identity / RECORD)
    return record if isinstance(record, dict) else None


def pip_command(engine: Engine, lock_file: Path, target: Path) -> list[str]:
    """The pip call: only wheels, only the locked ones, for the hosts' Python whatever runs pip."""
    tags = [f"manylinux_2_{minor}_{engine.machine}" for minor in range(5, 40)]
    if engine.machine == "x86_64":
        tags += ["manylinux1_x86_64", "manylinux2010_x86_64"]
    tags += [f"manylinux2014_{engine.machine}", f"linux_{engine.machine}"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--implementation", "cp", "--no-compile"]
    command += ["--python-version", engine.python, *(part for tag in tags for part in ("--platform", tag))]
    return [*command, "--target", str(target), "--requirement", str(lock_file)]


def record_digest(directory: Path) -> str:
    """SHA-256 over the RECORD files of all distributions: equal on two hosts means the same files were unpacked."""
    digest = hashlib.sha256()
    for record in sorted(directory.glob("*.dist-info/RECORD")):
        # Scripts in bin/ carry the interpreter of the machine that ran pip.
        rows = [line for line in record.read_text().splitlines() if not line.startswith(("../", "bin/"))]
        digest.update(f"{record.parent.name}\n".encode() + "\n".join(sorted(rows)).encode())
    return digest.hexdigest()


def install(root: Path, engine: Engine) -> bool:
    """Install ENGINE's wheels unless that was done before. Returns whether anything was installed."""
    with exclusive(root):
        if read(root, engine):
            return False
        partial = root / f".partial-{engine.identity}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        lock_file = partial / "requirements.txt"
        lock_file.write_text(engine.lock)
        _pip(pip_command(engine, lock_file, partial))
        if engine.python == f"{sys.version_info.major}.{sys.version_info.minor}":
            # Hosts may see this directory read-only; without compiled files each start would compile anew.
            subprocess.run(
                [sys.executable, "-m", "compileall", "-q", "-j", "0", str(partial)], check=False, capture_output=True
            )
        write_json(
            partial / RECORD,
            {
                "engine": engine.name,
                "identity": engine.identity,
                "python": engine.python,
                "machine": engine.machine,
                "digest": record_digest(partial),
                "distributions": len(list(partial.glob("*.dist-info"))),
            },
        )
        final = root / engine.identity
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        return True


def _pip(command: list[str]) -> None:
    """Run pip; a second time with PyTorch's index when the first found no torch."""
    environment = os.environ | {"PIP_NO_CACHE_DIR": "1"}
    first = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if first.returncode == 0:
        return
    errors = [line for line in first.stderr.splitlines() if line.startswith("ERROR")]
    if not any("torch==" in line for line in errors):
        raise EnvironmentFault(
            "pip could not install the locked wheels: " + " | ".join(errors or [first.stderr[-500:]])
        )
    second = subprocess.run(
        [*command, "--extra-index-url", TORCH_CPU_INDEX], capture_output=True, text=True, check=False, env=environment
    )
    if second.returncode != 0:
        errors = [line for line in second.stderr.splitlines() if line.startswith("ERROR")]
        raise EnvironmentFault(
            "the locked torch wheel is neither on the configured package index nor reachable on "
            f"{TORCH_CPU_INDEX}: {' | '.join(errors)}; open that address or put the wheel in a directory named by "
            "PIP_FIND_LINKS"
        )
