"""Run by the rank's unit before each start, on the host, without a controller: is everything right, right now?

Writes /run/gb10/rank.json, from which the launcher takes argv and environment. All faults are reported together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import engram_layout, engram_rows, rank, release, roce
from .files import write_json
from .nfs import probe_mount

CheckedFaults = list[str]


def _launch_faults(launch: dict[str, Any], previous: dict[str, Any]) -> CheckedFaults:
    if not launch.get("launch_id"):
        return [f"{rank.LAUNCH} names no launch: start the group with playbooks/serve.yml"]
    if previous.get("launch_id") == launch["launch_id"]:
        return [
            f"launch {launch['launch_id']} was already started on this host: a rank never rejoins its group; "
            "restart all ranks with playbooks/serve.yml"
        ]
    return []


def _checkpoint_faults(wanted: dict[str, Any]) -> CheckedFaults:
    directory = Path(wanted["checkpoint"])
    mount = wanted.get("mount")
    if mount:
        state = probe_mount(Path(mount["path"]), mount["source"], timeout=float(mount["timeout_s"]))
        if state.fault:
            return [state.fault]
    for name in wanted["checkpoint_files"]:
        path = directory / name
        if not path.is_file():
            return [f"{path} is missing: the checkpoint is not whole; check the head's disk and the mount"]
        if not rank.user_can_read(wanted["user"], path):
            return [f"{path} is not readable for user {wanted['user']}: chmod o+r it and o+x every folder above"]
    return []


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


def _memory_faults(wanted: dict[str, Any]) -> CheckedFaults:
    found, floor = rank.memory_available_mib(), wanted["memory_floor_mib"]
    if found >= floor:
        return []
    return [f"MemAvailable is {found} MiB, wanted {floor} MiB before a start: end what else uses memory on this host"]


def check(wanted: dict[str, Any]) -> tuple[CheckedFaults, dict[str, str]]:
    """All faults of this host for this rank, and the environment that the fabric gives it."""
    link = Path(wanted["release_link"])
    checks: tuple[Callable[[], CheckedFaults], ...] = (
        lambda: _launch_faults(rank.launch(), rank.running()),
        lambda: release.faults(link),
        lambda: _checkpoint_faults(wanted),
        lambda: _engram_faults(wanted),
        lambda: _memory_faults(wanted),
    )
    faults = [fault for one in checks for fault in one()]
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
    print(resolved.report, flush=True)
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
    rank.RUNNING.parent.mkdir(mode=0o755, exist_ok=True)
    write_json(
        rank.RUNNING,
        {
            "launch_id": launch["launch_id"],
            "master_port": launch["master_port"],
            "release": release.current(link),
            "digest": rank.wanted_digest(wanted),
            "configured": {"argv": wanted["argv"], "environment": wanted["environment"]},
            "argv": [*wanted["argv"], "--master-port", str(launch["master_port"])],
            "environment": wanted["environment"] | fabric,
            "python": wanted["python"],
            "python_path": wanted["python_path"],
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
