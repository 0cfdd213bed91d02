"""The archive that the hosts load: an OCI image whose digest depends on its content alone."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile

from embedded import container_image


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
