#!/usr/bin/env python3
"""Recompute a series' sha256 table from the real wheel, or check that it is right.

    files/patches/refresh.py [--check] [--wheel FILE] files/patches/vllm-0.33.0

Takes the wheel from --wheel or from $GB10_CACHE/wheels (default /var/cache/gb10-fleet/wheels),
unpacks only the files that the patches touch, applies the patches in order and writes `files:`
of series.yml. Exits 1 when a patch does not apply cleanly or --check finds a difference.

To change a patch: apply the series to a tree under git, edit, and take `git diff` again; all
versions of the wheel (aarch64, x86_64) carry the same Python files.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import yaml


def find_wheel(package: str, version: str) -> Path | None:
    cache = Path(os.environ.get("GB10_CACHE", "/var/cache/gb10-fleet")) / "wheels"
    return next(iter(sorted(cache.glob(f"{package}-{version}-*.whl"))), None)


def touched(series_dir: Path, patches: list[str]) -> list[str]:
    """Every path that the patches change or create, as they name it."""
    found: set[str] = set()
    for name in patches:
        found.update(re.findall(r"^\+\+\+ b/(\S+)", (series_dir / name).read_text(), flags=re.MULTILINE))
    return sorted(found)


def unpack(wheel: Path, paths: list[str], target: Path) -> None:
    """The wheel's own versions of these paths; new files are not in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for path in paths:
            if path in names:
                archive.extract(path, target)


def apply(series_dir: Path, patches: list[str], target: Path, *, reverse: bool = False) -> None:
    """Apply in order (or take back in reverse order); no fuzz, no leftovers."""
    for name in reversed(patches) if reverse else patches:
        command = ["patch", "--batch", "--silent", "-p1", "--fuzz=0", "--no-backup-if-mismatch", "-d", str(target)]
        command += ["-R"] if reverse else ["-N"]
        with (series_dir / name).open("rb") as f:
            subprocess.run(command, stdin=f, check=True)


def digests(root: Path, paths: list[str]) -> dict[str, str | None]:
    return {p: hashlib.sha256((root / p).read_bytes()).hexdigest() if (root / p).exists() else None for p in paths}


def table(series_dir: Path, wheel: Path) -> dict[str, dict[str, str | None]]:
    series = yaml.safe_load((series_dir / "series.yml").read_text())
    patches = [item["file"] for item in series["patches"]]
    paths = touched(series_dir, patches)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        unpack(wheel, paths, root)
        before = digests(root, paths)
        apply(series_dir, patches, root)
        after = digests(root, paths)
    return {path: {"before": before[path], "after": after[path]} for path in paths}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series", type=Path)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    path = args.series / "series.yml"
    text = path.read_text()
    series = yaml.safe_load(text)
    wheel = args.wheel or find_wheel(series["engine"]["package"], series["engine"]["version"])
    if wheel is None:
        sys.exit(f"no {series['engine']['package']} {series['engine']['version']} wheel in the cache; see docs")
    files = table(args.series, wheel)
    if args.check:
        wrong = [p for p in sorted({*files, *series["files"]}) if files.get(p) != series["files"].get(p)]
        for p in wrong:
            print(f"{p}: series.yml has {series['files'].get(p)}, the wheel and the patches give {files.get(p)}")
        return 1 if wrong else 0
    lines = []
    for p, item in files.items():
        lines += [f"  {p}:", f"    before: {item['before'] or 'null'}", f"    after: {item['after']}"]
    new = re.sub(r"(?ms)^files:.*?(?=^\S|\Z)", "files:\n" + "\n".join(lines) + "\n", text, count=1)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
