"""Which image a digest names, the words that podman gets, and what the launcher does with both."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
from ansible.module_utils.gb10 import container, launcher, rank, release

ID, MANIFEST, INDEX = ("sha256:" + letter * 64 for letter in "abc")
# As podman 4.3 lists images, shortened: one that was pulled, one that was loaded without a name.
PULLED = {
    "Id": ID.removeprefix("sha256:"),
    "Digest": MANIFEST,
    "RepoDigests": [f"docker.io/x/vllm@{MANIFEST}", f"docker.io/x/vllm@{INDEX}"],
}
LOADED = {"Id": "d" * 64, "RepoDigests": None}


@pytest.mark.parametrize(
    ("pin", "image"),
    [
        (MANIFEST, ID),
        (INDEX, ID),
        (ID, ID),
        ("sha256:" + "d" * 64, "sha256:" + "d" * 64),
        ("sha256:" + "e" * 64, ""),
    ],
)
def test_pin_finds_an_image_by_any_of_its_digests(pin, image):
    assert container.find([PULLED, LOADED], pin) == image


@pytest.fixture
def podman(monkeypatch):
    """podman without podman: records its words; images appear when they are pulled or loaded."""
    state = SimpleNamespace(calls=[], listed=[], arriving=[PULLED])

    def call(*words):
        state.calls.append(words)
        if words[0] in ("pull", "load"):
            state.listed += state.arriving
        return json.dumps(state.listed)

    monkeypatch.setattr(container, "podman", call)
    return state


def test_pull_is_by_digest(podman):
    assert container.fetch("docker.io/x/vllm", INDEX, "") == ID
    assert podman.calls[0] == ("pull", "--quiet", f"docker.io/x/vllm@{INDEX}")


def test_archive_is_loaded_instead(podman, tmp_path):
    archive = tmp_path / "image.tar"
    archive.touch()
    assert container.fetch("docker.io/x/vllm", ID, str(archive)) == ID
    assert podman.calls[0] == ("load", "--quiet", "--input", str(archive))


def test_archive_that_is_missing_is_named(podman, tmp_path):
    with pytest.raises(container.ContainerError, match=r"gone.tar is missing: copy the archive"):
        container.fetch("docker.io/x/vllm", ID, str(tmp_path / "gone.tar"))


def test_other_image_in_the_archive_is_refused_with_both_digests(podman, tmp_path):
    archive = tmp_path / "image.tar"
    archive.touch()
    with pytest.raises(container.ContainerError) as caught:
        container.fetch("docker.io/x/vllm", "sha256:" + "e" * 64, str(archive))
    assert "e" * 64 in str(caught.value)
    assert MANIFEST in str(caught.value)


@pytest.mark.parametrize(
    ("files", "driver", "text"),
    [
        ({}, "580.95.05", "run nvidia-ctk cdi generate"),
        ({"other.yaml": "kind: x.org/y"}, "580.95.05", "no description of nvidia.com/gpu"),
        ({"nvidia.yaml": "kind: nvidia.com/gpu\nlibcuda.so.580.95.05"}, "580.95.05", None),
        (
            {"nvidia.yaml": "kind: nvidia.com/gpu\nlibcuda.so.570.1.2"},
            "580.95.05",
            "names no library of the driver 580.95.05",
        ),
    ],
)
def test_gpu_needs_a_description_of_the_present_driver(tmp_path, files, driver, text):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    version = tmp_path / "version"
    version.write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  {driver}  Release Build\n")
    found = container.gpu_faults([tmp_path], version)
    assert (found == []) if text is None else (text in found[0])


AWKWARD = ["serve", "/m", "--x", '{"a b": "c\'d", "e": "$HOME %i \\n é"}', "two words", "*", ""]


def words(**changes):
    wanted = {"command": ["/usr/bin/python3", "-m", "vllm"], "gpu": False, "read_only": ["/srv/models"]} | changes
    return container.arguments(
        wanted,
        AWKWARD,
        {"A": 'x "y" $z %i', "VLLM_API_KEY": "secret"},
        image=ID,
        user=(990, 991),
        writable=["/var/cache/x"],
    )


def test_arguments_follow_the_image_unchanged():
    given = words()
    assert given[given.index(ID) :] == [ID, "-m", "vllm", *AWKWARD]
    assert "--entrypoint=/usr/bin/python3" in given


def test_key_is_named_and_never_written():
    given = words()
    assert "--env=VLLM_API_KEY" in given
    assert not any("secret" in word for word in given)
    assert '--env=A=x "y" $z %i' in given
    assert container.own_environment({"A": "x", "VLLM_API_KEY": "secret"})["VLLM_API_KEY"] == "secret"
    assert "A" not in container.own_environment({"A": "x"})


def test_container_has_no_privileges_and_stays_in_the_unit():
    given = words()
    assert not any("privileged" in word for word in given)
    for word in ("--cap-drop=all", "--cap-add=IPC_LOCK", "--user=990:991", "--cgroups=split", "--pull=never"):
        assert word in given
    assert "--volume=/srv/models:/srv/models:ro,rslave" in given
    assert "--volume=/var/cache/x:/var/cache/x" in given


def test_devices_are_given_where_they_are_wanted(monkeypatch, tmp_path):
    monkeypatch.setattr(container, "INFINIBAND", tmp_path)
    assert f"--device={tmp_path}" in words()
    monkeypatch.setattr(container, "INFINIBAND", tmp_path / "none")
    assert not any(word.startswith("--device") for word in words())
    assert "--device=nvidia.com/gpu=all" in words(gpu=True)


# --------------------------------------------------------------------------------------------- launcher


def test_caches_of_another_release_are_never_read_and_one_of_them_stays(tmp_path):
    for age, name in enumerate(["old", "before", "r2"]):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (age, age))
    folder = launcher.cache_folder(tmp_path, "r2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "r2"]
    assert {value.split("/")[-1] for value in launcher.cache_environment(folder).values()} == {
        "r2", "vllm", "huggingface", "triton", "tilelang", "flashinfer",
    }  # fmt: skip


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Run the launcher on a release; returns what it would become (argv, environment), or its output."""
    monkeypatch.setattr(launcher, "CACHES", tmp_path / "caches")
    monkeypatch.setattr(rank, "api_key_environment", lambda _: {"VLLM_API_KEY": "secret"})
    monkeypatch.setattr(launcher.pwd, "getpwnam", lambda _: SimpleNamespace(pw_uid=os.getuid(), pw_gid=os.getgid()))
    became = {}
    monkeypatch.setattr(os, "execve", lambda _, argv, environment: became.update(argv=argv, environment=environment))

    def call(record, **running):
        folder = tmp_path / "r1"
        folder.mkdir()
        (folder / release.RECORD).write_text(json.dumps(record))
        document = {
            "release": "r1", "argv": AWKWARD, "python": "/usr/bin/python3", "python_path": ["/a", "/b"],
            "environment": {"HOME": str(tmp_path / "home"), "Q": 'a "b" %c'}, "container": None,
        }  # fmt: skip
        monkeypatch.setattr(rank, "running", lambda: document | running)
        monkeypatch.setattr(
            rank, "configuration", lambda: {"release_link": str(folder), "user": "vllm", "writable": ["/data"]}
        )
        launcher.main()
        return became

    return call


CONTAINER = {"command": ["/bin/vllm"], "gpu": False, "read_only": []}


def test_venv_becomes_the_interpreter_of_the_release(start, tmp_path):
    became = start({"series": "abc"})
    assert became["argv"] == ["/usr/bin/python3", "-m", "vllm.entrypoints.cli.main", *AWKWARD]
    environment = became["environment"]
    assert environment["PYTHONPATH"] == "/a:/b"
    assert (environment["Q"], environment["VLLM_API_KEY"]) == ('a "b" %c', "secret")
    assert environment["TRITON_CACHE_DIR"] == str(tmp_path / "caches/r1/triton")


def test_container_becomes_podman_with_the_release_image(start, tmp_path):
    became = start({"series": ID}, container=CONTAINER)
    assert became["argv"][0] == container.PODMAN
    assert became["argv"][became["argv"].index(ID) + 1 :] == AWKWARD
    assert f"--env=TRITON_CACHE_DIR={tmp_path}/caches/r1/triton" in became["argv"]
    volumes = [word for word in became["argv"] if word.startswith("--volume")]
    assert [word.split(":")[1] for word in volumes] == [f"{tmp_path}/home", f"{tmp_path}/caches/r1", "/data"]
    assert "Q" not in became["environment"]
    assert became["environment"]["VLLM_API_KEY"] == "secret"


@pytest.mark.parametrize(("series", "wanted"), [("abc", CONTAINER), (ID, None)])
def test_release_of_the_other_backend_is_refused(start, capsys, series, wanted):
    assert start({"series": series}, container=wanted) == {}
    assert "run playbooks/engine.yml" in capsys.readouterr().out
