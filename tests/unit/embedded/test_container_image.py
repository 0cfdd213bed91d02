"""The archive that the hosts load: an OCI image whose digest depends on its content alone."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from embedded import container_image

HASHED_AND_NEVER_CHECKED = 1  # PEP 552


def blobs(path):
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


def tree(folder, age):
    (folder / "usr").mkdir(parents=True)
    (folder / "usr/python3").write_text("x")
    (folder / "usr/python").symlink_to("python3")
    os.mkfifo(folder / "usr/pipe")
    os.utime(folder / "usr/python3", (age, age))
    return folder


def test_archive_is_an_image_that_names_its_layer(tmp_path):
    layer = container_image._layer(tree(tmp_path / "a", 1))
    digest = container_image.write_archive(layer, ["A=1"], tmp_path / "image.tar")
    found = blobs(tmp_path / "image.tar")
    manifest = json.loads(found[f"blobs/{digest.replace(':', '/')}"])
    config = json.loads(found[f"blobs/{manifest['config']['digest'].replace(':', '/')}"])
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    assert config["config"]["Env"] == ["A=1"]
    assert json.loads(found["index.json"])["manifests"][0]["digest"] == digest
    for name, content in found.items():
        if name.startswith("blobs/"):
            assert name.rpartition("/")[2] == hashlib.sha256(content).hexdigest()


def test_layer_depends_on_content_alone_and_holds_no_devices(tmp_path):
    first, second = (container_image._layer(tree(tmp_path / name, age)) for name, age in (("a", 1), ("b", 1_000)))
    assert first == second
    with tarfile.open(fileobj=io.BytesIO(first)) as layer:
        assert sorted(layer.getnames()) == ["usr", "usr/python", "usr/python3"]


@pytest.mark.skipif(not shutil.which("patch"), reason="the package patch is not installed")
def test_no_import_of_the_engine_compiles(tmp_path, monkeypatch):
    monkeypatch.setattr(container_image, "ENVIRONMENTS", tmp_path)
    engine, compiled = tmp_path / "engine-abc", f"cpython-{sys.version_info.major}{sys.version_info.minor}.pyc"
    (engine / "engine-1.dist-info").mkdir(parents=True)
    (engine / "engine/__pycache__").mkdir(parents=True)
    texts = {"patched": "A = 1\n", "other": "B = 1\n"}
    for name, text in texts.items():
        (engine / f"engine/{name}.py").write_text(text)
        (engine / f"engine/__pycache__/{name}.{compiled}").write_text("of the environment")
    before, after = (hashlib.sha256(text.encode()).hexdigest() for text in ("A = 1\n", "A = 2\n"))
    series = container_image.release.Series.from_document(
        {
            "engine": "engine",
            "package": "engine",
            "version": "1",
            "files": {"engine/patched.py": {"before": before, "after": after}},
            "patches": [
                {
                    "file": "1.patch",
                    "text": "--- a/engine/patched.py\n+++ b/engine/patched.py\n@@ -1 +1 @@\n-A = 1\n+A = 2\n",
                }
            ],
        }
    )
    container_image._place_site(engine, series, tmp_path / "tree")
    folder = tmp_path / "tree" / container_image.SITE.lstrip("/") / "engine/__pycache__"
    patched = (folder / f"patched.{compiled}").read_bytes()
    assert int.from_bytes(patched[4:8], "little") == HASHED_AND_NEVER_CHECKED
    assert str(tmp_path).encode() not in patched
    wanted = Path(container_image.GUEST_ENVIRONMENTS) / f"engine-abc/engine/__pycache__/other.{compiled}"
    assert (folder / f"other.{compiled}").readlink() == wanted
