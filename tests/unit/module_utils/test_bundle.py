"""What a bundle finds to do, and that it does it once; units are judged from recorded states."""

from __future__ import annotations

import getpass
import grp
import os
import time

import pytest
from ansible.module_utils.gb10 import bundle
from ansible.module_utils.gb10.systemd import Unit

OWNER = {"owner": getpass.getuser(), "group": grp.getgrgid(os.getgid()).gr_name}


def unit(**changes) -> Unit:
    values = {
        "name": "x.service",
        "load": "loaded",
        "active": "active",
        "sub": "running",
        "enabled": "enabled",
        "needs_reload": False,
        "main_pid": 1,
        "invocation": "i",
        "control_group": "/x",
        "result": "success",
        "exit_status": 0,
        "entered_active": time.time(),
        "entered_inactive": 0.0,
    }
    return Unit(**values | changes)


def test_file_and_directory_are_made_once(tmp_path):
    wish = {
        "directories": [{"path": str(tmp_path / "d"), "mode": "0750", **OWNER}],
        "files": [{"path": str(tmp_path / "d" / "f"), "content": "x\n", "mode": "0640", **OWNER}],
    }
    planned, _ = bundle.run(wish, check=True)
    assert planned.changed
    assert not (tmp_path / "d").exists()
    assert bundle.run(wish, check=False)[0].changed
    assert (tmp_path / "d" / "f").read_text() == "x\n"
    assert (tmp_path / "d" / "f").stat().st_mode & 0o777 == 0o640
    assert not bundle.run(wish, check=False)[0].changed


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text("y\n"),
        lambda path: path.chmod(0o600),
        lambda path: path.unlink(),
    ],
)
def test_whatever_was_spoiled_is_repaired(tmp_path, spoil):
    path = tmp_path / "f"
    wish = {"files": [{"path": str(path), "content": "x\n", **OWNER}]}
    bundle.run(wish, check=False)
    spoil(path)
    assert bundle.run(wish, check=False)[0].changed
    assert path.read_text() == "x\n"
    assert path.stat().st_mode & 0o777 == 0o644


def test_secret_stays_out_of_the_diff(tmp_path):
    wish = {"files": [{"path": str(tmp_path / "key"), "content": "sk-1\n", "secret": True, **OWNER}]}
    todo = bundle.plan(wish)
    assert todo.changed
    assert "sk-1" not in str(todo.before) + str(todo.after)


def test_brief_files_are_counted_in_the_diff(tmp_path):
    names = ["a.py", "b.py", "c.py"]
    wish = {"files": [{"path": str(tmp_path / name), "content": "x\n", "brief": True, **OWNER} for name in names]}
    (tmp_path / "b.py").write_text("old\n")
    todo = bundle.plan(wish)
    key = f"files in {tmp_path}"
    assert (todo.before, todo.after) == ({key: "2 absent\nb.py differs"}, {key: "3 as wanted"})
    bundle.run(wish, check=False)
    assert [(tmp_path / name).read_text() for name in names] == ["x\n"] * 3
    assert not bundle.plan(wish).changed


def test_states_are_shown_by_names_even_of_users_to_come(tmp_path):
    path = tmp_path / "f"
    todo = bundle.plan({"files": [{"path": str(path), "content": "x\n", "group": "gb10-no-such", "mode": "0640"}]})
    assert todo.after[str(path)] == "root:gb10-no-such 0640\nx\n"
    path.write_text("y\n")
    path.chmod(0o604)
    todo = bundle.plan({"files": [{"path": str(path), "content": "x\n", **OWNER}]})
    assert todo.before[str(path)] == f"{OWNER['owner']}:{OWNER['group']} 0604\ny\n"


def test_absent_file_is_removed(tmp_path):
    path = tmp_path / "f"
    path.write_text("x")
    wish = {"files": [{"path": str(path), "absent": True}]}
    assert bundle.run(wish, check=False)[0].changed
    assert not path.exists()
    assert not bundle.run(wish, check=False)[0].changed


def test_file_that_does_not_validate_keeps_the_old_one(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    wish = {"files": [{"path": str(path), "content": "new\n", "validate": ["grep", "-q", "old", "%s"], **OWNER}]}
    with pytest.raises(bundle.BundleError, match="grep"):
        bundle.run(wish, check=False)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_unknown_owner_is_named(tmp_path):
    wish = {"files": [{"path": str(tmp_path / "f"), "content": "x\n", "owner": "nobody-here"}]}
    with pytest.raises(bundle.BundleError, match="nobody-here"):
        bundle.run(wish, check=False)


WISH = {"name": "x.service", "enabled": True, "state": "started", "restart_on": ["/etc/hostname-gb10"]}


@pytest.mark.parametrize(
    ("wish", "found", "changed", "verbs"),
    [
        ({}, {}, set(), []),
        ({}, {"enabled": "disabled"}, set(), ["enable"]),
        ({}, {"enabled": "static"}, set(), []),
        ({"enabled": False}, {}, set(), ["disable"]),
        ({}, {"active": "inactive"}, set(), ["start"]),
        ({}, {"active": "failed"}, set(), ["start"]),
        ({}, {}, {"/etc/hostname-gb10"}, ["restart"]),
        ({"state": "stopped"}, {}, set(), ["stop"]),
        ({"state": "stopped"}, {"active": "failed"}, set(), []),
        ({"state": None}, {"active": "inactive"}, set(), []),
    ],
)
def test_unit_orders(wish, found, changed, verbs):
    steps = bundle.plan_units([WISH | wish], {"x.service": unit(**found)}, changed)
    assert [step.verb for step in steps] == verbs


def test_unit_older_than_its_configuration_is_restarted(tmp_path):
    path = tmp_path / "conf"
    path.write_text("x")
    wish = WISH | {"restart_on": [str(path)]}
    old = unit(entered_active=time.time() - 60)
    assert [step.verb for step in bundle.plan_units([wish], {"x.service": old}, set())] == ["restart"]
    young = unit(entered_active=time.time() + 1)
    assert bundle.plan_units([wish], {"x.service": young}, set()) == []
