"""Which cause is named for which lines: real ones, and the order between those that come together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import causes
from ansible.module_utils.gb10.causes import HostFacts

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
GOOD = HostFacts(
    kernel="6.17.0-1032-nvidia",
    meminfo={"MemAvailable": 110 << 20, "CmaTotal": 65536, "CmaFree": 1024},
    memory_floor_mib=100 << 10,
)


def vllm(name):
    return (FIXTURES / "vllm" / name).read_text()


def named(text, facts=GOOD):
    row = causes.likely(text, facts)
    return row.id if row else ""


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("nccl_warn_gid_unset.txt", "own-gid-unset"),
        ("nccl_warn_innocent_peer.constructed.txt", "peers-gid-unset"),
        ("nccl_warn_modify_qp_timeout.constructed.txt", "fabric-does-not-answer"),
        ("nccl_warn_completion_error12.txt", "fabric-does-not-answer"),
        ("nccl_unhandled_system_error.txt", "nccl-without-reason"),
        ("rpc_timeout_engine_dead.constructed.log", "another-rank-hangs"),
        ("parent_exited_lines.txt", "other-rank-ended"),
        ("worker_died_lines.nearest.txt", "other-rank-ended"),
        ("dmesg_nvrm_oom.txt", "driver-out-of-memory"),
    ],
)
def test_captured_lines(name, wanted):
    assert named(vllm(name)) == wanted


@pytest.mark.parametrize("number", range(5))
def test_each_captured_cuda_failure_has_a_cause(number):
    line = vllm("cuda_failure_lines.txt").splitlines()[number]
    wanted = ["gpu-out-of-memory", "illegal-access", "", "capture-failed", "capture-failed"][number]
    assert named(line) == wanted


@pytest.mark.parametrize(
    "name",
    [
        "boot_v41_tp4_head.constructed.log",
        "boot_v41_tp4_worker_rank2.constructed.log",
        "boot_dsv4_tp2_head_then_serving.log",
    ],
)
def test_good_start_that_somebody_killed_is_blamed_on_nothing_in_its_log(name):
    assert named(vllm(name) + "\nunit result signal exit status 9") == "killed"


# The same line, three hosts: what is looked at first is what costs an operator least to exclude.
MEMLOCK = HostFacts(memlock=8388608, kernel=GOOD.kernel, meminfo=GOOD.meminfo, memory_floor_mib=GOOD.memory_floor_mib)
BAD_KERNEL = HostFacts(kernel="7.0.0-1019-nvidia", meminfo=GOOD.meminfo, memory_floor_mib=GOOD.memory_floor_mib)


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        (MEMLOCK, "locked-memory-limit"),
        (HostFacts(memlock=8388608, kernel="7.0.0-1019-nvidia"), "locked-memory-limit"),
        (BAD_KERNEL, "kernel-breaks-registration"),
        (HostFacts(kernel="7.0.0-1019-nvidia", kernel_command_line="ro kho=off"), "registration-refused"),
        (HostFacts(meminfo={"CmaFree": 70000, "CmaTotal": 65536}), "kernel-breaks-registration"),
        (HostFacts(meminfo={"MemAvailable": 1 << 20}, memory_floor_mib=2048), "no-memory-to-register"),
        (GOOD, "registration-refused"),
    ],
)
@pytest.mark.parametrize("number", range(2))
def test_memory_that_cannot_be_registered_is_blamed_on_the_right_thing(number, facts, wanted):
    line = vllm("nccl_warn_memlock.txt").splitlines()[number]
    assert named(line + "\nRuntimeError: NCCL error: unhandled system error", facts) == wanted


CONSTRUCTED = {
    "checkpoint-block-size": "ValueError: No common block size for 64 (FlashInfer",
    "memory-taken-before-start": "on startup is less than desired GPU memory utilization (0.8, 97.4 GiB)",
    "no-room-for-cache": "ValueError: No available memory for the cache blocks. Try increasing",
    "peers-did-not-come": "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4",
    "peers-do-not-connect": "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo",
    "port-taken": "OSError: [Errno 98] Address already in use",
    "not-divisible": "Total number of attention heads (10) must be divisible by tensor parallel size (4).",
    "unknown-argument": "vllm serve: error: unrecognized arguments: --x",
    "damaged-shard": "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
    "store-away": "nfs: server 192.0.2.1 not responding, still trying",
    "disk-full": "OSError: [Errno 28] No space left on device",
    "not-permitted": "PermissionError: [Errno 13] Permission denied: '/var/cache/gb10/vllm/triton'",
    "too-many-files": "OSError: [Errno 24] Too many open files",
    "kernel-killed-for-memory": "Out of memory: Killed process 4711 (VLLM::Worker)\nunit result signal exit status 9",
    "gpu-gone": "Unable to determine the device handle for GPU0: 000F:01:00.0: Unknown Error",
    "xid": "NVRM: Xid (PCI:000f:01:00): 119, Timeout waiting for RPC from GSP",
    "illegal-access": "NVRM: Xid (PCI:000f:01:00): 31, pid=4711, name=VLLM::Worker",
    "engine-not-whole": "(Worker pid=1) ERROR 08-15 11:20:19 [core.py:1] ModuleNotFoundError: No module named 'x'",
    "kernel-build-failed": "ninja: build stopped: subcommand failed.",
    "sparse-topk-kernel": "RuntimeError: persistent_topk launch failed: out of resources",
    "driver-too-old": "CUDA driver version is insufficient for CUDA runtime version",
    "crashed": "unit result core-dump exit status 11",
    "guard-ended-it": "gb10-memory-guard ended it: MemAvailable 2000 MiB\nunit result signal exit status 9",
}


@pytest.mark.parametrize(("wanted", "text"), CONSTRUCTED.items(), ids=CONSTRUCTED)
def test_wording_of_the_engines_sources(wanted, text):
    # What follows from a failure comes after it in every log.
    assert named(text + "\n" + vllm("worker_died_lines.nearest.txt")) == wanted


def test_import_that_was_only_tried_is_no_cause():
    assert named("WARNING [cpu.py:1] Failed to import from vllm._C with ModuleNotFoundError: No module") == ""


def test_table_is_whole():
    ids = [row.id for row in causes.TABLE]
    assert len(set(ids)) == len(ids)
    for row in causes.TABLE:
        re.compile(row.lines)
        assert row.cause
        assert row.remedy
        assert row.source
        assert str(row) == f"{row.cause}; {row.remedy} [{row.id}]"
