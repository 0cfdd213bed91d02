"""Run by the rank's unit before each start, on the host, without a controller: is everything right, right now?

Writes /run/gb10/rank.json, from which the launcher takes argv and environment. All faults are reported together.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

from . import (
    access,
    engram_layout,
    engram_rows,
    gpu_smi,
    kernel_prebuild,
    launcher,
    memory,
    nfs,
    processes,
    rank,
    release,
    roce,
)
from .files import write_json

CheckedFaults = list[str]
# A rank holds a socket for each peer and channel, and its shards; the service manager's default is 1024.
OPEN_FILES = 65536


def _launch_faults(launch: dict[str, Any], previous: dict[str, Any]) -> CheckedFaults:
    if not launch.get("launch_id"):
        return [f"{rank.LAUNCH} names no launch: start the group with playbooks/serve.yml"]
    if previous.get("launch_id") == launch["launch_id"]:
        return [
            f"launch {launch['launch_id']} was already started on this host: a rank never rejoins its group; "
            "restart all ranks with playbooks/serve.yml"
        ]
    return []


def _mount_faults(wanted: dict[str, Any]) -> CheckedFaults:
    mount = wanted.get("mount")
    if not mount:
        return []
    state = nfs.probe_mount(Path(mount["path"]), mount["source"], timeout=float(mount["timeout_s"]))
    return [state.fault] if state.fault else []


def _access_faults(wanted: dict[str, Any]) -> CheckedFaults:
    """The engine's user reads every file it will need and writes where it will write: root's view proves neither."""
    directory = Path(wanted["checkpoint"])
    reads = [directory / name for name in wanted["checkpoint_files"]]
    engram = wanted.get("engram")
    if engram:
        rows = Path(engram["directory"])
        reads += [rows / engram_rows.MANIFEST, *sorted(rows.glob("layer-*.rows"))]
    # The launcher makes the release's folder; what an earlier start by hand left in it may belong to somebody else.
    caches = launcher.CACHES / release.current(Path(wanted["release_link"]))
    writes = [caches, *sorted(path for path in caches.glob("*") if path.is_dir())]
    writes += [Path(path) for path in wanted.get("writable") or []]
    try:
        return access.faults(wanted["user"], reads, writes)
    except access.AccessError as error:
        return [str(error)]


def _engram_faults(wanted: dict[str, Any]) -> CheckedFaults:
    engram = wanted.get("engram")
    if not engram:
        return []
    config = engram_layout.parse_config(engram["config"])
    ranges = engram_layout.rank_ranges(config, wanted["world_size"], wanted["rank"])
    faults = engram_rows.check_copy(
        Path(engram["directory"]), wanted["rank"], wanted["world_size"], engram["revision"], ranges
    )
    return [f"{fault}: rerun playbooks/engram.yml" for fault in faults]


def _limit_faults(wanted: dict[str, Any]) -> CheckedFaults:
    """The limits of this very process, which are those of the unit: what a shell shows is another matter."""
    faults = []
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and wanted["fabric"]["require_rdma"]:
        faults.append(
            f"memlock is {locked} bytes in the rank unit, wanted infinity: limits.conf does not apply to services; "
            f"look for a drop-in with `systemctl cat {rank.UNIT}`"
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < OPEN_FILES:
        faults.append(
            f"open files are limited to {files} in the rank unit, wanted at least {OPEN_FILES}: "
            f"look for a drop-in with `systemctl cat {rank.UNIT}`"
        )
    return faults


def _leftover_faults(wanted: dict[str, Any], launch: dict[str, Any]) -> CheckedFaults:
    """Engines outside this unit, and whoever holds its ports. Nothing is ended here: a start is no place to kill."""
    group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
    found = processes.leftovers(group, rank.ports(wanted, launch))
    # What CUDA allocates is in no resident set.
    gpu = {one.pid: one.mib for one in gpu_smi.query_processes(10)[1]} if found else {}
    step = f"stop it by its id, or with playbooks/stop.yml where user {wanted['user']} owns it"
    faults = []
    for one in found:
        held = f", {gpu[one.process.pid]} MiB of the GPU" if gpu.get(one.process.pid) else ""
        faults.append(f"{one}{held} is in the way: {step}")
    return faults


def _memory_faults(wanted: dict[str, Any]) -> CheckedFaults:
    found, floor = rank.memory_available_mib(), wanted["memory_floor_mib"]
    if found >= floor:
        return []
    return [f"MemAvailable is {found} MiB, wanted {floor} MiB before a start: end what else uses memory on this host"]


def _shared_path_faults(wanted: dict[str, Any]) -> CheckedFaults:
    paths = {"the caches' directory": str(launcher.CACHES)}
    paths |= {key: value for key, value in wanted["environment"].items() if value.startswith("/")}
    return nfs.shared_path_faults(paths, nfs.parse_mounts(nfs.MOUNTS.read_text()))


def _kernel_faults(wanted: dict[str, Any], link: Path) -> CheckedFaults:
    if wanted.get("container"):
        return []  # an image brings its kernels along
    return kernel_prebuild.start_faults(link, wanted["environment"], gpu=Path("/dev/nvidiactl").exists())


def check(wanted: dict[str, Any]) -> tuple[CheckedFaults, dict[str, str]]:
    """All faults of this host for this rank, and the environment that the fabric gives it."""
    link = Path(wanted["release_link"])
    launch = rank.launch()
    print(memory.make_room(wanted["memory_floor_mib"]), flush=True)
    faults = [
        *_launch_faults(launch, rank.running()),
        *release.faults(link),
        # Nothing reads the store where its server gives no answer: the reader would hang, too.
        *(_mount_faults(wanted) or _access_faults(wanted)),
        *_engram_faults(wanted),
        *_kernel_faults(wanted, link),
        *_shared_path_faults(wanted),
        *_limit_faults(wanted),
        *_leftover_faults(wanted, launch),
        *_memory_faults(wanted),
    ]
    fabric = wanted["fabric"]
    try:
        resolved = roce.resolve(
            fabric["address"],
            require_rdma=fabric["require_rdma"],
            hca=fabric.get("hca") or None,
            gid_index=fabric.get("gid_index"),
            mtu=fabric.get("mtu"),
            wait_s=float(fabric["wait_s"]),
        )
    except roce.RoceError as error:
        return [*faults, str(error)], {}
    print(json.dumps(resolved.report), flush=True)
    return faults, dict(resolved.environment)


def main() -> int:
    try:
        wanted = rank.configuration()
    except rank.RankError as error:
        print(f"refusing to start: {error}", flush=True)
        return 1
    faults, fabric = check(wanted)
    if faults:
        for fault in faults:
            print(f"refusing to start rank {wanted['rank']}: {fault}", flush=True)
        return 1
    launch = rank.launch()
    link = Path(wanted["release_link"])
    empty = sorted(key for key, value in fabric.items() if not value)
    if empty:
        print(f"refusing to start rank {wanted['rank']}: {', '.join(empty)} would be empty", flush=True)
        return 1
    rank.RUNNING.parent.mkdir(exist_ok=True)
    rank.RUNNING.parent.chmod(0o755)  # the unit's umask holds here, too, and the launcher is another user
    rank.SERVING.unlink(missing_ok=True)
    write_json(
        rank.RUNNING,
        {
            "launch_id": launch["launch_id"],
            "master_port": launch["master_port"],
            "release": release.current(link),
            "digest": rank.wanted_digest(wanted),
            "api_key": rank.api_key_stamp(),
            "configured": {"argv": wanted["argv"], "environment": wanted["environment"]},
            "argv": [*wanted["argv"], "--master-port", str(launch["master_port"])],
            "environment": wanted["environment"] | fabric,
            "container": wanted.get("container"),
            "python": wanted["python"],
            "python_path": wanted["python_path"],
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
