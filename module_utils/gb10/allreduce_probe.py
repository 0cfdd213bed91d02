"""Measure all-reduces over all ranks with the engine's own torch and NCCL; one process a host.

Run as ``ENGINE_PYTHON -m gb10.allreduce_probe`` on every host at about the same time. The fabric's variables come
from the environment (gb10.roce), as they do for a rank. Without a GPU it runs over gloo and says so.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from .allreduce import SIZES, STEP_BYTES, STEP_OPERATIONS, parse_nccl_log, summarise

WARMUP = 20


def _timer(torch: Any, cuda: bool) -> Callable[[Callable[[], Any], int], list[float]]:
    """A function that runs an operation n times and returns each run's microseconds."""

    def on_gpu(operation: Callable[[], Any], count: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize()
        marks[0].record()
        for mark in marks[1:]:
            operation()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) * 1000 for a, b in itertools.pairwise(marks)]

    def on_cpu(operation: Callable[[], Any], count: int) -> list[float]:
        samples = []
        for _ in range(count):
            start = time.perf_counter()
            operation()
            samples.append((time.perf_counter() - start) * 1e6)
        return samples

    return on_gpu if cuda else on_cpu


def measure(torch: Any, *, rank: int, world: int, device: int | None, iterations: int) -> dict[str, Any]:
    """p50/p90 for every size, one decode step's worth, and the sizes whose sums were wrong.

    ``device`` is a CUDA index, None for gloo. Every rank must call this with the same arguments but rank and device.
    """
    dist = torch.distributed
    where = "cpu" if device is None else f"cuda:{device}"
    # bfloat16 is what the engine reduces; gloo gets float32. Both hold these small whole numbers exactly.
    dtype = torch.float32 if device is None else torch.bfloat16
    width = 4 if device is None else 2
    run = _timer(torch, device is not None)
    sizes: dict[str, dict[str, float]] = {}
    wrong: list[int] = []
    for size in SIZES:
        # Position-dependent, so that a misplaced chunk is seen as well as a missing one.
        pattern = torch.arange(size // width, device=where) % 7
        tensor = (pattern + rank).to(dtype)
        dist.all_reduce(tensor)
        if not torch.equal(tensor, (pattern * world + world * (world - 1) // 2).to(dtype)):
            wrong.append(size)
        tensor.zero_()
        run(lambda tensor=tensor: dist.all_reduce(tensor), WARMUP)  # type: ignore[misc]
        sizes[str(size)] = summarise(run(lambda tensor=tensor: dist.all_reduce(tensor), iterations))  # type: ignore[misc]
    tensor = torch.zeros(STEP_BYTES // width, device=where, dtype=dtype)

    def step() -> None:
        for _ in range(STEP_OPERATIONS):
            dist.all_reduce(tensor)

    run(step, 2)
    steps = [sample / 1000 for sample in run(step, max(3, iterations // 10))]
    return {"sizes": sizes, "step_ms": summarise(steps, digits=2), "wrong_sums": wrong}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gb10.allreduce_probe", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--master-address", required=True)
    parser.add_argument("--master-port", type=int, required=True)
    parser.add_argument("--device", type=int, default=0, help="CUDA device; a GB10 has one")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for joining and for one run")
    parser.add_argument("--backend", choices=["auto", "nccl", "gloo"], default="auto")
    parser.add_argument("--nccl-log", type=Path, required=True, help="where NCCL writes its own log")
    args = parser.parse_args(argv)

    # Read by NCCL when the first communicator is made, so they are set before torch is loaded.
    os.environ |= {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM,ENV",
        "NCCL_DEBUG_FILE": str(args.nccl_log),
    }
    torch = importlib.import_module("torch")
    importlib.import_module("torch.distributed")
    cuda = args.backend == "nccl" or (args.backend == "auto" and torch.cuda.is_available())
    if cuda:
        torch.cuda.set_device(args.device)
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"tcp://{args.master_address}:{args.master_port}",
        rank=args.rank,
        world_size=args.world,
        timeout=timedelta(seconds=args.timeout),
        device_id=torch.device("cuda", args.device) if cuda else None,
    )
    try:
        result = measure(
            torch,
            rank=args.rank,
            world=args.world,
            device=args.device if cuda else None,
            iterations=args.iterations,
        )
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
    result |= {
        "rank": args.rank,
        "world": args.world,
        "backend": "nccl" if cuda else "gloo",
        "device": torch.cuda.get_device_name(args.device) if cuda else "cpu",
        "torch": str(torch.__version__),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
    }
    if cuda:
        transport = parse_nccl_log(args.nccl_log.read_text(encoding="utf-8", errors="replace"))
        result["transport"] = asdict(transport) | {"used": transport.used}
    json.dump(result, sys.stdout)
    print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
