"""Becomes the rank's process: no shell and no unit file ever sees its arguments, so none can change them."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import container, rank, release
from .files import read_json

# What a service needs from systemd; everything else comes from the rank's own environment.
INHERITED = ("HOME", "USER", "LOGNAME", "LANG", "PATH", "NOTIFY_SOCKET", "CREDENTIALS_DIRECTORY", "INVOCATION_ID")
CACHES = Path("/var/cache/gb10/vllm")
# Variable to folder: every cache that a JIT compiler or a library writes is on the host's own disk, never on the store:
# ranks that share one deadlock or read each other's half-written files.
CACHE_VARIABLES = {
    "XDG_CACHE_HOME": "",
    "VLLM_CACHE_ROOT": "vllm",
    "HF_HOME": "huggingface",
    "TRITON_CACHE_DIR": "triton",
    "TILELANG_CACHE_DIR": "tilelang",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


def cache_folder(root: Path, name: str) -> Path:
    """The folder of one release's caches, made where it is missing; of the others only the youngest stays.

    What another release or image compiled is never read: stale kernels have answered garbage. The one before stays for
    a rollback.
    """
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    others = [path for path in root.iterdir() if path.is_dir() and path != folder]
    for path in sorted(others, key=lambda path: path.stat().st_mtime)[:-1]:
        shutil.rmtree(path, ignore_errors=True)
    return folder


def cache_environment(folder: Path) -> dict[str, str]:
    return {name: str(folder / part) if part else str(folder) for name, part in CACHE_VARIABLES.items()}


def venv_command(started: Mapping[str, Any], environment: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """argv and whole environment of a rank that runs from a release on this host."""
    environment = {key: os.environ[key] for key in INHERITED if key in os.environ} | environment
    environment["PYTHONPATH"] = ":".join(started["python_path"])
    # Compilers that a package brings along (FlashInfer calls ninja by name) lie beside the packages.
    tools = [f"{folder}/bin" for folder in started["python_path"]]
    environment["PATH"] = ":".join([*tools, environment.get("PATH", os.defpath)])
    return [started["python"], "-m", "vllm.entrypoints.cli.main", *started["argv"]], environment


def container_command(
    started: Mapping[str, Any], wanted: Mapping[str, Any], environment: dict[str, str], folder: Path, image: str
) -> tuple[list[str], dict[str, str]]:
    """argv and environment of podman, which runs the rank in IMAGE."""
    entry = pwd.getpwnam(wanted["user"])
    owned = [Path(environment["HOME"]), folder]
    for path in owned:  # this process is root, and so is what systemd made for its unit
        path.mkdir(parents=True, exist_ok=True)
        os.chown(path, entry.pw_uid, entry.pw_gid)
    writable = dict.fromkeys([*map(str, owned), *wanted["writable"]])
    key = rank.credential(os.environ)
    words = container.arguments(
        started["container"],
        started["argv"],
        environment,
        image=image,
        user=(entry.pw_uid, entry.pw_gid),
        writable=writable,
        key_file=str(key or ""),
    )
    return words, container.ENVIRONMENT


def image_of(release_folder: Path) -> str:
    """ID of the image that a release is, empty for one that lies on the host as files."""
    record = read_json(release_folder / release.RECORD) or {}
    series = str(record.get("series", ""))
    return series if container.PIN.fullmatch(series) else ""


def main() -> int:
    started = rank.running()
    wanted = rank.configuration()
    image = image_of(Path(wanted["release_link"]))
    if bool(image) != bool(started.get("container")):
        kinds = {True: "a container image", False: "an environment on this host"}
        print(
            f"refusing to start: release {started['release']} is {kinds[bool(image)]}, the profile wants "
            f"{kinds[not image]}: run playbooks/engine.yml",
            flush=True,
        )
        return 1
    folder = cache_folder(CACHES, started["release"])
    environment = cache_environment(folder) | started["environment"]
    if started.get("container"):
        argv, environment = container_command(started, wanted, environment, folder, image)
    else:
        argv, environment = venv_command(started, environment | rank.api_key_environment(os.environ))
    os.execve(argv[0], argv, environment)  # noqa: S606 - the point of this file
    return 1


if __name__ == "__main__":
    sys.exit(main())
