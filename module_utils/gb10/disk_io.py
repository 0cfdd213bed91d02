"""Reading and writing large files once, without the page cache or ahead of need."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

BLOCK_BYTES = 4096  # what O_DIRECT reads and writes whole ones of
CHUNK_BYTES, AHEAD = 4 << 20, 3


def aligned_buffer(size: int) -> memoryview:
    """Memory that begins at a page, as O_DIRECT wants it."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel may have none
        memory.madvise(mmap.MADV_HUGEPAGE)  # pages that lie together make few large requests to the disk
    return memoryview(memory)


def open_uncached(path: Path, flags: int) -> int:
    """Open with O_DIRECT; without it on a file system that has none, such as tmpfs before Linux 6.6."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o644)


def chunks(path: Path, start: int = 0, patience_s: float = 0) -> Iterator[memoryview]:
    """The bytes of a file from ``start``, a multiple of BLOCK_BYTES, on; past the page cache.

    While the caller works on a chunk another thread reads the next ones, so that neither the disk nor the caller waits.
    That takes AHEAD + 1 chunks of memory. A chunk is valid until the next is asked for.
    """
    buffers = itertools.cycle([aligned_buffer(CHUNK_BYTES) for _ in range(AHEAD + 1)])
    fd = open_uncached(path, os.O_RDONLY)
    size = os.fstat(fd).st_size

    def fill(buffer: memoryview, offset: int) -> memoryview:
        done, wanted = 0, min(CHUNK_BYTES, size - offset)
        while done < wanted:
            got = patiently(patience_s, functools.partial(os.preadv, fd, [buffer[done:]], offset + done))
            if not got:
                break  # the file is shorter now
            done += got
        return buffer[:done]

    try:
        with ThreadPoolExecutor(1) as reader:
            pending: deque[Future[memoryview]] = deque()
            for offset in range(start, size, CHUNK_BYTES):
                pending.append(reader.submit(fill, next(buffers), offset))
                if len(pending) == AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
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
