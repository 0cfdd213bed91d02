"""Wrong inventories through the front door: ansible-playbook refuses them before any host is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[3]
EXAMPLE = PROJECT / "inventory" / "gb10"


@pytest.fixture
def inventory(tmp_path):
    """The example inventory of a real fleet, as data and as a folder that can be spoiled."""
    folder = tmp_path / "fleet"
    (folder / "group_vars").mkdir(parents=True)
    (folder / "group_vars" / "fleet.yml").write_text((EXAMPLE / "group_vars" / "fleet.yml").read_text())
    return folder, yaml.safe_load((EXAMPLE / "hosts.yml").read_text())


def refuse(folder: Path, document: dict, *options: str) -> str:
    (folder / "hosts.yml").write_text(yaml.safe_dump(document))
    result = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(folder), "site.yml", *options],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"ANSIBLE_NOCOLOR": "1", "COLUMNS": "500"},
    )
    output = result.stdout + result.stderr
    assert result.returncode == 2, output
    assert "no host was touched" in output
    assert "PLAY [Look at every host" not in output
    return output


def test_two_heads_a_duplicate_rank_and_a_foreign_subnet_in_one_list(inventory):
    folder, document = inventory
    groups = document["all"]["children"]["fleet"]["children"]
    groups["head"]["hosts"]["spark-2"] = groups["workers"]["hosts"].pop("spark-2")
    groups["workers"]["hosts"]["spark-3"]["rank"] = 3
    groups["workers"]["hosts"]["spark-4"]["fabric_address"] = "203.0.113.14"
    output = refuse(folder, document)
    for text in ("group head has 2 hosts", "rank is 3 on each of them", "rank 2 is missing", "203.0.113.14 is outside"):
        assert text in output


def test_unknown_profile_lists_the_known_ones(inventory):
    output = refuse(*inventory, "-e", "profile=gone")
    assert "'gone' does not exist" in output
    assert "tiny-cpu-tp4" in output


def test_host_count_unlike_the_tensor_parallel_size(inventory):
    folder, document = inventory
    del document["all"]["children"]["fleet"]["children"]["workers"]["hosts"]["spark-4"]
    text = "profile deepseek-v4.1-flash-tp4 is for 4 hosts (tensor_parallel_size), group fleet has 3"
    assert text in refuse(folder, document)


def test_example_inventory_itself_is_right(inventory):
    folder, document = inventory
    (folder / "hosts.yml").write_text(yaml.safe_dump(document))
    expression = "msg={{ groups | gb10_inventory_faults(hostvars) | to_json }}"
    command = ["ansible", "localhost", "-i", str(folder), "-m", "ansible.builtin.debug", "-a", expression]
    result = subprocess.run(
        [str(Path(sys.executable).with_name(command[0])), *command[1:]],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "msg: '[]'" in result.stdout, result.stdout + result.stderr
