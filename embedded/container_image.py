"""A container image for the embedded hosts: Debian's Python and the patched files of the engine.

``python3 -m embedded.container_image``, with a patch series as JSON on its standard input, writes an OCI archive and
its digest where every host sees them (/opt/gb10/environments); no registry and no container engine is needed on this
machine. The wheels, gigabytes of them, stay outside: the profile mounts them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .image import SUITE
from .settings import ENVIRONMENTS, GUEST_ENVIRONMENTS, IMAGES, PROJECT, EmbeddedError

sys.path.append(str(PROJECT / "module_utils"))
from gb10 import release

# vLLM on processors asks lscpu for the cores; the rest is what `python3 -m` and its libraries need.
PACKAGES = "python3,libnuma1,libgomp1,libstdc++6,util-linux,libc-bin,dash,coreutils,grep,sed"
ARCHIVE = ENVIRONMENTS / "vllm-image.oci.tar"
DIGEST = ENVIRONMENTS / "vllm-image.digest"
RECIPE = ENVIRONMENTS / "vllm-image.recipe"  # what the archive was made from; written last
REFERENCE = "localhost/gb10-vllm-cpu:test"
SITE = "/opt/engine/site"


def engine_environment(engine: str) -> Path:
    """The engine's wheels on this machine. Raises EmbeddedError before playbooks/engine.yml has installed them."""
    found = sorted(ENVIRONMENTS.glob(f"{engine}-*"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise EmbeddedError(f"{ENVIRONMENTS} has no {engine}: run playbooks/engine.yml -e profile=tiny-cpu-tp4 first")
    return found[-1]


def _place_site(environment: Path, series: release.Series, tree: Path) -> None:
    """The patched packages at SITE, their links into ENVIRONMENT as the hosts see it."""
    site = tree / SITE.lstrip("/")
    made = release.make(environment, tree / "made", series, sys.executable)
    shutil.copytree(made / "site", site, symlinks=True)
    shutil.rmtree(tree / "made")
    # The image has no times, and nobody can write into it: what is not compiled here, by content, is at every import.
    command = [sys.executable, "-m", "compileall", "-q", "-f", "--invalidation-mode", "unchecked-hash"]
    patched = [str(site / path) for path in series.files if path.endswith(".py")]
    subprocess.run([*command, "-s", str(tree), "-p", "/", *patched], check=True)
    for path in site.rglob("*"):
        if path.is_symlink():
            target = Path(GUEST_ENVIRONMENTS) / path.readlink().relative_to(ENVIRONMENTS)
            path.unlink()
            path.symlink_to(target)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Nothing of the moment or of this machine; devices come from the container engine."""
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return None
    member.mtime, member.uname, member.gname = 0, "", ""
    return member


def _layer(tree: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as layer:
        for path in sorted(tree.rglob("*")):
            layer.add(path, str(path.relative_to(tree)), recursive=False, filter=_plain)
    return buffer.getvalue()


def write_archive(layer: bytes, environment: list[str], target: Path) -> str:
    """Write an OCI archive of one layer to TARGET in one step; returns the digest of its manifest."""
    blobs: dict[str, bytes] = {}

    def blob(kind: str, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        return {
            "mediaType": f"application/vnd.oci.image.{kind}",
            "digest": f"sha256:{digest}",
            "size": len(content),
        }

    def document(value: dict[str, Any]) -> bytes:
        return json.dumps(value, sort_keys=True).encode()

    data = blob("layer.v1.tar", layer)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {"Env": environment},
        "rootfs": {"type": "layers", "diff_ids": [data["digest"]]},
    }
    manifest = blob(
        "manifest.v1+json",
        document(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": blob("config.v1+json", document(config)),
                "layers": [data],
            }
        ),
    )
    named = manifest | {"annotations": {"org.opencontainers.image.ref.name": REFERENCE}}
    blobs["index.json"] = document({"schemaVersion": 2, "manifests": [named]})
    blobs["oci-layout"] = document({"imageLayoutVersion": "1.0.0"})
    partial = target.with_suffix(f".partial.{os.getpid()}")
    with tarfile.open(partial, "w") as archive:
        for name, content in sorted(blobs.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    partial.rename(target)
    return str(manifest["digest"])


@contextmanager
def _tree() -> Iterator[Path]:
    tree = IMAGES / f"container.{os.getpid()}"
    IMAGES.mkdir(parents=True, exist_ok=True)
    options = [f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale")]
    try:
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=extract", f"--include={PACKAGES}", *options, SUITE, str(tree)],
            check=True,
            stdin=subprocess.DEVNULL,
        )
        yield tree
    finally:
        shutil.rmtree(tree, ignore_errors=True)


def ensure(series: release.Series) -> str:
    """Make the image unless it stands for the present wheels and patches; returns its digest."""
    engine = engine_environment(series.engine)
    recipe = f"{SUITE} {PACKAGES} {engine.name} {series.digest} compiled"
    standing = RECIPE.read_text() if RECIPE.exists() and ARCHIVE.exists() and DIGEST.exists() else ""
    if standing == recipe:
        return DIGEST.read_text()
    RECIPE.unlink(missing_ok=True)
    environment = [
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        f"PYTHONPATH={SITE}:{GUEST_ENVIRONMENTS}/{engine.name}",
    ]
    print(f"building the container image from Debian {SUITE} (about half a minute)", file=sys.stderr, flush=True)
    with _tree() as tree:
        _place_site(engine, series, tree)
        digest = write_archive(_layer(tree), environment, ARCHIVE)
    DIGEST.write_text(digest)
    RECIPE.write_text(recipe)
    return digest


def main() -> int:
    try:
        print(ensure(release.Series.from_document(json.load(sys.stdin))))
    except (EmbeddedError, subprocess.CalledProcessError) as error:
        print(f"embedded: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
