"""Known lines of logs and what they mean for a rank that ended.

The table is ordered from what explains to what merely follows: a rank that ran out of locked memory also prints that
its engine died. The first row that matches and whose condition holds is the likely cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_ISSUES = "https://github.com/vllm-project/vllm/issues"
_KHO = "https://github.com/MiaAI-Lab/DeepSeek-V4.1-Flash-DGX-Sparks/issues/14"
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"


@dataclass(frozen=True)
class HostFacts:
    """What decides between causes with the same line. `memlock` in bytes, None for infinity; memory in MiB."""

    memlock: int | None = None
    kernel: str = ""
    kernel_command_line: str = ""
    meminfo: Mapping[str, int] = field(default_factory=dict)
    memory_floor_mib: int = 0

    @property
    def locked_memory_is_limited(self) -> bool:
        return self.memlock is not None

    @property
    def kernel_breaks_registration(self) -> bool:
        """Rule kernel-kho of roles/host_parity/files/known_bad.yml."""
        meminfo = self.meminfo
        bad = re.match(r"7\.0\.0-(1019|31)(-|$)", self.kernel) and "kho=off" not in self.kernel_command_line.split()
        return bool(bad) or meminfo.get("CmaFree", 0) > meminfo.get("CmaTotal", 0)

    @property
    def memory_is_short(self) -> bool:
        return self.meminfo.get("MemAvailable", 0) // 1024 < self.memory_floor_mib


@dataclass(frozen=True)
class Cause:
    """One row: the lines it is known by (a regular expression), what causes them and what to do."""

    id: str
    lines: str
    cause: str
    remedy: str
    source: str
    when: Callable[[HostFacts], bool] = lambda facts: True

    def __str__(self) -> str:
        return f"{self.cause}; {self.remedy} [{self.id}]"


_NO_LOCKED_MEMORY = r"ibv_(?:reg_mr\w*|create_cq|create_qp) failed.*Cannot allocate memory"

TABLE: tuple[Cause, ...] = (
    # --- the kernel's word on the host
    Cause(
        "kernel-killed-for-memory",
        r"Out of memory: Killed process|unit result oom-kill",
        "the kernel killed the rank because the host ran out of memory",
        "end what else uses memory there, or lower gpu-memory-utilization",
        "https://docs.kernel.org/admin-guide/mm/concepts.html#oom-killer",
    ),
    Cause(
        "guard-ended-it",
        r"gb10-memory-guard ended it",
        "the memory guard ended the rank before the host ran out of memory",
        "journalctl -u gb10-memory-guard names what was largest; end it, or lower gpu-memory-utilization",
        "docs/runbook.md",
    ),
    # --- locked memory: the same line has three causes, told apart by the host's state, in this order
    Cause(
        "locked-memory-limit",
        _NO_LOCKED_MEMORY,
        "the rank's unit limits locked memory, which RDMA needs for its buffers",
        "remove the drop-in that sets LimitMEMLOCK; limits.conf does not apply to services",
        _NCCL,
        lambda facts: facts.locked_memory_is_limited,
    ),
    Cause(
        "kernel-breaks-registration",
        _NO_LOCKED_MEMORY,
        "this kernel cannot register memory for RDMA (kexec handover takes the CMA area)",
        "boot 6.17.0-1032-nvidia, or add kho=off to the kernel command line and reboot",
        _KHO,
        lambda facts: facts.kernel_breaks_registration,
    ),
    Cause(
        "no-memory-to-register",
        _NO_LOCKED_MEMORY,
        "too little memory was free to register buffers for RDMA",
        "end what else uses memory there, then start the group",
        _NCCL,
        lambda facts: facts.memory_is_short,
    ),
    Cause(
        "registration-refused",
        _NO_LOCKED_MEMORY,
        "RDMA could not register memory, though the unit's limit, the kernel and free memory are fine",
        "run playbooks/hosts.yml and playbooks/fabric.yml -e fabric_retest=true",
        _NCCL,
    ),
    # --- fabric
    Cause(
        "own-gid-unset",
        r"ibv_modify_qp failed with 61.*local GID ::(?:,|\s|$)",
        "the GID index that NCCL uses is empty on this host: the table moved",
        "start the group again, the index is looked up at every start; if it stays, run playbooks/fabric.yml",
        "https://github.com/NVIDIA/nccl/issues/1538",
    ),
    Cause(
        "peers-gid-unset",
        r"ibv_modify_qp failed with 22.*remote GID ::(?:,|\s|$)",
        "a peer announced an empty GID; this host is not the culprit",
        "look at the other ranks' lines for a local GID ::, and run playbooks/fabric.yml",
        "https://github.com/NVIDIA/nccl/issues/1538",
    ),
    Cause(
        "fabric-does-not-answer",
        r"ibv_modify_qp failed with 110|Got completion with (?:status=|error )12",
        "a peer does not answer over RDMA: cable, switch, another MTU, or its rank ended first",
        "look which rank ended first, then run playbooks/fabric.yml -e fabric_retest=true",
        _NCCL,
    ),
    Cause(
        "peers-do-not-connect",
        r"Gloo connectFullMesh failed|Connection refused.*Gloo|gloo/transport.*(?:timed out|[Tt]imeout)",
        "the ranks cannot open TCP connections to each other over the fabric",
        "check the firewall's fabric rule and run playbooks/fabric.yml",
        "https://docs.vllm.ai/en/latest/usage/troubleshooting/",
    ),
    Cause(
        "peers-did-not-come",
        r"seconds waiting for clients|client socket has timed out|client socket has failed to connect",
        "the ranks did not all reach the rendezvous in time: one was late, ended, or cannot reach the head",
        "look which rank ended first or loads slowest; distributed-timeout-seconds of the profile is the bound",
        "https://pytorch.org/docs/stable/distributed.html",
    ),
    Cause(
        "port-taken",
        r"[Aa]ddress already in use|EADDRINUSE",
        "another process holds a port that the rank needs",
        "the next start names it: ansible-playbook playbooks/serve.yml",
        f"{_ISSUES}/8074",
    ),
    # --- memory of the GPU
    Cause(
        "memory-taken-before-start",
        r"is less than desired GPU memory utilization",
        "other processes held the memory that the engine claims at its start",
        "end them (nvidia-smi lists them), or lower gpu-memory-utilization",
        "vllm/v1/worker/utils.py",
    ),
    Cause(
        "no-room-for-cache",
        r"No available memory for the cache blocks|is needed, which is larger than the available KV cache",
        "weights and graphs leave too little of gpu-memory-utilization for the KV cache",
        "take a lane with less context, or raise gpu-memory-utilization",
        "vllm/v1/core/kv_cache_utils.py",
    ),
    Cause(
        "gpu-out-of-memory",
        r"OutOfMemoryError|CUDA out of memory|not enough GPU memory",
        "the GPU ran out of memory",
        "lower gpu-memory-utilization or max-num-batched-tokens, and end what else uses memory",
        "https://docs.vllm.ai/en/latest/configuration/conserving_memory/",
    ),
    # --- GPU
    Cause(
        "gpu-gone",
        r"Unable to determine the device handle|no CUDA-capable device|fallen off the bus|CUDA unknown error",
        "the driver does not see the GPU",
        "nvidia-smi on that host; reboot it, and power-cycle it when that does not help",
        "https://docs.nvidia.com/deploy/xid-errors/",
    ),
    Cause(
        "driver-too-old",
        r"CUDA driver version is insufficient|driver on your system is too old",
        "the driver is older than the CUDA of the engine",
        "run playbooks/hosts.yml: it names the driver wanted",
        "https://docs.nvidia.com/deploy/cuda-compatibility/",
    ),
    Cause(
        "illegal-access",
        r"illegal memory access was encountered|NVRM: Xid \([^)]*\): (?:13|31)\b",
        "a GPU kernel read memory that is not its own",
        "serve the lane eager-safe; if it holds there, graphs or drafting are at fault",
        "https://docs.nvidia.com/deploy/xid-errors/",
    ),
    Cause(
        "capture-failed",
        r"when stream is capturing|Capture cuda graph failed|failure during capture|error during capture",
        "capturing CUDA graphs failed",
        "serve the lane eager-safe, which captures none",
        _ISSUES,
    ),
    Cause(
        "xid",
        r"NVRM: Xid",
        "the GPU reported an error (Xid) to the kernel",
        "look the number up; a reboot clears most",
        "https://docs.nvidia.com/deploy/xid-errors/",
    ),
    # --- model and engine
    Cause(
        "checkpoint-block-size",
        r"No common block size for",
        "the attention backends have no block size in common for this model",
        "set block-size: 128 in the profile's arguments",
        "vllm/v1/worker/utils.py",
    ),
    Cause(
        "sparse-topk-kernel",
        r"persistent_topk",
        "the persistent top-k kernel needs more shared memory than a GB10 has",
        "set sparse-indexer-topk-backend: per_row in the profile's arguments",
        "docs/vllm-patches.md",
    ),
    Cause(
        "not-divisible",
        r"must be divisible by tensor parallel size|is not divisible by \d+",
        "tensor_parallel_size does not divide the model's dimensions",
        "take a profile whose tensor_parallel_size does",
        "vllm/config/model.py",
    ),
    Cause(
        "unknown-argument",
        r"error: (?:unrecognized arguments|argument --)",
        "this engine does not know an argument of the profile",
        "compare the profile's arguments with the engine version; playbooks/status.yml shows the release",
        "docs/profiles.md",
    ),
    Cause(
        "damaged-shard",
        r"SafetensorError|deserializing header|MetadataIncompleteBuffer|HeaderTooLarge",
        "a file of the checkpoint is damaged or cut off",
        "ansible-playbook playbooks/storage.yml verifies every file",
        "https://github.com/huggingface/safetensors",
    ),
    Cause(
        "store-away",
        r"Stale file handle|nfs: server \S+ not responding",
        "the store's mount does not answer",
        "power the head on, then ansible-playbook playbooks/storage.yml",
        "docs/runbook.md",
    ),
    Cause(
        "disk-full",
        r"No space left on device",
        "a file system is full",
        "df -h on that host; caches are in /var/cache/gb10, evidence in /var/lib/gb10/evidence",
        "docs/runbook.md",
    ),
    Cause(
        "not-permitted",
        r"\[Errno (?:13|30)\]",
        "the engine's user may not read or write a file",
        "the line names it; caches belong below /var/cache/gb10/vllm",
        "docs/runbook.md",
    ),
    Cause(
        "too-many-files",
        r"Too many open files",
        "the rank's unit limits open files",
        "remove the drop-in that sets LimitNOFILE; limits.conf does not apply to services",
        "https://www.freedesktop.org/software/systemd/man/systemd.exec.html",
    ),
    Cause(
        "kernel-build-failed",
        r"ninja: build stopped|cc1plus.*Killed|nvcc (?:fatal|error)|Could not find nvcc|Error building extension",
        "a kernel was compiled at run time and failed",
        "run playbooks/stop.yml, then playbooks/prebuild.yml",
        "docs/vllm-patches.md",
    ),
    Cause(
        "engine-not-whole",
        r"(?m)(?:^|\] )(?:ModuleNotFoundError|ImportError): ",
        "the engine's environment lacks a package or has another version of it",
        "rerun playbooks/engine.yml",
        "docs/vllm-patches.md",
    ),
    # --- what follows from something else
    Cause(
        "another-rank-hangs",
        r"RPC call to \w+ timed out",
        "another rank ended or hangs in a step",
        "look which rank ended first: playbooks/status.yml",
        f"{_ISSUES}/46611",
    ),
    Cause(
        "nccl-without-reason",
        r"NCCL error: unhandled (?:system|cuda) error",
        "NCCL failed, and its reason is in lines that NCCL_DEBUG hides",
        "set NCCL_DEBUG: INFO in vllm_rank_environment and start again",
        _NCCL,
    ),
    Cause(
        "driver-out-of-memory",
        r"NV_ERR_NO_MEMORY",
        "the driver found no memory; good starts print this line, too",
        "compare MemAvailable in the evidence with the profile's memory_floor_mib",
        "https://github.com/NVIDIA/open-gpu-kernel-modules/issues",
    ),
    Cause(
        "killed",
        r"unit result signal exit status 9\b",
        "somebody killed the rank (SIGKILL), and neither the kernel nor the guard says that it did",
        "look who was on that host: last, journalctl -b",
        "https://www.freedesktop.org/software/systemd/man/systemd.exec.html",
    ),
    Cause(
        "crashed",
        r"unit result (?:signal exit status (?:4|6|7|8|11)\b|core-dump)",
        "the engine crashed in native code",
        "the last lines name the kernel or library; serve the lane eager-safe to narrow it down",
        "https://www.freedesktop.org/software/systemd/man/systemd.exec.html",
    ),
    Cause(
        "other-rank-ended",
        r"Parent process exited|died unexpectedly|EngineDeadError|Engine core initialization failed",
        "a process of the engine ended first; this line is only the echo",
        "look above it, and which rank ended first",
        "vllm/v1/executor/multiproc_executor.py",
    ),
)


def likely(text: str, facts: HostFacts) -> Cause | None:
    """The first row of the table whose lines are in TEXT and whose condition holds on the host."""
    return next((row for row in TABLE if row.when(facts) and re.search(row.lines, text)), None)
