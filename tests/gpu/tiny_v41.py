"""One engine run of a random six-layer DeepSeek-V4.1, for engine_compare.py.

    tiny_v41.py make DIR              write model, Engram shards and row pack
    tiny_v41.py run DIR OUT CASE      CASE: {"storage": ..., "mode": ..., ...} as JSON

The Engram tables are real safetensors shards in the published format and go through the
engine's own loader; every other weight is the engine's deterministic dummy, because only
the tables differ between storages.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the loader below lives in this process
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", MAX_JOBS="12")

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from engram_files import REVISION, random_rows, write_checkpoint, write_pack, write_shard  # noqa: E402

LAYERS = (1, 3)
VOCAB = 1024
SHORT = [5, 9, 33, 77, 120, 45, 8, 99]
LONG = [(37 * i + i // 7) % 590 + 5 for i in range(5000)]
LONE = [[(13 * i + 7 * k) % 590 + 5 for i in range(k)] for k in (5, 12, 20, 32, 48)]
EIGHT = [[(11 * i + 13 * k) % 590 + 5 for i in range(5 + 37 * k)] for k in range(8)]


def make_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    text = ["the quick brown fox jumps over the lazy dog " * 20, "def main(): return 1\n" * 20]
    t.train_from_iterator(text, trainer)
    # The hash kernel trusts token ids, so every id that the model can emit needs an entry.
    t.add_tokens([f"<{i}>" for i in range(t.get_vocab_size(), VOCAB)])
    t.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1]}
    config |= {"pad_token": special[2], "model_max_length": 4096}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def make(directory: Path) -> None:
    import numpy as np
    from transformers import AutoTokenizer
    from vllm.models.deepseek_v41.common import engram
    from vllm.models.deepseek_v41.common.engram_prefetch import hash_columns

    directory.mkdir(parents=True)
    make_tokenizer(directory)
    token_map, compressed = engram.build_compressed_token_map(AutoTokenizer.from_pretrained(directory))
    config = json.loads((HERE / "deepseek_v41_config.json").read_text())
    config.pop("vision_config")
    config["image_token_id"] = 1000
    text = config["text_config"]
    text |= {"num_hidden_layers": 6, "n_routed_experts": 16, "num_experts_per_tok": 6}
    text |= {"compress_ratios": [0, 0, 2, 2, 1, 1, 0, 0, 0], "kv_source_layer_ids": [2, 4]}
    text |= {"index_source_layer_ids": [2, 4], "candidate_source_layer_id": 4, "engram_layer_ids": list(LAYERS)}
    text |= {"engram_vocab_size": 5000, "engram_compressed_vocab_size": compressed, "engram_pad_token_id": 2}
    text |= {"max_position_embeddings": 65536, "vocab_size": VOCAB}
    text |= {"dspark_target_layer_ids": [3, 4, 5], "dspark_noise_token_id": 5, "dspark_n_routed_experts": 16}
    layout = engram.EngramLayout(types.SimpleNamespace(**text | {"engram_num_embeddings": [0, 0]}))
    rows = [sum(map(sum, layer)) for layer in layout.primes]
    text["engram_num_embeddings"] = rows
    (directory / "config.json").write_text(json.dumps(config))

    tables = {layer: random_rows(rows[i], layer) for i, layer in enumerate(LAYERS)}
    rng = np.random.default_rng(0)
    shape = [text["hc_mult"], text["hidden_size"]]

    def bf16(values: Any) -> Any:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    def norm() -> tuple[str, list[int], Any]:
        return "BF16", shape, bf16(rng.normal(1, 0.2, shape))

    write_checkpoint(directory, tables, {layer: {"q_weight": norm(), "k_weight": norm()} for layer in LAYERS})
    # Without these the dummy head gives every token nearly the same logit.
    wide = [text["vocab_size"], text["hidden_size"]]
    more = {"embed.weight": bf16(rng.normal(0, 1, wide)), "head.weight": bf16(rng.normal(0, 0.03, wide))}
    write_shard(directory / "model-00000-of-00002.safetensors", {k: ("BF16", wide, v) for k, v in more.items()})
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | dict.fromkeys(more, "model-00000-of-00002.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map}))
    ranges = {layer: (0, rows[i]) for i, layer in enumerate(LAYERS)}
    write_pack(directory / "pack", directory, tables, ranges, 1, 0)

    # The row of the first layer and column that the fifth token of SHORT looks up.
    multipliers = engram.compute_hash_multipliers(LAYERS, 4, compressed)[0].numpy()
    tokens = np.array([token_map[t] for t in SHORT])
    pad = token_map[text["engram_pad_token_id"]]
    primes, offsets = np.array(layout.primes[0]), layout.offsets[0].numpy()
    row = int(hash_columns(tokens, 4, 5, pad, multipliers, primes, offsets, range(24))[0, 0])
    (directory / "looked_up_row").write_text(str(row))


def use_tiny_loader() -> None:
    """Dummy values for all weights, then the checkpoint's through the engine's own loader."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("auto")
    class TinyLoader(DefaultModelLoader):  # type: ignore[misc]
        def load_weights(self, model: Any, model_config: Any) -> None:
            DummyModelLoader.load_weights(self, model, model_config)
            super().load_weights(model, model_config)

        _process_online_quant_layer = DummyModelLoader._process_online_quant_layer


def check_every_lookup(directory: Path) -> Any:
    """Beside each lookup from disk, look the same ids up in the shards' tables on the GPU.

    Returns (rows checked, elements that differ), counted on the GPU by the same stream, so
    that captured graphs and piecewise breaks count too.
    """
    import torch
    from safetensors import safe_open
    from vllm.models.deepseek_v41.common import engram, engram_disk

    counts = torch.zeros(2, dtype=torch.int64, device="cuda")
    disk = engram_disk.DiskEngramEmbedding
    start, lookup = disk.__init__, disk.lookup

    def start_with_table(self: Any, layer_id: int, rows: int, dim: int, heads: Any, *rest: Any) -> None:
        start(self, layer_id, rows, dim, heads, *rest)
        reference = engram.ParallelEngramEmbedding(rows, dim, heads, cpu_offload=False)
        index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
        name = f"layers.{layer_id}.engram.embed."
        with safe_open(directory / index[name + "weight"], "pt") as shard:
            reference._weight_loader(reference.weight, shard.get_tensor(name + "weight"))
            reference._weight_loader(reference.weight_scale_inv, shard.get_tensor(name + "scale"))
        expected = torch.empty(2048, reference.part_n_hash_cols, dim, dtype=torch.bfloat16, device="cuda")
        self.__dict__["reference"] = (reference, expected)  # not a submodule: no loader may see it

    def lookup_and_compare(self: Any, indices: Any, out: Any, background: bool = False) -> None:
        lookup(self, indices, out, background)
        reference, expected = self.__dict__["reference"]
        expected = expected[: indices.shape[0]]
        reference.lookup(indices, expected)
        counts[0] += out.shape[0] * out.shape[1]
        counts[1] += (expected.view(torch.int16) != out.view(torch.int16)).sum()

    disk.__init__, disk.lookup = start_with_table, lookup_and_compare
    return counts


def engine_arguments(directory: Path, case: dict[str, Any]) -> dict[str, Any]:
    engram: dict[str, Any] = {}
    if case["storage"] == "disk":
        engram = {"storage": "disk", "disk_prefetch_tokens": case.get("prefetch", 0)}
        if case.get("pack"):
            engram["disk_path"] = case["pack"]
        if case.get("stats"):
            engram["disk_stats_dir"] = case["stats"]
    args: dict[str, Any] = {"model": str(directory), "revision": REVISION, "engram_config": engram, "seed": 0}
    args |= {"max_model_len": 8192, "max_num_seqs": 8, "max_num_batched_tokens": 2048}
    args |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30, "language_model_only": True}
    args |= {"enforce_eager": case["mode"] == "eager"}
    if case["mode"] != "eager":
        sizes = [6, 12, 24, 48] if case.get("dspark") else [1, 2, 4, 8]
        mode = {"piecewise": "PIECEWISE", "full": "FULL_AND_PIECEWISE"}[case["mode"]]
        args["compilation_config"] = {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}
    if case.get("dspark"):
        args["speculative_config"] = {"method": "dspark", "num_speculative_tokens": 5}
    return args


def run(directory: Path, out: Path, case: dict[str, Any]) -> None:
    if case.get("sync"):
        os.environ["VLLM_GPU_SYNC_CHECK"] = "warn"  # vLLM reports every step's waits for the GPU
    from vllm import LLM, SamplingParams

    use_tiny_loader()
    counts = check_every_lookup(directory) if case.get("check") else None
    llm = LLM(**engine_arguments(directory, case))
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=5)

    def generate(prompts: list[list[int]]) -> list[dict[str, Any]]:
        answers = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        return [
            {
                "tokens": list(a.outputs[0].token_ids),
                "logprobs": [sorted((t, lp.logprob) for t, lp in step.items()) for step in a.outputs[0].logprobs],
                "cached": a.num_cached_tokens,
            }
            for a in answers
        ]

    result = {
        **{f"lone {len(prompt)}": generate([prompt]) for prompt in (SHORT, *LONE)},
        "chunked": generate([LONG]),  # three chunks of 2048 tokens
        "prefix hit": generate([LONG[:4200] + SHORT]),
        "eight at once": generate(EIGHT),
        "lone 8 again": generate([SHORT]),
    }
    checked = None if counts is None else counts.tolist()
    out.write_text(json.dumps({"answers": result, "checked": checked}))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        run(Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
        os._exit(0)  # the engine's own teardown is not what is tested
