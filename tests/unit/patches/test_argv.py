"""Every argv of a profile gives the patched engine what it demands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3]
GOLDEN = sorted((PROJECT / "tests/fixtures/golden").glob("*.json"))
RANKS = [
    pytest.param(rank["argv"], id=f"{path.stem}-{name}")
    for path in GOLDEN
    for name, rank in json.loads(path.read_text()).items()
    if "--engram-config" in rank["argv"]
]


@pytest.mark.parametrize("argv", RANKS)
def test_a_row_pack_is_never_named_without_its_revision(argv: list[str]) -> None:
    options = json.loads(argv[argv.index("--engram-config") + 1])
    assert options["storage"] == "disk"
    if "disk_path" in options:
        assert len(argv[argv.index("--revision") + 1]) == 40


def test_the_documented_call_does_so_too() -> None:
    text = (PROJECT / "docs/vllm-patches.md").read_text()
    call = text[text.index("## Options") : text.index("| option | meaning |")]
    assert '"disk_path"' in call
    assert "--revision dba1be0a40aa45a94ad051997016db3960a90277" in call


def test_there_is_something_to_look_at() -> None:
    assert len(RANKS) >= 4
