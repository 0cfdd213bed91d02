"""A release: the engine's package as the patch series makes it, beside an environment that stays untouched.

``<root>/<engine>-<id>/site`` comes before the environment on the module path. It holds the packages that the series
touches: patched files as real files, everything else as links into the environment. A release is made under another
name, proven, and renamed; ``<root>/../current`` is a link that is switched in one step, so the previous release stays
ready for a rollback. ``release.json`` records for each file of the series its SHA-256 before and after.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import kernel_prebuild
from .files import exclusive, read_json, sha256_document, sha256_file, write_json

RECORD = "release.json"
SERIES_VERSION = 1  # enters the release id: a change of the layout makes new releases


class ReleaseFault(Exception):
    """Every fault of a tree or a series, one a line: file, found, wanted, next step."""


@dataclass(frozen=True)
class Series:
    """A patch series as the controller read it from files/patches/<engine>/.

    `files` maps a path relative to site-packages to its SHA-256 before (None for a new file) and after;
    `patches` are (file name, text) in order; `build` are commands that compile what the patches brought.
    """

    engine: str
    package: str
    version: str
    files: dict[str, tuple[str | None, str]]
    patches: tuple[tuple[str, str], ...]
    build: tuple[dict[str, Any], ...]

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Series:
        return cls(
            engine=document["engine"],
            package=document["package"],
            version=document["version"],
            files={path: (entry["before"], entry["after"]) for path, entry in document["files"].items()},
            patches=tuple((patch["file"], patch["text"]) for patch in document["patches"]),
            build=tuple(document.get("build") or []),
        )

    @property
    def digest(self) -> str:
        return sha256_document(
            [SERIES_VERSION, self.engine, sorted(self.files.items()), list(self.patches), list(self.build)]
        )


def release_name(environment: str, series: Series) -> str:
    """Name of the release made from one environment (its identity) by one series."""
    return f"{series.engine}-{sha256_document([environment, series.digest])[:12]}"


def installed_version(environment: Path, package: str) -> str:
    """Version of PACKAGE in an environment, from the name of its dist-info folder."""
    stem = package.replace("-", "_")
    found = [entry.name for entry in environment.glob(f"{stem}-*.dist-info")]
    return found[0].removeprefix(f"{stem}-").removesuffix(".dist-info") if found else "none"


def source_faults(environment: Path, series: Series) -> list[str]:
    """Compare the environment's files with the series' `before`: unpatched is right, everything else is named."""
    version = installed_version(environment, series.package)
    if version != series.version:
        return [
            f"{environment}: {series.package} is {version}, the patches are for {series.version}: "
            "install the locked wheels of this engine"
        ]
    faults = []
    for path, (before, after) in sorted(series.files.items()):
        source = environment / path
        found = sha256_file(source) if source.is_file() else None
        if found == before:
            continue
        if found == after:
            what = "is already patched"
        elif found is None:
            what = "is missing"
        elif before is None:
            what = "exists, though the series brings it new"
        else:
            what = "was edited by somebody else"
        faults.append(
            f"{source} {what}: sha256 found {found or 'none'}, wanted {before or 'none'}: "
            "delete the environment and rerun playbooks/engine.yml"
        )
    return faults


def _link_tree(environment: Path, site: Path, touched: set[str]) -> None:
    """Mirror the touched packages: real folders on the way to touched files, links for the rest."""
    folders = {str(parent) for path in touched for parent in Path(path).parents} - {"."}
    for folder in sorted(folders):
        (site / folder).mkdir(parents=True, exist_ok=True)
        source = environment / folder
        if not source.is_dir():
            continue
        for entry in source.iterdir():
            name = f"{folder}/{entry.name}"
            if name in folders or name in touched:
                continue
            if entry.name == "__pycache__":
                _link_compiled(
                    entry, site / name, {Path(path).stem for path in touched if Path(path).parent == Path(folder)}
                )
            else:
                (site / name).symlink_to(entry)


def _link_compiled(source: Path, target: Path, stale: set[str]) -> None:
    target.mkdir()
    for entry in source.iterdir():
        if entry.name.split(".")[0] not in stale:
            (target / entry.name).symlink_to(entry)


def _apply_patches(site: Path, series: Series) -> None:
    for name, text in series.patches:
        result = subprocess.run(
            ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch", "--reject-file=-", "--batch", "-d", str(site)],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            raise ReleaseFault(f"{name} does not apply: {result.stdout.strip()} {result.stderr.strip()}")


def _patched_faults(site: Path, series: Series) -> list[str]:
    faults = []
    for path, (_, after) in sorted(series.files.items()):
        target = site / path
        found = sha256_file(target) if target.is_file() and not target.is_symlink() else "none"
        if found != after:
            faults.append(
                f"{target}: sha256 found {found}, wanted {after}: the tree is not the reviewed one; "
                "rerun playbooks/engine.yml"
            )
    return faults


def _stat(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def make(environment: Path, root: Path, series: Series, python: str) -> Path:
    """Make the release unless it stands; returns its folder. Raises ReleaseFault with every fault found.

    A release that was finished and edited since is not made again over the edit: somebody may want it.
    """
    name = release_name(environment.name, series)
    final = root / name
    with exclusive(root):
        found = faults(final, series, whole=True)
        if found and (final / RECORD).exists():
            raise ReleaseFault("\n".join(found))
        if found:
            found = source_faults(environment, series)
            if found:
                raise ReleaseFault("\n".join(found))
            _make(environment, final, series, python)
    return final


def _make(environment: Path, final: Path, series: Series, python: str) -> None:
    for left in final.parent.glob(f".{final.name}.*"):
        shutil.rmtree(left)  # of a run that was killed
    partial = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        partial.chmod(0o755)
        site = partial / "site"
        site.mkdir()
        _link_tree(environment, site, set(series.files))
        for path, (before, _) in series.files.items():
            if before is not None:
                shutil.copyfile(environment / path, site / path)
        _apply_patches(site, series)
        found = _patched_faults(site, series)
        if found:
            raise ReleaseFault("\n".join(found))
        built = _build(site, series)
        scripts = [str(site / path) for path in series.files if path.endswith(".py")]
        if scripts:
            subprocess.run([python, "-m", "compileall", "-q", *scripts], check=True, capture_output=True)
        os.sync()  # before the record, which says that all is there
        write_json(
            partial / RECORD,
            {
                "engine": series.engine,
                "version": series.version,
                "environment": str(environment),
                "series": series.digest,
                "python": python,
                "files": {
                    path: {"before": before, "after": after, "stat": _stat(site / path)}
                    for path, (before, after) in series.files.items()
                },
                "built": built,
            },
        )
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _build(site: Path, series: Series) -> dict[str, dict[str, Any]]:
    built = {}
    for step in series.build:
        result = subprocess.run(step["command"], cwd=site, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ReleaseFault(f"{' '.join(step['command'])} failed with {result.returncode}: {result.stderr.strip()}")
        output = site / step["output"]
        if not output.is_file():
            raise ReleaseFault(f"{' '.join(step['command'])} made no {step['output']}")
        built[step["output"]] = {"sha256": sha256_file(output), "stat": _stat(output)}
    return built


def faults(release: Path, series: Series | None = None, *, whole: bool = False) -> list[str]:
    """Return what makes RELEASE unfit to run, an empty list when it is the reviewed tree.

    Compares sizes and modification times with the record (a few calls of stat, for every start of a rank); WHOLE
    reads the files again. SERIES, where the caller has it, must be the one that the release was made from.
    """
    step = "rerun playbooks/engine.yml"
    again = f"delete {release.resolve()} and {step}"
    try:
        record = read_json(release / RECORD)
    except ValueError as error:
        return [str(error)]
    if record is None:
        return [f"{release}: no {RECORD}, the release is absent or was not finished: {step}"]
    found = []
    if series is not None and record["series"] != series.digest:
        found.append(f"{release}: made from patch series {record['series'][:12]}, wanted {series.digest[:12]}: {step}")
    if not Path(record["environment"]).is_dir():
        found.append(f"{record['environment']}: the release's environment is gone: {step}")
    entries = {path: (entry["after"], entry["stat"]) for path, entry in record["files"].items()}
    entries |= {path: (entry["sha256"], entry["stat"]) for path, entry in record["built"].items()}
    for path, (wanted, stat) in sorted(entries.items()):
        target = release / "site" / path
        if not target.is_file():
            found.append(f"{target}: missing, wanted sha256 {wanted}: {again}")
        elif whole or _stat(target) != stat:
            digest = sha256_file(target)
            if digest != wanted:
                found.append(f"{target}: edited after patching: sha256 found {digest}, wanted {wanted}: {again}")
    return found + kernel_prebuild.faults(release, whole=whole)


def current(link: Path) -> str:
    """Name of the release that LINK points to, empty when there is none."""
    return link.readlink().name if link.is_symlink() else ""


def switch(link: Path, release: Path) -> bool:
    """Point LINK at RELEASE in one step. Returns whether it pointed elsewhere before."""
    if link.is_symlink() and link.readlink() == release:
        return False
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(release)
    temporary.replace(link)
    return True
