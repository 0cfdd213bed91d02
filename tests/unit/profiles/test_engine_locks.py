"""The lock of every engine: whole, hashed, and of the engine that its patches are for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

PATCHES = Path(__file__).resolve().parents[3] / "files" / "patches"
ENGINES = sorted(path.parent.name for path in PATCHES.glob("*/requirements.txt"))


@pytest.mark.parametrize("engine", ENGINES)
def test_lock_pins_and_hashes_every_package_once(engine):
    lines = (PATCHES / engine / "requirements.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    matches = [re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in pins]
    assert all(matches), [line for line, match in zip(pins, matches, strict=True) if not match]
    names = [re.sub(r"[-_.]+", "-", match[1]).lower() for match in matches]
    assert len(names) == len(set(names))
    wanted = yaml.safe_load((PATCHES / engine / "series.yml").read_text())["engine"]
    assert dict(zip(names, (match[2] for match in matches), strict=True))[wanted["package"]] == str(wanted["version"])
