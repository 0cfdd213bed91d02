"""The container backend: an image pinned by digest, and the argument list that runs a rank in it.

podman alone: the processes of `podman run --cgroups=split` stay below the unit's own control group, so that stop, the
memory guard and the journal reach them as they reach a rank without a container. docker's live below dockerd.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .meter import Meter

PODMAN = "/usr/bin/podman"
NAME = "vllm-rank"
INFINIBAND = Path("/dev/infiniband")
CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
# podman puts what it downloads below TMPDIR (podman(1)), and only a terminal is told how much that is.
ARRIVING = Path("/var/tmp/gb10-image")  # noqa: S108 - big files belong there; root makes and removes it
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
GPU_KIND = "nvidia.com/gpu"
PIN = re.compile(r"sha256:[0-9a-f]{64}")
# podman shows a container's variables to whoever inspects it and keeps them in files of its own, so the engine's key
# comes through neither: a shell of the image reads it from the unit's credential, and the engine takes its place.
KEY_FILE = "/run/gb10-api-key"
TAKE_KEY = f'IFS= read -r VLLM_API_KEY <{KEY_FILE} && export VLLM_API_KEY && exec "$@"'
# podman's own: none of the engine's variables, which could change what podman does.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/var/lib/containers"}


class ContainerError(Exception):
    """What keeps an image from being used: object, found, wanted, next step."""


# --------------------------------------------------------------------------------------------- images


def podman(*words: str, **environment: str) -> str:
    """Output of one podman command. Raises ContainerError with podman's own words."""
    try:
        result = subprocess.run(
            [PODMAN, *words], capture_output=True, text=True, check=False, env=os.environ | environment
        )
    except FileNotFoundError as error:
        raise ContainerError(f"{PODMAN} is missing: install the package podman") from error
    if result.returncode != 0:
        said = (result.stderr.strip() or result.stdout.strip()).splitlines()[-3:]
        raise ContainerError(f"podman {' '.join(words[:2])} failed: {' '.join(said)}")
    return result.stdout


def images() -> list[dict[str, Any]]:
    """Images of this host as `podman image ls --format json` tells them."""
    found = json.loads(podman("image", "ls", "--all", "--digests", "--no-trunc", "--format", "json") or "[]")
    return list(found or [])


def digests_of(image: Mapping[str, Any]) -> set[str]:
    """All digests that name one image: of its configuration (the image ID) and of the manifests it came with."""
    listed = [*(image.get("Digests") or []), *(image.get("RepoDigests") or []), str(image.get("Digest") or "")]
    return {f"sha256:{image['Id'].removeprefix('sha256:')}"} | {
        match.group() for text in listed if (match := PIN.search(text))
    }


def find(listed: Iterable[Mapping[str, Any]], pin: str) -> str:
    """ID (sha256:...) of the image that PIN names, empty when this host has none. PIN: digest of a manifest, or the ID.

    The ID is the digest of the image's configuration, which names each layer by its content: podman gives the same ID
    for the same image on every host, however it came there and whatever stores it.
    """
    for image in listed:
        if pin in digests_of(image):
            return f"sha256:{image['Id'].removeprefix('sha256:')}"
    return ""


def download_bytes(reference: str) -> int:
    """Size of what REFERENCE names for this machine, 0 where podman does not tell.

    podman 4 prints lists of manifests and single ones in Docker's form, and refuses single ones in OCI's.
    """
    try:
        document = json.loads(podman("manifest", "inspect", reference))
        if "manifests" not in document:
            return sum(int(part["size"]) for part in (document["config"], *document["layers"]))
        wanted = ARCHITECTURES.get(platform.machine(), platform.machine())
        digests = [one["digest"] for one in document["manifests"] if one["platform"]["architecture"] == wanted]
        return download_bytes(f"{reference.partition('@')[0]}@{digests[0]}")
    except (ContainerError, ValueError, KeyError, IndexError):
        return 0  # where something is wrong, the pull says it in better words


@contextlib.contextmanager
def metered(folder: Path, meter: Meter) -> Iterator[None]:
    """Count what comes to lie in FOLDER, which is there only meanwhile."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(mode=0o700)
    over = threading.Event()

    def count() -> None:
        seen = 0
        while not over.wait(1):
            with contextlib.suppress(FileNotFoundError):  # a file that is done may go
                size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                meter.done(max(0, size - seen))
                seen = max(seen, size)

    counter = threading.Thread(target=count, daemon=True)
    counter.start()
    try:
        yield
    finally:
        over.set()
        counter.join()
        shutil.rmtree(folder, ignore_errors=True)


def pull(reference: str, progress: Path | None) -> None:
    """Pull REFERENCE; PROGRESS, a Meter's file, is there until it has come."""
    try:
        with metered(ARRIVING, Meter(progress, download_bytes(reference))):
            podman("pull", "--quiet", reference, TMPDIR=str(ARRIVING))
    finally:
        if progress:
            progress.unlink(missing_ok=True)


def fetch(reference: str, pin: str, archive: str, progress: Path | None = None) -> str:
    """Bring the image to this host, from ARCHIVE where one is named, else from its registry; returns its ID."""
    if archive and not Path(archive).is_file():
        raise ContainerError(f"{archive} is missing: copy the archive to this host, or unset vllm_image_archive")
    if archive:
        podman("load", "--quiet", "--input", archive)
    else:
        pull(f"{reference}@{pin}", progress)
    listed = images()
    if image := find(listed, pin):
        return image
    have = sorted({digest for image in listed for digest in digests_of(image)})
    raise ContainerError(
        f"{archive or reference} brought no image with digest {pin}; this host has {', '.join(have) or 'none'}: "
        "correct vllm_image_digest, or fetch the archive again"
    )


def gpu_faults(folders: Iterable[Path] = CDI_FOLDERS, version: Path = DRIVER_VERSION) -> list[str]:
    """Why podman could not hand the GPU to a container: no CDI description, or one of another driver."""
    step = "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
    specs = [path for folder in folders for path in sorted(folder.glob("*")) if path.suffix in (".yaml", ".json")]
    specs = [path for path in specs if GPU_KIND in path.read_text(encoding="utf-8", errors="replace")]
    if not specs:
        return [f"no description of {GPU_KIND} in {' or '.join(map(str, folders))}: run {step}"]
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", version.read_text()) if version.is_file() else None
    if match and not any(f".so.{match.group(1)}" in path.read_text(encoding="utf-8") for path in specs):
        return [f"{specs[0]} names no library of the driver {match.group(1)} that is loaded: run {step}"]
    return []


# --------------------------------------------------------------------------------------------- release


def release_name(image: str) -> str:
    return f"vllm-image-{image.removeprefix('sha256:')[:12]}"


def release_record(folder: Path, reference: str, pin: str, image: str) -> dict[str, Any]:
    """release.json of an image: no file of it lies on the host, so there is none to compare (see release.py)."""
    return {
        "engine": reference,
        "version": pin,
        "environment": str(folder),
        "series": image,
        "python": "",
        "files": {},
        "built": {},
    }


# --------------------------------------------------------------------------------------------- running


def arguments(
    container: Mapping[str, Any],
    argv: Iterable[str],
    environment: Mapping[str, str],
    *,
    image: str,
    user: tuple[int, int],
    writable: Iterable[str],
    key_file: str = "",
) -> list[str]:
    """Words of `podman run` for one rank. Nothing of ARGV or ENVIRONMENT goes through a shell or a file.

    CONTAINER has `command` (words before ARGV in the image), `gpu` and `read_only` (paths mounted at the same place).
    KEY_FILE on the host holds the API key as one line; the image then needs /bin/sh.
    The process is USER (UID, GID) without capabilities but IPC_LOCK; its signals and its end are those of the unit.
    """
    command = [*(["/bin/sh", "-c", TAKE_KEY, "sh"] if key_file else []), *container["command"]]
    words = [PODMAN, "--events-backend=none", "run", "--rm", "--replace", f"--name={NAME}", "--pull=never"]
    # Two groups below the unit's own: one for podman, one for the image. Output is the unit's, so the journal's.
    words += ["--cgroups=split", "--log-driver=passthrough", "--pids-limit=-1", "--oom-score-adj=500"]
    # The first process of a PID namespace ignores SIGTERM until it handles it: an engine that still imports would have
    # to be killed. In the host's namespace it ends at once, and the unit's control group holds all there is to end.
    words += ["--network=host", "--ipc=host", "--pid=host"]
    words += [f"--user={user[0]}:{user[1]}", "--cap-drop=all", "--cap-add=IPC_LOCK"]
    words += ["--security-opt=no-new-privileges", "--ulimit=memlock=-1:-1", "--ulimit=nofile=1048576:1048576"]
    words += ["--http-proxy=false"]
    words += [f"--device={INFINIBAND}"] if INFINIBAND.is_dir() else []
    words += [f"--device={GPU_KIND}=all"] if container["gpu"] else []
    # A store that the host mounts again later is seen in the container, too.
    words += [f"--volume={path}:{path}:ro,rslave" for path in container["read_only"]]
    words += [f"--volume={path}:{path}" for path in writable]
    words += [f"--volume={key_file}:{KEY_FILE}:ro"] if key_file else []
    words += [f"--env={name}={value}" for name, value in environment.items()]
    return [*words, f"--entrypoint={command[0]}", image, *command[1:], *argv]
