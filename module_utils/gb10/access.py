"""What a service's user may really read and write: tried as that user, not computed from modes."""

from __future__ import annotations

import errno
import grp
import json
import os
import pwd
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHOWN = 5


class AccessError(Exception):
    """The user does not exist."""


def _owner(path: Path) -> str:
    status = path.lstat()
    try:
        names = f"{pwd.getpwuid(status.st_uid).pw_name}:{grp.getgrgid(status.st_gid).gr_name}"
    except KeyError:
        names = f"{status.st_uid}:{status.st_gid}"
    return f"{names} {status.st_mode & 0o7777:04o}"


def _blocked(path: Path) -> Path | None:
    """The first folder above PATH that this process may not enter."""
    return next(
        (folder for folder in reversed(path.parents) if folder.exists() and not os.access(folder, os.X_OK)), None
    )


def _nearest(path: Path) -> Path:
    """PATH, or the first folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _try(reads: Sequence[Path], writes: Sequence[Path]) -> list[dict[str, Any]]:
    """Every path that this process may not read the first byte of, or make a file in."""
    found: list[dict[str, Any]] = []
    for path, writing in [*((one, False) for one in reads), *((one, True) for one in writes)]:
        blocked = _blocked(path)
        try:
            if blocked:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            if writing:
                with tempfile.TemporaryFile(dir=_nearest(path)):
                    pass
            else:
                with path.open("rb") as handle:
                    handle.read(1)
        except OSError as error:
            found.append(
                {"path": str(path), "write": writing, "errno": error.errno, "blocked": str(blocked) if blocked else ""}
            )
    return found


def _as_user(user: str, reads: Sequence[Path], writes: Sequence[Path]) -> list[dict[str, Any]]:
    try:
        entry = pwd.getpwnam(user)
    except KeyError as error:
        raise AccessError(f"user {user} does not exist on this host: run playbooks/serve.yml") from error
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(out)
            if os.geteuid() == 0:
                os.initgroups(entry.pw_name, entry.pw_gid)
                os.setgid(entry.pw_gid)
                os.setuid(entry.pw_uid)
            with os.fdopen(into, "w") as handle:
                json.dump(_try(reads, writes), handle)
            code = 0
        finally:
            os._exit(code)
    os.close(into)
    with os.fdopen(out) as handle:
        text = handle.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        raise AccessError(f"files could not be tried as user {user}: the child ended with {status}")
    result: list[dict[str, Any]] = json.loads(text)
    return result


def _sentence(user: str, one: dict[str, Any]) -> str:
    path = Path(one["path"])
    if one["blocked"]:
        folder = Path(one["blocked"])
        return f"{path}: user {user} may not enter {folder} ({_owner(folder)}): chmod o+x {folder}"
    if one["errno"] == errno.ENOENT:
        return f"{path} is missing"
    if one["errno"] not in (errno.EACCES, errno.EPERM):
        return f"{path}: {os.strerror(one['errno'])} for user {user}"
    if one["write"]:
        folder = _nearest(path)
        return f"{folder} ({_owner(folder)}): user {user} cannot write in it: chown {user}: {folder}"
    return f"{path} ({_owner(path)}): user {user} cannot read it: chmod o+r {path}"


def faults(user: str, reads: Sequence[Path], writes: Sequence[Path]) -> list[str]:
    """What USER cannot read (the first byte) and cannot write in, a sentence each with the command that mends it.

    Raises AccessError where it cannot be tried, which is no proof of anything.
    """
    sentences = list(dict.fromkeys(_sentence(user, one) for one in _as_user(user, reads, writes)))
    more = len(sentences) - SHOWN
    return sentences if more <= 0 else [*sentences[:SHOWN], f"and {more} more files that user {user} cannot use"]
