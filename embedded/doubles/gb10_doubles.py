#!/usr/bin/python3 -IS
"""Doubles for what an embedded host lacks of a GB10: nvidia-smi, fwupdmgr, chronyc, and the files behind them.

One file, installed under each tool's name and as ``gb10-doubles``. The tools answer in shapes recorded on GB10 hosts
(tests/fixtures) as the state file says; the files lie in a tree that gb10_host_info's ``roots`` puts before ``/``.

  gb10-doubles install DIRECTORY   put tools, state and tree under DIRECTORY (the root of a host's disk)
  gb10-doubles reset               back to the factory state, missing tools included
  gb10-doubles set KEY VALUE       change the state, for instance: set gpu.mode latched
  gb10-doubles write PATH          replace a file of the tree by standard input, for instance: write proc/cmdline
  gb10-doubles remove PATH         remove a file of the tree

gpu.mode: healthy, latched, slow, throttled, wedged (never returns), no_driver, no_device, lost, mismatch,
no_permission (clocks cannot be set). An absent tool is a removed file. firmware.mode: ok, wedged, failed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

STATE = Path(os.environ.get("GB10_DOUBLES_STATE", "/etc/gb10-doubles.json"))
VOLATILE = STATE.with_suffix(".run") if "GB10_DOUBLES_STATE" in os.environ else Path("/run/gb10-doubles.run")
"""What a driver forgets at a reboot: the clock lock and persistence mode."""
TREE = STATE.with_suffix("") / "root"
TOOLS = ("gb10-doubles", "nvidia-smi", "fwupdmgr", "chronyc")

# EC, SoC and PD: GUID and version. The kernel's ESRT gives them in decimal, fwupdmgr in hexadecimal.
FIRMWARE = {
    "Embedded Controller": ("3d13c989-e6a8-4ead-95ee-921f09868f65", "0x03000508"),
    "UEFI Device Firmware (SoC)": ("b488217b-3895-4fc0-b1bf-ab7005a2d45a", "0x02009b0b"),
    "UEFI Device Firmware (PD)": ("dd1a238a-5f8e-46bd-9401-a88da99c5a96", "0x00000516"),
}
FACTORY: dict[str, Any] = {
    "gpu": {
        "mode": "healthy",
        "name": "NVIDIA GB10",
        "driver": "580.173.02",
        "vbios": "9A.0B.2D.00.00",
        "processes": [],
    },
    "firmware": {"mode": "ok"},
    "time": {"server": "192.0.2.123", "offset_s": "0.000021"},
}
FILES = {
    "etc/dgx-release": 'DGX_NAME="DGX Spark"\nDGX_SWBUILD_VERSION="7.2.3"\nDGX_OTA_VERSION="7.5.0"\n',
    "proc/sys/kernel/osrelease": "6.17.0-1032-nvidia\n",
    "proc/cmdline": "BOOT_IMAGE=/boot/vmlinuz-6.17.0-1032-nvidia ro init_on_alloc=0 iommu.passthrough=0 quiet splash\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.173.02  Release\n",
    "usr/lib/aarch64-linux-gnu/libnvidia-ml.so.580.173.02": "a double\n",
    "usr/lib/aarch64-linux-gnu/libnccl.so.2": "a double of NCCL 2.28.9\n",
    "lib/modules/6.17.0-1032-nvidia/modules.dep": "",
    "run/chrony/chronyd.pid": "1\n",
    "sys/class/dmi/id/sys_vendor": "NVIDIA\n",
    "sys/class/dmi/id/product_name": "NVIDIA_DGX_Spark\n",
    "sys/class/dmi/id/bios_version": "5.36_0ACUM027\n",
    "sys/class/infiniband/rocep1s0f0/fw_ver": "28.45.4028\n",
    "sys/class/nvme/nvme0/model": "SAMSUNG MZALC4T0HBL1-00B07\n",
    "sys/class/nvme/nvme0/firmware_rev": "NXHB202Q\n",
    **{
        f"sys/firmware/efi/esrt/entries/entry{number}/{name}": f"{value}\n"
        for number, (guid, version) in enumerate(FIRMWARE.values())
        for name, value in (("fw_class", guid), ("fw_version", int(version, 16)))
    },
    "sys/devices/system/cpu/cpufreq/policy0/scaling_governor": "performance\n",
}

BUS = "0000000F:01:00.0"
UUID = "GPU-00000000-0000-0000-0000-000000000001"
MAX_CLOCK = 3003
# MHz, W, degrees, state, reasons. All but "throttled" are recorded; GB10's captures show the reason bits only at a
# clock that is still high, so its clock here is chosen to lie below the floor.
BUSY = {
    "locked": (2177, 81.27, 68, "P0", 0x0),
    "unlocked": (2398, 53.30, 84, "P0", 0x0),
    "latched": (728, 14.20, 45, "P0", 0x0),
    "slow": (2177, 15.00, 45, "P0", 0x0),
    "throttled": (1180, 38.00, 89, "P0", 0x20),
}
IDLE = {"locked": (2190, 11.17, 42, "P0", 0x0), "unlocked": (208, 4.52, 36, "P8", 0x1)}

FAILURES = {
    "no_driver": (
        9,
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
        " Make sure that the latest NVIDIA driver is installed and running.\n",
    ),
    "no_device": (6, "No devices were found\n"),
    "lost": (
        255,
        "Unable to determine the device handle for GPU0: 000F:01:00.0: Unknown Error\nNo devices were found\n",
    ),
    "mismatch": (18, "Failed to initialize NVML: Driver/library version mismatch\n"),
}


def load(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return document


def save(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    new.replace(path)


def hang() -> None:
    while True:
        time.sleep(3600)


# --- nvidia-smi ---


def probe_runs() -> bool:
    """Whether the load probe runs on this host: the double's clock rises with it."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if b"gpu_probe" in (entry / "cmdline").read_bytes():
                    return True
            except OSError:
                continue
    return False


def readings(gpu: dict[str, Any], volatile: dict[str, Any]) -> dict[str, tuple[str, str, str]]:
    """Field -> (header, value, unit) of --query-gpu; GB10 answers [N/A] for memory and power limits."""
    lock = "locked" if volatile.get("lock") else "unlocked"
    busy = BUSY[gpu["mode"] if gpu["mode"] in BUSY else lock]
    if gpu["mode"] == "slow" and lock == "unlocked":
        busy = (2398, *busy[1:])
    working = gpu.get("busy", probe_runs())
    sm, watts, celsius, state, reasons = busy if working else IDLE[lock]
    if volatile.get("lock"):
        sm = min(sm, int(volatile["lock"].split(",")[1]))
    missing = "[N/A]"
    rows = [
        ("index", "index", "0", ""),
        ("name", "name", gpu["name"], ""),
        ("uuid", "uuid", UUID, ""),
        ("pci.bus_id", "pci.bus_id", BUS, ""),
        ("driver_version", "driver_version", gpu["driver"], ""),
        ("vbios_version", "vbios_version", gpu["vbios"], ""),
        ("persistence_mode", "persistence_mode", "Enabled" if volatile.get("persistence") else "Disabled", ""),
        ("compute_cap", "compute_cap", "12.1", ""),
        ("clocks.sm", "clocks.current.sm [MHz]", str(sm), " MHz"),
        ("clocks.gr", "clocks.current.graphics [MHz]", str(sm), " MHz"),
        ("clocks.max.sm", "clocks.max.sm [MHz]", str(MAX_CLOCK), " MHz"),
        ("clocks.mem", "clocks.current.memory [MHz]", missing, ""),
        ("power.draw", "power.draw [W]", f"{watts:.2f}", " W"),
        ("power.limit", "power.limit [W]", missing, ""),
        ("temperature.gpu", "temperature.gpu", str(celsius), ""),
        ("utilization.gpu", "utilization.gpu [%]", "96" if working else "0", " %"),
        ("pstate", "pstate", state, ""),
        ("clocks_event_reasons.active", "clocks_event_reasons.active", f"0x{reasons:016x}", ""),
        ("memory.total", "memory.total [MiB]", missing, ""),
        ("memory.used", "memory.used [MiB]", missing, ""),
        ("memory.free", "memory.free [MiB]", missing, ""),
    ]
    return {field: (header, value, unit) for field, header, value, unit in rows}


def query_gpu(fields: list[str], words: list[str], state: dict[str, Any]) -> int:
    known = readings(state["gpu"], load(VOLATILE))
    for field in fields:
        if field not in known:
            print(f'Field "{field}" is not a valid field to query.')
            return 2
    if "noheader" not in words:
        print(", ".join(known[field][0] for field in fields))
    print(", ".join(known[field][1] + ("" if "nounits" in words else known[field][2]) for field in fields), flush=True)
    return 0


def query_processes(fields: list[str], words: list[str], state: dict[str, Any]) -> int:
    if "noheader" not in words:
        print(", ".join(fields))
    for pid, name, mib in state["gpu"]["processes"]:
        cells = {"gpu_uuid": UUID, "pid": pid, "process_name": name, "used_memory": mib}
        cells["used_gpu_memory"] = cells["used_memory"] = mib if "nounits" in words else f"{mib} MiB"
        print(", ".join(str(cells[field]) for field in fields))
    return 0


def set_clocks(lock: str | None, mode: str) -> int:
    if mode == "no_permission":
        print(f"The current user does not have permission to change clocks for GPU {BUS}.")
        return 4
    save(VOLATILE, {**load(VOLATILE), "lock": lock})
    if lock:
        low, high = lock.split(",")
        print(f'GPU clocks set to "(gpuClkMin {low}, gpuClkMax {high})" for GPU {BUS}')
    print("All done.")
    return 0


def set_persistence(on: bool, mode: str) -> int:
    if mode == "no_permission":
        print(f"Unable to set persistence mode for GPU {BUS}: Insufficient Permissions")
        return 4
    volatile = load(VOLATILE)
    word = "Enabled" if on else "Disabled"
    if bool(volatile.get("persistence")) is on:
        print(f"Persistence mode is already {word} for GPU {BUS}.")
    else:
        print(f"{word} Legacy persistence mode for GPU {BUS}.")
    save(VOLATILE, {**volatile, "persistence": on})
    print("All done.")
    return 0


def options_of(arguments: list[str]) -> dict[str, str]:
    """``--name=value``, ``-name=value`` and ``-name value`` alike, by name without dashes."""
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name, given, value = rest.pop(0).partition("=")
        if not given and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        options[name.lstrip("-")] = value
    return options


def nvidia_smi(arguments: list[str]) -> int:
    state = load(STATE)
    mode = state["gpu"]["mode"]
    if mode == "wedged":
        hang()
    if mode in FAILURES:
        status, text = FAILURES[mode]
        print(text, end="")
        return status
    options = options_of(arguments)
    words = options.get("format", "").split(",")
    if "query-gpu" in options:
        fields = options["query-gpu"].split(",")
        period = options.get("lms")
        status = query_gpu(fields, words, state)
        while period and not status:
            time.sleep(int(period) / 1000)
            status = query_gpu(fields, [*words, "noheader"], load(STATE))
        return status
    if "query-compute-apps" in options:
        return query_processes(options["query-compute-apps"].split(","), words, state)
    if "lgc" in options or "lock-gpu-clocks" in options:
        return set_clocks(options.get("lgc") or options["lock-gpu-clocks"], mode)
    if "rgc" in options or "reset-gpu-clocks" in options:
        return set_clocks(None, mode)
    if "lmc" in options:
        print(f"Setting locked Memory clocks is not supported for GPU {BUS}.\nTreating as warning and moving on.")
        print("All done.")
        return 0
    if "pm" in options or "persistence-mode" in options:
        return set_persistence((options.get("pm") or options["persistence-mode"]) == "1", mode)
    if "L" in options:
        print(f"GPU 0: {state['gpu']['name']} (UUID: {UUID})")
        return 0
    print(f"gb10-doubles: nvidia-smi {' '.join(arguments)} was not recorded", file=sys.stderr)
    return 2


# --- the others ---


def fwupdmgr(arguments: list[str]) -> int:
    firmware = load(STATE)["firmware"]
    if firmware["mode"] == "wedged":
        hang()
    if firmware["mode"] == "failed":
        print("Failed to connect to daemon: Could not connect: Connection refused")
        return 1
    if arguments[:1] == ["get-upgrades"]:
        print("No updates available")
        return 2
    devices: list[dict[str, Any]] = [{"Name": "DGX Spark Platform Key", "Version": "2025"}]
    for name, (guid, version) in FIRMWARE.items():
        devices.append({"Name": name.partition(" (")[0], "Guid": [guid], "Version": version})
    print(json.dumps({"Devices": devices}, indent=2))
    return 0


def chronyc(_arguments: list[str]) -> int:
    clock = load(STATE)["time"]
    print(
        f"C000027B,{clock['server']},3,1789900000.000000000,{clock['offset_s']},0.000001,0.000002,-1.2,0,0.1,0.01,0.001,64.0,Normal"
    )
    return 0


def install(root: Path) -> None:
    """Put tools, state and tree below ``root``, the root of a host's disk."""
    reset(root / "usr/local/bin", root / "etc/gb10-doubles.json", root / "etc/gb10-doubles/root")


def reset(binaries: Path, state: Path, tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    for name, text in FILES.items():
        write(tree, name, text)
    save(state, FACTORY)
    binaries.mkdir(parents=True, exist_ok=True)
    for tool in TOOLS:
        if not (binaries / tool).exists():
            shutil.copy(Path(__file__), binaries / tool)
            (binaries / tool).chmod(0o755)


def write(tree: Path, name: str, text: str) -> None:
    path = tree / name.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def change(key: str, value: str) -> None:
    """Set one value of the state: JSON for lists, objects and booleans, else text (a version is no number)."""
    state = load(STATE)
    group, _, name = key.partition(".")
    state[group][name] = json.loads(value) if value[:1] in ("[", "{") or value in ("true", "false") else value
    save(STATE, state)


def gb10_doubles(arguments: list[str]) -> int:
    verb, *rest = arguments or ["help"]
    if verb == "install":
        install(Path(rest[0]))
    elif verb == "reset":
        reset(Path(__file__).resolve().parent, STATE, TREE)
        VOLATILE.unlink(missing_ok=True)
    elif verb == "set":
        change(*rest)
    elif verb == "write":
        write(TREE, rest[0], sys.stdin.read())
    elif verb == "remove":
        path = TREE / rest[0].lstrip("/")
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    else:
        print(__doc__)
        return 2
    return 0


def main(argv: list[str]) -> int:
    tools = {"nvidia-smi": nvidia_smi, "fwupdmgr": fwupdmgr, "chronyc": chronyc}
    return tools.get(Path(argv[0]).name, gb10_doubles)(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
