"""Headers: a genuine one, and each way in which one can lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible.module_utils.gb10.safetensors import SafetensorsError, Tensor, read_header

A = {"dtype": "F8_E4M3", "shape": [2, 3], "data_offsets": [0, 6]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [6, 14]}


def write(path: Path, header: object, data: int = 14, pad: int = 0) -> Path:
    raw = (header if isinstance(header, str) else json.dumps(header)).encode() + b" " * pad
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))
    return path


@pytest.mark.parametrize("pad", [0, 1, 7])
def test_a_whole_file_is_read(tmp_path, pad):
    header = read_header(write(tmp_path / "a", {"b": B, "a": A, "__metadata__": {"format": "pt"}}, pad=pad))
    start = header.data_start
    assert header.tensors == {
        "a": Tensor("F8_E4M3", (2, 3), start, start + 6),
        "b": Tensor("F32", (2,), start + 6, start + 14),
    }
    assert header.file_bytes == start + 14


FAULTS = [
    ({"a": A, "b": B}, 13, "truncated: .* bytes, its header describes"),
    ({"a": A, "b": B}, 15, "too long"),
    ({"a": A, "b": {**B, "data_offsets": [7, 15]}}, 15, "b begins at byte .*, the tensor before it ends at"),
    ({"a": A, "b": {**B, "data_offsets": [5, 13]}}, 13, "b begins at byte"),
    ({"a": {**A, "shape": [2, 4]}}, 6, r"a is F8_E4M3 \[2, 4\] but has 6 bytes"),
    ({"a": {**A, "dtype": "F8_E3M4"}}, 6, "unknown dtype F8_E3M4"),
    ({"a": {**A, "shape": [-2, -3]}}, 6, "no natural number"),
    ({"a": {"dtype": "U8"}}, 6, "broken safetensors header"),
    ('{"a": 1, "a": 2}', 6, "twice"),
    ("[]", 0, "broken safetensors header"),
    ('{"a"', 0, "broken safetensors header"),
]


@pytest.mark.parametrize(("header", "data", "message"), FAULTS)
def test_a_lying_header_is_refused(tmp_path, header, data, message):
    with pytest.raises(SafetensorsError, match=message):
        read_header(write(tmp_path / "a", header, data))


@pytest.mark.parametrize("content", [b"", b"\x01\x00", b"\xff" * 8, (9).to_bytes(8, "little") + b"{}"])
def test_a_file_without_a_header_is_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(SafetensorsError, match="no safetensors header"):
        read_header(tmp_path / "a")


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(SafetensorsError, match="No such file"):
        read_header(tmp_path / "a")
