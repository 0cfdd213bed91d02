"""Make a small checkpoint with Engram tables in the real format of DeepSeek-V4.1-Flash.

    python3 embedded/checkpoints/engram.py DIRECTORY [--vocab-size 2003] [--seed 1]

Real are: the keys of config.json, the names, dtypes and shapes of the tensors, prime-sized buckets, one table a shard
with other tensors beside it, the index. Small are only the primes. Headers have odd lengths and one table does not come
first in its shard, so that a reader that assumes alignment or offset 0 reads wrong rows. Bytes are random, by the seed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Mapping
from pathlib import Path

LAYERS = (1, 14)
MAX_NGRAM, HEADS, HEAD_DIM, SCALE_GROUP = 4, 8, 256, 32
BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2}
Spec = Mapping[str, tuple[str, tuple[int, ...]]]


def primes_from(lowest: int, count: int) -> list[int]:
    found: list[int] = []
    candidate = lowest
    while len(found) < count:
        if candidate > 1 and all(candidate % d for d in range(2, math.isqrt(candidate) + 1)):
            found.append(candidate)
        candidate += 1
    return found


def header_of(tensors: Spec, pad: int = 0) -> tuple[bytes, int]:
    """What precedes ``tensors`` in their order, ending ``pad`` bytes past a multiple of 8, and their bytes."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * ((pad - len(raw)) % 8)
    return len(raw).to_bytes(8, "little") + raw, end


def write_shard(path: Path, tensors: Spec, pad: int, rng: random.Random) -> None:
    header, size = header_of(tensors, pad)
    with path.open("wb") as file:
        file.write(header)
        for start in range(0, size, 1 << 20):
            file.write(rng.randbytes(min(1 << 20, size - start)))


def engram_tensors(layer: int, rows: int, table_first: bool, hidden: int = 64, width: int = 96) -> Spec:
    """One layer's table, and the tensors beside it of a model of size ``hidden`` and rows joined to ``width``."""
    name = f"layers.{layer}.engram"
    table = {
        f"{name}.embed.weight": ("F8_E4M3", (rows, HEAD_DIM)),
        f"{name}.embed.scale": ("F8_E8M0", (rows, HEAD_DIM // SCALE_GROUP)),
    }
    small = {
        f"{name}.q_weight": ("BF16", (4, hidden)),
        f"{name}.k_weight": ("BF16", (4, hidden)),
        f"{name}.wkv.weight": ("F8_E4M3", (5 * hidden, width)),
        f"{name}.wkv.scale": ("F8_E8M0", (5 * hidden // SCALE_GROUP, width // SCALE_GROUP)),
    }
    return {**table, **small} if table_first else {**small, **table}


def make_checkpoint(directory: Path, vocab_size: int = 2003, seed: int = 1) -> None:
    """Write config.json, the index and three shards; about ``vocab_size`` * 13 kB."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)  # noqa: S311 test data, no secret
    columns = (MAX_NGRAM - 1) * HEADS
    primes = primes_from(vocab_size, columns * len(LAYERS))
    rows = [sum(primes[i * columns : (i + 1) * columns]) for i in range(len(LAYERS))]
    shards: list[Spec] = [{"embed.weight": ("BF16", (128, 64)), "layers.0.attn.wkv.scale": ("F8_E8M0", (10, 3))}]
    shards += [engram_tensors(layer, n, layer == LAYERS[0]) for layer, n in zip(LAYERS, rows, strict=True)]
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(directory / name, tensors, pad=2 * number + 1, rng=rng)
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(math.prod(shape) * BYTES[dtype] for dtype, shape in tensors.values())
    text = {
        "vocab_size": 128,
        "engram_layer_ids": LAYERS,
        "engram_num_embeddings": rows,
        "engram_max_ngram_size": MAX_NGRAM,
        "engram_vocab_size": vocab_size,
        "engram_n_heads": HEADS,
        "engram_head_dim": HEAD_DIM,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99,
    }
    config = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "text_config": text}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    for file, content in (("config.json", config), ("model.safetensors.index.json", index)):
        (directory / file).write_text(json.dumps(content, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--vocab-size", type=int, default=2003)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    make_checkpoint(args.directory, args.vocab_size, args.seed)


if __name__ == "__main__":
    main()
