"""Profiles: their schema, their argv, overlays, capture sizes and the memory budget as tables."""

from __future__ import annotations

import copy
import datetime
import json
from pathlib import Path

import gb10_profile
import pytest
from ansible.errors import AnsibleFilterError
from ansible.module_utils.gb10 import profile as profiles

PROJECT = Path(__file__).resolve().parents[3]
PATCHES = PROJECT / "files" / "patches"
NAMES = profiles.names(PROJECT / "profiles")


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_is_sound(name):
    assert gb10_profile.gb10_profile(name)["tensor_parallel_size"] >= 1


def test_filters_keep_their_names():
    assert set(gb10_profile.FilterModule().filters()) == {
        "gb10_profile",
        "gb10_argv",
        "gb10_capture_sizes",
        "gb10_memory_budget",
        "gb10_memory_faults",
    }


# --------------------------------------------------------------------------------------------- schema


def changed(document, path, value):
    """DOCUMENT with the key at the dotted PATH set, or taken away when VALUE is ABSENT."""
    result = copy.deepcopy(document)
    *sections, key = path.split("/")
    place = result
    for section in sections:
        place = place[section]
    if value is ABSENT:
        del place[key]
    else:
        place[key] = value
    return result


ABSENT = object()
TINY, FLASH, FLASH_TP2 = "tiny-cpu-tp4", "deepseek-v4.1-flash-tp4", "deepseek-v4-flash-tp2"
IMAGE = "deepseek-v4-flash-tp2-container"
SIZES = "arguments/compilation-config/cudagraph_capture_sizes"
FAULTS = {
    "missing key": (TINY, "readiness", ABSENT, "key readiness is missing"),
    "missing inner key": (TINY, "readiness/pattern", ABSENT, "key readiness.pattern is missing"),
    "unknown key": (TINY, "engines", {}, "unknown key engines"),
    "unknown inner key": (FLASH, "memory/weight_gib", 1, "unknown key memory.weight_gib; known are graphs_gib"),
    "half a budget": (FLASH, "memory/graphs_gib", ABSENT, "memory.graphs_gib is missing: a budget needs all of"),
    "text for a number": (TINY, "tensor_parallel_size", "4", "tensor_parallel_size is '4', wanted int"),
    "true for a number": (TINY, "tensor_parallel_size", True, "tensor_parallel_size is True, wanted int"),
    "no hosts": (TINY, "tensor_parallel_size", 0, "tensor_parallel_size is 0, wanted the number of hosts"),
    "number for text": (TINY, "engine/python", 3.11, "engine.python is 3.11, wanted str, in quotes"),
    "engine without patches": (TINY, "engine/name", "vllm-9", "no files/patches/vllm-9/series.yml"),
    "engine without lock": (TINY, "engine/name", "vllm-9", "no files/patches/vllm-9/requirements.txt"),
    "unknown backend": (TINY, "engine/backend", "docker", "engine.backend is 'docker', wanted venv or container"),
    "container without image": (IMAGE, "engine/image", "", "engine.image is missing: the container backend needs it"),
    "container without command": (IMAGE, "engine/command", [], "engine.command is missing"),
    "image by tag": (IMAGE, "engine/image", "docker.io/x/vllm:latest", "wanted a repository without tag and digest"),
    "image with digest": (IMAGE, "engine/image", "x/vllm@sha256:ab", "wanted a repository without tag and digest"),
    "short digest": (IMAGE, "engine/digest", "sha256:ab", "engine.digest is 'sha256:ab', wanted sha256: and 64"),
    "relative mount": (IMAGE, "engine/mounts", ["opt/x"], "engine.mounts has 'opt/x', wanted absolute paths"),
    "mount with a colon": (IMAGE, "engine/mounts", ["/a:/b"], "engine.mounts has '/a:/b', wanted absolute paths"),
    "unknown store": (TINY, "checkpoint/store", "ceph", "checkpoint.store is 'ceph', wanted nfs or copy"),
    "warm-up of nothing": (TINY, "readiness/warm_up", [0], "readiness.warm_up has 0, wanted how often to repeat"),
    "proof that is no text": (TINY, "log_proof", [5], "log_proof has 5, wanted text"),
    "no config.json": (TINY, "checkpoint/files", [], "does not name config.json"),
    "no name": (TINY, "served_model_names", [], "served_model_names is empty"),
    "name as a number": (TINY, "served_model_names", ["a", 4.1], "served_model_names has 4.1, wanted text"),
    "sizes of no kind": (FLASH, SIZES, ["6", 12], "cudagraph_capture_sizes are ['6', 12], wanted [5, 6,"),
    "bad pattern": (TINY, "readiness/pattern", "[a-z", "readiness.pattern '[a-z': unterminated character set"),
    "flag with dashes": (TINY, "arguments/--dtype", "x", "arguments has '--dtype', wanted a long flag"),
    "flag of the launch": (TINY, "arguments/master-port", 29501, "arguments.master-port comes from each launch"),
    "key in argv": (TINY, "arguments/api-key", "k", "every user of a host can read a process's arguments"),
    "JSON as text": (TINY, "arguments/engram-config", '{"storage":"disk"}', "write it as YAML; it becomes one word"),
    "JSON with a numeric key": (TINY, "arguments/x", {1: 2}, "arguments.x has the key 1, wanted text"),
    "JSON with a date": (
        TINY,
        "arguments/x",
        {"day": datetime.date(2026, 1, 1)},
        "arguments.x.day is the date 2026-01-01: quote it",
    ),
    "JSON with infinity": (TINY, "arguments/x", {"a": [float("inf")]}, "arguments.x.a is inf, which JSON cannot hold"),
    "NUL in a word": (TINY, "arguments/x", "a\0b", "arguments.x has a NUL byte"),
    "environment number": (TINY, "environment/OMP_NUM_THREADS", 1, "OMP_NUM_THREADS is 1, wanted text, in quotes"),
    "empty environment": (TINY, "environment/A", "", "environment.A is '', wanted text"),
    "key in the environment": (TINY, "environment/VLLM_API_KEY", "k", "set vllm_rank_api_key_file instead"),
    "environment name": (TINY, "environment/A B", "x", "environment has the name 'A B'"),
    "pinned GID": (FLASH, "environment/NCCL_IB_GID_INDEX", "3", "NCCL_IB_GID_INDEX is looked up on each host"),
    "pinned interface": (FLASH, "environment/GLOO_SOCKET_IFNAME", "eth0", "GLOO_SOCKET_IFNAME is looked up"),
    "heads": (FLASH, "model/attention_heads", 62, "tensor_parallel_size 4 does not divide model.attention_heads 62"),
    "experts": (FLASH, "model/routed_experts", 254, "does not divide model.routed_experts 254"),
    "draft experts": (FLASH, "tensor_parallel_size", 3, "3 does not divide model.draft_experts 128"),
    "more than positions": (FLASH, "arguments/max-model-len", 2**21, "the model has 1048576 positions"),
    "more than the KV floor": (FLASH, "arguments/max-model-len", 2**20, "one request of full length has to fit"),
    "mtp for V4.1": (FLASH, "arguments/speculative-config/method", "mtp", "is 'mtp', wanted 'dspark', the draft"),
    "dspark for V4": (
        FLASH_TP2,
        "arguments/speculative-config/method",
        "dspark",
        "is 'dspark', wanted 'mtp'",
    ),
    "adaptive": (FLASH, "arguments/speculative-config/enable_adaptive_verification", True, "pads batches"),
    "not multiples": (FLASH, SIZES, [1, 2, 4, 8, 16], "cudagraph_capture_sizes are [1, 2, 4, 8, 16], wanted [5, 6,"),
    "multiples of k + 1 alone": (FLASH, SIZES, [6, 12, 18, 24, 30, 36], "pads a batch of the model or of its drafter"),
    "sizes for fewer requests": (FLASH, "arguments/max-num-seqs", 8, "with 5 drafted tokens and 8 requests"),
    "requests unknown": (FLASH, "arguments/max-num-seqs", ABSENT, "arguments.max-num-seqs as numbers"),
    "eager and graphs": (FLASH, "arguments/enforce-eager", True, "captures no graphs, and compilation-config"),
    "images without limit": (FLASH, "arguments/limit-mm-per-prompt", ABSENT, "lacks limit-mm-per-prompt or"),
    "limit without images": (FLASH, "arguments/language-model-only", True, "no images are served"),
    "tables in memory": (FLASH, "arguments/engram-config", {"cpu_offload": True}, "storage is not disk"),
    "Engram unpinned": (FLASH, "checkpoint/revision", ABSENT, "has to pin checkpoint.revision"),
    "Engram rows": (FLASH, "engram/engram_num_embeddings", [384006168, 384016681], "engram: "),
    "Engram in an image": (
        FLASH,
        "engine/backend",
        "container",
        "engine.backend is container and the profile has engram",
    ),
    "Engram flag alone": (FLASH, "engram", ABSENT, "arguments has engram-config and the profile no engram"),
}


@pytest.mark.parametrize(("name", "path", "value", "text"), FAULTS.values(), ids=FAULTS)
def test_profile_fault_is_named(name, path, value, text):
    document = changed(gb10_profile.gb10_profile(name), path, value)
    faults = profiles.faults("p", document, PATCHES)
    assert any(fault.startswith("profile p: ") and text in fault for fault in faults), faults


def test_all_faults_come_in_one_list():
    document = changed(gb10_profile.gb10_profile(FLASH), "served_model_names", [])
    document["arguments"] |= {"port": 1, "max-model-len": 2**21}
    assert len(profiles.faults("p", document, PATCHES)) == 4


def test_profile_that_is_no_mapping_is_refused():
    assert profiles.faults("p", ["x"], PATCHES) == ["profile p: the file holds list, wanted a mapping"]


# --------------------------------------------------------------------------------------------- overlays


@pytest.fixture
def folder(tmp_path):
    text = (PROJECT / "profiles" / f"{TINY}.yml").read_text()
    (tmp_path / "base.yml").write_text(text)
    return tmp_path


def load(folder, name, text):
    (folder / f"{name}.yml").write_text(text)
    return profiles.load(folder, name, PATCHES)


def test_overlay_merges_mappings_replaces_lists_and_takes_keys_away(folder):
    text = "extends: base\nserved_model_names: [a, b]\narguments: {dtype: float32, enforce-eager: null, x: {y: 1}}\n"
    base = profiles.load(folder, "base", PATCHES)
    lane = load(folder, "lane", text)
    assert lane["served_model_names"] == ["a", "b"]
    assert list(lane["arguments"]) == [*(key for key in base["arguments"] if key != "enforce-eager"), "x"]
    assert lane["arguments"]["dtype"] == "float32"
    assert {key for key in base if base[key] != lane[key]} == {"served_model_names", "arguments"}


def test_overlay_of_an_overlay(folder):
    load(folder, "lane", "extends: base\nstart_timeout_s: 1\n")
    assert load(folder, "lane-2", "extends: lane\nmemory_floor_mib: 2\n")["start_timeout_s"] == 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("extends: gone\n", "profile lane extends 'gone', which does not exist; profiles/ has base, lane"),
        ("extends: lane\n", "profile lane: extends leads in a circle: lane -> lane"),
        ("extends: base\nengine: {name: x}\n", "profile lane: engine x has no files/patches/x/series.yml"),
        ("a: [\n", "profile lane: while parsing a flow node"),
    ],
)
def test_overlay_fault_is_named(folder, text, fault):
    with pytest.raises(profiles.ProfileError) as caught:
        load(folder, "lane", text)
    assert caught.value.faults[0].startswith(fault)


@pytest.mark.parametrize("name", ["gone", "../profiles/tiny-cpu-tp4", ""])
def test_unknown_profile_lists_the_known_ones(name):
    with pytest.raises(AnsibleFilterError, match=r"does not exist; profiles/ has .*tiny-cpu-tp4"):
        gb10_profile.gb10_profile(name)


def test_shards_are_named():
    files = gb10_profile.gb10_profile(FLASH)["checkpoint"]["files"]
    assert files[0] == "config.json"
    assert [files[-48], files[-1]] == ["model-00001-of-00048.safetensors", "model-00048-of-00048.safetensors"]


# --------------------------------------------------------------------------------------------- argv


AWKWARD = "π \"quoted\" 'single' %c $HOME \\ back `tick` two  spaces"


def argv(rank=0, **arguments):
    document = changed(gb10_profile.gb10_profile(TINY), "arguments", arguments)
    return gb10_profile.gb10_argv(
        document, rank=rank, model="/m", head_address="192.0.2.11", api_address="127.0.0.1", api_port=8000
    )


def test_head_listens_and_worker_does_not():
    assert argv()[-4:] == ["--host", "127.0.0.1", "--port", "8000"]
    assert argv(rank=3)[-1] == "--headless"
    assert argv(rank=3)[argv(rank=3).index("--node-rank") + 1] == "3"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, ["--x"]),
        (False, []),
        (None, []),
        (7, ["--x", "7"]),
        (0.8, ["--x", "0.8"]),
        (AWKWARD, ["--x", AWKWARD]),
        (["a", 2], ["--x", "a", "2"]),
        ({"method": "dspark", "k": 5}, ["--x", '{"method":"dspark","k":5}']),
    ],
)
def test_value_becomes_words(value, words):
    assert argv(rank=1, x=value)[len(argv(rank=1)) :] == words


def test_awkward_text_survives_inside_json():
    assert json.loads(argv(rank=1, x={AWKWARD: [AWKWARD]})[-1]) == {AWKWARD: [AWKWARD]}


# --------------------------------------------------------------------------------------------- computing


@pytest.mark.parametrize(
    ("tokens", "requests", "method", "sizes"),
    [
        (5, 8, "dspark", [5, 6, 10, 12, 15, 18, 20, 24, 25, 30, 35, 36, 40, 42, 48]),
        (5, 6, "dspark", [5, 6, 10, 12, 15, 18, 20, 24, 25, 30, 36]),
        (2, 8, "mtp", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 18, 21, 24]),
        (0, 4, "dspark", [1, 2, 3, 4]),
    ],
)
def test_capture_sizes(tokens, requests, method, sizes):
    assert gb10_profile.gb10_capture_sizes(tokens, requests, method) == sizes


def host(available_gib=117.0, total_gib=121.7):
    return {"total_mib": total_gib * 1024, "available_mib": available_gib * 1024}


def test_budget_of_a_gb10_gives_the_measured_cache():
    budget = gb10_profile.gb10_memory_budget(gb10_profile.gb10_profile(FLASH), {"a": host()})
    assert budget["faults"] == []
    row = budget["rows"][0]
    assert row["kv"] == pytest.approx(5.15, abs=0.05)  # 5.15 GiB were measured with this configuration
    assert row["claim"] == pytest.approx(97.36)
    assert row["left"] == pytest.approx(19.64)
    assert row["kv_tokens"] >= 1_000_000


def test_budget_without_figures_says_so_and_keeps_the_guards_floor():
    budget = gb10_profile.gb10_memory_budget(gb10_profile.gb10_profile(FLASH_TP2), {"a": host(), "b": host(102.0)})
    assert [row["kv_tokens"] for row in budget["rows"]] == [None, None]
    assert [fault[:2] for fault in budget["faults"]] == ["b:"]
    assert gb10_profile.gb10_memory_budget(gb10_profile.gb10_profile(TINY), {"a": host()}) == {"rows": [], "faults": []}


@pytest.mark.parametrize(
    ("hosts", "share", "texts"),
    [
        ({"a": host(), "b": host(101.0)}, 0.80, ["b: 101.00 GiB are available and the engine claims 97.36 GiB"]),
        ({"a": host()}, 0.78, ["a: the KV cache would hold "]),
        ({"a": host(60.0, 64.0)}, 0.80, ["a: the KV cache would hold 0 tokens"]),
    ],
)
def test_budget_fault_is_named(hosts, share, texts):
    document = changed(gb10_profile.gb10_profile(FLASH), "arguments/gpu-memory-utilization", share)
    faults = gb10_profile.gb10_memory_budget(document, hosts)["faults"]
    assert [fault.startswith(text) for fault, text in zip(faults, texts, strict=True)] == [True] * len(texts)


def test_running_rank_is_judged_by_the_total_alone():
    state = {"memory_total_mib": 121.7 * 1024, "memory_available_mib": 5000, "active": True}
    profile = gb10_profile.gb10_profile(FLASH)
    assert gb10_profile.gb10_memory_faults(profile, {"a": {"rank": state}, "away": {"unreachable": True}}) == []
    faults = gb10_profile.gb10_memory_faults(profile, {"a": {"rank": state | {"active": False}}})
    assert ["4.88 GiB are available" in fault for fault in faults] == [True]
    assert gb10_profile.gb10_memory_faults(profile, {"a": {"rank": state | {"memory_total_mib": 64 * 1024}}})


@pytest.mark.parametrize(
    ("name", "digest", "fault"),
    [
        (IMAGE, "sha256:" + "0" * 64, False),
        (IMAGE, "", True),
        (IMAGE, None, True),
        (IMAGE, "production-ready", True),
        (FLASH_TP2, "", False),
    ],
)
def test_image_has_to_be_pinned(name, digest, fault):
    assert bool(profiles.digest_faults(gb10_profile.gb10_profile(name), digest)) is fault


def test_colon_of_a_registrys_port_is_no_tag():
    document = changed(gb10_profile.gb10_profile(IMAGE), "engine/image", "registry.lan:5000/vllm")
    assert profiles.faults("p", document, PATCHES) == []
