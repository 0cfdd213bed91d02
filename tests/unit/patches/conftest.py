"""The helpers that the GPU tests and the bench use too."""

from __future__ import annotations

import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
for folder in ("bench", "tests/gpu"):
    sys.path.insert(0, str(PROJECT / folder))
