"""What the user of a service can read and write, on real files with a real second user."""

from __future__ import annotations

import os

import pytest
from ansible.module_utils.gb10 import access

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def tree(tmp_path):
    """A checkpoint and a cache that everybody may use, below folders that everybody may enter."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model-00001-of-00001.safetensors", "manifest.json"):
        (tmp_path / "model" / name).write_text("x")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    return tmp_path


def faults(tree):
    return access.faults(
        "nobody", sorted((tree / "model").iterdir()), [tree / "cache", tree / "cache" / "new" / "triton"]
    )


@needs_root
def test_usable_files_have_no_fault_and_nothing_is_left(tree):
    assert faults(tree) == []
    assert list((tree / "cache").iterdir()) == []


@needs_root
def test_roots_cache_directory_is_refused_with_the_command(tree):
    (tree / "cache").chmod(0o755)
    cache = tree / "cache"
    assert faults(tree) == [f"{cache} (root:root 0755): user nobody cannot write in it: chown nobody: {cache}"]


@needs_root
@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "manifest.json"])
def test_file_that_only_root_reads_is_refused(tree, name):
    path = tree / "model" / name
    path.chmod(0o600)
    assert faults(tree) == [f"{path} (root:root 0600): user nobody cannot read it: chmod o+r {path}"]


@needs_root
def test_roots_groups_do_not_help(tree):
    path = tree / "model" / "config.json"
    path.chmod(0o640)
    assert len(faults(tree)) == 1


@needs_root
def test_folder_without_search_permission_is_named(tree):
    (tree / "model").chmod(0o744)
    found = access.faults("nobody", [tree / "model" / "config.json"], [])
    assert found == [
        f"{tree / 'model' / 'config.json'}: user nobody may not enter {tree / 'model'} (root:root 0744): "
        f"chmod o+x {tree / 'model'}"
    ]


@needs_root
def test_many_files_are_counted(tree):
    for number in range(20):
        (tree / "model" / f"shard-{number:02}").write_text("x")
    for path in (tree / "model").iterdir():
        path.chmod(0o600)
    assert faults(tree)[access.SHOWN :] == ["and 18 more files that user nobody cannot use"]


def test_missing_file_is_a_fault(tree):
    user = "nobody" if os.geteuid() == 0 else os.environ["USER"]
    assert access.faults(user, [tree / "model" / "gone"], []) == [f"{tree / 'model' / 'gone'} is missing"]


def test_unknown_user_is_no_proof():
    with pytest.raises(access.AccessError, match="does not exist"):
        access.faults("no-such-user", [], [])
