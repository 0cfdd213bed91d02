"""The engine's modules through main(): install, distribute, patch, refuse, go back, build kernels."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from pathlib import Path

import gb10_engine_environment
import gb10_kernel_prebuild
import gb10_patch_series
import pytest
from ansible.module_utils.gb10 import environment, kernel_prebuild, nfs
from ansible.module_utils.testing import patch_module_args


@pytest.fixture
def run(capsys):
    def call(module, **arguments):
        with patch_module_args(arguments), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return call


ORIGINAL, PATCHED = "A = 1\n", "A = 2\n"


@pytest.fixture
def wheels(monkeypatch):
    """Stands in for the package index."""

    def unpack(command: list[str]) -> None:
        folder = Path(command[command.index("--target") + 1])
        (folder / "engine").mkdir()
        (folder / "engine" / "a.py").write_text(ORIGINAL)
        (folder / "engine-1.0.dist-info").mkdir()
        (folder / "engine-1.0.dist-info" / "RECORD").write_text("engine/a.py,sha256=x,6\n")

    monkeypatch.setattr(environment, "_pip", unpack)


def wanted(root: Path, **changes):
    base = {"root": str(root), "engine": "engine-1", "python": "3.11", "machine": "x86_64", "lock": "engine==1.0\n"}
    return base | {"progress": str(root.parent / "progress.json")} | changes


def test_one_host_installs_and_another_unpacks(run, tmp_path, wheels, monkeypatch):
    archive = str(tmp_path / "store/engine.tar")
    dry = run(gb10_engine_environment, **wanted(tmp_path / "build", archive=archive, _ansible_check_mode=True))
    assert dry["changed"]
    assert not (tmp_path / "build").exists()
    built = run(gb10_engine_environment, **wanted(tmp_path / "build", archive=archive))
    assert built["changed"]
    again = run(gb10_engine_environment, **wanted(tmp_path / "build", archive=archive))
    assert (again["changed"], again["sha256"]) == (False, built["sha256"])

    monkeypatch.setattr(environment, "_pip", lambda command: pytest.fail("no index here"))
    from_archive = wanted(tmp_path / "host", source="archive", archive=archive, sha256=built["sha256"])
    assert run(gb10_engine_environment, **from_archive)["changed"]
    assert (tmp_path / "host" / built["identity"] / "engine/a.py").read_text() == ORIGINAL
    assert not run(gb10_engine_environment, **from_archive)["changed"]
    other = run(gb10_engine_environment, **from_archive | {"root": str(tmp_path / "third"), "sha256": "0" * 64})
    assert f"wanted {'0' * 64}" in other["msg"]


def test_a_host_without_the_store_reads_the_archive_from_its_export(run, tmp_path, wheels, monkeypatch):
    archive = tmp_path / "export/.engines/engine.tar"
    built = run(gb10_engine_environment, **wanted(tmp_path / "build", archive=str(archive)))
    used = []

    @contextlib.contextmanager
    def mounted(source, at, options):
        used.append(source)
        assert "ro" in options
        yield tmp_path / "export"

    monkeypatch.setattr(nfs, "mounted", mounted)
    from_export = wanted(tmp_path / "host", source="archive", sha256=built["sha256"])
    from_export |= {"archive": "/srv/models/.engines/engine.tar", "export": "192.0.2.1:/srv/models"}
    assert run(gb10_engine_environment, **from_export)["changed"]
    assert used == ["192.0.2.1:/srv/models"]
    # Where the host sees the archive itself, and for one that is no part of the export, nothing is mounted.
    third = from_export | {"root": str(tmp_path / "third")}
    assert run(gb10_engine_environment, **third | {"archive": str(archive)})["changed"]
    fourth = from_export | {"root": str(tmp_path / "fourth"), "archive": "/nowhere/engine.tar"}
    assert "/nowhere/engine.tar is missing" in run(gb10_engine_environment, **fourth)["msg"]
    assert len(used) == 1


# ------------------------------------------------------------------------------------------------- releases


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


PATCH = "--- a/engine/a.py\n+++ b/engine/a.py\n@@ -1 +1 @@\n-A = 1\n+A = 2\n"


def series(text: str = PATCH):
    return {
        "engine": "engine-1",
        "package": "engine",
        "version": "1.0",
        "patches": [{"file": "0001.patch", "text": text}],
        "files": {"engine/a.py": {"before": sha(ORIGINAL), "after": sha(PATCHED)}},
    }


@pytest.fixture
def host(tmp_path, run, wheels):
    """A host with the environment: its arguments for gb10_patch_series."""
    made = run(gb10_engine_environment, **wanted(tmp_path / "environments"))
    return {
        "environments": str(tmp_path / "environments"),
        "environment": made["identity"],
        "releases": str(tmp_path / "releases"),
        "link": str(tmp_path / "current"),
        "python": sys.executable,
        "series": series(),
    }


def test_release_is_made_once_and_check_mode_makes_none(run, host, tmp_path):
    assert run(gb10_patch_series, **host, _ansible_check_mode=True)["changed"]
    assert not (tmp_path / "current").exists()
    made = run(gb10_patch_series, **host)
    assert made["changed"]
    assert (tmp_path / "current/site/engine/a.py").read_text() == PATCHED
    assert not run(gb10_patch_series, **host)["changed"]
    assert not run(gb10_patch_series, **host, whole=True)["changed"]


def test_missing_environment_is_said_and_not_an_error(run, host):
    assert run(gb10_patch_series, **host | {"environment": "other-1"})["environment_missing"]


@pytest.mark.parametrize("whole", [False, True])
def test_edited_release_is_refused_by_file_found_and_wanted(run, host, tmp_path, whole):
    run(gb10_patch_series, **host)
    edited = tmp_path / "current/site/engine/a.py"
    edited.write_text(text := "A = 3\n")
    refused = run(gb10_patch_series, **host, whole=whole)
    assert refused["failed"]
    for part in (str(Path("site/engine/a.py")), f"found {sha(text)}", f"wanted {sha(PATCHED)}", "delete "):
        assert part in refused["msg"]
    assert edited.read_text() == text


def test_edited_environment_is_refused(run, host, tmp_path):
    (tmp_path / "environments" / host["environment"] / "engine/a.py").write_text("A = 0\n")
    refused = run(gb10_patch_series, **host)
    assert "was edited by somebody else" in refused["msg"]
    assert not (tmp_path / "current").exists()


def test_back_and_forward_again(run, host, tmp_path):
    first = run(gb10_patch_series, **host)["release"]
    assert "no earlier release" in run(gb10_patch_series, **host, rollback=True)["msg"]
    second = run(gb10_patch_series, **host | {"series": series("another reason\n" + PATCH)})["release"]
    assert first != second
    for back, forward in ((first, second), (second, first)):
        moved = run(gb10_patch_series, **host, rollback=True)
        assert (moved["release"], moved["previous"]) == (back, forward)
        assert (tmp_path / "current").readlink().name == back


def test_damaged_release_is_not_gone_back_to(run, host, tmp_path):
    first = run(gb10_patch_series, **host)["release"]
    run(gb10_patch_series, **host | {"series": series("another reason\n" + PATCH)})
    (tmp_path / "releases" / first / "site/engine/a.py").write_text("A = 9\n")
    assert "edited after patching" in run(gb10_patch_series, **host, rollback=True)["msg"]
    assert (tmp_path / "current").readlink().name != first


# ------------------------------------------------------------------------------------------------- kernels


@pytest.fixture
def kernels(tmp_path):
    (tmp_path / "release/site").mkdir(parents=True)
    (tmp_path / "gpu").touch()
    base = {key: str(tmp_path / key) for key in ("release", "cache")}
    base |= {"python": sys.executable, "python_path": [str(tmp_path)], "user": "", "modules": ["m:f"], "units": []}
    return base | {"device": str(tmp_path / "gpu"), "progress": str(tmp_path / "progress.json"), "floor_gib": 0}


def test_a_host_without_a_gpu_says_so(run, kernels):
    result = run(gb10_kernel_prebuild, **kernels | {"device": "/nonexistent"})
    assert (result["changed"], result["skipped"]) == (False, True)
    assert "no NVIDIA GPU on this host (/nonexistent is missing)" in result["msg"]


def test_kernels_are_built_once(run, kernels, monkeypatch):
    built = []

    def prebuild(wish, report, progress):
        built.append(wish.modules)
        kernel_prebuild.write_json(wish.release / "kernels.json", {})
        return {"m:f": "built"}

    monkeypatch.setattr(kernel_prebuild, "prebuild", prebuild)
    monkeypatch.setattr(kernel_prebuild, "standing", lambda wish: bool(built))
    assert run(gb10_kernel_prebuild, **kernels, _ansible_check_mode=True)["changed"]
    assert not built
    assert run(gb10_kernel_prebuild, **kernels)["kernels"] == {"m:f": "built"}
    assert not run(gb10_kernel_prebuild, **kernels)["changed"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"floor_gib": 1e9}, "MemAvailable is"),
        ({"modules": ["nowhere:f"]}, "ModuleNotFoundError"),
        ({"config": "/nonexistent/config.json"}, "/nonexistent/config.json"),
    ],
)
def test_refusals_and_failures_are_sentences(run, kernels, changes, said):
    result = run(gb10_kernel_prebuild, **kernels | changes)
    assert result["failed"]
    assert said in result["msg"]


def test_check_mode_on_a_host_without_the_store_says_that_kernels_would_be_built(run, kernels):
    assert run(gb10_kernel_prebuild, **kernels, config="/nonexistent/config.json", _ansible_check_mode=True)["changed"]


def test_nothing_is_built_while_the_model_is_served(run, kernels, monkeypatch):
    monkeypatch.setattr(kernel_prebuild, "active", lambda units: list(units))
    result = run(gb10_kernel_prebuild, **kernels | {"units": ["vllm-rank.service"]})
    assert "vllm-rank.service is running" in result["msg"]
    assert "playbooks/stop.yml" in result["msg"]
