"""What a rank does with its GPU, inside the hardened unit that role vllm_rank installs.

Needs an NVIDIA GPU, PyTorch, root and a running systemd; skipped where one is missing. The unit's own prestart and
launcher are replaced by a probe; every other line of the [Service] section stays.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no NVIDIA GPU", allow_module_level=True)
if os.getuid() or not Path("/run/systemd/system").is_dir():
    pytest.skip("needs root and systemd", allow_module_level=True)

pytestmark = pytest.mark.gpu
PROJECT = Path(__file__).resolve().parents[2]
TEMPLATE = PROJECT / "roles/vllm_rank/templates/etc/systemd/system/vllm-rank.service.j2"
NAME = "gb10-gpu-probe"
STAGE = Path("/run", NAME)  # the unit has a /tmp of its own and no /root
WORK = {
    "matrix product": "x @ x",
    "pinned memory": "torch.ones(1 << 26).pin_memory().to('cuda', non_blocking=True)",
    "1 GiB locked": "lock(1 << 30)",
    "Triton kernel": "triton_sum()",
    "CUDA graph": "graph()",
    "compiled function": "torch.compile(lambda a: (a * 2).relu().sum())(x)",
    "NCCL": "nccl()",
    "nvidia-smi": "subprocess.run(['nvidia-smi', '-L'], check=True, capture_output=True)",
    "worker process": "worker()",
}
PROBE = """
import ctypes, json, mmap, multiprocessing, os, subprocess, sys, traceback
import torch, triton, triton.language as tl
x = torch.ones(512, 512, device="cuda")

@triton.jit
def add(a, b, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(b + at, tl.load(a + at) + 1)

def triton_sum():
    out = torch.empty(512, device="cuda")
    add[(1,)](x, out, 512)
    assert out.sum().item() == 1024

def graph():
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = x * 3
    captured.replay()
    assert y[0, 0].item() == 3

def lock(size):
    memory = mmap.mmap(-1, size)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None, use_errno=True).mlock(ctypes.c_void_p(at), ctypes.c_size_t(size)):
        raise OSError(ctypes.get_errno(), "mlock")

def nccl():
    torch.distributed.init_process_group("nccl", init_method="tcp://127.0.0.1:29811", rank=0, world_size=1)
    torch.distributed.all_reduce(x)
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()

def child(queue):
    queue.put(torch.ones(3, device="cuda").sum().item())

def worker():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get(timeout=120) == 3
    process.join()

if __name__ == "__main__":
    said = {}
    for name, code in json.load(open(sys.argv[1])).items():
        try:
            eval(code)
            torch.cuda.synchronize()
            said[name] = "ok"
        except BaseException:
            said[name] = traceback.format_exc()
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    said["confined"] = [status[key].strip() for key in ("Uid", "CapBnd", "NoNewPrivs", "Seccomp")]
    open(os.environ["STATE_DIRECTORY"] + "/said.json", "w").write(json.dumps(said))
"""


def unit_text(user: str) -> str:
    """The unit as the role renders it, with the probe for its commands and folders of the probe's own."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True)  # noqa: S701 no HTML
    text = environment.from_string(TEMPLATE.read_text()).render(
        ansible_managed="probe", rank=0, gb10_profile={"tensor_parallel_size": 1}, profile="probe",
        vllm_rank_user=user, vllm_rank_fabric_wait=300, _vllm_rank_library=STAGE, _vllm_rank_has_key=False,
        _vllm_rank_backend="venv", _vllm_rank_writable=[],
    )  # fmt: skip
    kept = [line for line in text.splitlines() if not line.startswith(("ExecStart", "Type=", "After=", "Wants="))]
    start = f"ExecStart={sys.executable} {STAGE}/probe.py {STAGE}/work.json"
    passed = [f'Environment="{key}={os.environ[key]}"' for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ]
    caches = [f"Environment={key}=/var/cache/{NAME}/{key}" for key in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
    at = kept.index("[Service]") + 1
    kept[at:at] = ["Type=oneshot", start, *passed, *caches]
    return "\n".join(kept).replace("gb10/vllm", NAME) + "\n"


@pytest.fixture(scope="module")
def said():
    user, unit = "nobody", Path("/run/systemd/system", f"{NAME}.service")
    STAGE.mkdir(mode=0o755, exist_ok=True)
    try:
        (STAGE / "probe.py").write_text(PROBE)
        (STAGE / "work.json").write_text(json.dumps(WORK))
        unit.write_text(unit_text(user))
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        started = subprocess.run(["systemctl", "start", unit.name], capture_output=True, text=True, timeout=500)
        answer = Path("/var/lib", NAME, "said.json")
        assert answer.exists(), started.stderr
        yield json.loads(answer.read_text())
    finally:
        unit.unlink(missing_ok=True)
        subprocess.run(["systemctl", "daemon-reload"], check=False)
        for path in (STAGE, Path("/var/lib", NAME), Path("/var/cache", NAME)):
            shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("work", WORK)
def test_hardened_unit_leaves_what_a_rank_does(said, work):
    assert said[work] == "ok"


def test_probe_ran_confined(said):
    uid, capabilities, no_new_privileges, seccomp = said["confined"]
    assert uid.split()[0] != "0"
    assert (int(capabilities, 16), no_new_privileges, seccomp) == (0, "1", "2")
