"""Make a checkpoint of real size without its bytes: real configuration, headers and lengths, holes instead of data.

    python3 -m embedded.checkpoints.hollow DIRECTORY CONFIG [--shards 48] [--total-bytes 510286023000]

Every look at a checkpoint that reads no tensors is done on it as on the real one. The last shards hold one Engram table
each, with the headers of the real shards; of the others only the sum of the sizes is real, each is one tensor.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from .engram import BYTES, Spec, engram_tensors, header_of

# DeepSeek-V4.1-Flash.
SHARDS, TOTAL_BYTES = 48, 510_286_023_000
OTHERS = ("tokenizer.json", "tokenizer_config.json")


def size_of(tensors: Spec) -> int:
    return sum(math.prod(shape) * BYTES[dtype] for dtype, shape in tensors.values())


def shards_of(config: Path, shards: int, total_bytes: int) -> list[Spec]:
    """The tensors of every shard."""
    whole = json.loads(config.read_text())
    text = whole.get("text_config", whole)
    tables = [
        engram_tensors(
            layer,
            rows,
            table_first=True,
            hidden=text["hidden_size"],
            width=(text["engram_max_ngram_size"] - 1) * text["engram_n_heads"] * text["engram_head_dim"],
        )
        for layer, rows in zip(text.get("engram_layer_ids", ()), text.get("engram_num_embeddings", ()), strict=True)
    ]
    count = shards - len(tables)
    share, rest = divmod(total_bytes - sum(map(size_of, tables)), count)
    return [{f"hollow.{number}.weight": ("F8_E4M3", (share + (number < rest),))} for number in range(count)] + tables


def make_hollow(directory: Path, config: Path, shards: int = SHARDS, total_bytes: int = TOTAL_BYTES) -> None:
    """Write the model that ``config``, its config.json, describes: some 300 kB of disk for any number of bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards_of(config, shards, total_bytes), 1):
        name = f"model-{number:05}-of-{shards:05}.safetensors"
        header, size = header_of(tensors)
        (directory / name).write_bytes(header)
        os.truncate(directory / name, len(header) + size)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (directory / "config.json").write_text(config.read_text())
    for name in OTHERS:
        (directory / name).write_text("{}\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("--shards", type=int, default=SHARDS)
    parser.add_argument("--total-bytes", type=int, default=TOTAL_BYTES)
    args = parser.parse_args(argv)
    make_hollow(args.directory, args.config, args.shards, args.total_bytes)


if __name__ == "__main__":
    main()
