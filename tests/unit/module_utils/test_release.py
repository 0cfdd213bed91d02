"""Releases on a small tree: made, refused, damaged, rolled back."""

from __future__ import annotations

import hashlib
import shutil
import sys

import pytest
from ansible.module_utils.gb10 import release

ORIGINAL = "def nodes():\n    return []\n# end\nEND = 1\n"
PATCHED = ORIGINAL.replace("[]", "[0]")
PATCH = """\
--- a/engine/sub/nodes.py
+++ b/engine/sub/nodes.py
@@ -1,4 +1,4 @@
 def nodes():
-    return []
+    return [0]
 # end
 END = 1
--- /dev/null
+++ b/engine/new.txt
@@ -0,0 +1 @@
+new
"""

pytestmark = pytest.mark.skipif(not shutil.which("patch"), reason="the package patch is not installed")


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def series(**changes) -> release.Series:
    document = {
        "engine": "engine-1",
        "package": "engine",
        "version": "1.0",
        "patches": [{"file": "0001-x.patch", "text": PATCH}],
        "files": {
            "engine/sub/nodes.py": {"before": sha(ORIGINAL), "after": sha(PATCHED)},
            "engine/new.txt": {"before": None, "after": sha("new\n")},
        },
    } | changes
    return release.Series.from_document(document)


@pytest.fixture
def environment(tmp_path):
    root = tmp_path / "environments" / "engine-1-abc"
    (root / "engine/sub/__pycache__").mkdir(parents=True)
    (root / "engine-1.0.dist-info").mkdir()
    (root / "engine/sub/nodes.py").write_text(ORIGINAL)
    (root / "engine/sub/other.py").write_text("OTHER = 1\n")
    (root / "engine/sub/__pycache__/nodes.cpython-311.pyc").write_text("stale")
    (root / "engine/sub/__pycache__/other.cpython-311.pyc").write_text("good")
    (root / "engine/__init__.py").write_text("")
    return root


def make(environment, **changes):
    return release.make(environment, environment.parent.parent / "releases", series(**changes), sys.executable)


def test_release_has_patched_files_and_links_to_the_rest(environment):
    made = make(environment)
    assert (made / "site/engine/sub/nodes.py").read_text() == PATCHED
    assert (made / "site/engine/new.txt").read_text() == "new\n"
    assert (made / "site/engine/__init__.py").is_symlink()
    assert (made / "site/engine/sub/__pycache__/other.cpython-311.pyc").is_symlink()
    assert not (made / "site/engine/sub/__pycache__/nodes.cpython-311.pyc").is_symlink()
    assert (environment / "engine/sub/nodes.py").read_text() == ORIGINAL


def test_made_release_is_sound_and_made_once(environment):
    made = make(environment)
    assert release.faults(made, series(), whole=True) == []
    before = (made / "release.json").stat().st_mtime_ns
    assert make(environment) == made
    assert (made / "release.json").stat().st_mtime_ns == before


def test_another_series_is_another_release(environment):
    other = series(patches=[{"file": "0001-y.patch", "text": PATCH}])
    assert release.release_name("e", series()) != release.release_name("e", other)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda env: (env / "engine/sub/nodes.py").write_text(PATCHED), "is already patched"),
        (lambda env: (env / "engine/sub/nodes.py").write_text(ORIGINAL + "# mine\n"), "was edited by somebody else"),
        (lambda env: (env / "engine/sub/nodes.py").unlink(), "is missing: sha256 found none"),
        (lambda env: (env / "engine/new.txt").write_text("x"), "exists, though the series brings it new"),
        (lambda env: (env / "engine-1.0.dist-info").rename(env / "engine-0.9.dist-info"), "engine is 0.9, the patches"),
        (lambda env: (env / "engine-1.0.dist-info").rmdir(), "engine is none, the patches are for 1.0"),
    ],
)
def test_foreign_tree_is_refused_by_name(environment, damage, text):
    damage(environment)
    with pytest.raises(release.ReleaseFault, match=text):
        make(environment)
    releases = environment.parent.parent / "releases"
    assert [path.name for path in releases.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"patches": [{"file": "0009.patch", "text": PATCH.replace("return []", "return ()")}]}, "0009.patch does not"),
        ({"patches": []}, "sha256 found none, wanted"),
        ({"build": [{"command": ["false"], "output": "x.so"}]}, "false failed with 1"),
        ({"build": [{"command": ["true"], "output": "x.so"}]}, "made no x.so"),
    ],
)
def test_series_that_fails_leaves_no_release(environment, changes, text):
    with pytest.raises(release.ReleaseFault, match=text):
        make(environment, **changes)
    assert [path.name for path in (environment.parent.parent / "releases").iterdir()] == [".lock"]


def test_build_output_is_recorded_and_watched(environment):
    made = make(environment, build=[{"command": ["cp", "engine/new.txt", "engine/lib.so"], "output": "engine/lib.so"}])
    assert release.faults(made) == []
    (made / "site/engine/lib.so").write_text("bad")
    assert "engine/lib.so: edited after patching" in release.faults(made)[0]


@pytest.mark.parametrize("whole", [False, True])
def test_edit_after_patching_is_found(environment, whole):
    made = make(environment)
    (made / "site/engine/sub/nodes.py").write_text(PATCHED + "# edit\n")
    found = release.faults(made, whole=whole)
    assert len(found) == 1
    assert sha(PATCHED + "# edit\n") in found[0]
    assert sha(PATCHED) in found[0]
    with pytest.raises(release.ReleaseFault, match=f"edited after patching.*delete {made}"):
        make(environment)
    shutil.rmtree(made)
    assert make(environment) == made
    assert release.faults(made, whole=True) == []


def test_remains_of_a_killed_run_are_swept(environment):
    releases = environment.parent.parent / "releases"
    name = release.release_name(environment.name, series())
    (releases / f".{name}.abc" / "site").mkdir(parents=True)
    make(environment)
    assert sorted(path.name for path in releases.iterdir()) == [".lock", name]


def test_touched_but_equal_file_is_no_fault(environment):
    made = make(environment)
    (made / "site/engine/sub/nodes.py").touch()
    assert release.faults(made) == []


def test_environment_that_is_gone_is_a_fault(environment):
    made = make(environment)
    shutil.rmtree(environment)
    assert any("environment is gone" in fault for fault in release.faults(made))


def test_unfinished_release_is_a_fault(tmp_path):
    assert "was not finished" in release.faults(tmp_path / "absent")[0]


def test_switch_is_idempotent_and_replaces(tmp_path):
    link, first, second = tmp_path / "current", tmp_path / "r1", tmp_path / "r2"
    assert release.switch(link, first)
    assert not release.switch(link, first)
    assert release.switch(link, second)
    assert release.current(link) == "r2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current"]
