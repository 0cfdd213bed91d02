"""Reading and writing large files once, without the page cache or ahead of need."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# The kernel cuts what one POSIX_FADV_WILLNEED asks for to the disk's largest request, so it is asked piece by piece.
AHEAD_BYTES = 2 << 20


def open_uncached(path: Path, flags: int) -> int:
    """Open with O_DIRECT; without it on a file system that has none, such as tmpfs before Linux 6.6."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o644)


def read_ahead(fd: int, offset: int, size: int) -> None:
    """Begin to read ``size`` bytes into the page cache; does not wait for them."""
    for start in range(offset, offset + size, AHEAD_BYTES):
        os.posix_fadvise(fd, start, min(AHEAD_BYTES, offset + size - start), os.POSIX_FADV_WILLNEED)


def patiently(patience_s: float, read: Callable[[], T]) -> T:
    """The result of ``read``, tried anew for ``patience_s`` seconds while a mounted server gives no answer.

    A mount with ``softerr`` reports that as ETIMEDOUT to the reader that asked, and as EIO to others of the same page.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return read()
        except OSError as error:
            if error.errno not in (errno.ETIMEDOUT, errno.EIO) or time.monotonic() >= deadline:
                raise
        time.sleep(1)
