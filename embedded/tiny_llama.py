"""A random Llama small enough for four hosts without a GPU, written with the standard library alone.

The weights are seeded, so every build has the same bytes. Rows of the output matrix that belong to anything but
a lower-case letter or a space are zero: greedy text is then readable, and a check on it can fail.
"""

from __future__ import annotations

import io
import json
import random
import string
import struct
import tarfile

# vLLM's attention on CPUs has kernels for heads of 32 and more.
HIDDEN, LAYERS, HEADS, HEAD_DIM, INTERMEDIATE = 64, 2, 8, 32, 256
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 256 + len(SPECIAL)
READABLE = string.ascii_lowercase + " "


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes, in byte order (openai/gpt-2, bytes_to_unicode)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    substitutes = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]


def _tokenizer() -> dict[str, object]:
    vocabulary = {character: index for index, character in enumerate(_byte_characters() + SPECIAL)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 256 + index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "torch_dtype": "bfloat16",
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": SPECIAL[0],
    "eos_token": SPECIAL[2],
    "model_max_length": 2048,
    "chat_template": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


def _bfloat16(values: list[float]) -> bytes:
    return b"".join(struct.pack("<f", value)[2:] for value in values)


def _tensors() -> dict[str, tuple[list[int], bytes]]:
    source = random.Random(20261129)  # noqa: S311 - weights need a seed, not secrecy

    def matrix(rows: int, columns: int) -> tuple[list[int], bytes]:
        scale = columns**-0.5
        return [rows, columns], _bfloat16([source.gauss(0, scale) for _ in range(rows * columns)])

    ones = ([HIDDEN], _bfloat16([1.0] * HIDDEN))
    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": ones}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.self_attn.{name}_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN) for name in "qkv"}
        tensors[f"{prefix}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        tensors |= {f"{prefix}.mlp.{name}_proj.weight": matrix(INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        tensors[f"{prefix}.mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
        tensors |= {f"{prefix}.{name}_layernorm.weight": ones for name in ("input", "post_attention")}
    readable = {ord(character) for character in READABLE}
    rows = [
        _bfloat16([source.gauss(0, 1) for _ in range(HIDDEN)]) if token in readable else bytes(2 * HIDDEN)
        for token in range(VOCABULARY)
    ]
    tensors["lm_head.weight"] = ([VOCABULARY, HIDDEN], b"".join(rows))
    return tensors


def _safetensors() -> tuple[bytes, int]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, (shape, data) in _tensors().items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body, len(body)


def files() -> dict[str, bytes]:
    """File name to content of the whole checkpoint directory."""
    shard, total = _safetensors()
    names = [name for name, _ in _tensors().items()]
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors"),
    }
    documents = {
        "config.json": CONFIG,
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": TOKENIZER_CONFIG,
        "model.safetensors.index.json": index,
    }
    encoded = {name: json.dumps(document, indent=1).encode() + b"\n" for name, document in documents.items()}
    return {"model-00001-of-00001.safetensors": shard} | encoded


def as_tar(directory: str) -> bytes:
    """Pack `files` under DIRECTORY; config.json comes last, so its presence means that the rest is there."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in sorted(files().items(), key=lambda item: item[0] == "config.json"):
            entry = tarfile.TarInfo(f"{directory}/{name}")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
