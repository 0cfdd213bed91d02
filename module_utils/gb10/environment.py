"""The engine's environment: pinned wheels unpacked into one directory that nobody changes afterwards.

Layout: ``<root>/<engine>-<id>/`` holds site-packages and, written last, ``environment.json``. The id is taken from the
lock file and the Python version, so another lock is another directory and an old one stays for a rollback.

One host installs; the others unpack what it packed, so that no two hosts can have other files, and only one needs a
package index. The SHA-256 of the archive reaches them beside the archive, from the host that made it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from .files import exclusive, read_json, write_json
from .meter import Meter

RECORD = "environment.json"
# PyTorch's CPU builds carry a local version (+cpu), which PyPI does not take.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CHUNK = 8 << 20  # bytes of an archive that are read and hashed at once


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
        os.sync()  # before the record, which says that all is there
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


def pack(root: Path, engine: Engine, archive: Path, progress: Path | None = None) -> str:
    """Write the environment to ARCHIVE (tar) unless it is there whole; returns the SHA-256 of the archive."""
    if not read(root, engine):
        raise EnvironmentFault(f"{root / engine.identity} is not complete, so it cannot be packed: install it first")
    record = archive.with_name(archive.name + ".json")
    with exclusive(archive.parent):
        known = read_json(record)
        if known and archive.is_file() and archive.stat().st_size == known["bytes"]:
            return str(known["sha256"])
        record.unlink(missing_ok=True)
        partial = archive.with_name(f".{archive.name}.partial")
        command = ["tar", "-c", "--owner=0", "--group=0", "--numeric-owner", "-C", str(root), engine.identity]
        tar = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        total = sum(path.lstat().st_size for path in (root / engine.identity).rglob("*"))
        with partial.open("wb") as target:
            digest, size = _copy(cast("IO[bytes]", tar.stdout), target, Meter(progress, total))
        _end(tar, f"packing {root / engine.identity}")
        partial.replace(archive)
        write_json(record, {"sha256": digest, "bytes": size})
        return digest


def unpack(root: Path, engine: Engine, archive: Path, wanted: str, progress: Path | None = None) -> bool:
    """Unpack what `pack` wrote on another host, unless it is here; WANTED is the archive's SHA-256 there.

    Nothing is kept of an archive with another digest. Returns whether anything was unpacked.
    """
    with exclusive(root):
        if read(root, engine):
            return False
        if not archive.is_file():
            raise EnvironmentFault(f"{archive} is missing: is the model store mounted? Rerun playbooks/storage.yml")
        partial = root / f".partial-{engine.identity}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        tar = subprocess.Popen(
            ["tar", "-x", "--no-same-owner", "-C", str(partial)], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            with archive.open("rb") as source:
                found, size = _copy(source, cast("IO[bytes]", tar.stdin), Meter(progress, archive.stat().st_size))
        except BrokenPipeError:
            found, size = "", 0  # tar says why
        _end(tar, f"unpacking {archive}")
        step = "delete it and rerun playbooks/engine.yml"
        made = partial / engine.identity
        record = read_json(made / RECORD) or {}
        if found == wanted and record.get("digest") == record_digest(made):
            final = root / engine.identity
            shutil.rmtree(final, ignore_errors=True)
            os.sync()  # before the name, which says that all is there
            made.rename(final)
        shutil.rmtree(partial)
        if found != wanted:
            raise EnvironmentFault(f"{archive} ({size} bytes) has sha256 {found}, wanted {wanted}: {step}")
        if not read(root, engine):
            raise EnvironmentFault(
                f"{archive} holds no whole {engine.identity}: delete it and rerun playbooks/engine.yml"
            )
        return True


def _copy(source: IO[bytes], target: IO[bytes], meter: Meter) -> tuple[str, int]:
    """Copy all of SOURCE; returns its SHA-256 and its size."""
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        target.write(chunk)
        size += len(chunk)
        meter.done(len(chunk))
    return digest.hexdigest(), size


def _end(tar: subprocess.Popen[bytes], what: str) -> None:
    """Wait for tar and raise what it said."""
    _, errors = tar.communicate()
    if tar.returncode != 0:
        raise EnvironmentFault(f"{what} failed: {errors.decode(errors='replace').strip()[-500:]}")


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
