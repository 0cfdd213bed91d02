"""Each backend that a profile may name has a role, and playbooks/engine.yml takes it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.gb10 import profile

PROJECT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("backend", profile.BACKENDS)
def test_backend_has_a_role(backend):
    task = yaml.safe_load((PROJECT / "playbooks/engine.yml").read_text())[0]["tasks"][0]
    roles = ast.literal_eval(re.search(r"{'.*?}", task["ansible.builtin.include_role"]["name"]).group())
    assert set(roles) == set(profile.BACKENDS)
    assert (PROJECT / "roles" / roles[backend] / "tasks" / "main.yml").is_file()
