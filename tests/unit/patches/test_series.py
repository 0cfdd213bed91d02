"""The series on the real wheel's files, and what it refuses: configurations and row packs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import py_compile
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

np = pytest.importorskip("numpy")
import refresh  # noqa: E402
from engram_files import REVISION, random_rows, sign, write_checkpoint, write_pack  # noqa: E402
from reader_lib import COMMON, SERIES, Part, Reader, build, new_files  # noqa: E402


def load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


DOCUMENT = yaml.safe_load((SERIES / "series.yml").read_text())
PATCHES = [item["file"] for item in DOCUMENT["patches"]]
FILES = DOCUMENT["files"]


@pytest.fixture
def tree(wheel: Path, tmp_path: Path) -> Path:
    """The released versions of the files that the series touches."""
    refresh.unpack(wheel, list(FILES), tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that patch 0001 adds; they need no wheel."""
    return new_files(tmp_path_factory.mktemp("added"))


@pytest.fixture(scope="module")
def rows(added: Path) -> Any:
    return load("gb10_engram_rows_of_the_patch", added / COMMON / "engram_rows.py")


def test_the_table_is_what_the_wheel_and_the_patches_give(wheel: Path) -> None:
    assert refresh.table(SERIES, wheel) == FILES


def test_every_patch_is_listed_with_its_reasons() -> None:
    assert sorted(PATCHES) == sorted(p.name for p in SERIES.glob("*.patch")) == PATCHES
    assert all(item["why"].strip() and item["drop_when"].strip() for item in DOCUMENT["patches"])
    assert sorted(FILES) == refresh.touched(SERIES, PATCHES)


def test_the_new_files_are_the_listed_ones(tree: Path) -> None:
    assert refresh.digests(tree, list(FILES)) == {p: item["before"] for p, item in FILES.items()}


def test_it_applies_compiles_and_reverts_to_the_byte(tree: Path) -> None:
    before = refresh.digests(tree, list(FILES))
    refresh.apply(SERIES, PATCHES, tree)
    assert refresh.digests(tree, list(FILES)) == {p: item["after"] for p, item in FILES.items()}
    assert not [p for p in tree.rglob("*") if p.suffix in {".orig", ".rej"}]
    for path in FILES:
        if path.endswith(".py"):
            py_compile.compile(str(tree / path), cfile=str(tree / "x.pyc"), doraise=True)
    refresh.apply(SERIES, PATCHES, tree, reverse=True)
    assert refresh.digests(tree, list(FILES)) == before


def crlf(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace("cpu_offload: bool = True", "cpu_offload: bool = False"))


FOREIGN: dict[str, Callable[[Path], None]] = {
    "patched already": lambda tree: refresh.apply(SERIES, PATCHES, tree),
    "CRLF": lambda tree: crlf(tree / "vllm/config/engram.py"),
    "edited beside the hunk": lambda tree: edit(tree / "vllm/config/engram.py"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_another_tree_does_not_give_the_digests(tree: Path, case: str) -> None:
    FOREIGN[case](tree)
    try:
        refresh.apply(SERIES, PATCHES, tree)
    except subprocess.CalledProcessError:
        return
    assert refresh.digests(tree, list(FILES)) != {p: item["after"] for p, item in FILES.items()}


# ------------------------------------------------------------- configuration


@pytest.fixture
def engram_config(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The patched EngramConfig with pydantic and vLLM's own decorator stood in for."""
    refresh.apply(SERIES, PATCHES, tree)

    def model_validator(mode: str) -> Callable[[Any], Any]:
        def mark(function: Any) -> Any:
            function.validates = True
            return function

        assert mode == "after"
        return mark

    def config(cls: type) -> type:
        def validate(self: Any) -> None:
            for value in vars(cls).values():
                if getattr(value, "validates", False):
                    value(self)

        cls.__post_init__ = validate  # type: ignore[attr-defined]
        return dataclasses.dataclass(cls)

    def factors(self: Any, ignored: set[str]) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ignored}

    pydantic, utils = types.ModuleType("pydantic"), types.ModuleType("vllm.config.utils")
    pydantic.__dict__.update(model_validator=model_validator)
    utils.__dict__.update(config=config, get_hash_factors=factors, hash_factors=lambda f: json.dumps(f, sort_keys=True))
    for name, module in {"pydantic": pydantic, "vllm.config.utils": utils}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("vllm", "vllm.config"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return load("gb10_patched_engram_config", tree / "vllm/config/engram.py").EngramConfig


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"cpu_offload": False},
    {"storage": "disk"},
    {"storage": "disk", "disk_path": "/var/lib/gb10/engram", "disk_threads": 64, "disk_prefetch_tokens": 16384},
    {"storage": "disk", "disk_stats_dir": "/run/gb10", "dp_shared_memory": False},
]
REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"disk_path": "/x"}, "require storage=disk"),
    ({"disk_stats_dir": "/x"}, "require storage=disk"),
    ({"disk_prefetch_tokens": 1}, "require storage=disk"),
    ({"storage": "disk", "cpu_offload": False}, "cpu_offload=True"),
    ({"storage": "disk", "use_thp": True}, "use_thp=False"),
    ({"storage": "disk", "dp_shared_memory": True}, "dp_shared_memory unset"),
    ({"storage": "disk", "embedding_across_dp": True}, "embedding_across_dp"),
    ({"storage": "disk", "disk_threads": 0}, "1 to 256, not 0"),
    ({"storage": "disk", "disk_threads": 257}, "1 to 256, not 257"),
    ({"storage": "disk", "disk_prefetch_tokens": -1}, "negative"),
]


@pytest.mark.parametrize("options", ACCEPTED)
def test_configurations_that_work(engram_config: Any, options: dict[str, Any]) -> None:
    config = engram_config(**options)
    config.verify_parallel_config(types.SimpleNamespace(data_parallel_size=1, enable_elastic_ep=False))


@pytest.mark.parametrize(("options", "message"), REJECTED)
def test_configurations_that_do_not(engram_config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engram_config(**options)


def test_disk_needs_one_replica_and_the_right_model(engram_config: Any) -> None:
    config = engram_config(storage="disk")
    with pytest.raises(ValueError, match="data_parallel_size=1"):
        config.verify_parallel_config(types.SimpleNamespace(data_parallel_size=2, enable_elastic_ep=False))
    other = types.SimpleNamespace(
        architecture="Qwen4ExpForCausalLM", hf_text_config=types.SimpleNamespace(ple_layer_ids=[1])
    )
    with pytest.raises(ValueError, match="does not support Qwen4ExpForCausalLM"):
        config.verify_model_config(other)


def test_where_rows_lie_changes_no_compiled_graph(engram_config: Any) -> None:
    disk = engram_config(storage="disk", disk_path="/a", disk_threads=1)
    assert disk.compute_hash() == engram_config(storage="disk").compute_hash() != engram_config().compute_hash()


# ------------------------------------------------------------------ row packs

SIZES = {1: 700, 14: 641}
START, END = 200, 551


@pytest.fixture
def copies(tmp_path: Path) -> Any:
    model, pack = tmp_path / "model", tmp_path / "pack"
    model.mkdir()
    tables = {layer: random_rows(n, layer) for layer, n in SIZES.items()}
    write_checkpoint(model, tables, pad=1)
    write_pack(pack, model, tables, dict.fromkeys(SIZES, (START, END)), 4, 1)
    return types.SimpleNamespace(model=model, pack=pack, tables=tables)


def row_range(rows: Any, layer: int = 14) -> Any:
    return rows.RowRange(layer, SIZES[layer], 4, 1, START, END)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("reader"))


@pytest.mark.parametrize("source", ["pack", "shards"])
@pytest.mark.parametrize("layer", SIZES)
def test_both_sources_give_the_ranks_rows(rows: Any, copies: Any, library: Path, source: str, layer: int) -> None:
    wanted = row_range(rows, layer)
    if source == "pack":
        files = rows.local_rows(str(copies.pack), wanted, REVISION, str(copies.model))
    else:
        files = rows.checkpoint_rows(str(copies.model), wanted)
    weight, scale = (Path(p) for p in (files.weight_path, files.scale_path))
    parts = files.weight, files.scale
    as_c = Part(*vars(parts[0]).values()), Part(*vars(parts[1]).values())
    with Reader(library, weight, END - START, 400, 2, scale=scale, parts=as_c) as reader:
        reader.lookup(list(range(END - START)))
        for i in range(END - START):
            w, s = copies.tables[layer]
            assert reader.row(i) == w[START + i].tobytes() + s[START + i].tobytes()


def manifest(pack: Path, change: Callable[[dict[str, Any]], None], *, signed: bool = True) -> None:
    path = pack / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(sign(document) if signed else document))


def layer14(**change: Any) -> Callable[[Any], None]:
    return lambda c: manifest(c.pack, lambda m: m["layers"][1].update(change))


def shard14(copies: Any) -> Path:
    return Path(copies.model) / "model-00002-of-00002.safetensors"


def lengthen(path: Path, size: int) -> None:
    with path.open("r+b") as f:
        f.truncate(path.stat().st_size + size)


def rewrite_header(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


WRONG_PACKS: dict[str, tuple[Callable[[Any], object], str]] = {
    "other rank": (lambda c: manifest(c.pack, lambda m: m.update(rank=2)), "rank is 2, wanted 1"),
    "other tp": (lambda c: manifest(c.pack, lambda m: m.update(tp=2)), "tp is 2, wanted 4"),
    "other revision": (lambda c: manifest(c.pack, lambda m: m.update(revision="0" * 40)), "revision is '000"),
    "other format": (lambda c: manifest(c.pack, lambda m: m.update(format="x")), "format is 'x'"),
    "other version": (lambda c: manifest(c.pack, lambda m: m.update(version=2)), "version is 2, wanted 1"),
    "not complete": (lambda c: manifest(c.pack, lambda m: m.update(complete=False)), "complete is False"),
    "without the layer": (lambda c: manifest(c.pack, lambda m: m["layers"].pop()), "0 entries for layer 14"),
    "range shifted": (layer14(start=START + 15), "start is 215, wanted 200"),
    "range of another rank": (layer14(start=0, end=200), "end is 200, wanted 551"),
    "other table": (layer14(table_rows=640), "table_rows is 640"),
    "edited": (lambda c: manifest(c.pack, lambda m: m.update(rank=1, tp=4, x=1), signed=False), "damaged or edited"),
    "no manifest": (lambda c: (c.pack / "manifest.json").unlink(), "no complete copy"),
    "half a manifest": (
        lambda c: (c.pack / "manifest.json").write_text((c.pack / "manifest.json").read_text()[:300]),
        "no complete copy",
    ),
    "no row file": (lambda c: (c.pack / "layer-14.rows").unlink(), "No such file"),
    "short row file": (lambda c: lengthen(c.pack / "layer-14.rows", -1), "size of"),
    "long row file": (lambda c: lengthen(c.pack / "layer-14.rows", 4096), "size of"),
    "shard of another size": (lambda c: lengthen(shard14(c), 1), "size of its source shard"),
    "shard of another dtype": (lambda c: rewrite_header(shard14(c), b'"F8_E8M0"', b'"F8_E4M3"'), "F8_E4M3"),
    "shard cut short": (lambda c: lengthen(shard14(c), -1), "cut short"),
    "no index": (lambda c: (c.model / "model.safetensors.index.json").unlink(), "local directory"),
}


@pytest.mark.parametrize("case", WRONG_PACKS)
def test_a_pack_that_is_not_this_ranks_is_refused(rows: Any, copies: Any, case: str) -> None:
    damage, message = WRONG_PACKS[case]
    damage(copies)
    with pytest.raises(rows.EngramRowsError, match=message):
        rows.local_rows(str(copies.pack), row_range(rows), REVISION, str(copies.model))


def test_all_faults_of_a_manifest_are_named_together(rows: Any, copies: Any) -> None:
    manifest(copies.pack, lambda m: m.update(rank=3, tp=8))
    with pytest.raises(rows.EngramRowsError, match=r"tp is 8, wanted 4; rank is 3, wanted 1; .*--revision"):
        rows.local_rows(str(copies.pack), row_range(rows), None, str(copies.model))


def test_a_copy_made_by_the_project_is_accepted(rows: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The writer (module_utils) and the reader (patch) agree on the format."""
    from ansible.module_utils.gb10 import engram_layout, engram_rows

    text = {"engram_layer_ids": [1, 14], "engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_head_dim": 256}
    text |= {"engram_vocab_size": 100, "engram_compressed_vocab_size": 50, "engram_pad_token_id": 2}
    model, pack = tmp_path / "model", tmp_path / "pack"
    model.mkdir()
    buckets = engram_layout.bucket_rows(engram_layout.EngramConfig((1, 14), (0, 0), 4, 8, 256, 100))
    sizes = {layer: sum(buckets[layer]) for layer in (1, 14)}
    text["engram_num_embeddings"] = [sizes[1], sizes[14]]
    (model / "config.json").write_text(json.dumps({"text_config": text}))
    tables = {layer: random_rows(sizes[layer], layer) for layer in (1, 14)}
    write_checkpoint(model, tables)
    arguments = ["copy", "--directory", str(pack), "--source", str(model), "--revision", REVISION]
    assert engram_rows.main([*arguments, "--tp", "4", "--rank", "2", "--margin-mb", "0"]) == 0, capsys.readouterr()
    ranges = engram_layout.rank_ranges(engram_layout.read_config(model), 4, 2)
    for layer, (start, end) in ranges.items():
        wanted = rows.RowRange(layer, sizes[layer], 4, 2, start, end)
        files = rows.local_rows(str(pack), wanted, REVISION, str(model))
        assert files.kind == "local copy"
        with pytest.raises(rows.EngramRowsError, match="rank is 2, wanted 1"):
            rows.local_rows(str(pack), dataclasses.replace(wanted, rank=1), REVISION, str(model))


# -------------------------------------------------------- hashes for prefetch


@pytest.fixture(scope="module")
def hash_columns(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The function alone: its module imports the engine."""
    text = (SERIES / "0003-engram-prompt-prefetch.patch").read_text()
    part = next("diff --git" + p for p in text.split("diff --git")[1:] if "engram_prefetch.py" in p and "new file" in p)
    folder = tmp_path_factory.mktemp("prefetch")
    subprocess.run(["patch", "-s", "-p1", "-d", str(folder)], input=part, text=True, check=True)
    source = (folder / COMMON / "engram_prefetch.py").read_text()
    names: dict[str, Any] = {"np": np, "DEAD_ID": -1}
    start, stop = source.index("def hash_columns("), source.index("@dataclass")
    exec(compile(source[start:stop], "engram_prefetch.py", "exec"), names)  # noqa: S102 - our own file
    return names["hash_columns"]


def plain_hash(tokens: list[int], t: int, pad: int, mult: list[int], primes: list[list[int]], base: list[int]) -> Any:
    """One token's ids in plain Python, from the definition: an n-gram ends where an image or the start is."""
    rolling, blocked, out = 0, False, []
    for shift in range(4):
        source = tokens[t - shift] if t >= shift else -1
        blocked = blocked or source == -1
        rolling ^= (pad if blocked else source) * mult[shift]
        if shift:
            heads = range(len(primes[0]))
            out += [rolling % primes[shift - 1][h] + base[(shift - 1) * len(heads) + h] for h in heads]
    return out


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 60), (1, 5), (3, 60), (57, 60)])
@pytest.mark.parametrize("columns", [range(24), range(6), range(18, 24)])
def test_host_hashes(hash_columns: Any, start: int, stop: int, columns: range) -> None:
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, 99092, 60)
    tokens[[0, 7, 8, 30]] = -1
    multipliers = rng.integers(0, 2**62 // 99092, 4) * 2 + 1
    primes = np.array([[16000057 + 2 * (8 * k + h) for h in range(8)] for k in range(3)])
    offsets = np.concatenate([[0], np.cumsum(primes.ravel())[:-1]])
    got = hash_columns(tokens, start, stop, 2, multipliers, primes, offsets, columns)
    for t in range(start, stop):
        plain = plain_hash(tokens.tolist(), t, 2, multipliers.tolist(), primes.tolist(), offsets.tolist())
        assert got[t - start].tolist() == [plain[c] for c in columns]
