"""gb10_container_image through main(): first, again, another digest, check mode, no podman."""

from __future__ import annotations

import json

import gb10_container_image
import pytest
from ansible.module_utils.gb10 import container
from ansible.module_utils.testing import patch_module_args

OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64


@pytest.fixture
def host(tmp_path, monkeypatch, capsys):
    """A host with one image; pulls bring the one asked for."""
    listed, pulled = [{"Id": OLD.removeprefix("sha256:")}], []

    def podman(*words, **_):
        if words[0] == "manifest":
            return "{}"
        if words[0] == "pull":
            pulled.append(words[-1])
            listed.append({"Id": words[-1].rpartition("@sha256:")[2]})
        return json.dumps(listed)

    monkeypatch.setattr(container, "podman", podman)
    monkeypatch.setattr(container, "ARRIVING", tmp_path / "arriving")

    def call(digest, **changes):
        options = {
            "image": "docker.io/x/vllm",
            "digest": digest,
            "gpu": False,
            "releases": str(tmp_path / "releases"),
            "link": str(tmp_path / "current"),
            "progress": str(tmp_path / "progress.json"),
        }
        with patch_module_args(options | changes), pytest.raises(SystemExit):
            gb10_container_image.main()
        result = json.loads(capsys.readouterr().out)
        return result | {"pulled": list(pulled), "link": (tmp_path / "current").is_symlink()}

    return call


def test_image_that_is_there_becomes_the_release_and_stays(host):
    first = host(OLD)
    assert (first["changed"], first["image_id"], first["release"]) == (True, OLD, "vllm-image-aaaaaaaaaaaa")
    assert first["pulled"] == []
    assert host(OLD)["changed"] is False


def test_another_digest_is_pulled_once_and_the_way_back_needs_no_pull(host):
    host(OLD)
    assert host(NEW)["pulled"] == [f"docker.io/x/vllm@{NEW}"]
    back = host(OLD)
    assert (back["changed"], back["previous"], len(back["pulled"])) == (True, "vllm-image-bbbbbbbbbbbb", 1)


def test_check_mode_tells_and_touches_nothing(host):
    result = host(NEW, _ansible_check_mode=True)
    assert (result["changed"], result["image_id"], result["pulled"], result["link"]) == (True, "", [], False)


def test_missing_pin_and_missing_gpu_come_together(host, monkeypatch):
    monkeypatch.setattr(container, "CDI_FOLDERS", ())
    result = host("", gpu=True)
    assert result["failed"]
    assert "set vllm_image_digest" in result["msg"]
    assert "no description of nvidia.com/gpu" in result["msg"]
