"""The exact argv and environment of every rank of the DeepSeek profiles, as roles/vllm_rank renders them.

tests/fixtures/golden/PROFILE.json holds them for the hosts of inventory/gb10 with the role's defaults. The master port
and the fabric's variables are not in them: they belong to a launch, and to each host at its start. After a change that
is meant, write the files anew, read the difference line by line, and commit it with the reason:

    GB10_GOLDEN=write .venv/bin/pytest tests/unit/profiles/test_golden.py && git diff tests/fixtures/golden
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import filter_loader, init_plugin_loader
from ansible.template import Templar
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager

PROJECT = Path(__file__).resolve().parents[3]
GOLDEN = PROJECT / "tests" / "fixtures" / "golden"
ROLE = PROJECT / "roles" / "vllm_rank"
PROFILES = sorted(path.stem for path in (PROJECT / "profiles").glob("deepseek-*.yml"))


@pytest.fixture(scope="module")
def render():
    """Profile -> {host: {argv, environment}}, through the role's own variables, as a play would have them."""
    init_plugin_loader()
    filter_loader.add_directory(str(PROJECT / "filter_plugins"))
    loader = DataLoader()
    inventory = InventoryManager(loader, sources=[str(PROJECT / "inventory" / "gb10")])
    manager = VariableManager(loader, inventory)
    hostvars = HostVars(inventory, manager, loader)
    files = [str(ROLE / part / "main.yml") for part in ("defaults", "vars")]
    role = [loader.load_from_file(path, trusted_as_template=True) for path in files]

    def call(profile: str) -> dict[str, dict[str, object]]:
        documents = {}
        for host in inventory.get_hosts("fleet"):
            variables = role[0] | manager.get_vars(host=host) | role[1] | {"hostvars": hostvars, "profile": profile}
            document = Templar(loader, variables=variables).template(variables["_vllm_rank_document"])
            if document["rank"] < document["world_size"]:
                documents[str(host)] = {key: document[key] for key in ("argv", "environment")}
        # Through JSON, as on the host, where Ansible's tagged values are gone.
        return json.loads(json.dumps(documents))

    return call


@pytest.mark.parametrize("profile", PROFILES)
def test_every_rank_gets_exactly_this(render, profile):
    path, found = GOLDEN / f"{profile}.json", render(profile)
    if os.environ.get("GB10_GOLDEN") == "write":
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    wanted = json.loads(path.read_text(encoding="utf-8"))
    assert json.dumps(found) == json.dumps(wanted)  # in this order, too


def test_no_golden_file_is_left_of_a_profile_that_is_gone():
    assert sorted(path.stem for path in GOLDEN.glob("*.json")) == PROFILES


@pytest.mark.parametrize("profile", PROFILES)
def test_ranks_differ_in_nothing_but_what_a_rank_is(profile):
    ranks = list(json.loads((GOLDEN / f"{profile}.json").read_text(encoding="utf-8")).values())
    head = ranks[0]["argv"]
    own = head.index("--host")
    assert head[own : own + 4] == ["--host", "127.0.0.1", "--port", "8000"]
    for number, rank in enumerate(ranks):
        assert rank["environment"] == ranks[0]["environment"]
        assert rank["argv"][rank["argv"].index("--node-rank") + 1] == str(number)
        if number:
            assert rank["argv"].count("--headless") == 1
            shared = [*rank["argv"][:own], *head[own : own + 4], *rank["argv"][own + 1 :]]
            shared[shared.index("--node-rank") + 1] = "0"
            assert shared == head
