"""The row pack: how Engram rows lie in a file, and how segments of it are packed, written and read.

Docs/engram.md is the format's specification. Everything here works on one segment at a time in buffers of its own, past
the page cache where the file system allows it, so that memory and the engine's cache stay out of the copy's way.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
from array import array

from .disk_io import aligned_buffer

WEIGHT_BYTES, SCALE_BYTES = 256, 8
ROW_BYTES = WEIGHT_BYTES + SCALE_BYTES
BLOCK_BYTES = 4096
ROWS_PER_BLOCK = BLOCK_BYTES // ROW_BYTES
SEGMENT_BLOCKS = 2048
SEGMENT_BYTES = SEGMENT_BLOCKS * BLOCK_BYTES
SEGMENT_ROWS = SEGMENT_BLOCKS * ROWS_PER_BLOCK
IOV_MAX, IOVEC_BYTES = 1024, 16  # 64-bit Linux: struct iovec of one call, a pointer and a size each
_LIBC = ctypes.CDLL(None, use_errno=True)
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_ulong
_LIBC.process_vm_readv.argtypes = [ctypes.c_int, _POINTER, _COUNT, _POINTER, _COUNT, _COUNT]
_LIBC.process_vm_readv.restype = ctypes.c_ssize_t


class ShortReadError(OSError):
    """The file ends before the bytes that were asked for."""

    def __init__(self, offset: int) -> None:
        super().__init__(errno.ENODATA, f"ends at or before byte {offset}")


def pack_bytes(rows: int) -> int:
    """Bytes of a row pack of ``rows`` rows."""
    return -(-rows // ROWS_PER_BLOCK) * BLOCK_BYTES


def segment_count(size: int) -> int:
    """Segments of a row pack of ``size`` bytes."""
    return -(-size // SEGMENT_BYTES)


def segment_span(size: int, index: int) -> tuple[int, int]:
    """Half-open byte range of segment ``index`` in a row pack of ``size`` bytes."""
    return index * SEGMENT_BYTES, min(size, (index + 1) * SEGMENT_BYTES)


def row_offset(index: int) -> int:
    """Byte of row ``index``, counted from the pack's first row."""
    return index // ROWS_PER_BLOCK * BLOCK_BYTES + index % ROWS_PER_BLOCK * ROW_BYTES


def digest_of(data: memoryview) -> str:
    """The digest that manifests hold. SHA-256: the fastest of hashlib's where the CPU has instructions for it."""
    return hashlib.sha256(data).hexdigest()


class Buffer:
    """Page-aligned memory for one segment, as O_DIRECT wants it."""

    def __init__(self) -> None:
        self.view = aligned_buffer(SEGMENT_BYTES)

    def read(self, fd: int, span: tuple[int, int]) -> memoryview:
        """The file's bytes in ``span``, whole blocks; raises ShortReadError when it ends earlier."""
        start, end = span
        return _read(fd, self.view[: end - start], start)


class Packer(Buffer):
    """A buffer that packs source rows; 8 MiB for them and 8 MiB for the source's bytes.

    Source rows begin at any byte and O_DIRECT reads whole blocks, so these go into ``source``, from where
    process_vm_readv scatters the weights to their places, 1024 rows a call: far cheaper than moving each in Python, and
    several times faster than reading the source through the page cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self.source = Buffer()
        self._words = self.view.cast("Q")
        base, self._from = (ctypes.addressof(ctypes.c_char.from_buffer(b.view)) for b in (self, self.source))
        self._places = array("Q", (word for i in range(SEGMENT_ROWS) for word in (base + row_offset(i), WEIGHT_BYTES)))

    def pack(self, fd: int, weight_offset: int, scale_offset: int, rows: int) -> memoryview:
        """The packed segment of ``rows`` rows whose weights and scales begin at these bytes of the open shard.

        Overwrites ``source``. Raises ShortReadError when the shard ends earlier.
        """
        scales = self._fetch(fd, scale_offset, rows * SCALE_BYTES)[1].cast("Q")
        stride = BLOCK_BYTES // SCALE_BYTES
        for i in range(min(ROWS_PER_BLOCK, rows)):
            column = scales[i::ROWS_PER_BLOCK]
            first = (i * ROW_BYTES + WEIGHT_BYTES) // SCALE_BYTES
            self._words[first : first + (len(column) - 1) * stride + 1 : stride] = column
        self._scatter(self._fetch(fd, weight_offset, rows * WEIGHT_BYTES)[0], rows)
        packed = self.view[: pack_bytes(rows)]
        end = row_offset(rows - 1) + ROW_BYTES
        packed[end:] = bytes(len(packed) - end)  # rows of the segment before may lie behind the last row
        return packed

    def _scatter(self, start: int, rows: int) -> None:
        """Copy the weights of ``rows`` rows from byte ``start`` of the source to their places."""
        places = self._places.buffer_info()[0]
        for done in range(0, rows, IOV_MAX):
            count = min(IOV_MAX, rows - done)
            size = count * WEIGHT_BYTES
            whence = array("Q", (self._from + start + done * WEIGHT_BYTES, size))
            got = _LIBC.process_vm_readv(os.getpid(), places + done * IOVEC_BYTES, count, whence.buffer_info()[0], 1, 0)
            if got != size:
                raise OSError(ctypes.get_errno(), "process_vm_readv of this process's own memory")

    def _fetch(self, fd: int, offset: int, size: int) -> tuple[int, memoryview]:
        """Read the blocks that hold these bytes into ``source``; where in it the bytes begin, and the bytes."""
        skew = offset % BLOCK_BYTES
        blocks = self.source.view[: -(-(skew + size) // BLOCK_BYTES) * BLOCK_BYTES]
        _read(fd, blocks, offset - skew, least=skew + size)
        return skew, blocks[skew : skew + size]


def write(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``; on a file system without O_DIRECT also get it onto the disk and out of the cache."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
    if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        os.fdatasync(fd)
        os.posix_fadvise(fd, offset, len(data), os.POSIX_FADV_DONTNEED)


def write_changed_blocks(fd: int, wanted: memoryview, found: memoryview, offset: int) -> int:
    """Write the blocks in which ``found`` differs from ``wanted``; returns how many."""
    blocks = [slice(o, o + BLOCK_BYTES) for o in range(0, len(wanted), BLOCK_BYTES)]
    changed = [block for block in blocks if found[block] != wanted[block]]
    for block in changed:
        write(fd, wanted[block], offset + block.start)
    return len(changed)


def same(a: memoryview, b: memoryview) -> bool:
    """Byte equality, by memcmp: a memoryview would compare item by item, and hold the interpreter meanwhile."""
    first, second = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (a, b))
    size = ctypes.c_size_t(len(a))
    return len(a) == len(b) and _LIBC.memcmp(ctypes.c_void_p(first), ctypes.c_void_p(second), size) == 0


def _read(fd: int, data: memoryview, offset: int, least: int | None = None) -> memoryview:
    """Fill ``data``, or the first ``least`` bytes of it where the file ends within the last block."""
    done = 0
    while done < (len(data) if least is None else least):
        got = os.preadv(fd, [data[done:]], offset + done)
        if not got:
            raise ShortReadError(offset + done)
        done += got
    return data
