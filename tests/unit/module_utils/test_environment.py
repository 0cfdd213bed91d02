"""Environments of locked wheels: identity, completeness, what pip is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import environment
from ansible.module_utils.gb10.environment import Engine, EnvironmentFault

ENGINE = Engine("engine-1", "3.11", "x86_64", "six==1.16.0 --hash=sha256:00\n")


@pytest.mark.parametrize(
    "changes", [("engine-2", "3.11", "x86_64"), ("engine-1", "3.12", "x86_64"), ("engine-1", "3.11", "aarch64")]
)
def test_identity_follows_what_is_installed(changes):
    assert Engine(*changes, ENGINE.lock).identity != ENGINE.identity


def test_identity_follows_the_lock():
    assert Engine("engine-1", "3.11", "x86_64", "six==1.17.0\n").identity != ENGINE.identity


def test_pip_takes_locked_wheels_for_the_hosts_only(tmp_path):
    command = environment.pip_command(Engine("e", "3.12", "aarch64", ""), tmp_path / "r.txt", tmp_path)
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(command)
    assert command[command.index("--python-version") + 1] == "3.12"
    assert "manylinux_2_28_aarch64" in command
    assert not any("x86_64" in word for word in command)


@pytest.fixture
def installed(monkeypatch):
    """Stand in for the network: what pip would unpack is written by hand; everything around it is real."""

    def unpack(command: list[str]) -> None:
        folder = Path(command[command.index("--target") + 1]) / "six-1.16.0.dist-info"
        folder.mkdir()
        (folder / "RECORD").write_text("six.py,sha256=abc,10\n../bin/six,sha256=def,5\n")

    monkeypatch.setattr(environment, "_pip", unpack)


def test_installed_once_and_recorded_last(tmp_path, installed):
    assert environment.read(tmp_path, ENGINE) is None
    assert environment.install(tmp_path, ENGINE)
    record = environment.read(tmp_path, ENGINE)
    assert record["identity"] == ENGINE.identity
    assert record["distributions"] == 1
    assert not environment.install(tmp_path, ENGINE)


def test_remains_of_a_killed_install_do_not_count(tmp_path, installed):
    (tmp_path / ENGINE.identity).mkdir()
    (tmp_path / f".partial-{ENGINE.identity}").mkdir()
    (tmp_path / f".partial-{ENGINE.identity}" / "half").write_text("x")
    assert environment.read(tmp_path, ENGINE) is None
    assert environment.install(tmp_path, ENGINE)
    assert not (tmp_path / ENGINE.identity / "half").exists()


def test_failed_install_leaves_no_environment(tmp_path, monkeypatch):
    def refuse(command: list[str]) -> None:
        raise EnvironmentFault("no such wheel")

    monkeypatch.setattr(environment, "_pip", refuse)
    with pytest.raises(EnvironmentFault):
        environment.install(tmp_path, ENGINE)
    assert environment.read(tmp_path, ENGINE) is None


def test_digest_ignores_scripts_and_order(tmp_path):
    digests = []
    for name, rows in (
        ("a", "x.py,sha256=1,1\ny.py,sha256=2,2\nbin/x,sha256=3,3\n"),
        ("b", "y.py,sha256=2,2\nx.py,sha256=1,1\n"),
    ):
        (tmp_path / name / "x-1.dist-info").mkdir(parents=True)
        (tmp_path / name / "x-1.dist-info" / "RECORD").write_text(rows)
        digests.append(environment.record_digest(tmp_path / name))
    assert digests[0] == digests[1]


def test_pip_failure_names_the_wheel(monkeypatch):
    script = ["sh", "-c", "echo 'ERROR: No matching distribution found for six==1.16.0' >&2; exit 1"]
    with pytest.raises(EnvironmentFault, match="No matching distribution found for six"):
        environment._pip(script)


def test_missing_torch_is_looked_for_on_pytorchs_index_and_explained():
    script = ["sh", "-c", "echo 'ERROR: No matching distribution found for torch==2.13.0+cpu' >&2; exit 1"]
    with pytest.raises(EnvironmentFault, match=r"download\.pytorch\.org.*PIP_FIND_LINKS"):
        environment._pip(script)


# ------------------------------------------------------------- one host packs, the others unpack


@pytest.fixture
def packed(tmp_path, installed):
    """An installed environment and its archive: (archive, sha256)."""
    environment.install(tmp_path / "built", ENGINE)
    archive = tmp_path / "store" / f"{ENGINE.identity}.tar"
    return archive, environment.pack(tmp_path / "built", ENGINE, archive)


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_other_hosts_get_the_same_files(tmp_path, packed):
    archive, digest = packed
    assert environment.unpack(tmp_path / "host", ENGINE, archive, digest, tmp_path / "progress.json")
    assert tree(tmp_path / "host" / ENGINE.identity) == tree(tmp_path / "built" / ENGINE.identity)
    assert json.loads((tmp_path / "progress.json").read_text())["done_bytes"] == archive.stat().st_size
    archive.unlink()
    assert not environment.unpack(tmp_path / "host", ENGINE, archive, digest)


def test_packed_once(tmp_path, packed):
    archive, digest = packed
    before = archive.stat().st_mtime_ns
    assert environment.pack(tmp_path / "built", ENGINE, archive) == digest
    assert archive.stat().st_mtime_ns == before
    archive.write_bytes(archive.read_bytes()[:-512])  # as a full disk leaves it
    assert environment.pack(tmp_path / "built", ENGINE, archive) == digest


def test_only_a_complete_environment_is_packed(tmp_path):
    with pytest.raises(EnvironmentFault, match="is not complete"):
        environment.pack(tmp_path, ENGINE, tmp_path / "x.tar")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda archive: archive.unlink(), "is missing"),
        (lambda archive: archive.write_bytes(b"x" * 20000), "unpacking .* failed"),
        (lambda archive: archive.write_bytes(archive.read_bytes()[:700]), "wanted"),
        (lambda archive: archive.write_bytes(archive.read_bytes().replace(b"abc", b"abd")), "wanted"),
    ],
)
def test_damaged_archive_leaves_nothing(tmp_path, packed, damage, said):
    archive, digest = packed
    damage(archive)
    with pytest.raises(EnvironmentFault, match=said):
        environment.unpack(tmp_path / "host", ENGINE, archive, digest)
    assert environment.read(tmp_path / "host", ENGINE) is None


def test_archive_of_another_engine_is_refused(tmp_path, packed):
    archive, digest = packed
    other = Engine("engine-2", "3.11", "x86_64", ENGINE.lock)
    with pytest.raises(EnvironmentFault, match="holds no whole engine-2"):
        environment.unpack(tmp_path / "host", other, archive, digest)
