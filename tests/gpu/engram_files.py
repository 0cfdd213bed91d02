"""Small Engram checkpoints and row packs in the published formats, for tests."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

REVISION = "dba1be0a40aa45a94ad051997016db3960a90277"
WEIGHT_BYTES, SCALE_BYTES, ROW_BYTES, BLOCK, PER_BLOCK = 256, 8, 264, 4096, 15
Bytes = NDArray[np.uint8]


def random_rows(rows: int, seed: int) -> tuple[Bytes, Bytes]:
    """Weight [rows, 256] without the two NaN codes of e4m3, scale [rows, 8] near 2^0."""
    rng = np.random.default_rng(seed)
    weight = rng.integers(0, 256, (rows, WEIGHT_BYTES), dtype=np.uint8)
    weight[(weight & 0x7F) == 0x7F] = 0
    return weight, rng.integers(120, 129, (rows, SCALE_BYTES), dtype=np.uint8)


def write_shard(path: Path, tensors: Mapping[str, tuple[str, list[int], Bytes | int]], pad: int = 0) -> None:
    """A safetensors file; a tensor given as a byte count becomes a hole.

    The header ends at a multiple of 8 as the format's own writer does it, plus pad bytes.
    """
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        size = data if isinstance(data, int) else data.nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            if isinstance(data, int):
                f.seek(data, 1)
            else:
                f.write(data.tobytes())
        f.truncate(8 + len(text) + offset)


def write_checkpoint(
    directory: Path,
    tables: Mapping[int, tuple[Bytes, Bytes]],
    more: Mapping[int, Mapping[str, tuple[str, list[int], Bytes]]] | None = None,
    pad: int = 0,
) -> None:
    """One shard a layer, and the index."""
    weight_map = {}
    for i, (layer, (weight, scale)) in enumerate(tables.items()):
        shard = f"model-{i + 1:05}-of-{len(tables):05}.safetensors"
        prefix = f"layers.{layer}.engram."
        tensors = {
            prefix + "embed.weight": ("F8_E4M3", list(weight.shape), weight),
            prefix + "embed.scale": ("F8_E8M0", list(scale.shape), scale),
        }
        tensors |= {prefix + name: tensor for name, tensor in (more or {}).get(layer, {}).items()}
        write_shard(directory / shard, tensors, pad)
        weight_map |= dict.fromkeys(tensors, shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pack_rows(weight: Bytes, scale: Bytes) -> bytes:
    """The bytes of layer-<L>.rows (docs/engram.md)."""
    blocks = -(-len(weight) // PER_BLOCK)
    rows = np.zeros((blocks * PER_BLOCK, ROW_BYTES), dtype=np.uint8)
    rows[: len(weight)] = np.concatenate([weight, scale], axis=1)
    out = np.zeros((blocks, BLOCK), dtype=np.uint8)
    out[:, : PER_BLOCK * ROW_BYTES] = rows.reshape(blocks, -1)
    return out.tobytes()


def sign(manifest: dict[str, object]) -> dict[str, object]:
    manifest.pop("sha256", None)
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return manifest | {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def write_manifest(
    directory: Path, checkpoint: Path, ranges: Mapping[int, tuple[int, int, int]], tp: int, rank: int
) -> None:
    """ranges: layer -> (start, end, table_rows). The row files may be written before or after."""
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    layers = []
    for layer, (start, end, table_rows) in ranges.items():
        shard = checkpoint / index[f"layers.{layer}.engram.embed.weight"]
        with shard.open("rb") as f:
            prefix = f.read(8)
            text = f.read(struct.unpack("<Q", prefix)[0])
        header = json.loads(text)
        offset = {
            part: 8 + len(text) + header[f"layers.{layer}.engram.embed.{part}"]["data_offsets"][0]
            for part in ("weight", "scale")
        }
        source = {"file": shard.name, "bytes": shard.stat().st_size}
        source["header_sha256"] = hashlib.sha256(prefix + text).hexdigest()
        source["weight_offset"] = offset["weight"] + start * WEIGHT_BYTES
        source["scale_offset"] = offset["scale"] + start * SCALE_BYTES
        entry = {"layer": layer, "file": f"layer-{layer}.rows", "start": start, "end": end}
        entry |= {"table_rows": table_rows, "bytes": -(-(end - start) // PER_BLOCK) * BLOCK}
        layers.append(entry | {"source": source, "segments": []})
    manifest: dict[str, object] = {"format": "gb10-engram-rows", "version": 1, "model": "test", "revision": REVISION}
    manifest |= {"tp": tp, "rank": rank, "row_bytes": ROW_BYTES, "weight_row_bytes": WEIGHT_BYTES}
    manifest |= {"scale_row_bytes": SCALE_BYTES, "block_bytes": BLOCK, "rows_per_block": PER_BLOCK}
    manifest |= {"segment_bytes": 8388608, "layers": layers, "created": "2026-11-29T17:00:00Z", "complete": True}
    (directory / "manifest.json").write_text(json.dumps(sign(manifest)))


def write_pack(
    directory: Path,
    checkpoint: Path,
    tables: Mapping[int, tuple[Bytes, Bytes]],
    ranges: Mapping[int, tuple[int, int]],
    tp: int,
    rank: int,
) -> None:
    """This rank's row pack with its manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    for layer, (start, end) in ranges.items():
        weight, scale = tables[layer]
        (directory / f"layer-{layer}.rows").write_bytes(pack_rows(weight[start:end], scale[start:end]))
    full = {layer: (start, end, len(tables[layer][0])) for layer, (start, end) in ranges.items()}
    write_manifest(directory, checkpoint, full, tp, rank)
