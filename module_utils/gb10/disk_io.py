"""Reading and writing large files once, without the page cache or ahead of need."""

from __future__ import annotations

import errno
import os
from pathlib import Path

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
