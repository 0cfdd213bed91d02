"""Measure one GPU under load: fp16 burn, decode-shaped GEMV, copy, and the driver's clocks beside them.

Self-contained on purpose (standard library and the engine's own torch): the host runs it with the
engine's Python as ``python -m gb10.gpu_probe``, and anybody can run the file alone. It measures and
never judges (:mod:`gpu_verdict` does), never changes a clock, and refuses while a process holds the GPU:
beside an engine it would measure the engine, and one fleet lost a host to its allocation.

One JSON object on standard output. Exit status 0 measured, 1 cannot measure, 3 refused.
Units: TFLOPS, GB/s (10^9), MHz, W, degrees Celsius, Unix seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

REFUSED = 3
CLOCK_FIELDS = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
BURST_S, PAUSE_S = 0.070, 0.030
"""Duty cycle of decoding: short bursts with pauses show the slow state that a continuous load hides."""


class ProbeError(Exception):
    """The probe cannot measure; the message says why."""


@dataclass(frozen=True)
class Sizes:
    """What is multiplied: a square GEMM of ``burn``, and [rows, k] @ [k, n] for the GEMV."""

    burn: int
    rows: int
    k: int
    n: int
    copy_bytes: int
    burn_dtype: str
    gemv_dtype: str


# 4096 and 6x5120 @ 5120x16384 are the sizes of the figures published for GB10 (75-90 TFLOPS, 224-233 GB/s).
CUDA_SIZES = Sizes(4096, 6, 5120, 16384, 256 << 20, "float16", "bfloat16")
# A CPU has no fast fp16 GEMM; the embedded hosts share two cores, so seconds must be enough.
CPU_SIZES = Sizes(512, 6, 1024, 4096, 16 << 20, "float32", "float32")


def parse_number(text: str) -> float | None:
    """A number of nvidia-smi's csv, or None: GB10 answers ``[N/A]`` for several fields."""
    try:
        return float(text.strip())
    except ValueError:
        return None


def parse_clock_line(line: str, now: float) -> dict[str, Any] | None:
    """One csv line of CLOCK_FIELDS as a sample, or None for anything else (a warning, an error text)."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 4 or parse_number(cells[0]) is None:
        return None
    sm_mhz, watts, celsius = (parse_number(cell) for cell in cells[:3])
    reasons = int(cells[3], 16) if cells[3].startswith("0x") else None
    return {"t": round(now, 3), "sm_mhz": sm_mhz, "watts": watts, "celsius": celsius, "reasons": reasons}


class ClockSampler:
    """Samples the driver's clocks from one long-running nvidia-smi, which costs less than many short ones."""

    def __init__(self, command: str | None, period_ms: int) -> None:
        self.samples: list[dict[str, Any]] = []
        self._process: subprocess.Popen[str] | None = None
        if command is None:
            return
        argv = [command, f"--query-gpu={CLOCK_FIELDS}", "--format=csv,noheader,nounits", "-i", "0", f"-lms={period_ms}"]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None  # noqa: S101 - for the type checker; started only with a process
        for line in self._process.stdout or ():
            sample = parse_clock_line(line, time.time())
            if sample is not None:
                self.samples.append(sample)

    def between(self, start: float, end: float) -> list[dict[str, Any]]:
        """The samples taken in [start, end)."""
        return [sample for sample in list(self.samples) if start <= sample["t"] < end]

    def stop(self) -> None:
        """End nvidia-smi without waiting for it: a wedged one would not go."""
        if self._process is not None:
            self._process.kill()


def gpu_processes(command: str | None, timeout_s: float = 10.0) -> list[str]:
    """Processes that hold the GPU, one csv line each. Raises ProbeError when the driver gives no answer."""
    if command is None:
        return []
    argv = [command, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise ProbeError(f"{command} gave no answer in {timeout_s:g} s") from None
    if process.returncode:
        raise ProbeError(f"{command} ended with {process.returncode}: {output.strip()}")
    return [line.strip() for line in output.splitlines() if line.strip()]


class Load:
    """The tensors and the three operations on one device, timed by the wall clock around a synchronisation."""

    def __init__(self, torch: Any, device: str, sizes: Sizes) -> None:
        self._torch, self._sizes, self.cuda = torch, sizes, device == "cuda"
        torch.manual_seed(0)
        if not self.cuda:
            torch.set_num_threads(1)  # the other core carries ssh, systemd and the sampler
        burn_dtype, gemv_dtype = getattr(torch, sizes.burn_dtype), getattr(torch, sizes.gemv_dtype)
        self._a, self._b = (
            torch.randn(sizes.burn, sizes.burn, device=device).div_(16).to(burn_dtype) for _ in range(2)
        )
        self._c = torch.empty_like(self._a)
        self._x = torch.randn(sizes.rows, sizes.k, device=device).to(gemv_dtype)
        self._w = torch.randn(sizes.k, sizes.n, device=device).div_(16).to(gemv_dtype)
        self._y = torch.empty(sizes.rows, sizes.n, device=device, dtype=gemv_dtype)
        self._src = torch.ones(sizes.copy_bytes, device=device, dtype=torch.uint8)
        self._dst = torch.empty_like(self._src)

    def burn(self) -> None:
        self._torch.mm(self._a, self._b, out=self._c)

    def gemv(self) -> None:
        self._torch.mm(self._x, self._w, out=self._y)

    def copy(self) -> None:
        self._dst.copy_(self._src)

    @property
    def burn_flop(self) -> int:
        return 2 * self._sizes.burn**3

    @property
    def gemv_bytes(self) -> int:
        """Bytes that one GEMV must move: weight, input and output once."""
        return sum(t.numel() * t.element_size() for t in (self._w, self._x, self._y))

    @property
    def copy_bytes(self) -> int:
        """Bytes that one copy moves: read and written."""
        return 2 * self._sizes.copy_bytes

    def wait(self) -> None:
        if self.cuda:
            self._torch.cuda.synchronize()

    def repeat(self, operation: Any, times: int) -> float:
        """Seconds for ``times`` calls, the device's work included."""
        start = time.perf_counter()
        for _ in range(times):
            operation()
        self.wait()
        return time.perf_counter() - start

    def times_for(self, operation: Any, seconds: float) -> int:
        """How many calls take about ``seconds``, after a warm-up of ten."""
        self.repeat(operation, 10)
        once = self.repeat(operation, 10) / 10
        return max(1, round(seconds / once))


def rate(load: Load, operation: Any, work: int, seconds: float, pause_s: float = 0.0) -> dict[str, Any]:
    """Run bursts for ``seconds``; the median rate of the bursts and each one's [Unix time, rate], in work/s."""
    times = load.times_for(operation, BURST_S)
    timeline, done, busy, start = [], 0, 0.0, time.time()
    while time.time() - start < seconds:
        now, took = time.time(), load.repeat(operation, times)
        timeline.append([round(now, 3), work * times / took])
        done, busy = done + times, busy + took
        if pause_s:
            time.sleep(pause_s)
    rates = sorted(value for _, value in timeline)
    return {
        "start": start,
        "end": time.time(),
        "mean": work * done / busy,
        "p10": rates[len(rates) // 10],
        "p50": rates[len(rates) // 2],
        "max": rates[-1],
        "timeline": timeline,
    }


def scaled(result: dict[str, Any], unit: float, digits: int) -> dict[str, Any]:
    """The rates of one result in ``unit``s, rounded."""
    out = {key: round(result[key] / unit, digits) for key in ("mean", "p10", "p50", "max")}
    timeline = [[t, round(value / unit, digits)] for t, value in result["timeline"]]
    return (
        {"start": round(result["start"], 3), "seconds": round(result["end"] - result["start"], 2)}
        | out
        | {"timeline": timeline}
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The whole measurement as the object that main() prints."""
    smi = shutil.which(options.nvidia_smi)
    holders = gpu_processes(smi)
    if holders:
        return {"refused": "a process holds the GPU; stop the engine first", "processes": holders}
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise ProbeError(f"{sys.executable} has no torch: {error}") from error
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    sizes = CUDA_SIZES if device == "cuda" else CPU_SIZES
    if options.size:
        sizes = replace(sizes, burn=options.size)
    sampler = ClockSampler(smi, options.sample_ms)
    try:
        load = Load(torch, device, sizes)
        burn = rate(load, load.burn, load.burn_flop, options.burn_seconds)
        gemv = rate(load, load.gemv, load.gemv_bytes, options.gemv_seconds, PAUSE_S)
        copy = rate(load, load.copy, load.copy_bytes, options.copy_seconds)
    finally:
        sampler.stop()
    # The clock needs a second to rise, and the last sample may fall into the pause after the burn.
    settled = burn["start"] + min(1.0, options.burn_seconds / 4)
    return {
        "device": device,
        "name": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "sizes": asdict(sizes),
        "burn_tflops": scaled(burn, 1e12, 4),
        "gemv_gb_s": scaled(gemv, 1e9, 2),
        "copy_gb_s": scaled(copy, 1e9, 2),
        "burn_clocks": sampler.between(settled, burn["end"]),
        "gemv_clocks": sampler.between(gemv["start"], gemv["end"]),
    }


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_probe", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--burn-seconds", type=float, default=10.0)
    parser.add_argument("--gemv-seconds", type=float, default=20.0)
    parser.add_argument("--copy-seconds", type=float, default=2.0)
    parser.add_argument("--size", type=int, default=0, help="side of the burn's square matrices")
    parser.add_argument("--sample-ms", type=int, default=200)
    parser.add_argument("--nvidia-smi", default="nvidia-smi")
    parser.add_argument("--json", action="store_true", help="the whole object, timelines included")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    try:
        result = measure(options)
    except (ProbeError, OSError, RuntimeError) as error:  # torch reports an exhausted or lost device as RuntimeError
        result = {"error": str(error).splitlines()[0] if str(error) else type(error).__name__}
    if not options.json:
        for part in ("burn_tflops", "gemv_gb_s", "copy_gb_s"):
            result.get(part, {}).pop("timeline", None)
    print(json.dumps(result, sort_keys=True, indent=None if options.json else 1))
    return REFUSED if "refused" in result else 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
