"""Read and judge the header of a safetensors file, without reading its data.

Format: https://github.com/huggingface/safetensors#format. A file is an unsigned 64-bit little-endian header length, a
JSON header of that length, and the tensors' bytes, which the header must describe without gaps or overlaps.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class SafetensorsError(Exception):
    """The file is no whole safetensors file; the message names the file, what was found and what was wanted."""


@dataclass(frozen=True)
class Tensor:
    """One tensor: its absolute half-open byte range ``[start, end)`` in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """The header of ``path``: sizes in bytes, ``sha256`` over the length field and the JSON."""

    path: Path
    file_bytes: int
    data_start: int
    sha256: str
    tensors: Mapping[str, Tensor]


def read_header(path: Path) -> Header:
    """Read the header and prove that it describes exactly the bytes that the file has.

    Raises SafetensorsError for a file that is absent, unreadable, truncated, too long or has a header that lies.
    """
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > MAX_HEADER_BYTES or 8 + length > file_bytes:
                raise SafetensorsError(
                    f"{path}: no safetensors header: the file has {file_bytes} bytes, a header would need {8 + length}"
                )
            raw = file.read(length)
    except OSError as error:
        raise SafetensorsError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
        tensors = {name: _tensor(name, spec, 8 + length) for name, spec in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise SafetensorsError(f"{path}: broken safetensors header: {error}") from error
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != end:
            raise SafetensorsError(f"{path}: {name} begins at byte {tensor.start}, the tensor before it ends at {end}")
        end = tensor.end
    if file_bytes != end:
        state = "truncated" if file_bytes < end else "too long"
        raise SafetensorsError(f"{path}: {state}: {file_bytes} bytes, its header describes {end}")
    return Header(path, file_bytes, 8 + length, hashlib.sha256(prefix + raw).hexdigest(), tensors)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)


def _tensor(name: str, spec: Mapping[str, Any], data_start: int) -> Tensor:
    dtype, shape, (begin, end) = spec["dtype"], tuple(spec["shape"]), spec["data_offsets"]
    if dtype not in BITS:
        raise ValueError(f"{name} has the unknown dtype {dtype}")
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"{name} has a shape or offset that is no natural number")
    if (end - begin) * 8 != math.prod(shape) * BITS[dtype]:
        raise ValueError(f"{name} is {dtype} {list(shape)} but has {end - begin} bytes")
    return Tensor(dtype, shape, data_start + begin, data_start + end)
