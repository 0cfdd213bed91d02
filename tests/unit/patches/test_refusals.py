"""What is refused, by name, on the released wheel's own files: found and wanted, and nothing is left behind."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import refresh
import yaml
from ansible.module_utils.gb10 import kernel_prebuild, release
from reader_lib import SERIES

DOCUMENT = yaml.safe_load((SERIES / "series.yml").read_text())
PATCHES = [item["file"] for item in DOCUMENT["patches"]]
FILES = DOCUMENT["files"]

CONFIG = "vllm/config/engram.py"
LOOKUP = "vllm/models/deepseek_v41/common/engram.py"
NEW = "vllm/models/deepseek_v41/common/engram_rows.py"


def series() -> release.Series:
    texts = [{"file": name, "text": (SERIES / name).read_text()} for name in PATCHES]
    document = {"engine": "vllm-0.33.0", **DOCUMENT["engine"], "patches": texts, "files": FILES}
    return release.Series.from_document(document | {"build": DOCUMENT["build"]})


@pytest.fixture
def environment(wheel: Path, tmp_path: Path) -> Path:
    """An environment with the released files that the series touches."""
    root = tmp_path / "environments" / "vllm-0.33.0-0123456789ab"
    refresh.unpack(wheel, list(FILES), root)
    (root / "vllm-0.33.0.dist-info").mkdir()
    return root


def make(environment: Path) -> Path:
    return release.make(environment, environment.parent.parent / "releases", series(), sys.executable)


def patch_first(root: Path) -> None:
    refresh.apply(SERIES, PATCHES[:1], root)


def crlf(root: Path) -> None:
    (root / CONFIG).write_bytes((root / CONFIG).read_bytes().replace(b"\n", b"\r\n"))


def edit(root: Path) -> None:
    (root / LOOKUP).write_text((root / LOOKUP).read_text() + "# a local change\n")


def older(root: Path) -> None:
    (root / "vllm-0.33.0.dist-info").rename(root / "vllm-0.32.0.dist-info")


# What is done to the environment, which file the refusal names, and as what.
FOREIGN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "patched before": (lambda root: refresh.apply(SERIES, PATCHES, root), CONFIG, "is already patched"),
    "patched by one of three": (patch_first, LOOKUP, "is already patched"),
    "one file of the patches copied in": (
        lambda root: shutil.copy(root / CONFIG, root / NEW),
        NEW,
        "exists, though the series brings it new",
    ),
    "foreign edit": (edit, LOOKUP, "was edited by somebody else"),
    "CRLF": (crlf, CONFIG, "was edited by somebody else"),
    "file missing": (lambda root: (root / CONFIG).unlink(), CONFIG, "is missing"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_environment_is_refused(environment: Path, case: str) -> None:
    damage, path, said = FOREIGN[case]
    damage(environment)
    found = refresh.digests(environment, [path])[path] or "none"
    wanted = FILES[path]["before"] or "none"
    with pytest.raises(release.ReleaseFault) as refused:
        make(environment)
    line = next(line for line in str(refused.value).splitlines() if f"/{path} " in line)
    assert f"{path} {said}: sha256 found {found}, wanted {wanted}: " in line
    assert [entry.name for entry in (environment.parent.parent / "releases").iterdir()] == [".lock"]


def test_another_version_is_refused(environment: Path) -> None:
    older(environment)
    with pytest.raises(release.ReleaseFault, match=re.escape("vllm is 0.32.0, the patches are for 0.33.0")):
        make(environment)


def test_the_release_made_from_it_stands_and_is_not_patched_twice(environment: Path) -> None:
    made = make(environment)
    assert release.faults(made, series(), whole=True) == []
    before = {path: (made / "site" / path).stat().st_mtime_ns for path in FILES}
    assert make(environment) == made
    assert {path: (made / "site" / path).stat().st_mtime_ns for path in FILES} == before
    assert refresh.digests(environment, list(FILES)) == {path: item["before"] for path, item in FILES.items()}


def unpatch(site: Path) -> None:
    refresh.apply(SERIES, PATCHES, site, reverse=True)


def patch_again(site: Path) -> None:
    """As `patch --force` does it: the hunks are added a second time where they fit."""
    text = (site / CONFIG).read_text()
    (site / CONFIG).write_text(text + text[text.index("    disk_path") :])


def half(site: Path) -> None:
    refresh.apply(SERIES, PATCHES[1:], site, reverse=True)


# The start of every rank and engine.yml look at the release with the same function.
DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "unpatched": (unpatch, CONFIG),
    "patched twice": (patch_again, CONFIG),
    "partly patched": (half, CONFIG),
    "foreign edit": (edit, LOOKUP),
    "CRLF": (crlf, CONFIG),
    "reader built elsewhere": (
        lambda site: (site / DOCUMENT["build"][0]["output"]).write_bytes(b"\x7fELF"),
        DOCUMENT["build"][0]["output"],
    ),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("case", DAMAGED)
def test_a_release_that_is_not_the_reviewed_tree_is_refused(environment: Path, case: str, whole: bool) -> None:
    made = make(environment)
    damage, path = DAMAGED[case]
    damage(made / "site")
    faults = release.faults(made, series(), whole=whole)
    line = next(line for line in faults if f"/site/{path}: " in line)
    if (made / "site" / path).exists():
        assert f"found {release.sha256_file(made / 'site' / path)}, wanted " in line
    assert f"delete {made} and rerun playbooks/engine.yml" in line
    with pytest.raises(release.ReleaseFault, match=re.escape(line)):
        make(environment)


def test_damaged_kernels_keep_a_rank_from_starting(environment: Path) -> None:
    made = make(environment)
    kernel = made / "kernels/modules/one/one.so"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("kernel")
    entry = {"sha256": release.sha256_file(kernel), "stat": kernel_prebuild._stat(kernel)}
    record = {"wish": "", "modules": {"one": entry}, "deep_gemm": [], "offer": ""}
    kernel_prebuild.write_json(made / "kernels/kernels.json", record)
    assert release.faults(made) == []
    kernel.write_text("other kernel")
    assert "one.so: edited: sha256 found" in release.faults(made)[0]
