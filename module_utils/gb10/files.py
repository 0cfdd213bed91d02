"""Files that are whole or absent, never half-written."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_atomic(path: Path, content: bytes, *, mode: int = 0o644, uid: int = -1, gid: int = -1) -> None:
    """Replace PATH by CONTENT in one step, owner and MODE included; -1 leaves an id as the process has it."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fchmod(handle.fileno(), mode)
            os.fchown(handle.fileno(), uid, gid)
            os.fsync(handle.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise


def write_json(path: Path, document: Any, *, mode: int = 0o644) -> None:
    """Write DOCUMENT as sorted JSON, atomically."""
    write_atomic(path, (json.dumps(document, indent=1, sort_keys=True) + "\n").encode(), mode=mode)


def read_json(path: Path) -> Any:
    """Return the JSON document at PATH, None where there is no file; ValueError names a damaged file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): delete it and rerun the playbook that writes it") from error


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold a lock on DIRECTORY, made if missing: a run that was killed may have left a child that works there still."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_document(document: Any) -> str:
    """Hex SHA-256 of a JSON-able document, independent of key order."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
