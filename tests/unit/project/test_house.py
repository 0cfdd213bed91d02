"""Promises about the project itself: documentation that loads, specs that match defaults, scenarios that test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[3]
MODULES = sorted(path.stem for path in (PROJECT / "library").glob("gb10_*.py"))
ROLES = sorted(path.name for path in (PROJECT / "roles").iterdir() if (path / "tasks").is_dir())
SCENARIOS = sorted(path.parent for path in (PROJECT / "molecule").glob("*/molecule.yml"))
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def documentation():
    result = subprocess.run(
        [str(BIN / "ansible-doc"), "--json", "-t", "module", *MODULES],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("module", MODULES)
def test_module_has_documentation_that_loads(documentation, module):
    doc = documentation[module]
    assert doc["doc"]["short_description"]
    assert doc["examples"]
    assert doc["return"]


@pytest.mark.parametrize("role", ROLES)
def test_role_options_and_defaults_have_the_same_keys(role):
    folder = PROJECT / "roles" / role
    specs = yaml.safe_load((folder / "meta" / "argument_specs.yml").read_text())["argument_specs"]
    options = {key: value for spec in specs.values() for key, value in spec.get("options", {}).items()}
    defaults_file = folder / "defaults" / "main.yml"
    defaults = yaml.safe_load(defaults_file.read_text()) if defaults_file.is_file() else {}
    assert {key for key, value in options.items() if not value.get("required") and key.startswith(role)} == set(
        defaults or {}
    )
    assert all(not value.get("required") or key not in (defaults or {}) for key, value in options.items())


# What a single run says with -e, what stands in for a GB10 or an engine in tests.
NOT_OF_AN_INVENTORY = {"engram_rows_level", "fabric_retest", "vllm_engine_rollback", "vllm_engine_verify_whole"}
NOT_OF_AN_INVENTORY |= {"vllm_rank_restart", "fabric_sysfs", "host_parity_roots", "memory_guard_unit"}
OF_NO_ROLE = {"ansible_user", "ansible_become", "profile", "gb10_profile", "fabric_subnet", "memory_budget"}


def test_the_example_inventory_lists_every_choice_with_its_default():
    defaults = {}
    for role in ROLES:
        path = PROJECT / "roles" / role / "defaults" / "main.yml"
        defaults |= yaml.safe_load(path.read_text()) or {} if path.is_file() else {}
    lines = (PROJECT / "inventory/gb10/group_vars/fleet.yml").read_text().splitlines()
    choices = [line.removeprefix("# ") for line in lines]
    listed = {key: value for line in choices if re.match(r"\w+:", line) for key, value in yaml.safe_load(line).items()}
    derived = {key for key, value in defaults.items() if "{{" in str(value)}  # from a profile or from another variable
    assert set(listed) - set(defaults) == OF_NO_ROLE
    assert set(defaults) - set(listed) - derived == NOT_OF_AN_INVENTORY
    elsewhere = {key for key, value in listed.items() if value == ["..."]}
    for key in set(listed) & set(defaults) - derived - elsewhere:
        assert listed[key] == defaults[key], key


@pytest.mark.parametrize("role", ROLES)
def test_role_tasks_stay_short(role):
    text = (PROJECT / "roles" / role / "tasks" / "main.yml").read_text()
    assert len(text.splitlines()) <= 60


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.name)
def test_scenario_has_tests_and_verifies(scenario):
    sequence = yaml.safe_load((scenario / "molecule.yml").read_text())["scenario"]["test_sequence"]
    assert {"converge", "verify"} <= set(sequence)
    tests = list((scenario / "tests").glob("test_*.py"))
    assert tests
    assert any("\ndef test_" in path.read_text() for path in tests)


def test_site_holds_nothing_but_stages():
    stages = yaml.safe_load((PROJECT / "site.yml").read_text())
    assert all("import_playbook" in stage for stage in stages)
    assert stages[0]["import_playbook"].endswith("validate.yml")
    assert stages[-1]["import_playbook"].endswith("verify.yml")
