"""Every unit of the roles, rendered and judged by systemd itself."""

from __future__ import annotations

import re
import shutil
import subprocess

import jinja2
import pytest

from tests.conftest import PROJECT

UNITS = sorted((PROJECT / "roles").glob("*/templates/**/*.service.j2"))
# What a unit's text depends on; what only fills in a name or a number may stay undefined.
SHAPES = [
    ("gb10-api-front.service.j2", {"api_front_port": 443, "api_front_certificate": "/etc/ssl/front.pem"}),
    ("gb10-api-front.service.j2", {"api_front_port": 8443, "api_front_certificate": ""}),
    ("vllm-rank.service.j2", {"_vllm_rank_backend": "venv", "vllm_rank_fabric_wait": 60, "_vllm_rank_has_key": True}),
]
SHAPES += [("vllm-rank.service.j2", SHAPES[-1][1] | {"_vllm_rank_backend": "container"})]
SHAPES += [(path.name, {}) for path in UNITS if path.name not in dict(SHAPES)]
STORE = {"model_store_path": "/srv/models", "_model_store_source": "192.0.2.11:/srv/models", "model_store_timeout": 10}
STORE |= {"_model_store_mount_options": ["ro", "softerr"]}
MOUNTS = [("store.mount.j2", STORE), ("store.automount.j2", STORE)]
WORST = 3.0

needs_analyze = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed here")


def render(name, values):
    (template,) = (PROJECT / "roles").glob(f"*/templates/**/{name}")
    engine = jinja2.Environment(undefined=jinja2.ChainableUndefined, trim_blocks=True)  # noqa: S701 - a unit is no HTML
    return engine.from_string(template.read_text()).render(values)


def exposure(folder, name, values):
    """Exposure by `systemd-analyze security`, 0 (best) to 10."""
    unit = folder / name.removesuffix(".j2")
    unit.write_text(render(name, values))
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", result.stdout)
    assert found, result.stdout + result.stderr
    return float(found[1]), result.stdout


@needs_analyze
@pytest.mark.parametrize(("name", "values"), SHAPES + MOUNTS, ids=lambda value: value if isinstance(value, str) else "")
def test_systemd_has_nothing_to_say_about_a_unit(tmp_path, name, values):
    # The programs are not installed on the machine that tests; a mount is named after its directory.
    text = re.sub(r"^(Exec\w+=[-+!]*)\S+", r"\1/bin/true", render(name, values), flags=re.MULTILINE)
    unit = tmp_path / name.removesuffix(".j2").replace("store.", "srv-models.")
    unit.write_text(text)
    result = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@needs_analyze
@pytest.mark.parametrize(("name", "values"), SHAPES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_service_is_confined(tmp_path, name, values):
    found, report = exposure(tmp_path, name, values)
    assert found <= WORST, report
