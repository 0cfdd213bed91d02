"""Building kernels ahead: what is refused, what is built once, and that nothing else compiles then."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.gb10 import kernel_prebuild, launcher, nfs

PROJECT = Path(__file__).resolve().parents[3]
MEMINFO = "MemTotal:       127535892 kB\nMemFree:        20000000 kB\nMemAvailable:   {} kB\n"
PLENTY = MEMINFO.format(100 * 2**20)
MOUNTS = nfs.parse_mounts("/dev/nvme0n1p2 / ext4 rw 0 0\nhead:/srv/models /mnt/models nfs4 ro 0 0\n")
HERE, THERE = Path("/var/cache/gb10/vllm"), Path("/mnt/models/cache")

REFUSED = [
    (PLENTY, [], HERE, []),
    (PLENTY, ["vllm-rank.service"], HERE, ["vllm-rank.service is running"]),
    (MEMINFO.format(23 * 2**20), [], HERE, ["MemAvailable is 23.0 GiB, wanted 24.0"]),
    (
        PLENTY,
        [],
        THERE,
        ["the cache is /mnt/models/cache, on head:/srv/models (nfs4): choose a directory on this host"],
    ),
    (MEMINFO.format(2**20), ["a", "b"], THERE, ["a is running", "b is running", "1.0 GiB", "the cache is"]),
]


@pytest.mark.parametrize(("meminfo", "units", "cache", "said"), REFUSED)
def test_every_reason_is_given(meminfo: str, units: list[str], cache: Path, said: list[str]) -> None:
    faults = kernel_prebuild.refusals(meminfo, 24.0, units, cache, MOUNTS)
    assert len(faults) == len(said)
    assert all(part in fault for part, fault in zip(said, faults, strict=True))


def test_a_meminfo_without_the_line_is_an_error() -> None:
    with pytest.raises(kernel_prebuild.KernelPrebuildError, match="no MemAvailable"):
        kernel_prebuild.mem_available_gib("MemTotal: 1 kB\n")


# ------------------------------------------------------------------------------------------------- building

# Has what FlashInfer 0.7.2 offers to whoever builds: jit.env, and a build description with these members. A module
# that is not offered as compiled is compiled at its first use, or refused where FLASHINFER_DISABLE_JIT is set.
FLASHINFER = {
    "flashinfer/__init__.py": "",
    "flashinfer/jit/__init__.py": "",
    "flashinfer/jit/env.py": """
import importlib.util, os, pathlib
flashinfer_version = "0.7.2.post1"
JIT = pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / "cached_ops"
def _target_cuda_architectures(): return frozenset({"sm121a"})
PROVIDERS = []
if importlib.util.find_spec("flashinfer_jit_cache"):
    import flashinfer_jit_cache
    PROVIDERS = flashinfer_jit_cache.get_jit_cache_providers()
    assert flashinfer_jit_cache.__version__ == flashinfer_version
""",
    "flashinfer/jit/ops.py": """
import os
from . import env
class Spec:
    def __init__(self, name):
        self.name, self.jit_library_path = name, env.JIT / name / (name + ".so")
    def build(self, need_lock=False):
        if os.environ.get("FLASHINFER_DISABLE_JIT"): raise RuntimeError("JIT compilation is disabled: " + self.name)
        if self.name == "bad":
            print("nvcc fatal: Unsupported gpu architecture"); raise SystemExit(2)
        if self.name == "slow":
            import time; time.sleep(60)
        self.jit_library_path.parent.mkdir(parents=True, exist_ok=True)
        if not self.jit_library_path.exists():
            said = self.name, os.environ["MAX_JOBS"], os.environ["FLASHINFER_NVCC_THREADS"]
            self.jit_library_path.write_text(" ".join(said))
    def load(self, path): return path.read_text()
    def build_and_load(self):
        for provider in env.PROVIDERS:
            if self.name in provider.modules and set(provider.cuda_architectures) & env._target_cuda_architectures():
                return self.load(provider.jit_cache_dir / self.name / (self.name + ".so"))
        self.build()
        return self.load(self.jit_library_path)
def one(): return Spec("one")
def two(): return Spec("two")
def bad(): return Spec("bad")
def slow(): return Spec("slow")
""",
}


@pytest.fixture
def wish(tmp_path: Path) -> kernel_prebuild.Wish:
    """A release without kernels and an engine that has FlashInfer's double."""
    for name, text in FLASHINFER.items():
        (tmp_path / "engine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "engine" / name).write_text(text)
    (tmp_path / "releases" / "r1" / "site").mkdir(parents=True)
    (tmp_path / "current").symlink_to(tmp_path / "releases" / "r1")
    return kernel_prebuild.Wish(
        release=tmp_path / "current",
        python=sys.executable,
        python_path=(str(tmp_path / "current/site"), str(tmp_path / "engine")),
        cache=tmp_path / "cache",
        environment={"FLASHINFER_CUDA_ARCH_LIST": "12.1a", "MAX_JOBS": "20"},
        modules=("flashinfer.jit.ops:one",),
    )


def build(wish: kernel_prebuild.Wish, **changes: Any) -> dict[str, str]:
    return kernel_prebuild.prebuild(dataclasses.replace(wish, **changes), lambda _: None)


def first_use(wish: kernel_prebuild.Wish, name: str) -> subprocess.CompletedProcess[str]:
    """What the engine does: import FlashInfer from its module path and use a module, nothing else set."""
    program = f"from flashinfer.jit import ops; print(ops.{name}().build_and_load())"
    env = {"PYTHONPATH": ":".join(wish.python_path), "FLASHINFER_WORKSPACE_BASE": str(wish.folder / "flashinfer")}
    env |= {"MAX_JOBS": "2", "FLASHINFER_NVCC_THREADS": "1"}
    return subprocess.run([wish.python, "-B", "-c", program], env=env, capture_output=True, text=True, check=False)


def test_without_prebuilt_kernels_the_engine_compiles(wish: kernel_prebuild.Wish) -> None:
    assert first_use(wish, "two").returncode == 0
    assert (wish.folder / "flashinfer/cached_ops/two/two.so").exists()


def test_with_them_it_uses_those_and_refuses_to_compile_another(wish: kernel_prebuild.Wish) -> None:
    assert build(wish) == {"flashinfer.jit.ops:one": "built"}
    shutil.rmtree(wish.folder / "flashinfer")  # the release has its own
    assert first_use(wish, "one").stdout == "one 2 1\n"
    refused = first_use(wish, "two")
    assert "JIT compilation is disabled: two" in refused.stderr
    assert not (wish.folder / "flashinfer/cached_ops/two").exists()


def test_kernels_stand_until_the_wish_changes(wish: kernel_prebuild.Wish) -> None:
    assert not kernel_prebuild.standing(wish)
    build(wish)
    assert kernel_prebuild.standing(wish)
    more = dataclasses.replace(wish, modules=(*wish.modules, "flashinfer.jit.ops:two"))
    assert not kernel_prebuild.standing(more)
    assert not kernel_prebuild.standing(dataclasses.replace(wish, environment={"FLASHINFER_CUDA_ARCH_LIST": "9.0a"}))
    # Also where the kernels of before have switched compiling off.
    assert build(more) == {"flashinfer.jit.ops:one": "kept", "flashinfer.jit.ops:two": "built"}
    assert kernel_prebuild.standing(more)
    assert first_use(more, "two").stdout == "two 2 1\n"


@pytest.mark.parametrize(
    ("module", "said"),
    [("ops:bad", "Unsupported gpu architecture"), ("ops:none", "AttributeError"), ("nowhere:x", "ModuleNotFoundError")],
)
def test_a_build_that_fails_says_why_and_offers_nothing(wish: kernel_prebuild.Wish, module: str, said: str) -> None:
    build(wish)
    with pytest.raises(kernel_prebuild.KernelPrebuildError, match=said):
        build(wish, modules=(*wish.modules, f"flashinfer.jit.{module}"))
    assert not kernel_prebuild.standing(wish)
    assert not (wish.release / "site/flashinfer_jit_cache").exists()


def test_a_build_that_never_ends_is_ended(wish: kernel_prebuild.Wish) -> None:
    said: list[str] = []
    slow = dataclasses.replace(wish, modules=("flashinfer.jit.ops:slow",), timeout_s=1)
    with pytest.raises(kernel_prebuild.KernelPrebuildError, match=r"ops:slow took more than 1 s"):
        kernel_prebuild.prebuild(slow, said.append)
    assert said == ["flashinfer.jit.ops:slow, 1 s"]


DAMAGES = [
    (lambda release: (release / "kernels/modules/one/one.so").write_text("other"), "one.so: edited: sha256 found"),
    (lambda release: (release / "kernels/modules/one/one.so").unlink(), "one.so: missing"),
    (lambda release: (release / "site/flashinfer_jit_cache/__init__.py").write_text(""), "__init__.py: missing or ed"),
    (lambda release: shutil.rmtree(release / "site/flashinfer_jit_cache"), "__init__.py: missing or edited"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_damaged_kernels_are_named_and_built_again(wish: kernel_prebuild.Wish, damage: Any, said: str) -> None:
    build(wish)
    assert kernel_prebuild.faults(wish.release, whole=True) == []
    damage(wish.release.resolve())
    (fault,) = kernel_prebuild.faults(wish.release)
    assert said in fault
    assert "playbooks/prebuild.yml" in fault
    assert not kernel_prebuild.standing(wish)
    build(wish)
    assert kernel_prebuild.standing(wish)


def test_main_reports_and_refuses(wish: kernel_prebuild.Wish, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--release", str(wish.release), "--cache", str(wish.cache), "flashinfer.jit.ops:one"]
    arguments += [part for folder in wish.python_path for part in ("--python-path", folder)]
    assert kernel_prebuild.main([*arguments, "--floor-gib", "0"]) == 0
    assert "flashinfer.jit.ops:one: built" in capsys.readouterr().out
    assert kernel_prebuild.main([*arguments, "--floor-gib", "1e9"]) == 1
    assert "wanted 1000000000.0" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- DeepGEMM


def test_the_shapes_come_from_the_checkpoint_and_the_arguments() -> None:
    config = json.loads((PROJECT / "tests/gpu/deepseek_v41_config.json").read_text())
    arguments = yaml.safe_load((PROJECT / "profiles/deepseek-v4.1-flash-tp4.yml").read_text())["arguments"]
    shapes = {"hidden": 5120, "hc_mult": 4, "heads": 32, "head_dim": 128, "pages": [32, 64]}
    assert kernel_prebuild.deep_gemm_shapes(config, arguments) == shapes | {"max_tokens": 8192, "max_decodes": 36}
    assert kernel_prebuild.deep_gemm_shapes({"model_type": "llama"}, arguments) is None


# ------------------------------------------------------------------------------------------------- before a start

READY = {"MAX_JOBS": "2", "FLASHINFER_NVCC_THREADS": "1", "TRITON_CACHE_DIR": "/var/cache/gb10/vllm/triton"}
START: list[tuple[dict[str, str], list[str]]] = [
    ({}, []),
    ({"MAX_JOBS": "20"}, ["MAX_JOBS is 20, wanted 1 to 2"]),
    ({"MAX_JOBS": "", "FLASHINFER_NVCC_THREADS": ""}, ["MAX_JOBS is unset", "FLASHINFER_NVCC_THREADS is unset"]),
    ({"FLASHINFER_DISABLE_JIT": ""}, ["FLASHINFER_DISABLE_JIT is set to nothing"]),
]


@pytest.mark.parametrize(("changes", "said"), START)
def test_a_rank_that_could_compile_is_not_started(
    wish: kernel_prebuild.Wish, changes: dict[str, str], said: list[str]
) -> None:
    build(wish)
    found = kernel_prebuild.start_faults(wish.release, READY | changes, gpu=True)
    assert len(found) == len(said)
    assert all(part in fault for part, fault in zip(said, found, strict=True))
    assert kernel_prebuild.start_faults(wish.release, READY | changes, gpu=False) == []


def test_a_release_without_kernels_is_not_started_on_a_gpu(wish: kernel_prebuild.Wish) -> None:
    (fault,) = kernel_prebuild.start_faults(wish.release, READY, gpu=True)
    assert "no kernels were built for this release: run playbooks/prebuild.yml" in fault


def test_the_build_fills_the_caches_that_the_launcher_names(wish: kernel_prebuild.Wish) -> None:
    started = launcher.cache_environment(launcher.CACHES / wish.release.resolve().name)
    built = kernel_prebuild.caches(dataclasses.replace(wish, cache=launcher.CACHES).folder)
    assert {key: started[key] for key in built} == built


def test_the_role_names_the_modules_that_were_read_in_flashinfer() -> None:
    defaults = yaml.safe_load((PROJECT / "roles/vllm_engine/defaults/main.yml").read_text())
    assert tuple(defaults["vllm_engine_kernels"]) == kernel_prebuild.SM12X_MODULES
