"""The rank's unit as the role renders it, judged by systemd itself; and a rule over every unit of the project."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import jinja2
import pytest
from ansible.module_utils.gb10 import systemd

ROLES = Path(__file__).resolve().parents[3] / "roles"
TEMPLATE = ROLES / "vllm_rank/templates/etc/systemd/system/vllm-rank.service.j2"
KINDS = [f".{kind.lower()}" for kind in systemd.KINDS]
UNITS = sorted(path for path in ROLES.glob("*/templates/**/*.j2") if Path(path.stem).suffix in KINDS)

needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


class Anything(jinja2.ChainableUndefined):
    """A variable that a template of another role asks for."""

    def __str__(self) -> str:
        return "60"

    def __int__(self) -> int:
        return 60


def render(tmp_path, **changes):
    variables = {
        "ansible_managed": "Ansible managed",
        "rank": 0,
        "profile": "tiny 100%%",
        "gb10_profile": {"tensor_parallel_size": 4},
        "vllm_rank_user": "vllm",
        "vllm_rank_fabric_wait": 60,
        "_vllm_rank_library": "/usr/local/lib/gb10-fleet",
        "_vllm_rank_backend": "venv",
        "_vllm_rank_has_key": False,
        "_vllm_rank_writable": ["/var/lib/gb10/vllm", "/var/cache/gb10/vllm/triton"],
    } | changes
    options = {"undefined": jinja2.StrictUndefined, "keep_trailing_newline": True, "trim_blocks": True}
    environment = jinja2.Environment(**options)  # noqa: S701 - a unit file is no page
    unit = tmp_path / "vllm-rank.service"
    unit.write_text(environment.from_string(TEMPLATE.read_text()).render(variables))
    return unit


VARIANTS = {
    "worker": {"rank": 3},
    "head with a key": {"_vllm_rank_has_key": True},
    "container": {"_vllm_rank_backend": "container"},
    "caches elsewhere": {"_vllm_rank_writable": ["/data/100%/my caches", "/var/cache/gb10/vllm"]},
}


@needs_analyze
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_systemd_has_nothing_to_say_about_the_unit(tmp_path, changes):
    unit = render(tmp_path, **changes)
    result = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_unit_sets_the_limits_that_rdma_needs(tmp_path):
    values = {key: value for _, key, value in systemd.settings(render(tmp_path).read_text())}
    assert values["LimitMEMLOCK"] == "infinity"
    assert int(values["LimitNOFILE"]) >= 65536


def test_only_the_head_with_a_key_loads_one(tmp_path):
    assert "LoadCredential" not in render(tmp_path).read_text()
    assert "LoadCredential=api-key:/etc/gb10/api-key\n" in render(tmp_path, _vllm_rank_has_key=True).read_text()


def test_no_word_of_the_rank_is_in_the_unit(tmp_path):
    # Arguments and environment reach the process through a file: no % and no quote of theirs meets systemd.
    values = [
        value for _, key, value in systemd.settings(render(tmp_path).read_text()) if key.startswith(("Exec", "Env"))
    ]
    assert values == [
        "PYTHONPATH=/usr/local/lib/gb10-fleet",
        "+/usr/bin/python3 -B -m gb10.prestart",
        "/usr/bin/python3 -B -m gb10.launcher",
    ]


def test_directories_outside_its_own_are_writable_as_they_are_named(tmp_path):
    text = render(tmp_path, _vllm_rank_writable=["/data/100%/my caches"]).read_text()
    assert 'ReadWritePaths="-/data/100%%/my caches"\n' in text


@pytest.mark.parametrize("template", UNITS, ids=lambda path: path.name)
def test_start_limits_and_time_outs_do_what_they_say(template):
    environment = jinja2.Environment(undefined=Anything)  # noqa: S701
    text = environment.from_string(template.read_text()).render()
    assert systemd.unit_file_faults(Path(template.stem), text) == []
