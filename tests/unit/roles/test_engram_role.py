"""The stage as an operator runs it, with this machine standing in for two hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from embedded.checkpoints.engram import make_checkpoint

PROJECT = Path(__file__).parents[3]


@pytest.fixture
def play(tmp_path):
    make_checkpoint(tmp_path / "store/tiny", vocab_size=211)
    config = json.loads((tmp_path / "store/tiny/config.json").read_text())
    profile = {"tensor_parallel_size": 2, "checkpoint": {"directory": "tiny", "revision": "r"}, "engram": config}
    hosts = {
        f"spark-{rank}": {"rank": rank, "engram_rows_directory": str(tmp_path / f"spark-{rank}")} for rank in (0, 1)
    }
    (tmp_path / "hosts.json").write_text(json.dumps({"all": {"children": {"fleet": {"hosts": hosts}}}}))
    shared = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "model_store_path": str(tmp_path / "store"),
        "engram_rows_margin_gb": 0,
    }

    def call(*argv, profile=profile):
        variables = json.dumps({**shared, "gb10_profile": profile})
        ansible = Path(sys.executable).with_name("ansible-playbook")
        argv = [ansible, "-i", tmp_path / "hosts.json", "playbooks/engram.yml", "-e", variables, *argv]
        env = os.environ | {"ANSIBLE_HOME": str(tmp_path / "home"), "ANSIBLE_NOCOLOR": "1"}
        done = subprocess.run(map(str, argv), cwd=PROJECT, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return dict(re.findall(r"^(spark-\d) +: ok=\d+ +changed=(\d+)", done.stdout, re.MULTILINE)), done.stdout

    return call


def test_the_stage_copies_once_and_passes_over_a_profile_without_engram(play, tmp_path):
    assert play()[0] == {"spark-0": "1", "spark-1": "1"}
    assert (tmp_path / "spark-1/manifest.json").exists()
    assert play("--check", "--diff")[0] == {"spark-0": "0", "spark-1": "0"}
    changed, printed = play(profile={"tensor_parallel_size": 2, "checkpoint": {"directory": "tiny"}})
    assert changed == {"spark-0": "0", "spark-1": "0"}
    assert "The profile has no engram." in printed
