"""Everything that has to be equal, or right, on a GB10 host, gathered in one go.

Nearly all of it is read from /proc, /sys and a few files; nvidia-smi has no such place, and chronyc,
timedatectl and fwupdmgr are asked only where files do not answer. Every group of facts is gathered in a
thread of its own with a deadline, so neither a stale NFS mount nor a wedged driver can hold the host:
what is late is unknown, and says so.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from . import nfs
from .gpu_smi import ABSENT, OK, query_processes, query_status
from .host_command import CommandError, run_bounded

ENGINE_UNIT = "vllm-rank.service"
COMPETING_SERVICES = (
    "ollama",
    "vllm",
    "sglang",
    "llama-server",
    "llama-swap",
    "localai",
    "comfyui",
    "tritonserver",
    "text-generation-inference",
)
DISPLAY_MANAGERS = ("gdm", "gdm3", "lightdm", "sddm", "display-manager")
NCCL_PLACES = (
    "/usr/lib/*-linux-gnu/libnccl.so.2",
    "/usr/local/lib/libnccl.so.2",
    "/usr/local/cuda/lib64/libnccl.so.2",
    "/opt/gb10/environments/*/nvidia/nccl/lib/libnccl.so.2",
)

# What a kernel command line says about one host alone, or about the kernel that is compared by itself.
_OWN_PARAMETERS = re.compile(
    r"(BOOT_IMAGE|initrd|root|resume|resume_offset|ip|hostname|umid|ubd\w+|vec\w+|systemd\.(hostname|machine_id))="
)

# fwupd's names are not unique ("UEFI Device Firmware" twice), the GUIDs are; fwupd's version is the ESRT's in hex.
_FIRMWARE_GUIDS = {
    "3d13c989-e6a8-4ead-95ee-921f09868f65": "firmware_ec",
    "b488217b-3895-4fc0-b1bf-ab7005a2d45a": "firmware_soc",
    "dd1a238a-5f8e-46bd-9401-a88da99c5a96": "firmware_pd",
}
_FIRMWARE_NAMES = {"Embedded Controller": "firmware_ec", "UEFI Device Firmware": "firmware_soc"}

_RUNTIME_PACKAGES = ("docker-ce", "docker.io", "containerd.io", "containerd", "podman", "runc", "crun")
_LISTED_PACKAGES = re.compile(
    r"linux-(image|headers|modules|tools)-\S+|linux-nvidia\S*|nvidia-driver-\S+|nvidia-container-toolkit|earlyoom|chrony"
    r"|systemd-timesyncd|nfs-(kernel-server|common)|" + "|".join(re.escape(name) for name in _RUNTIME_PACKAGES)
)


class HostInfoError(Exception):
    """A fact that cannot be had; the message is the reason an operator reads."""


@dataclass(frozen=True)
class Fact:
    """One value with where it came from; a value of None is unknown, and ``unknown`` says why."""

    value: Any
    source: str
    unknown: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fact as the module returns it; ``unknown`` only where the value is."""
        known = {"value": self.value, "source": self.source}
        return known | ({"unknown": self.unknown or "not reported"} if self.value is None else {})


@dataclass(frozen=True)
class Settings:
    """How to gather: where the files are (first hit wins), how long to wait, and what counts as competing."""

    roots: tuple[Path, ...] = (Path("/"),)
    timeout_s: float = 10.0
    engine_unit: str = ENGINE_UNIT
    competing_services: Sequence[str] = COMPETING_SERVICES
    nccl_places: Sequence[str] = NCCL_PLACES

    def path(self, path: str) -> Path:
        """The file (or link) under the first root that has it, else under the last root."""
        candidates = [root / path.lstrip("/") for root in self.roots]
        return next((candidate for candidate in candidates if os.path.lexists(candidate)), candidates[-1])

    def read(self, path: str) -> str:
        """Text of the file. Raises HostInfoError."""
        try:
            return self.path(path).read_text(errors="replace").strip("\0\n ")
        except OSError as error:
            raise HostInfoError(f"{path}: {error.strerror}") from error

    def glob(self, pattern: str) -> list[str]:
        """Paths (as the host names them) that match under any root, sorted."""
        found = set()
        for root in self.roots:
            found |= {"/" + str(match.relative_to(root)) for match in root.glob(pattern.lstrip("/"))}
        return sorted(found)


def attempt(source: str, value: Callable[[], Any]) -> Fact:
    """A fact from a function that may raise HostInfoError or CommandError."""
    try:
        return Fact(value(), source)
    except (HostInfoError, CommandError) as error:
        return Fact(None, source, str(error))


# --- parsers, each pure ---


def parse_dgx_release(text: str) -> str | None:
    """The effective DGX OS version: the last OTA version, else the factory's. Values may be unquoted with spaces."""
    values = re.findall(r'^DGX_(OTA|SWBUILD)_VERSION="?([^"\n]+?)"?\s*$', text, re.MULTILINE)
    return next((v for kind, v in reversed(values) if kind == "OTA"), values[0][1] if values else None)


def parse_command_line(text: str) -> str:
    """The kernel's command line without what belongs to one host alone."""
    return " ".join(word for word in text.split() if not _OWN_PARAMETERS.match(word))


def parse_meminfo(text: str) -> dict[str, int]:
    """Numbers of /proc/meminfo by name: kB, or plain counts for HugePages_*."""
    return {name: int(number) for name, number in re.findall(r"^(\S+):\s+(\d+)", text, re.MULTILINE)}


def parse_driver_module(text: str) -> str | None:
    """Driver version of /proc/driver/nvidia/version."""
    match = re.search(r"NVRM version:.*?\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else None


def parse_os_release(text: str) -> str | None:
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)"?', text, re.MULTILINE)
    return match[1] if match else None


def parse_firmware(document: str) -> dict[str, str]:
    """EC, SoC and PD versions of ``fwupdmgr get-devices --json``: by GUID, by name only where the name is unique."""
    try:
        devices = json.loads(document)["Devices"]
    except (ValueError, KeyError, TypeError) as error:
        raise HostInfoError(f"fwupdmgr printed no device list: {error}") from error
    found: dict[str, str] = {}
    names = [device.get("Name") for device in devices]
    for device in devices:
        name = _FIRMWARE_NAMES.get(device.get("Name", "")) if names.count(device.get("Name")) == 1 else None
        known = next((_FIRMWARE_GUIDS[guid] for guid in device.get("Guid", ()) if guid in _FIRMWARE_GUIDS), name)
        if known and device.get("Version"):
            found[known] = device["Version"]
    return found


def parse_packages(text: str) -> tuple[dict[str, str], list[str]]:
    """Installed versions of the packages that matter, and the names on hold, of /var/lib/dpkg/status."""
    versions, held = {}, []
    for paragraph in text.split("\n\n"):
        name = paragraph.lstrip("\n").partition("\n")[0].removeprefix("Package: ")
        if not _LISTED_PACKAGES.fullmatch(name):
            continue
        status = re.search(r"^Status: (\S+) \S+ (\S+)$", paragraph, re.MULTILINE)
        version = re.search(r"^Version: (\S+)$", paragraph, re.MULTILINE)
        if status and status[1] == "hold":
            held.append(name)
        if status and version and status[2] == "installed":
            versions[name] = version[1]
    return versions, sorted(held)


def parse_mounts(text: str) -> list[dict[str, Any]]:
    """NFS mounts of /proc/self/mounts, lowest layer first: path, server, export, version, read_only."""
    mounts = []
    for mount in filter(lambda mount: mount.is_nfs, nfs.parse_mounts(text)):
        server, _, export = mount.source.rpartition(":/")
        row: dict[str, Any] = {"path": mount.path, "server": server.strip("[]"), "export": f"/{export}"}
        mounts.append(row | {"version": mount.option("vers") or None, "read_only": "ro" in mount.options})
    return mounts


def parse_offset_ms(text: str) -> float | None:
    """Milliseconds of the ``Offset:`` line of ``timedatectl timesync-status``, such as +1min 2.5s or -316us."""
    match = re.search(r"Offset: ([+-]?)(.+)", text)
    if not match:
        return None
    units = {"us": 0.001, "ms": 1.0, "s": 1e3, "min": 6e4, "h": 3.6e6}
    total = sum(float(n) * units[unit] for n, unit in re.findall(r"([\d.]+)(us|ms|min|s|h)", match[2]))
    return round(-total if match[1] == "-" else total, 3)


def host_key_fingerprint(public_key: str) -> str:
    """``TYPE SHA256:...`` as ssh-keygen -l prints it, from the text of a .pub file."""
    kind, blob = public_key.split()[:2]
    digest = hashlib.sha256(base64.b64decode(blob)).digest()
    return f"{kind} SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def file_fingerprint(path: Path) -> str:
    """Size and a hash of both ends: enough to tell two builds of one version, without reading 300 MB at every run."""
    edge = 65536
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = hashlib.sha256(stream.read(edge))
        stream.seek(max(0, size - edge))
        digest.update(stream.read(edge))
    return f"{size} bytes, ends {digest.hexdigest()[:12]}"


# --- collectors: each returns some of the facts and may be late as a whole ---


def system(settings: Settings) -> dict[str, Fact]:
    facts = {
        "os_version": attempt("/etc/os-release", lambda: parse_os_release(settings.read("/etc/os-release"))),
        "dgx_release": attempt("/etc/dgx-release", lambda: parse_dgx_release(settings.read("/etc/dgx-release"))),
        "architecture": Fact(os.uname().machine, "uname"),
        "page_size": Fact(os.sysconf("SC_PAGE_SIZE"), "sysconf"),
        "boot_target": attempt("default.target", lambda: default_target(settings)),
    }
    for name, path in {
        "kernel_release": "/proc/sys/kernel/osrelease",
        "boot_id": "/proc/sys/kernel/random/boot_id",
        "machine_id": "/etc/machine-id",
        "product_name": "/sys/class/dmi/id/product_name",
        "product_vendor": "/sys/class/dmi/id/sys_vendor",
        "firmware_uefi": "/sys/class/dmi/id/bios_version",
    }.items():
        facts[name] = attempt(path, partial(text_of, settings, path))
    facts["kernel_command_line"] = attempt("/proc/cmdline", lambda: parse_command_line(settings.read("/proc/cmdline")))
    facts["kernels_installed"] = Fact(
        [Path(path).name for path in settings.glob("/lib/modules/*")] or None, "/lib/modules"
    )
    governors = settings.glob("/sys/devices/system/cpu/cpufreq/policy*/scaling_governor")
    facts["cpu_governor"] = attempt(
        "/sys/devices/system/cpu/cpufreq", lambda: " ".join(sorted({settings.read(path) for path in governors})) or None
    )
    keys = settings.glob("/etc/ssh/ssh_host_*_key.pub")
    facts["ssh_host_keys"] = attempt(
        "/etc/ssh", lambda: [host_key_fingerprint(settings.read(path)) for path in keys] or None
    )
    return facts


def text_of(settings: Settings, path: str) -> str | None:
    return settings.read(path) or None


def default_target(settings: Settings) -> str | None:
    for folder in ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"):
        link = settings.path(f"{folder}/default.target")
        if link.is_symlink():
            return link.readlink().name
    return None


def memory(settings: Settings) -> dict[str, Fact]:
    source = "/proc/meminfo"
    names = {
        "mem_total_kib": "MemTotal",
        "mem_available_kib": "MemAvailable",
        "mem_free_kib": "MemFree",
        "swap_total_kib": "SwapTotal",
        "cma_total_kib": "CmaTotal",
        "cma_free_kib": "CmaFree",
        "hugepages_total": "HugePages_Total",
    }
    try:
        numbers = parse_meminfo(settings.read(source))
    except HostInfoError as error:
        return {name: Fact(None, source, str(error)) for name in names}
    # A kernel without huge pages has no such line, and reserves none.
    numbers.setdefault("HugePages_Total", 0)
    return {name: Fact(numbers.get(label), source, f"no line {label}") for name, label in names.items()}


def driver(settings: Settings) -> dict[str, Fact]:
    """The module that is loaded and the library that programs will load; they differ between upgrade and reboot."""
    libraries = settings.glob("/usr/lib/*-linux-gnu/libnvidia-ml.so.*.*")
    versions = sorted({path.rpartition(".so.")[2] for path in libraries})
    return {
        "driver_module": attempt(
            "/proc/driver/nvidia/version", lambda: parse_driver_module(settings.read("/proc/driver/nvidia/version"))
        ),
        "driver_library": Fact(" ".join(versions) or None, "libnvidia-ml.so", "no such library"),
    }


def gpu(settings: Settings) -> dict[str, Fact]:
    answer = query_status(settings.timeout_s)
    facts = {"gpu_status": Fact(answer.status, "nvidia-smi")}
    for name, field in {
        "gpu_name": "name",
        "gpu_driver": "driver_version",
        "gpu_vbios": "vbios_version",
        "gpu_persistence": "persistence_mode",
        "gpu_sm_mhz": "clocks.sm",
        "gpu_watts": "power.draw",
    }.items():
        facts[name] = Fact(answer.values.get(field), f"nvidia-smi {field}", answer.text or "not reported")
    return facts


def gpu_processes(settings: Settings) -> dict[str, Fact]:
    """Who holds the GPU, with the unit each belongs to; without nvidia-smi nobody can."""
    source = "nvidia-smi --query-compute-apps"
    status, processes = query_processes(settings.timeout_s)
    if status not in (OK, ABSENT):
        return {name: Fact(None, source, status) for name in ("gpu_processes", "competing_processes")}
    rows = [{"pid": p.pid, "name": p.name, "mib": p.mib, "unit": unit_of(settings, p.pid)} for p in processes]
    others = [
        f"{row['name']} (pid {row['pid']}, {row['mib']} MiB, {row['unit'] or 'no unit'})"
        for row in rows
        if row["unit"] != settings.engine_unit
    ]
    return {"gpu_processes": Fact(rows, source), "competing_processes": Fact(others, source)}


def unit_of(settings: Settings, pid: int) -> str | None:
    """The innermost systemd unit of a process, None where its cgroup names none."""
    try:
        units = re.findall(r"[^/]+\.(?:service|scope)", settings.read(f"/proc/{pid}/cgroup"))
    except HostInfoError:
        return None
    return units[-1] if units else None


def services(settings: Settings) -> dict[str, Fact]:
    """Running units, seen as control groups: no systemctl, and no D-Bus that stalls on a host in trouble."""
    source = "/sys/fs/cgroup/system.slice"

    def running(names: Iterable[str]) -> list[str]:
        return [name for name in names if settings.glob(f"{source}/{name}.service/cgroup.procs")]

    def engine_pids() -> list[int]:
        try:
            return [int(pid) for pid in settings.read(f"{source}/{settings.engine_unit}/cgroup.procs").split()]
        except HostInfoError:
            return []  # no control group: the unit does not run

    return {
        "competing_services": Fact(running(settings.competing_services), source),
        "display_managers": Fact(running(DISPLAY_MANAGERS), source),
        "engine_pids": Fact(engine_pids(), source),
    }


def firmware(settings: Settings) -> dict[str, Fact]:
    """EC, SoC and PD firmware: from the ESRT that fwupd reads too, and from fwupd only where there is no ESRT."""
    names = tuple(_FIRMWARE_GUIDS.values())
    source, found, why = "/sys/firmware/efi/esrt", {}, "not in the ESRT"
    for entry in settings.glob(f"{source}/entries/*"):
        try:
            name = _FIRMWARE_GUIDS.get(settings.read(f"{entry}/fw_class").lower())
            if name:
                found[name] = f"0x{int(settings.read(f'{entry}/fw_version')):08x}"
        except (HostInfoError, ValueError) as error:
            why = str(error)
    if not settings.glob(f"{source}/entries"):
        source, why = "fwupdmgr get-devices", "not listed"
        try:
            exit_status, output = run_bounded(["fwupdmgr", "get-devices", "--json"], settings.timeout_s)
            if exit_status:
                raise HostInfoError(" ".join(output.split()) or f"exit status {exit_status}")
            found = parse_firmware(output)
        except (HostInfoError, CommandError) as error:
            why = str(error)
    return {name: Fact(found.get(name), source, why) for name in names}


def devices(settings: Settings) -> dict[str, Fact]:
    """ConnectX and NVMe firmware; several functions of one card count once, soft-RoCE has no firmware."""
    connectx = {settings.read(path) for path in settings.glob("/sys/class/infiniband/*/fw_ver")} - {""}
    models, revisions = [], []
    for path in settings.glob("/sys/class/nvme/nvme*"):
        models.append(settings.read(f"{path}/model"))
        revisions.append(settings.read(f"{path}/firmware_rev"))
    return {
        "firmware_connectx": Fact(" ".join(sorted(connectx)) or None, "/sys/class/infiniband", "no RDMA device"),
        "nvme_model": Fact(", ".join(models) or None, "/sys/class/nvme", "no NVMe device"),
        "firmware_nvme": Fact(", ".join(revisions) or None, "/sys/class/nvme", "no NVMe device"),
    }


def packages(settings: Settings) -> dict[str, Fact]:
    source = "/var/lib/dpkg/status"
    names = ("packages", "packages_held", "container_runtime", "container_toolkit")
    try:
        versions, held = parse_packages(settings.read(source))
    except HostInfoError as error:
        return {name: Fact(None, source, str(error)) for name in names}
    runtime = [f"{name} {versions[name]}" for name in _RUNTIME_PACKAGES if name in versions]
    return {
        "packages": Fact(versions, source),
        "packages_held": Fact(held, source),
        "container_runtime": Fact(", ".join(runtime) or "none", source),
        "container_toolkit": Fact(versions.get("nvidia-container-toolkit", "none"), source),
    }


def nccl(settings: Settings) -> dict[str, Fact]:
    """Every NCCL on the host: pip's and DGX OS's carry the same version and differ."""
    found = {}
    for pattern in settings.nccl_places:
        for path in settings.glob(pattern):
            real = settings.path(path).resolve()
            found[path] = f"{real.name}, {file_fingerprint(real)}"
    return {"nccl_libraries": Fact(found, "files")}


def clock(settings: Settings) -> dict[str, Fact]:
    if settings.glob("/run/chrony/chronyd.pid"):
        exit_status, output = run_bounded(["chronyc", "-c", "-n", "tracking"], settings.timeout_s)
        cells = output.strip().split(",")
        if exit_status or len(cells) < 5:
            raise HostInfoError(f"chronyc tracking: {output.strip() or exit_status}")
        return {
            "time_source": Fact(f"chrony {cells[1]}" if cells[1] else None, "chronyc tracking", "not synchronised"),
            "time_offset_ms": Fact(round(float(cells[4]) * 1000, 3), "chronyc tracking"),
        }
    if settings.glob("/run/systemd/timesync"):
        _, output = run_bounded(["timedatectl", "timesync-status"], settings.timeout_s)
        server = re.search(r"Server: (.+)", output)
        why = "not synchronised yet"
        return {
            "time_source": Fact(f"timesyncd {server[1]}" if server else None, "timedatectl timesync-status", why),
            "time_offset_ms": Fact(parse_offset_ms(output), "timedatectl timesync-status", why),
        }
    why = "neither chrony nor systemd-timesyncd runs"
    return {name: Fact(None, "/run", why) for name in ("time_source", "time_offset_ms")}


def probe_mount(path: Path) -> str:
    """Read one byte of one file of a mount, the first within two levels; opening asks the server, caches cannot answer.

    Returns ``ok`` or the error's text ("Stale file handle"). May never return: call it in a thread.
    """
    folders = [path]
    for depth in (0, 1):
        below = []
        for folder in folders[:16]:
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)[:64]
            except PermissionError:
                continue
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    below.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    try:
                        with open(entry.path, "rb", buffering=0) as stream:  # noqa: PTH123 - a path of scandir
                            stream.read(1)
                    except PermissionError:
                        continue  # refused by the server, so the server answers
                    return "ok"
        if depth == 0:
            folders = below
    return "ok"


def mounts(settings: Settings) -> dict[str, Fact]:
    source = "/proc/self/mounts"
    try:
        rows = parse_mounts(settings.read(source))
    except HostInfoError as error:
        return {"nfs_mounts": Fact(None, source, str(error))}

    def state(path: str) -> str:
        try:
            return probe_mount(Path(path))
        except OSError as error:
            return error.strerror or "unreadable"

    paths = sorted({row["path"] for row in rows})
    states = together({path: partial(state, path) for path in paths}, settings.timeout_s)
    silent = f"no answer in {settings.timeout_s:g} s"
    return {"nfs_mounts": Fact([row | {"state": states.get(row["path"], silent)} for row in rows], source)}


COLLECTORS: Mapping[str, tuple[Callable[[Settings], dict[str, Fact]], str]] = {
    "system": (
        system,
        "os_version dgx_release architecture page_size boot_target kernel_release kernel_command_line "
        "kernels_installed boot_id machine_id ssh_host_keys product_name product_vendor firmware_uefi cpu_governor",
    ),
    "memory": (
        memory,
        "mem_total_kib mem_available_kib mem_free_kib swap_total_kib cma_total_kib cma_free_kib hugepages_total",
    ),
    "driver": (driver, "driver_module driver_library"),
    "gpu": (gpu, "gpu_status gpu_name gpu_driver gpu_vbios gpu_persistence gpu_sm_mhz gpu_watts"),
    "gpu_processes": (gpu_processes, "gpu_processes competing_processes"),
    "services": (services, "competing_services display_managers engine_pids"),
    "firmware": (firmware, "firmware_ec firmware_soc firmware_pd"),
    "devices": (devices, "firmware_connectx nvme_model firmware_nvme"),
    "packages": (packages, "packages packages_held container_runtime container_toolkit"),
    "nccl": (nccl, "nccl_libraries"),
    "clock": (clock, "time_source time_offset_ms"),
    "mounts": (mounts, "nfs_mounts"),
}
"""Each collector with the facts it owes, so that a late or broken one leaves unknowns instead of gaps."""

FACTS = tuple(name for _, names in COLLECTORS.values() for name in names.split())


def together(calls: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, Any]:
    """Results of ``calls``, each in a daemon thread; those that are late or raise a bug's exception are left out.

    Daemon threads, because a thread pool waits at exit for a read that never returns.
    """
    results: dict[str, Any] = {}

    def keep(name: str, call: Callable[[], Any]) -> None:
        results[name] = call()

    threads = [threading.Thread(target=keep, args=item, daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(results)


def gather(settings: Settings) -> dict[str, dict[str, Any]]:
    """All FACTS of this host: name -> value, source and, where the value is None, why. Never raises, never hangs."""

    def guarded(collect: Callable[[Settings], dict[str, Fact]], names: str) -> dict[str, Fact]:
        try:
            return collect(settings)
        except (HostInfoError, CommandError) as error:
            why = str(error)
        except Exception as error:  # a surprise in one group must not cost the others
            why = f"{type(error).__name__}: {error}"
        return {name: Fact(None, getattr(collect, "__name__", "collector"), why) for name in names.split()}

    late = settings.timeout_s + 2.0  # after the bounds inside, so that their reasons are the ones reported
    gathered = together({group: partial(guarded, *owed) for group, owed in COLLECTORS.items()}, late)
    facts = {}
    for group, (_, names) in COLLECTORS.items():
        silent = "not reported" if group in gathered else f"no answer in {late:g} s"
        for name in names.split():
            facts[name] = gathered.get(group, {}).get(name, Fact(None, group, silent)).as_dict()
    return facts
