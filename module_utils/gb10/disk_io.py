"""Reading and writing large files once, without the page cache or ahead of need."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

BLOCK_BYTES = 4096  # what O_DIRECT reads and writes whole ones of
CHUNK_BYTES = 8 << 20


def open_uncached(path: Path, flags: int) -> int:
    """Open with O_DIRECT; without it on a file system that has none, such as tmpfs before Linux 6.6."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o644)


def chunks(path: Path, start: int = 0, patience_s: float = 0) -> Iterator[memoryview]:
    """The bytes of a file from ``start``, a multiple of BLOCK_BYTES, on; past the page cache, 16 MiB of memory.

    While the caller works on a chunk another thread reads the next one. A chunk is valid until the next is asked for.
    """
    here, there = (memoryview(mmap.mmap(-1, CHUNK_BYTES)) for _ in range(2))
    fd = open_uncached(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        with ThreadPoolExecutor(1) as reader:

            def begin(buffer: memoryview, offset: int) -> Future[int]:
                return reader.submit(patiently, patience_s, functools.partial(os.preadv, fd, [buffer], offset))

            pending = begin(here, start)
            while start < size and (got := pending.result()):
                start += got
                if start < size:
                    pending = begin(there, start)
                yield here[:got]
                here, there = there, here
    finally:
        os.close(fd)


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
