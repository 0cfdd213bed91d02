"""Profiles: all that one served model needs, as data, read and judged on the control host before any host is touched.

A profile is ``profiles/NAME.yml``. With ``extends: OTHER`` it is an overlay: mappings are merged key by key, anything
else replaces what OTHER has, and null takes a key away. docs/profiles.md describes the keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .container import PIN
from .engram_layout import EngramLayoutError, parse_config, row_ranges

# Key -> (type, required), by section; "" is the top.
SCHEMA: dict[str, dict[str, tuple[type | tuple[type, ...], bool]]] = {
    "": {
        "description": (str, True),
        "engine": (dict, True),
        "tensor_parallel_size": (int, True),
        "checkpoint": (dict, True),
        "served_model_names": (list, True),
        "arguments": (dict, True),
        "environment": (dict, True),
        "require_rdma": (bool, True),
        "log_proof": (list, False),
        "memory_floor_mib": (int, True),
        "start_timeout_s": (int, True),
        "readiness": (dict, True),
        "model": (dict, False),
        "memory": (dict, False),
        "engram": (dict, False),
    },
    "engine": {
        "name": (str, True),
        "python": (str, True),
        "machine": (str, True),
        "backend": (str, False),
        "image": (str, False),
        "digest": (str, False),
        "command": (list, False),
        "gpu": (bool, False),
        "mounts": (list, False),
    },
    "checkpoint": {
        "directory": (str, True),
        "files": (list, True),
        "shards": (int, False),
        "store": (str, False),
        "model": (str, False),
        "revision": (str, False),
    },
    "readiness": {
        "prompt": (str, True),
        "max_tokens": (int, True),
        "pattern": (str, True),
        "timeout_s": ((int, float), True),
        "warm_up": (list, False),
    },
    "model": {
        "type": (str, True),
        "attention_heads": (int, True),
        "routed_experts": (int, True),
        "draft_experts": (int, False),
        "max_positions": (int, True),
        "vision": (bool, True),
    },
    "memory": {
        "kv_floor_tokens": (int, True),
        "weights_gib": ((int, float), False),
        "vision_gib": ((int, float), False),
        "graphs_gib": ((int, float), False),
        "working_gib": ((int, float), False),
        "kv_bytes_per_token": (int, False),
    },
}

BACKENDS = ("venv", "container")
STORES = ("nfs", "copy")
# What load() fills in, so that no reader needs a default of its own.
ENGINE_DEFAULTS: dict[str, Any] = {
    "backend": "venv",
    "image": "",
    "digest": "",
    "command": [],
    "gpu": True,
    "mounts": [],
}

# What this project gives each rank itself, from the inventory, the launch or a profile's own key.
RESERVED_FLAGS = {
    "served-model-name": "served_model_names",
    "tensor-parallel-size": "tensor_parallel_size",
    "revision": "checkpoint.revision",
    "distributed-executor-backend": "gb10_argv",
    "nnodes": "tensor_parallel_size",
    "node-rank": "the inventory",
    "master-addr": "the inventory",
    "master-port": "each launch",
    "headless": "the inventory",
    "host": "vllm_rank_api_address",
    "port": "vllm_rank_api_port",
    "api-key": "a credential: every user of a host can read a process's arguments",
}
RESERVED_ENVIRONMENT = re.compile(
    r"VLLM_HOST_IP|(NCCL|GLOO|TP)_SOCKET_IFNAME|NCCL_SOCKET_FAMILY|NCCL_NET|"
    r"NCCL_IB_(DISABLE|HCA|GID_INDEX|ROCE_VERSION_NUM|ADDR_FAMILY|ADDR_RANGE)"
)
# What the checkpoints hold weights for: DSpark stages in V4.1, for which vLLM 0.33.0 refuses mtp
# (config/speculative.py), and one MTP layer in V4-Flash, for which it would take dspark and fail at loading.
SPECULATIVE_METHODS = {"deepseek_v41": "dspark", "deepseek_v4": "mtp"}


class ProfileError(Exception):
    """Everything wrong with one profile, or the profiles there are."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


# --------------------------------------------------------------------------------------------- loading


def names(directory: Path) -> list[str]:
    return sorted(path.stem for path in directory.glob("*.yml"))


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """OVERLAY over BASE: mappings are merged, null takes a key away, anything else replaces."""
    result = dict(base)
    for key, value in overlay.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merge(result[key], value)
        else:
            result[key] = value
    return result


def _document(directory: Path, name: str, below: tuple[str, ...] = ()) -> Any:
    if name not in names(directory):
        extended = f"profile {below[-1]} extends {name!r}, which" if below else f"profile {name!r}"
        raise ProfileError([f"{extended} does not exist; profiles/ has {', '.join(names(directory))}"])
    if name in below:
        raise ProfileError([f"profile {below[0]}: extends leads in a circle: {' -> '.join([*below, name])}"])
    try:
        document = yaml.safe_load((directory / f"{name}.yml").read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ProfileError([f"profile {name}: {error}"]) from error
    if not isinstance(document, dict) or "extends" not in document:
        return document
    base = _document(directory, str(document.pop("extends")), (*below, name))
    return merge(base, document) if isinstance(base, dict) else base


def load(directory: Path, name: str, patches: Path) -> dict[str, Any]:
    """The profile DIRECTORY/NAME.yml, whole: overlays applied, shards named. Raises ProfileError with all faults."""
    document = _document(directory, name)
    found = faults(name, document, patches)
    if found:
        raise ProfileError(found)
    checkpoint = document["checkpoint"]
    count = checkpoint.get("shards", 0)
    shards = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    return {
        **document,
        "engine": ENGINE_DEFAULTS | document["engine"],
        "checkpoint": checkpoint | {"files": [*checkpoint["files"], *shards]},
        "log_proof": document.get("log_proof", []),
    }


# --------------------------------------------------------------------------------------------- judging


def _typed(value: Any, wanted: type | tuple[type, ...]) -> bool:
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


def _shape_faults(section: str, document: Mapping[str, Any]) -> list[str]:
    keys = SCHEMA[section]
    prefix = f"{section}." if section else ""
    found = [f"key {prefix}{key} is missing" for key, (_, required) in keys.items() if required and key not in document]
    for key, value in document.items():
        if key not in keys:
            found.append(f"unknown key {prefix}{key}; known are {', '.join(sorted(keys))}")
        elif not _typed(value, keys[key][0]):
            kinds = keys[key][0]
            wanted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
            hint = ", in quotes" if wanted == "str" else ""
            found.append(f"{prefix}{key} is {value!r}, wanted {wanted}{hint}")
        elif not section and key in SCHEMA:
            found += _shape_faults(key, value)
    return found


def _word_faults(where: str, value: Any) -> list[str]:
    """Values that would not reach the engine as they are written."""
    if isinstance(value, Mapping):
        found = [
            f"{where} has the key {key!r}, wanted text: JSON has no other keys"
            for key in value
            if not isinstance(key, str)
        ]
        return found + [fault for key, item in value.items() for fault in _word_faults(f"{where}.{key}", item)]
    if isinstance(value, list):
        return [fault for item in value for fault in _word_faults(where, item)]
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{where} is {value}, which JSON cannot hold"]
    if isinstance(value, str):
        if "\0" in value:
            return [f"{where} has a NUL byte, which no argument of a process can hold"]
        if re.match(r"\s*[{\[]", value):
            return [f"{where} is the text {value!r}: write it as YAML; it becomes one word of JSON"]
    elif value is not None and not isinstance(value, (bool, int, float)):
        return [f"{where} is the {type(value).__name__} {value}: quote it; JSON has no such type"]
    return []


def _argument_faults(arguments: Mapping[str, Any]) -> list[str]:
    found = []
    for flag, value in arguments.items():
        if not isinstance(flag, str) or not re.fullmatch(r"[a-z][a-z0-9-]*", flag):
            found.append(f"arguments has {flag!r}, wanted a long flag of the engine without its dashes")
        elif flag in RESERVED_FLAGS:
            found.append(f"arguments.{flag} comes from {RESERVED_FLAGS[flag]}; take it out of arguments")
        found += _word_faults(f"arguments.{flag}", value)
    return found


def _environment_faults(environment: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in environment.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            found.append(f"environment has the name {name!r}, wanted letters, digits and underscores")
        elif name == "VLLM_API_KEY":
            found.append(
                "environment.VLLM_API_KEY is a secret, and a profile is none: set vllm_rank_api_key_file instead"
            )
        elif RESERVED_ENVIRONMENT.fullmatch(name):
            found.append(f"environment.{name} is looked up on each host at every start; take it out")
        if not isinstance(value, str):
            found.append(f"environment.{name} is {value!r}, wanted text, in quotes")
        elif not value or "\0" in value:
            found.append(f"environment.{name} is {value!r}, wanted text that a process can be given")
    return found


def _engine_faults(engine: Mapping[str, Any], patches: Path) -> list[str]:
    backend, found = engine.get("backend", "venv"), []
    if backend not in BACKENDS:
        found.append(f"engine.backend is {backend!r}, wanted {' or '.join(BACKENDS)}")
    if backend == "venv":
        found += [
            f"engine {engine['name']} has no files/patches/{engine['name']}/{file}"
            for file in ("series.yml", "requirements.txt")
            if not (patches / engine["name"] / file).is_file()
        ]
    if backend == "container":
        found += [
            f"engine.{key} is missing: the container backend needs it"
            for key in ("image", "command")
            if not engine.get(key)
        ]
    image, digest = engine.get("image", ""), engine.get("digest", "")
    if re.search(r"[@\s]|:[^/]*$", image):
        found.append(
            f"engine.image is {image!r}, wanted a repository without tag and digest: a tag names another image tomorrow"
        )
    if digest and not PIN.fullmatch(digest):
        found.append(f"engine.digest is {digest!r}, wanted sha256: and 64 hexadecimal digits")
    for key, pattern, wanted in (
        ("command", r"[^\0]+", "words"),
        ("mounts", r"/[^:\0]*", "absolute paths without a colon"),
    ):
        found += [
            f"engine.{key} has {word!r}, wanted {wanted}"
            for word in engine.get(key, [])
            if not isinstance(word, str) or not re.fullmatch(pattern, word)
        ]
    return found


def digest_faults(profile: Mapping[str, Any], digest: str | None) -> list[str]:
    """What is wrong with the DIGEST that the inventory (vllm_image_digest) or else the profile pins an image by."""
    engine = profile["engine"]
    digest = digest or engine["digest"]
    if engine["backend"] != "container" or PIN.fullmatch(digest):
        return []
    return [
        f"vllm_image_digest is {digest or 'not set'}, wanted sha256: and 64 hexadecimal digits: {engine['image']} "
        "has to be pinned; its registry's page, or `podman pull` and `podman image ls --digests`, tell the digest"
    ]


def _model_faults(document: Mapping[str, Any]) -> list[str]:
    """What cannot work by the model's own dimensions."""
    model, arguments = document["model"], document["arguments"]
    size, found = document["tensor_parallel_size"], []
    for key in ("attention_heads", "routed_experts", "draft_experts"):
        if model.get(key, 0) % size:
            found.append(f"tensor_parallel_size {size} does not divide model.{key} {model[key]}")
    length = arguments.get("max-model-len")
    if isinstance(length, int) and length > model["max_positions"]:
        found.append(f"arguments.max-model-len is {length}, the model has {model['max_positions']} positions")
    text_only = bool(arguments.get("language-model-only"))
    limits = [flag for flag in ("limit-mm-per-prompt", "mm-processor-cache-gb") if flag in arguments]
    if model["vision"] and not text_only and len(limits) < 2:
        found.append(
            "the model sees images and arguments lacks limit-mm-per-prompt or mm-processor-cache-gb: without limits "
            "the engine reserves memory for its own defaults; set both, or language-model-only"
        )
    if limits and (text_only or not model["vision"]):
        found.append(f"arguments has {' and '.join(limits)} and no images are served; take it out")
    return found


def _memory_faults(document: Mapping[str, Any]) -> list[str]:
    length, memory = document["arguments"].get("max-model-len"), document.get("memory")
    if not memory:
        return []
    parts = ("weights_gib", "graphs_gib", "working_gib", "kv_bytes_per_token")
    missing = [f"memory.{key}" for key in parts if key not in memory]
    if 0 < len(missing) < len(parts):
        return [f"{', '.join(missing)} is missing: a budget needs all of {', '.join(parts)}"]
    if not isinstance(length, int) or length <= memory["kv_floor_tokens"]:
        return []
    return [
        f"arguments.max-model-len is {length} and memory.kv_floor_tokens {memory['kv_floor_tokens']}: "
        "one request of full length has to fit in the KV cache"
    ]


def _speculation_faults(document: Mapping[str, Any]) -> list[str]:
    arguments, model_type = document["arguments"], document.get("model", {}).get("type")
    speculation = arguments.get("speculative-config")
    graphs = arguments.get("compilation-config") or {}
    if not isinstance(graphs, Mapping) or not isinstance(speculation or {}, Mapping):
        return ["arguments.speculative-config and arguments.compilation-config are mappings"]
    sizes = graphs.get("cudagraph_capture_sizes")
    if arguments.get("enforce-eager") and graphs:
        return ["arguments has enforce-eager, which captures no graphs, and compilation-config; take one of them out"]
    if not speculation:
        return []
    found = []
    method, count = speculation.get("method"), speculation.get("num_speculative_tokens")
    wanted = SPECULATIVE_METHODS.get(str(model_type), method)
    if method != wanted:
        found.append(f"speculative-config.method is {method!r}, wanted {wanted!r}, the draft of {model_type} weights")
    if speculation.get("enable_adaptive_verification"):
        found.append("speculative-config.enable_adaptive_verification pads batches, and vLLM refuses it on a GB10")
    requests = arguments.get("max-num-seqs")
    if not _typed(count, int) or not _typed(requests, int):
        return [*found, "speculation needs num_speculative_tokens and arguments.max-num-seqs as numbers"]
    if sizes is not None and method is not None:
        exact = capture_sizes(count, requests, str(method))
        if sizes != exact:
            found.append(
                f"cudagraph_capture_sizes are {sizes}, wanted {exact}: with {count} drafted tokens and "
                f"{requests} requests any other list pads a batch of the model or of its drafter"
            )
    return found


def _engram_faults(document: Mapping[str, Any]) -> list[str]:
    engram, flags = document.get("engram"), document["arguments"].get("engram-config")
    if engram is None:
        return [] if flags is None else ["arguments has engram-config and the profile no engram"]
    found = [] if document["checkpoint"].get("revision") else ["a profile with engram has to pin checkpoint.revision"]
    try:
        row_ranges(parse_config(engram), document["tensor_parallel_size"])
    except EngramLayoutError as error:
        found += [f"engram: {fault}" for fault in error.faults]
    if document["engine"].get("backend") == "container":
        found.append(
            "engine.backend is container and the profile has engram, wanted venv: an image brings a vLLM without the "
            "patches that read rows from disk"
        )
    if not isinstance(flags, Mapping) or flags.get("storage") != "disk":
        found.append("arguments.engram-config.storage is not disk: in memory the tables take 47 GiB a rank")
    return found


def faults(name: str, document: Any, patches: Path) -> list[str]:
    """Everything wrong with a profile, one sentence each. PATCHES has a folder for each engine."""
    if not isinstance(document, dict):
        return [f"profile {name}: the file holds {type(document).__name__}, wanted a mapping"]
    found = _shape_faults("", document)
    if not found:
        found += _engine_faults(document["engine"], patches)
        if "config.json" not in document["checkpoint"]["files"]:
            found.append("checkpoint.files does not name config.json")
        if not document["served_model_names"]:
            found.append("served_model_names is empty")
        lists = {
            "served_model_names": document["served_model_names"],
            "checkpoint.files": document["checkpoint"]["files"],
            "log_proof": document.get("log_proof", []),
        }
        found += [
            f"readiness.warm_up has {length!r}, wanted how often to repeat the prompt in a request before ready"
            for length in document["readiness"].get("warm_up", [])
            if not _typed(length, int) or length < 1
        ]
        if (store := document["checkpoint"].get("store", "nfs")) not in STORES:
            found.append(f"checkpoint.store is {store!r}, wanted {' or '.join(STORES)}")
        for key, items in lists.items():
            found += [f"{key} has {item!r}, wanted text" for item in items if not isinstance(item, str) or not item]
        if document["tensor_parallel_size"] < 1:
            found.append(f"tensor_parallel_size is {document['tensor_parallel_size']}, wanted the number of hosts")
        else:
            found += _model_faults(document) if "model" in document else []
            found += _engram_faults(document)
        found += _argument_faults(document["arguments"]) + _environment_faults(document["environment"])
        found += _memory_faults(document) + _speculation_faults(document)
        try:
            re.compile(document["readiness"]["pattern"])
        except re.error as error:
            found.append(f"readiness.pattern {document['readiness']['pattern']!r}: {error}")
    return [f"profile {name}: {fault}" for fault in found]


# --------------------------------------------------------------------------------------------- computing


def capture_sizes(speculative_tokens: int, max_num_seqs: int, method: str = "dspark") -> list[int]:
    """Batch sizes (tokens) to capture, so that no decode batch of 1 to MAX_NUM_SEQS requests is padded.

    A decoding request is ``k + 1`` tokens for the model. DSpark's drafter runs ``k`` tokens a request
    (vllm/v1/worker/gpu/spec_decode/dspark/speculator.py, 0.33.0: anchor as first prediction), the one of mtp 1 token.
    vLLM rounds the sizes up to multiples of either length, so a list without ``k`` would pad each draft of one request.
    """
    draft = speculative_tokens if method == "dspark" else 1
    lengths = {speculative_tokens + 1, draft} if speculative_tokens else {1}
    return sorted({length * requests for length in lengths for requests in range(1, max_num_seqs + 1)})


def memory_budget(
    profile: Mapping[str, Any], hosts: Mapping[str, Mapping[str, float | None]], guard_gib: float = 5.0
) -> dict[str, list[Any]]:
    """What a rank takes of each host's memory, in GiB, and what does not fit.

    HOSTS maps a host to ``total_mib`` and ``available_mib`` (MemTotal and MemAvailable). The engine claims
    ``gpu-memory-utilization`` of the total: weights, vision, graphs and working memory; the rest is its KV cache. The
    guard's floor has to stay available beside the claim; that is not judged where an engine holds its memory already,
    told by an ``available_mib`` of None. Returns ``rows`` (one a host, the cache None where the profile
    does not know what the engine needs beside it) and ``faults``.
    """
    memory = profile.get("memory", {})
    share = profile["arguments"].get("gpu-memory-utilization")
    if share is None:  # nothing is claimed ahead: an engine on processors, or one with a cache of a given size
        return {"rows": [], "faults": []}
    fixed = {key: float(memory.get(f"{key}_gib", 0)) for key in ("weights", "vision", "graphs", "working")}
    rows, found = [], []
    for host, state in hosts.items():
        total = float(state["total_mib"] or 0) / 1024
        claim = total * float(share)
        numbers = {"claim": claim}
        if (free := state["available_mib"]) is not None:
            numbers |= {"available": free / 1024, "left": free / 1024 - claim}
        tokens = None
        if "weights_gib" in memory:
            numbers |= fixed | {"kv": claim - sum(fixed.values())}
            tokens = max(0, int(numbers["kv"] * 2**30 / memory["kv_bytes_per_token"]))
        rows.append({"host": host} | {key: round(value, 2) for key, value in numbers.items()} | {"kv_tokens": tokens})
        if tokens is not None and tokens < memory["kv_floor_tokens"]:
            found.append(
                f"{host}: the KV cache would hold {tokens} tokens ({numbers['kv']:.2f} GiB), wanted "
                f"{memory['kv_floor_tokens']}: {share:g} of {total:.2f} GiB less {sum(fixed.values()):.2f} GiB; "
                "take a lane with less context or raise gpu-memory-utilization"
            )
        if numbers.get("left", guard_gib) < guard_gib:
            found.append(
                f"{host}: {numbers['available']:.2f} GiB are available and the engine claims {claim:.2f} GiB, which "
                f"leaves {numbers['left']:.2f} GiB, wanted {guard_gib:g} GiB for the memory guard: end what else uses "
                "memory, or lower gpu-memory-utilization"
            )
    return {"rows": rows, "faults": found}


def words(flag: str, value: Any) -> list[str]:
    """Words of one argument: a mapping is one word of JSON, true a bare flag, false and null nothing."""
    option = f"--{flag}"
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    if isinstance(value, Mapping):
        return [option, json.dumps(value, separators=(",", ":"), ensure_ascii=False)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [option, *(str(item) for item in value)]
    return [option, str(value)]


def argv(
    profile: Mapping[str, Any], *, rank: int, model: str, head_address: str, api_address: str, api_port: int
) -> list[str]:
    """Words of `vllm` for one rank, without the master port, which belongs to a launch."""
    size = int(profile["tensor_parallel_size"])
    own: Iterable[tuple[str, Any]] = (
        ("served-model-name", list(profile["served_model_names"])),
        ("revision", profile["checkpoint"].get("revision")),
        ("tensor-parallel-size", size),
        ("distributed-executor-backend", "mp"),
        ("nnodes", size),
        ("node-rank", rank),
        ("master-addr", head_address),
        *([("host", api_address), ("port", api_port)] if int(rank) == 0 else [("headless", True)]),
    )
    flags = (*own, *profile["arguments"].items())
    return ["serve", model, *(word for flag, value in flags for word in words(flag, value))]
