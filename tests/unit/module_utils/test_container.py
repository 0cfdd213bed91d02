"""Which image a digest names, the words that podman gets, and what the launcher does with both."""

from __future__ import annotations

import json
import os
import subprocess
import time
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
def podman(monkeypatch, tmp_path):
    """podman without podman: records its words; images appear when they are pulled or loaded."""
    state = SimpleNamespace(calls=[], listed=[], arriving=[PULLED])

    def call(*words, **_):
        state.calls.append(words)
        if words[0] == "manifest":
            raise container.ContainerError("no such manifest")
        if words[0] in ("pull", "load"):
            state.listed += state.arriving
        return json.dumps(state.listed)

    monkeypatch.setattr(container, "podman", call)
    monkeypatch.setattr(container, "ARRIVING", tmp_path / "arriving")
    return state


def test_pull_is_by_digest(podman):
    assert container.fetch("docker.io/x/vllm", INDEX, "") == ID
    assert ("pull", "--quiet", f"docker.io/x/vllm@{INDEX}") in podman.calls


LAYERS = {"config": {"size": 10}, "layers": [{"size": 400}, {"size": 90}]}
LIST = {
    "manifests": [
        {"digest": "sha256:s390", "platform": {"architecture": "s390x"}},
        {"digest": "sha256:mine", "platform": {"architecture": "arm64"}},
    ]
}


@pytest.mark.parametrize(
    ("answers", "size"),
    [
        ({"r@pin": LAYERS}, 500),
        ({"r@pin": LIST, "r@sha256:mine": LAYERS}, 500),
        ({"r@pin": {"manifests": LIST["manifests"][:1]}}, 0),
        ({"r@pin": {"schemaVersion": 1}}, 0),
        ({}, 0),
    ],
)
def test_manifest_tells_how_much_will_come(monkeypatch, answers, size):
    def call(*words):
        if words[-1] not in answers:
            raise container.ContainerError("unauthorized")
        return json.dumps(answers[words[-1]])

    monkeypatch.setattr(container, "podman", call)
    monkeypatch.setattr(container.platform, "machine", lambda: "aarch64")
    assert container.download_bytes("r@pin") == size


def test_pull_tells_how_much_has_come_and_leaves_nothing(monkeypatch, tmp_path):
    progress, arriving, seen = tmp_path / "run" / "image.json", tmp_path / "arriving", []
    (arriving / "left").mkdir(parents=True)

    def call(*words, **environment):
        if words[0] == "manifest":
            return json.dumps(LAYERS)
        assert environment == {"TMPDIR": str(arriving)}
        assert not list(arriving.iterdir())
        for layer, size in enumerate((400, 90)):
            (arriving / "storage1").mkdir(exist_ok=True)
            (arriving / "storage1" / str(layer)).write_bytes(b"x" * size)
            time.sleep(1.2)
            seen.append(json.loads(progress.read_text()))
        return ""

    monkeypatch.setattr(container, "podman", call)
    monkeypatch.setattr(container, "ARRIVING", arriving)
    container.pull("r@pin", progress)
    assert [(one["done_bytes"], one["total_bytes"]) for one in seen] == [(400, 500), (490, 500)]
    assert not arriving.exists()
    assert not progress.exists()


def test_pull_that_fails_leaves_nothing_either(monkeypatch, tmp_path):
    def call(*words, **_):
        raise container.ContainerError("podman pull failed: connection refused")

    monkeypatch.setattr(container, "podman", call)
    monkeypatch.setattr(container, "ARRIVING", tmp_path / "arriving")
    with pytest.raises(container.ContainerError, match="connection refused"):
        container.pull("r@pin", tmp_path / "image.json")
    assert list(tmp_path.iterdir()) == []


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


def words(key_file="", **changes):
    wanted = {"command": ["/usr/bin/python3", "-m", "vllm"], "gpu": False, "read_only": ["/srv/models"]} | changes
    return container.arguments(
        wanted,
        AWKWARD,
        {"A": 'x "y" $z %i'},
        image=ID,
        user=(990, 991),
        writable=["/var/cache/x"],
        key_file=key_file,
    )


def test_arguments_follow_the_image_unchanged():
    given = words()
    assert given[given.index(ID) :] == [ID, "-m", "vllm", *AWKWARD]
    assert "--entrypoint=/usr/bin/python3" in given


def test_key_is_a_file_of_the_unit_and_no_variable_of_podman():
    given = words(key_file="/run/credentials/vllm-rank.service/api-key")
    assert "--volume=/run/credentials/vllm-rank.service/api-key:/run/gb10-api-key:ro" in given
    assert [word for word in given if word.startswith("--env")] == ['--env=A=x "y" $z %i']
    assert "--entrypoint=/bin/sh" in given
    assert given[given.index(ID) + 1 :] == ["-c", container.TAKE_KEY, "sh", "/usr/bin/python3", "-m", "vllm", *AWKWARD]


KEYS = ["plain", """q"uo'te $HOME %i \\ `id` two  words""", "clé"]


@pytest.mark.parametrize("key", KEYS)
def test_key_and_arguments_reach_the_engine_unchanged_through_the_shell(tmp_path, monkeypatch, key):
    """Runs what podman would run in the image: the entry point and the words behind the image."""
    file = tmp_path / "api-key"
    file.write_text(key + "\n")
    monkeypatch.setattr(container, "TAKE_KEY", container.TAKE_KEY.replace(container.KEY_FILE, str(file)))
    show = "import json, os, sys; print(json.dumps([os.environ['VLLM_API_KEY'], sys.argv[1:]]))"
    given = words(key_file=str(file), command=["/usr/bin/env", "python3", "-c", show])
    done = subprocess.run(["/bin/sh", *given[given.index(ID) + 1 :]], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [key, AWKWARD]


@pytest.mark.parametrize("content", [None, ""])
def test_engine_does_not_start_without_the_key_it_should_have(tmp_path, content):
    file = tmp_path / "api-key"
    if content is not None:
        file.write_text(content)
    script = container.TAKE_KEY.replace(container.KEY_FILE, str(file))
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", "/bin/echo", "started"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "started" not in done.stdout


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
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / rank.CREDENTIAL).write_text("secret\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "credentials"))
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
    assert became["argv"][became["argv"].index(ID) + 1 :] == ["-c", container.TAKE_KEY, "sh", "/bin/vllm", *AWKWARD]
    assert f"--env=TRITON_CACHE_DIR={tmp_path}/caches/r1/triton" in became["argv"]
    volumes = [word for word in became["argv"] if word.startswith("--volume")]
    assert [word.split(":")[1] for word in volumes] == [
        f"{tmp_path}/home", f"{tmp_path}/caches/r1", "/data", container.KEY_FILE
    ]  # fmt: skip
    assert became["environment"] == container.ENVIRONMENT
    assert not any("secret" in word for word in became["argv"])


def test_container_without_a_key_needs_no_shell(start, monkeypatch):
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    became = start({"series": ID}, container=CONTAINER)
    assert became["argv"][became["argv"].index(ID) + 1 :] == AWKWARD
    assert "--entrypoint=/bin/vllm" in became["argv"]


@pytest.mark.parametrize(("series", "wanted"), [("abc", CONTAINER), (ID, None)])
def test_release_of_the_other_backend_is_refused(start, capsys, series, wanted):
    assert start({"series": series}, container=wanted) == {}
    assert "run playbooks/engine.yml" in capsys.readouterr().out
