"""The helpers that the GPU tests and the bench use too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3]
for folder in ("bench", "tests/gpu", "files/patches"):
    sys.path.insert(0, str(PROJECT / folder))


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The released wheel of the engine that the series is for."""
    import refresh

    found: Path | None = refresh.find_wheel("vllm", "0.33.0")
    if found is None:
        pytest.skip("no vllm 0.33.0 wheel in $GB10_CACHE/wheels; `make wheels` fetches it")
    return found
