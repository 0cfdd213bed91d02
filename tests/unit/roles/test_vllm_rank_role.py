"""What the role does on which host, in which order: run by Ansible with modules that only write down their calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3]
PLAYBOOK = Path(sys.executable).parent / "ansible-playbook"

# Stands for gb10_bundle, gb10_rank and gb10_rank_info: appends its call, answers what the scenario says for its host.
MODULE = """#!/usr/bin/python
import json, os, time
from ansible.module_utils.basic import AnsibleModule, _load_params
params = _load_params()
module = AnsibleModule(argument_spec={key: {"type": "raw"} for key in params if not key.startswith("_ansible")},
                       supports_check_mode=True)
host, scenario = os.environ["GB10_HOST"], json.loads(open(os.environ["GB10_SCENARIO"]).read())
wanted = "ask" if module.params.get("completion") else module.params.get("state") or "read"
wanted = "wait" if module.params.get("wait") else wanted
with open(os.environ["GB10_CALLS"], "a") as calls:
    calls.write(json.dumps([host, wanted, module.params.get("evidence") or ""]) + "\\n")
started = os.path.exists(os.environ["GB10_CALLS"] + ".started." + host)
if wanted == "started":
    open(os.environ["GB10_CALLS"] + ".started." + host, "w").close()
state = dict(scenario["state"])
state.update(scenario["after" if started else "before"].get(host, {}))
if wanted == "wait" and state["active"] and host != "one":
    time.sleep(2)
text = "abc" if wanted == "ask" and state["active"] else ""
module.exit_json(changed=wanted in ("started", "stopped"), rank=state, completion={"text": text, "fault": ""},
                 launch={"launch_id": "l2", "master_port": 21000}, evidence="/evidence/now", phases={"ready": 90.0},
                 checkpoint_fault="", mount="local")
"""
# Stands for the package on the hosts, which saves evidence and ends a rank at once.
EVIDENCE = """
import json, pathlib, sys
order = json.load(sys.stdin)
with open({calls!r}, "a") as calls:
    calls.write(json.dumps([pathlib.Path(__file__).parents[1].name, "ended", order["evidence"]]) + "\\n")
print(json.dumps({{"evidence": "/evidence/now", "stay": ""}}))
"""
STATE = {
    "active": True,
    "unit": "active",
    "unit_result": "success",
    "exit_status": 0,
    "rank": 1,
    "phase": "serving",
    "phase_order": 7,
    "phase_name": "serving",
    "phase_percent": 0,
    "age": 1.0,
    "typical": {},
    "launch_id": "l1",
    "cause": "",
    "last_lines": [],
    "release": "r1",
    "release_faults": [],
    "drift": "",
    "needs_reload": False,
    "log_missing": [],
    "process": {"unknown": ""},
}
DOWN = {"active": False, "unit": "inactive", "phase": "down", "launch_id": ""}
STARTED = {host: {"launch_id": "l2"} for host in ("one", "two")}


@pytest.fixture
def play(tmp_path):
    """Run a playbook on two hosts in SCENARIO; exit status, output and calls."""
    library = tmp_path / "library"
    library.mkdir()
    for name in ("gb10_bundle", "gb10_rank", "gb10_rank_info"):
        (library / f"{name}.py").write_text(MODULE)
    for host in ("one", "two"):
        package = tmp_path / "hosts" / host / "gb10"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "evidence.py").write_text(EVIDENCE.format(calls=str(tmp_path / "calls")))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "systemctl").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "systemctl").chmod(0o755)
    hosts = "".join(
        f"{name} ansible_connection=local ansible_python_interpreter={sys.executable} rank={number} "
        f"fabric_address=192.0.2.{11 + number}\n"
        for number, name in enumerate(("one", "two"))
    )
    (tmp_path / "inventory").write_text(
        f"{hosts}[head]\none\n[workers]\ntwo\n[fleet:children]\nhead\nworkers\n[all:vars]\nprofile=tiny-cpu-tp2\n"
        "gb10_profile={{ profile | gb10_profile }}\nfabric_subnet=192.0.2.0/24\n"
    )
    (tmp_path / "play.yml").write_text(
        "- hosts: fleet\n  gather_facts: false\n  any_errors_fatal: true\n"
        "  environment: {GB10_HOST: '{{ inventory_hostname }}'}\n  tasks:\n"
        "    - ansible.builtin.import_role: {name: vllm_rank}\n"
    )

    def run(before, after):
        (tmp_path / "scenario.json").write_text(json.dumps({"state": STATE, "before": before, "after": after}))
        environment = os.environ | {
            "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"),
            "ANSIBLE_LIBRARY": str(library),
            "ANSIBLE_ROLES_PATH": str(PROJECT / "roles"),
            "ANSIBLE_NOCOLOR": "1",
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "GB10_SCENARIO": str(tmp_path / "scenario.json"),
            "GB10_CALLS": str(tmp_path / "calls"),
        }
        command = [str(PLAYBOOK), "-i", str(tmp_path / "inventory"), str(tmp_path / "play.yml")]
        installed = str(tmp_path / "hosts" / "{{ inventory_hostname }}")
        extra = ["-e", json.dumps({"vllm_rank_poll": 5, "_vllm_rank_library": installed})]
        done = subprocess.run([*command, *extra], env=environment, capture_output=True, text=True, check=False)
        calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
        return done, [call for call in calls if call[1] not in ("read", "wait")]

    return run


def test_served_model_costs_one_question_to_the_head_and_nothing_else(play):
    done, calls = play({}, {})
    assert done.returncode == 0, done.stdout
    assert calls == [["one", "ask", ""]]


def test_head_is_not_asked_where_a_rank_is_dead(play):
    done, calls = play({"two": DOWN}, STARTED)
    assert done.returncode == 0, done.stdout
    # Everything is stopped, the head first; then the worker starts, then the head, and only then is the head asked.
    assert [call[:2] for call in calls][:5] == [
        ["one", "stopped"],
        ["two", "stopped"],
        ["two", "started"],
        ["one", "started"],
        ["one", "ask"],
    ]
    assert sorted(call[:2] for call in calls[5:]) == [["one", "ready"], ["two", "ready"]]
    assert "two: ready after 90 s" in done.stdout


def test_rank_that_dies_while_it_loads_stops_all_with_evidence(play):
    dead = {"active": False, "unit": "failed", "unit_result": "signal", "exit_status": 9}
    dead |= {"cause": "somebody killed the rank", "last_lines": ["the last line"], "launch_id": ""}
    loading = {"launch_id": "l2", "phase": "loading", "phase_name": "loading"}
    done, calls = play({"one": DOWN, "two": DOWN}, {"one": loading, "two": dead})
    assert done.returncode != 0
    stops = {call[0]: call[2] for call in calls if call[1] == "ended"}
    assert set(stops) == {"one", "two"}
    assert "the last line" in stops["two"]
    assert "given up because of two\nrank 1 ended" in stops["one"]
    for text in ("likely cause  somebody killed the rank", "last lines    the last line", "two /evidence/now"):
        assert (done.stdout + done.stderr).count(text) == 1
    assert "fatal: [one]" not in done.stdout + done.stderr
    assert not [call for call in calls if call[1] in ("ask", "ready")]
