"""Which rows of the Engram tables a tensor-parallel rank owns, and where they lie in the checkpoint.

A table of one layer is a concatenation of hash buckets, one a column, ``(max_ngram_size - 1) * n_heads`` of them. A
bucket has a prime number of rows: the smallest primes not below ``engram_vocab_size`` that no column before it uses, in
the order of the layers. Rank r of tp owns the whole columns ``[r * ceil(columns / tp), (r + 1) * ceil(columns / tp))``,
as in vLLM's ``ParallelEngramEmbedding`` (vllm/models/deepseek_v41/common/engram.py, 0.33.0).
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .safetensors import SafetensorsError, read_header

INDEX = "model.safetensors.index.json"
HEAD_DIM = 256
SCALE_GROUP = 32  # weights that share one scale
WEIGHT_DTYPE, SCALE_DTYPE = "F8_E4M3", "F8_E8M0"


class EngramLayoutError(Exception):
    """The configuration or the checkpoint cannot give the rows; ``faults`` lists everything that is wrong."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


@dataclass(frozen=True)
class EngramConfig:
    """The Engram part of a model's config.json; ``num_embeddings`` is the rows of each layer's table."""

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    n_heads: int
    head_dim: int
    vocab_size: int

    @property
    def columns(self) -> int:
        """Hash columns, and so buckets, of each table."""
        return (self.max_ngram_size - 1) * self.n_heads


@dataclass(frozen=True)
class Table:
    """The table of one layer in the checkpoint: where weight and scale begin in its shard, in bytes."""

    layer: int
    rows: int
    file: str
    file_bytes: int
    header_sha256: str
    weight_start: int
    scale_start: int


@dataclass(frozen=True)
class RankRows:
    """The rows ``[start, end)`` of a table that one rank owns, and the bytes of row ``start`` in the shard."""

    table: Table
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start

    @property
    def weight_offset(self) -> int:
        return self.table.weight_start + self.start * HEAD_DIM

    @property
    def scale_offset(self) -> int:
        return self.table.scale_start + self.start * (HEAD_DIM // SCALE_GROUP)


def parse_config(config: Mapping[str, Any]) -> EngramConfig:
    """The Engram keys of a config.json, at its top or under ``text_config``.

    Raises EngramLayoutError when a key is missing, or when the primes do not sum to the stored tables.
    """
    text = config.get("text_config", config)
    names = ("layer_ids", "num_embeddings", "max_ngram_size", "n_heads", "head_dim", "vocab_size")
    missing = [f"engram_{name}" for name in names if f"engram_{name}" not in text]
    if missing:
        raise EngramLayoutError([f"config has no {', '.join(missing)}: not a model with Engram tables"])
    values = [text[f"engram_{name}"] for name in names]
    engram = EngramConfig(tuple(map(int, values[0])), tuple(map(int, values[1])), *(int(value) for value in values[2:]))
    faults = []
    if engram.head_dim != HEAD_DIM:
        faults.append(f"engram_head_dim is {engram.head_dim}; row packs hold rows of {HEAD_DIM}")
    if engram.columns < 1 or engram.vocab_size < 2:
        faults.append("engram_max_ngram_size, engram_n_heads or engram_vocab_size leaves no hash column")
    if len(engram.layer_ids) != len(engram.num_embeddings) or len(set(engram.layer_ids)) != len(engram.layer_ids):
        faults.append(
            f"engram_layer_ids {list(engram.layer_ids)} does not match "
            f"engram_num_embeddings {list(engram.num_embeddings)}"
        )
    if not faults:
        for (layer, buckets), rows in zip(bucket_rows(engram).items(), engram.num_embeddings, strict=True):
            if sum(buckets) != rows:
                faults.append(
                    f"layer {layer}: the {len(buckets)} primes from {buckets[0]} to {buckets[-1]} sum to {sum(buckets)}"
                    f" rows, engram_num_embeddings says {rows}"
                )
    if faults:
        raise EngramLayoutError(faults)
    return engram


def bucket_rows(config: EngramConfig) -> dict[int, tuple[int, ...]]:
    """Layer to the prime number of rows of each of its columns."""
    primes = _primes_from(config.vocab_size)
    return {layer: tuple(next(primes) for _ in range(config.columns)) for layer in config.layer_ids}


def row_ranges(config: EngramConfig, tp: int) -> dict[int, tuple[tuple[int, int], ...]]:
    """Layer to the half-open row range of every rank; ranks past the last column get an empty range at the end."""
    if tp < 1:
        raise EngramLayoutError([f"tensor-parallel size is {tp}, wanted 1 or more"])
    share = -(-config.columns // tp)
    ranges = {}
    for layer, buckets in bucket_rows(config).items():
        bounds = [sum(buckets[: share * rank]) for rank in range(tp + 1)]
        ranges[layer] = tuple(itertools.pairwise(bounds))
    return ranges


def rank_ranges(config: EngramConfig, tp: int, rank: int) -> dict[int, tuple[int, int]]:
    """Layer to the half-open row range of ``rank``. Raises EngramLayoutError when there is no such rank."""
    ranges = row_ranges(config, tp)
    if not 0 <= rank < tp:
        raise EngramLayoutError([f"rank is {rank}, wanted one of [0, {tp})"])
    return {layer: of_ranks[rank] for layer, of_ranks in ranges.items()}


def read_config(model_dir: Path) -> EngramConfig:
    """parse_config of ``model_dir``/config.json; EngramLayoutError also when it cannot be read."""
    return parse_config(_read_json(model_dir / "config.json"))


def find_tables(model_dir: Path, config: EngramConfig) -> list[Table]:
    """Find every layer's table through the index and the headers of the shards it names.

    Raises EngramLayoutError with every fault: a tensor that the index or the shard lacks, another dtype or shape,
    a shard that is absent, truncated or too long.
    """
    weight_map = _read_json(model_dir / INDEX).get("weight_map", {})
    header_of = functools.cache(read_header)
    faults: list[str] = []
    tables = []
    for layer, rows in zip(config.layer_ids, config.num_embeddings, strict=True):
        starts = []
        wanted = {
            f"layers.{layer}.engram.embed.weight": (WEIGHT_DTYPE, (rows, HEAD_DIM)),
            f"layers.{layer}.engram.embed.scale": (SCALE_DTYPE, (rows, HEAD_DIM // SCALE_GROUP)),
        }
        files = {weight_map.get(name) for name in wanted}
        file = files.pop()
        if files or file is None:
            faults.append(f"{INDEX}: {' and '.join(wanted)} are not both in one shard")
            continue
        try:
            header = header_of(model_dir / file)
        except SafetensorsError as error:
            faults.append(str(error))
            continue
        for name, (dtype, shape) in wanted.items():
            tensor = header.tensors.get(name)
            if tensor is None:
                faults.append(f"{header.path}: has no {name}, the index says it has")
            elif (tensor.dtype, tensor.shape) != (dtype, shape):
                faults.append(
                    f"{header.path}: {name} is {tensor.dtype} {list(tensor.shape)}, wanted {dtype} {list(shape)}"
                )
            else:
                starts.append(tensor.start)
        if len(starts) == len(wanted):
            tables.append(Table(layer, rows, file, header.file_bytes, header.sha256, *starts))
    if faults:
        raise EngramLayoutError(faults)
    return tables


def rank_rows(model_dir: Path, tp: int, rank: int) -> list[RankRows]:
    """The rows of ``rank`` in every table of the checkpoint in ``model_dir``; raises EngramLayoutError."""
    config = read_config(model_dir)
    ranges = rank_ranges(config, tp, rank)
    return [RankRows(table, *ranges[table.layer]) for table in find_tables(model_dir, config)]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise EngramLayoutError([f"{path}: cannot be read: {error.strerror}"]) from error
    except ValueError as error:
        raise EngramLayoutError([f"{path}: is no JSON: {error}"]) from error
    if not isinstance(content, dict):
        raise EngramLayoutError([f"{path}: is no JSON object"])
    return content


def _primes_from(lowest: int) -> Iterator[int]:
    """Primes not below ``lowest`` in order; trial division, as there are 48 to find near 16 million."""
    candidate = max(lowest, 2)
    while True:
        if candidate == 2 or (candidate % 2 and all(candidate % d for d in range(3, int(candidate**0.5) + 1, 2))):
            yield candidate
        candidate += 1
