"""Compile the engine's kernels before it serves, and let nothing compile when it does.

FlashInfer comes as sources and compiles a module when it is first used. On a GB10 that takes minutes and several GiB
a compiler out of the memory that the engine holds, and has wedged hosts. So the modules that a profile names are built
into the release's cache on the host's own disk while nothing is served, two jobs at a time, and copied into the
release:

    <release>/kernels/modules/<name>/<name>.so         what was built
    <release>/kernels/kernels.json                     from what, with size and SHA-256
    <release>/site/flashinfer_jit_cache/__init__.py    offers them to FlashInfer; written last

The last is FlashInfer's own way to bring compiled modules along (flashinfer/jit/env.py, providers). A module from
there is loaded without asking ninja, and the same file sets FLASHINFER_DISABLE_JIT, with which FlashInfer raises
MissingJITCacheError instead of compiling a module. That switch alone would also refuse modules in FlashInfer's own
cache, which `JitSpecNvcc.try_load` does not look into.

DeepGEMM compiles a kernel for each shape and keeps it in a persistent cache; the shapes of DeepSeek-V4.1 are run
through it once. TileLang and Triton compile in the engine's warm-up into persistent caches of the host; the engine
logs what they still compile later (`vllm.utils.jit_monitor`).

By hand: ``python3 -m gb10.kernel_prebuild --help``.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import exclusive, read_json, sha256_document, sha256_file, write_atomic, write_json
from .meter import Meter
from .nfs import MOUNTS, Mount, parse_mounts, shared_path_faults

# What DeepSeek-V4.1 and V4 need on SM12x, read in flashinfer-python 0.7.2.post1; not yet confirmed on a GB10.
SM12X_MODULES = (
    "flashinfer.jit.mla:gen_sparse_mla_sm120_module",
    "flashinfer.jit.gemm.core:gen_gemm_sm120_module_cutlass_mxfp8",
    "flashinfer.jit.fused_moe:gen_cutlass_fused_moe_sm120_module",
)
JOBS = 2
FLOOR_GIB = 24.0  # two compilers of CUTLASS kernels beside a running system
KERNELS, RECORD, PROVIDER = "kernels", "kernels.json", "flashinfer_jit_cache"
STEP = "run playbooks/prebuild.yml"

# Both run in the engine's Python, as the engine's user.
_FLASHINFER = """
import importlib, json, os, sys
from flashinfer.jit import env
os.environ.pop("FLASHINFER_DISABLE_JIT", None)  # set by the kernels of an earlier run
module, function = sys.argv[1].split(":")
spec = getattr(importlib.import_module(module), function)()
path = spec.jit_library_path
before = path.stat().st_mtime_ns if path.exists() else None
spec.build(need_lock=True)
spec.load(path)
print(json.dumps({
    "name": spec.name, "path": str(path), "action": "kept" if before == path.stat().st_mtime_ns else "built",
    "version": env.flashinfer_version, "architectures": sorted(env._target_cuda_architectures()),
}))
"""

# Zeros of every shape that selects another kernel; the results are of no interest.
_DEEP_GEMM = """
import json, os, sys, torch
from pathlib import Path
from vllm.model_executor.kernels.mhc.tilelang_kernels import compute_num_split
from vllm.utils import deep_gemm as dg
from vllm.utils.platform_utils import num_compute_units
shape = json.loads(sys.argv[1])
zeros = lambda *size, dtype=torch.float32: torch.zeros(*size, dtype=dtype, device="cuda")
rows, hc = shape["max_tokens"], shape["hc_mult"]
for k in (shape["hidden"] * hc, shape["hidden"]):
    splits = {compute_num_split(64, k, -(-m // 64)): m for m in range(rows, 0, -64)} | {compute_num_split(64, k, 1): 1}
    for split, m in splits.items():
        mix = hc * (hc + 2)
        x, fn = zeros(m, k, dtype=torch.bfloat16), zeros(mix, k)
        dg.tf32_hc_prenorm_gemm(x, fn, zeros(split, m, mix), zeros(split, m), split)
heads, dim, sms = shape["heads"], shape["head_dim"], num_compute_units()
fp8 = torch.float8_e4m3fn
for page in shape["pages"]:
    for batch in sorted({1, shape["max_decodes"]}):
        lens = torch.full((batch, 1), page, dtype=torch.int32, device="cuda")
        plan = dg.get_paged_mqa_logits_metadata(lens, page, sms)
        table = zeros(batch, 4, dtype=torch.int32)
        cache = zeros(4, page, 1, dim + 4, dtype=torch.uint8)
        q = (zeros(batch, 1, heads, dim, dtype=fp8), None)
        dg.fp8_fp4_paged_mqa_logits(q, cache, zeros(batch, heads), lens, table, plan, 4 * page)
m, n = 128, 256
bounds = zeros(m, dtype=torch.int32), torch.full((m,), n, dtype=torch.int32, device="cuda")
kv = (zeros(n, dim, dtype=fp8), zeros(n))
dg.fp8_fp4_mqa_logits((zeros(m, heads, dim, dtype=fp8), None), kv, zeros(m, heads), *bounds, n)
torch.cuda.synchronize()
cache = Path(os.environ["VLLM_CACHE_ROOT"]) / "deep_gemm" / "cache"
print(json.dumps({"kernels": sorted(entry.name for entry in cache.iterdir())}))
"""

_OFFER = '''"""Kernels that playbooks/prebuild.yml built for this release. FlashInfer imports this file (jit/env.py)."""

import os
from pathlib import Path
from types import SimpleNamespace

__version__ = {version!r}
# From here on a module that is not among these is an error, not a compiler beside a loaded model.
os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")


def get_jit_cache_providers():
    return [
        SimpleNamespace(
            provider_id="gb10",
            distribution="gb10-kernels",
            version=__version__,
            jit_cache_dir=Path(__file__).resolve().parents[2] / "kernels" / "modules",
            cuda_architectures={architectures!r},
            modules={modules!r},
        )
    ]
'''


class KernelPrebuildError(Exception):
    """The kernels cannot or must not be built now; the message ends with the next step."""


@dataclass(frozen=True)
class Wish:
    """What to build, with what, for whom.

    `python_path` is the engine's, `environment` what its unit gives it, `cache` the folder of this host below which
    each release's compilers have their own, `modules` are ``package.module:function`` (the function returns
    FlashInfer's build description), `deep_gemm` the shapes of `deep_gemm_shapes` or None.
    """

    release: Path
    python: str
    python_path: tuple[str, ...]
    cache: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    modules: tuple[str, ...] = SM12X_MODULES
    deep_gemm: Mapping[str, Any] | None = None
    timeout_s: float = 3600

    @property
    def folder(self) -> Path:
        """Where the compilers of this release keep their work; the launcher names it in the same way."""
        return self.cache / self.release.resolve().name

    @property
    def digest(self) -> str:
        """Of all that decides the kernels; the release's own name stands for the packages in it."""
        arch = self.environment.get("FLASHINFER_CUDA_ARCH_LIST", "")
        return sha256_document([self.release.resolve().name, list(self.modules), self.deep_gemm, arch])


def caches(folder: Path) -> dict[str, str]:
    """Where the compilers keep their work, as the launcher gives it to the engine."""
    return {
        "XDG_CACHE_HOME": str(folder),
        "VLLM_CACHE_ROOT": f"{folder}/vllm",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TILELANG_CACHE_DIR": f"{folder}/tilelang",
        "FLASHINFER_WORKSPACE_BASE": f"{folder}/flashinfer",
    }


def build_environment(wish: Wish) -> dict[str, str]:
    """The build's environment: the engine's own, with two compilers at once whatever the profile says."""
    tools = [f"{folder}/bin" for folder in wish.python_path]
    path = ":".join([*tools, os.environ.get("PATH", os.defpath)])
    bounds = {"MAX_JOBS": str(JOBS), "FLASHINFER_NVCC_THREADS": "1"}
    forbidden = {"FLASHINFER_DISABLE_JIT", "PYTHONPATH"}
    own = {key: value for key, value in wish.environment.items() if key not in forbidden}
    return {
        **own,
        **caches(wish.folder),
        **bounds,
        "HOME": str(wish.folder),
        "PATH": path,
        "PYTHONPATH": ":".join(wish.python_path),
    }


def deep_gemm_shapes(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """DeepGEMM's shapes of a checkpoint's config.json under these arguments of vLLM; None where it uses none."""
    text = config.get("text_config") or config
    if text.get("model_type") != "deepseek_v41" and config.get("model_type") != "deepseek_v41":
        return None
    drafts = (arguments.get("speculative-config") or {}).get("num_speculative_tokens", 0)
    return {
        "hidden": text["hidden_size"],
        "hc_mult": text["hc_mult"],
        "heads": text["index_n_heads"],
        "head_dim": text["index_head_dim"],
        "pages": [32, 64],  # states a page of 64 tokens at compression 2 and 1
        "max_tokens": arguments.get("max-num-batched-tokens", 2048),
        "max_decodes": arguments.get("max-num-seqs", 1) * (1 + drafts),
    }


# ------------------------------------------------------------------------------------------------- refusals


def mem_available_gib(meminfo: str) -> float:
    """MemAvailable of /proc/meminfo's text. Raises KernelPrebuildError when it is not there."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    raise KernelPrebuildError("/proc/meminfo has no MemAvailable; is this Linux?")


def refusals(
    meminfo: str, floor_gib: float, active_units: Sequence[str], cache: Path, mounts: list[Mount]
) -> list[str]:
    """Every reason not to build now, each with what was found and wanted; empty when it may start."""
    faults = [
        f"{unit} is running: a build beside it can wedge the host: run playbooks/stop.yml first"
        for unit in active_units
    ]
    free = mem_available_gib(meminfo)
    if free < floor_gib:
        faults.append(f"MemAvailable is {free:.1f} GiB, wanted {floor_gib:.1f}: stop what holds it")
    return faults + shared_path_faults({"the cache": str(cache)}, mounts)


def active(units: Iterable[str]) -> list[str]:
    """Those of the units that systemd says are active or about to be."""
    found = []
    for unit in units:
        state = subprocess.run(["systemctl", "is-active", unit], capture_output=True, text=True, check=False)
        if state.stdout.strip() in {"active", "activating", "reloading", "deactivating"}:
            found.append(unit)
    return found


# ------------------------------------------------------------------------------------------------- building


def prebuild(wish: Wish, report: Callable[[str], None], progress: Path | None = None) -> dict[str, str]:
    """Build all that is wanted and offer it to the engine. Returns module -> "built" or "kept".

    Raises KernelPrebuildError with the compiler's last lines; the release then offers no kernels, old or new.
    """
    release = wish.release.resolve()
    wish.folder.mkdir(parents=True, exist_ok=True)
    if identity := _identity(wish):
        os.chown(wish.folder, identity["user"], identity["group"])
    with exclusive(release / KERNELS):
        _withdraw(release)
        meter = Meter(progress, len(wish.modules) + bool(wish.deep_gemm))
        made, actions = [], {}
        for module in wish.modules:
            found = _run(wish, _FLASHINFER, module, report)
            made.append(found)
            actions[module] = found["action"]
            meter.done(1)
        kernels: list[str] = []
        if wish.deep_gemm:
            kernels = _run(wish, _DEEP_GEMM, json.dumps(wish.deep_gemm), report)["kernels"]
            actions["DeepGEMM"] = f"{len(kernels)} kernels"
            meter.done(1)
        _offer(release, wish, made, kernels)
    return actions


def _identity(wish: Wish) -> dict[str, Any]:
    """As whom to compile, for Popen; empty for whoever runs this."""
    if not wish.user or os.geteuid() != 0:
        return {}
    account = pwd.getpwnam(wish.user)
    groups = os.getgrouplist(wish.user, account.pw_gid)
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": groups}


def _run(wish: Wish, program: str, argument: str, report: Callable[[str], None]) -> dict[str, Any]:
    """One build in the engine's Python; the JSON document that it prints last."""
    start = time.monotonic()
    child = subprocess.Popen(
        [wish.python, "-B", "-c", program, argument],
        env=build_environment(wish),
        cwd=wish.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **_identity(wish),
    )
    output = _wait(child, start, wish.timeout_s, report, argument)
    lines = output.strip().splitlines()
    if child.returncode != 0:
        raise KernelPrebuildError(
            f"{argument}: {wish.python} ended with {child.returncode}: {' | '.join(lines[-5:])}; "
            "the whole output: FLASHINFER_JIT_VERBOSE=1 python3 -m gb10.kernel_prebuild"
        )
    document: dict[str, Any] = json.loads(lines[-1])
    return document


def _wait(
    child: subprocess.Popen[str], start: float, timeout_s: float, report: Callable[[str], None], what: str
) -> str:
    """The child's whole output; says every five seconds that it still runs, and ends it when it takes too long."""
    while True:
        try:
            return child.communicate(timeout=min(5, timeout_s))[0]
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - start
            report(f"{what}, {elapsed:.0f} s")
            if elapsed > timeout_s:
                os.killpg(child.pid, signal.SIGKILL)  # the compilers too
                child.communicate()
                raise KernelPrebuildError(
                    f"{what} took more than {timeout_s:.0f} s and was ended; look at the host's load and memory"
                ) from None


def _withdraw(release: Path) -> None:
    shutil.rmtree(release / "site" / PROVIDER, ignore_errors=True)
    (release / KERNELS / RECORD).unlink(missing_ok=True)
    shutil.rmtree(release / KERNELS / "modules", ignore_errors=True)


def _offer(release: Path, wish: Wish, made: list[dict[str, Any]], kernels: list[str]) -> None:
    """Copy what was built, record it, and write the file that FlashInfer imports, in this order."""
    recorded = {}
    for module in made:
        target = release / KERNELS / "modules" / module["name"] / f"{module['name']}.so"
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as scratch,
            Path(module["path"]).open("rb") as built,
        ):
            shutil.copyfileobj(built, scratch)
            scratch.flush()
            os.fchmod(scratch.fileno(), 0o755)
            os.fsync(scratch.fileno())
        Path(scratch.name).replace(target)
        recorded[module["name"]] = {"sha256": sha256_file(target), "stat": _stat(target)}
    text = ""
    if made:
        versions = sorted({module["version"] for module in made})
        architectures = made[0]["architectures"]
        text = _OFFER.format(version=versions[0], architectures=architectures, modules=sorted(recorded))
    document = {"wish": wish.digest, "modules": recorded, "deep_gemm": kernels, "offer": text}
    write_json(release / KERNELS / RECORD, document)
    if text:
        (release / "site" / PROVIDER).mkdir()
        write_atomic(release / "site" / PROVIDER / "__init__.py", text.encode())


def _stat(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


# ------------------------------------------------------------------------------------------------- judging


def standing(wish: Wish) -> bool:
    """Whether exactly these kernels were built for this release and are whole."""
    record = read_json(wish.release / KERNELS / RECORD)
    return bool(record) and record["wish"] == wish.digest and not faults(wish.release)


def faults(release: Path, *, whole: bool = False) -> list[str]:
    """What was changed of the kernels that a release has; nothing where it has none. WHOLE reads them again."""
    record = read_json(release / KERNELS / RECORD)
    if record is None:
        return []
    found = []
    for name, entry in sorted(record["modules"].items()):
        path = release / KERNELS / "modules" / name / f"{name}.so"
        if not path.is_file():
            found.append(f"{path}: missing, wanted sha256 {entry['sha256']}: {STEP}")
        elif (whole or _stat(path) != entry["stat"]) and (digest := sha256_file(path)) != entry["sha256"]:
            found.append(f"{path}: edited: sha256 found {digest}, wanted {entry['sha256']}: {STEP}")
    offer = release / "site" / PROVIDER / "__init__.py"
    if record["offer"] and (not offer.is_file() or offer.read_text() != record["offer"]):
        found.append(f"{offer}: missing or edited; without it FlashInfer compiles while it serves: {STEP}")
    return found


def start_faults(release: Path, environment: Mapping[str, str], *, gpu: bool) -> list[str]:
    """Why a rank with this ENVIRONMENT could compile while it serves; nothing on a host without a GPU.

    `release.faults` holds the kernels to their record, and the start refuses every path on the network by itself.
    """
    if not gpu:
        return []
    found = []
    if read_json(release / KERNELS / RECORD) is None:
        found.append(f"{release}/{KERNELS}: no kernels were built for this release: {STEP}")
    jobs, threads = environment.get("MAX_JOBS", ""), environment.get("FLASHINFER_NVCC_THREADS", "")
    if not jobs.isdigit() or not 1 <= int(jobs) <= JOBS:
        found.append(f"MAX_JOBS is {jobs or 'unset'}, wanted 1 to {JOBS}: set it in the profile's environment")
    if threads != "1":
        found.append(f"FLASHINFER_NVCC_THREADS is {threads or 'unset'}, wanted 1: set it in the profile's environment")
    if "FLASHINFER_DISABLE_JIT" in environment and not environment["FLASHINFER_DISABLE_JIT"]:
        found.append("FLASHINFER_DISABLE_JIT is set to nothing, which lets FlashInfer compile: take it out")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Build, or print every reason not to and return 1."""
    parser = argparse.ArgumentParser(prog="gb10.kernel_prebuild", description="Build kernels ahead, on this host.")
    parser.add_argument("modules", nargs="*", help="package.module:function of FlashInfer; none means those of SM12x")
    parser.add_argument("--release", type=Path, required=True, help="such as /opt/gb10/current")
    parser.add_argument("--python", default=sys.executable, help="the engine's")
    parser.add_argument("--python-path", action="append", default=[], help="once for each folder of the engine's")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--deep-gemm", type=json.loads, help="shapes as JSON")
    parser.add_argument("--arch", default="12.1a")
    parser.add_argument("--floor-gib", type=float, default=FLOOR_GIB)
    parser.add_argument("--unit", action="append", default=[], help="must not be running")
    args = parser.parse_args(argv)
    wish = Wish(
        release=args.release,
        python=args.python,
        python_path=tuple(args.python_path),
        cache=args.cache.absolute(),
        environment=dict(os.environ) | {"FLASHINFER_CUDA_ARCH_LIST": args.arch},
        modules=tuple(args.modules or SM12X_MODULES),
        deep_gemm=args.deep_gemm,
    )
    try:
        mounts = parse_mounts(MOUNTS.read_text())
        found = refusals(Path("/proc/meminfo").read_text(), args.floor_gib, active(args.unit), wish.cache, mounts)
        if not found:
            for module, action in prebuild(wish, lambda text: print(text, flush=True)).items():
                print(f"{module}: {action}", flush=True)
    except KernelPrebuildError as error:
        found = [str(error)]
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
