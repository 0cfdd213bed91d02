"""Compile the engine's kernels before it serves, and tell what compiled while it did.

FlashInfer comes as sources and compiles a module when it is first used. On a GB10 that takes minutes and
several GiB a compiler job out of the memory that the engine holds, and has wedged hosts. So the modules that a
profile names are built into a cache on the host's own disk while nothing is served, two jobs at a time. The
engine is then started with FLASHINFER_DISABLE_JIT=1, with which a module that is missing all the same is an
error that names it. DeepGEMM, TileLang and Triton compile in the engine's own warm-up and have no such switch:
for these the caches' contents are recorded when the engine is ready, and whatever is new later was compiled
while serving.

Run by hand or by a unit: ``python3 -m gb10.kernel_prebuild --python ENGINE/bin/python --cache DIR MODULE...``
with modules written ``package.module:function`` (the function returns FlashInfer's build description).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# What DeepSeek-V4.1 and V4 need on SM12x, read in flashinfer-python 0.7.2.post1; not yet confirmed on a GB10.
SM12X_MODULES = (
    "flashinfer.jit.mla:gen_sparse_mla_sm120_module",
    "flashinfer.jit.gemm.core:gen_gemm_sm120_module_cutlass_mxfp8",
    "flashinfer.jit.fused_moe:gen_cutlass_fused_moe_sm120_module",
)
JOBS = 2
FLOOR_GIB = 24.0  # two compilers of CUTLASS kernels beside a running system

# Runs in the engine's Python. The lock is FlashInfer's own, so that two builders do not meet.
_BUILD = """
import importlib, sys
module, function = sys.argv[1].split(":")
spec = getattr(importlib.import_module(module), function)()
if spec.try_load() is None:
    spec.build(need_lock=True)
    print("built")
else:
    print("kept")
"""


class KernelPrebuildError(Exception):
    """The kernels cannot or must not be built now; the message ends with the next step."""


@dataclass(frozen=True)
class Built:
    """One module: ``built`` now or ``kept`` from before, and how long that took."""

    module: str
    action: str
    seconds: float


def environment(cache: Path, arch: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The build's environment: where it goes, for which GPU, and how many compilers at once."""
    own = {
        "FLASHINFER_WORKSPACE_BASE": str(cache),
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "FLASHINFER_NVCC_THREADS": "1",
        "MAX_JOBS": str(JOBS),
    }
    # The engine's own switch must not reach the build, which it would forbid.
    return {k: v for k, v in inherited.items() if k != "FLASHINFER_DISABLE_JIT"} | own


def mem_available_gib(meminfo: str) -> float:
    """MemAvailable of /proc/meminfo's text. Raises KernelPrebuildError when it is not there."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    raise KernelPrebuildError("/proc/meminfo has no MemAvailable; is this Linux?")


def refusals(meminfo: str, floor_gib: float, active_units: Sequence[str], cache_filesystem: str) -> list[str]:
    """Every reason not to build now, each with what was found and wanted; empty when it may start."""
    faults = [f"{unit} is running: stop it first, a build beside it can wedge the host" for unit in active_units]
    free = mem_available_gib(meminfo)
    if free < floor_gib:
        faults.append(f"MemAvailable is {free:.1f} GiB, wanted {floor_gib:.1f}: stop what holds it")
    if cache_filesystem.startswith(("nfs", "cifs", "fuse")):
        faults.append(f"the cache is on {cache_filesystem}, wanted a disk of this host: hosts must not share it")
    return faults


def active(units: Iterable[str]) -> list[str]:
    """Those of the units that systemd says are active or about to be."""
    found = []
    for unit in units:
        state = subprocess.run(["systemctl", "is-active", unit], capture_output=True, text=True, check=False)
        if state.stdout.strip() in {"active", "activating", "reloading", "deactivating"}:
            found.append(unit)
    return found


def filesystem_of(path: Path, mounts: str) -> str:
    """Type of the file system that holds path, from the text of /proc/mounts."""
    best = ("", "unknown")
    for line in mounts.splitlines():
        fields = line.split()
        point = fields[1].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, fields[2])
    return best[1]


def prebuild(
    python: Path, cache: Path, arch: str, modules: Sequence[str], report: Callable[[str], None], timeout_s: float = 3600
) -> list[Built]:
    """Build each module that the cache lacks, in order. Raises KernelPrebuildError with the compiler's last lines."""
    cache.mkdir(parents=True, exist_ok=True)
    done = []
    for number, module in enumerate(modules, 1):
        start = time.monotonic()
        command = [str(python), "-c", _BUILD, module]
        child = subprocess.Popen(
            command,
            env=environment(cache, arch, os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        output = _wait(child, start, timeout_s, report, f"{number}/{len(modules)} {module}")
        lines = output.strip().splitlines()
        if child.returncode != 0:
            raise KernelPrebuildError(
                f"{module}: {python} ended with {child.returncode}: {' | '.join(lines[-5:])}; "
                "run it by hand with FLASHINFER_JIT_VERBOSE=1"
            )
        done.append(Built(module, "kept" if "kept" in lines else "built", time.monotonic() - start))
    return done


def _wait(
    child: subprocess.Popen[str], start: float, timeout_s: float, report: Callable[[str], None], what: str
) -> str:
    """The child's whole output; says every five seconds that it still runs, and ends it when it takes too long."""
    while True:
        try:
            return child.communicate(timeout=5)[0]
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - start
            report(f"{what}, {elapsed:.0f} s")
            if elapsed > timeout_s:
                os.killpg(child.pid, signal.SIGKILL)  # the compilers too
                child.communicate()
                raise KernelPrebuildError(
                    f"{what} took more than {timeout_s:.0f} s and was ended; look at the host's load and memory"
                ) from None


def contents(caches: Iterable[Path]) -> set[str]:
    """Every file that compilers have left in these caches, to be recorded when the engine is ready."""
    skipped = {".lock", ".log", ".tmp"}
    found = set()
    for cache in caches:
        found |= {str(p) for p in cache.rglob("*") if p.is_file() and p.suffix not in skipped}
    return found


def compiled_since(caches: Iterable[Path], recorded: Iterable[str]) -> list[str]:
    """Files that are there now and were not recorded: what was compiled while the engine served."""
    return sorted(contents(caches) - set(recorded))


def main(argv: Sequence[str] | None = None) -> int:
    """Build, or print every reason not to and return 1."""
    parser = argparse.ArgumentParser(prog="gb10.kernel_prebuild", description="Build FlashInfer modules ahead.")
    parser.add_argument("modules", nargs="*", default=list(SM12X_MODULES))
    parser.add_argument("--python", type=Path, required=True, help="the engine's")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--arch", default="12.1a")
    parser.add_argument("--floor-gib", type=float, default=FLOOR_GIB)
    parser.add_argument("--unit", action="append", default=[], help="must not be running")
    args = parser.parse_args(argv)
    try:
        cache = args.cache.absolute()
        filesystem = filesystem_of(cache, Path("/proc/mounts").read_text())
        faults = refusals(Path("/proc/meminfo").read_text(), args.floor_gib, active(args.unit), filesystem)
        if not faults:
            for item in prebuild(args.python, cache, args.arch, args.modules, lambda text: print(text, flush=True)):
                print(f"{item.module}: {item.action} in {item.seconds:.0f} s", flush=True)
    except KernelPrebuildError as error:
        faults = [str(error)]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
