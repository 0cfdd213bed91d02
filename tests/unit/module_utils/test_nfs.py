"""Mount tables, export tables and bounded probes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import nfs

STORE = Path("/srv/models")
SOURCE = "10.10.0.11:/srv/models"
RIGHT = "10.10.0.11:/srv/models /srv/models nfs4 ro,noatime,vers=4.2,softerr,proto=tcp 0 0"
AUTOFS = "systemd-1 /srv/models autofs rw,relatime,fd=44,pgrp=1,timeout=0,direct 0 0"


def fault(*lines: str, version: str = "4.2") -> str:
    return nfs.mount_fault(nfs.layers(nfs.parse_mounts("\n".join(lines)), STORE), STORE, SOURCE, version)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([RIGHT], ""),
        ([AUTOFS, RIGHT], ""),
        ([], "nothing is mounted, wanted 10.10.0.11:/srv/models"),
        ([AUTOFS], "nothing is mounted"),
        ([RIGHT.replace("srv/models /", "srv/models-2026-08 /")], "10.10.0.11:/srv/models-2026-08 (nfs4) is mounted"),
        ([RIGHT.replace(" ro,", " rw,")], "is mounted read-write"),
        ([RIGHT, RIGHT, RIGHT], "3 mounts stacked"),
        ([RIGHT.replace("vers=4.2", "vers=3").replace("nfs4", "nfs")], "is mounted as NFS 3, wanted 4.2"),
        (["/dev/sda1 /srv/models ext4 ro 0 0"], "/dev/sda1 (ext4) is mounted"),
        ([RIGHT.replace("/srv/models nfs4", "/srv/models/more nfs4")], "nothing is mounted"),
    ],
)
def test_live_mount_is_judged(lines, text):
    found = fault(*lines)
    assert (text in found) if text else found == ""


def test_version_3_on_demand():
    assert fault(RIGHT.replace("vers=4.2", "vers=3").replace("nfs4", "nfs"), version="3") == ""


@pytest.mark.parametrize(
    ("wanted", "missing"),
    [
        (["ro", "vers=4.2", "softerr", "noatime", "timeo=20", "retrans=1", "_netdev"], ""),
        (["softerr", "timeo=30", "nconnect=4"], "timeo=30,nconnect=4"),
        (["rdma", "port=20049", "hard"], "hard,proto=rdma"),
    ],
)
def test_options_that_the_live_mount_lacks_are_named(wanted, missing):
    (live,) = nfs.parse_mounts(RIGHT.replace("softerr", "softerr,timeo=20,retrans=1"))
    assert nfs.options_fault(live, wanted) == (f"{STORE}: {SOURCE} is mounted without {missing}" if missing else "")


MOUNTED = """\
/dev/root / ext4 rw,relatime 0 0
systemd-1 /srv/models autofs rw,relatime,fd=44,direct 0 0
10.10.0.11:/srv/models /srv/models nfs4 ro,softerr 0 0
10.10.0.11:/home /home nfs rw 0 0
/dev/nvme1n1 /home/cache ext4 rw 0 0
host /opt/gb10/environments hostfs ro 0 0
me@10.10.0.11:/data /mnt/data fuse.sshfs rw 0 0
/dev/sdb1 /mnt/stick fuseblk rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("/var/cache/gb10/vllm/triton", None),
        ("/srv/models", "10.10.0.11:/srv/models"),
        ("/srv/models/m/config.json", "10.10.0.11:/srv/models"),
        ("/srv/models2", None),
        ("/home/user/.cache", "10.10.0.11:/home"),
        ("/home/cache/triton", None),
        ("/opt/gb10/environments/x", None),
        ("/mnt/data/cache", "me@10.10.0.11:/data"),
        ("/mnt/stick", None),
    ],
)
def test_what_is_not_a_disk_of_the_host_is_told_apart(path, source):
    mount = nfs.network_mount(Path(path), nfs.parse_mounts(MOUNTED))
    assert (mount.source if mount else None) == source


def test_a_cache_on_the_network_is_named_also_behind_a_link(tmp_path):
    (tmp_path / "link").symlink_to("/srv/models/cache")
    caches = {"TRITON_CACHE_DIR": "/var/cache/triton", "HOME": "/home/vllm", "HF_HOME": str(tmp_path / "link")}
    hf, home = nfs.shared_path_faults(caches, nfs.parse_mounts(MOUNTED))
    assert home == "HOME is /home/vllm, on 10.10.0.11:/home (nfs): choose a directory on this host's disk"
    assert "HF_HOME is " in hf
    assert "on 10.10.0.11:/srv/models (nfs4)" in hf


def test_octal_escapes_of_a_path():
    assert nfs.parse_mounts(r"h:/a\040b /mnt/c\011d nfs ro 0 0")[0] == nfs.Mount(
        "h:/a b", "/mnt/c\td", "nfs", frozenset({"ro"})
    )


def test_etab_is_read():
    text = "/srv/models\t198.18.1.0/24(ro,sync,wdelay,root_squash,no_subtree_check,sec=sys,secure)\n"
    exports = nfs.parse_etab(text)
    assert {"ro", "root_squash"} <= exports["/srv/models", "198.18.1.0/24"]


def test_probe_that_answers():
    assert nfs.bounded(lambda: None, 5) == nfs.Probe()


def test_probe_of_a_missing_file_names_it(tmp_path):
    assert nfs.bounded(nfs.read_one_byte(tmp_path / "gone"), 5).fault == f"No such file or directory: {tmp_path}/gone"


def test_probe_that_never_returns_is_given_up():
    started = time.monotonic()
    probe = nfs.bounded(lambda: time.sleep(60), 0.3)
    assert probe.silent
    assert time.monotonic() - started < 5


def test_stale_handle_is_told_apart():
    def stale() -> None:
        raise OSError(116, os.strerror(116), "/srv/models")

    assert nfs.bounded(stale, 5).stale


def test_probe_leaves_no_child(tmp_path, monkeypatch):
    fork, children = os.fork, []

    def recorded() -> int:
        pid = fork()
        if pid:
            children.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", recorded)
    nfs.bounded(nfs.read_one_byte(tmp_path), 5)
    assert children
    for child in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "store" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "shard").write_text("x")
    return folder


def test_folder_that_lets_nobody_in_is_named(checkpoint):
    checkpoint.parent.chmod(0o750)
    assert any(f"chmod o+x {checkpoint.parent}" in fault for fault in nfs.search_faults(checkpoint))


# A host: its mount table, what systemd mounts when asked, and whether the server answers.


class FakeHost:
    """Stands in for mount, umount, systemctl and the server."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table, self.lines = tmp_path / "mounts", [AUTOFS]
        self.answer, self.orders = nfs.Probe(), []
        self.write()
        monkeypatch.setattr(nfs, "MOUNTS", self.table)
        monkeypatch.setattr(nfs, "bounded", lambda action, timeout: self.answer)
        monkeypatch.setattr(nfs, "_run", self.run)
        monkeypatch.setattr(nfs, "systemctl", self.systemctl)

    def write(self) -> None:
        self.table.write_text("\n".join(self.lines) + "\n")

    def run(self, *command: str) -> None:
        self.orders.append(" ".join(command))
        self.lines.pop()
        self.write()

    def systemctl(self, *arguments: str, timeout: float = 60) -> None:
        if arguments[0] == "restart":
            self.orders.append(" ".join(arguments))
            self.answer = nfs.Probe()
            self.lines.append(RIGHT)
            self.write()

    def attach(self, *, in_use: bool = False, check: bool = False) -> nfs.Outcome:
        self.write()
        options = ["ro", "softerr"]
        return nfs.attach(
            STORE, SOURCE, "4.2", "srv-models", "m/config.json", options, timeout=10, in_use=in_use, check=check
        )


@pytest.fixture
def host(tmp_path, monkeypatch):
    return FakeHost(tmp_path, monkeypatch)


OTHER = RIGHT.replace("srv/models /", "srv/models-2026-08 /").replace(" ro,", " rw,")
STALE = nfs.Probe(fault="Stale file handle: /srv/models", stale=True)
UMOUNT, RESTART = "umount -l /srv/models", "restart srv-models.automount"
REPAIRS = {
    "another export": ([AUTOFS, OTHER], nfs.Probe(), [UMOUNT, RESTART], "10.10.0.11:/srv/models-2026-08 (nfs4)"),
    "three layers": ([AUTOFS, RIGHT, RIGHT, RIGHT], nfs.Probe(), [UMOUNT] * 3 + [RESTART], "3 mounts stacked"),
    "nothing": ([], nfs.Probe(), [RESTART], "nothing is mounted"),
    "stale": ([AUTOFS, RIGHT], STALE, [UMOUNT, RESTART], "Stale file handle"),
    "options": ([AUTOFS, RIGHT.replace("softerr", "hard")], nfs.Probe(), [UMOUNT, RESTART], "mounted without softerr"),
}


@pytest.mark.parametrize(("lines", "answer", "orders", "reason"), REPAIRS.values(), ids=REPAIRS)
def test_a_wrong_mount_is_replaced_by_exactly_one_right_one(host, lines, answer, orders, reason):
    host.lines, host.answer = list(lines), answer
    assert reason in host.attach(check=True).repaired[0]
    assert host.orders == []
    outcome = host.attach()
    assert (len(outcome.repaired), outcome.faults, host.orders) == (1, [], orders)
    assert [line for line in host.lines if line != AUTOFS] == [RIGHT]
    assert host.attach() == nfs.Outcome()


@pytest.mark.parametrize("name", ["another export", "three layers", "nothing", "stale"])
def test_a_wrong_mount_below_a_running_rank_stays_and_is_told(host, name):
    host.lines, host.answer = list(REPAIRS[name][0]), REPAIRS[name][1]
    outcome = host.attach(in_use=True)
    assert (outcome.repaired, host.orders) == ([], [])
    assert "the rank is running, so the mount stays: stop the group first" in outcome.faults[0]


def test_other_options_are_no_reason_to_end_a_rank(host):
    host.lines = list(REPAIRS["options"][0])
    assert host.attach(in_use=True) == nfs.Outcome()


def test_a_server_that_is_away_is_told_and_its_mount_left_alone(host):
    host.lines, host.answer = [AUTOFS, RIGHT], nfs.Probe(fault="no answer in 10 s", silent=True)
    outcome = host.attach()
    assert outcome.faults == [
        "/srv/models from 10.10.0.11:/srv/models gives no answer in 10 s: start the export on 10.10.0.11, then retry"
    ]
    assert host.orders == []
