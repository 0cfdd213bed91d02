"""How far a long piece of work is, in a file that others may read at any moment."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path


class Meter:
    """Counts finished bytes of many threads; rewrites ``path`` once a second and at the end.

    The file is ``{"done_bytes", "total_bytes", "started"}``, the last in seconds since the epoch. Without a path it
    only counts.
    """

    def __init__(self, path: Path | None, total: int) -> None:
        self._path, self._total = path, total
        self._started, self._done, self._shown = time.time(), 0, float("-inf")
        self._lock = threading.Lock()

    def done(self, size: int) -> None:
        """Count ``size`` more bytes."""
        with self._lock:
            self._done += size
            now = time.monotonic()
            if self._path and (now - self._shown >= 1 or self._done == self._total):
                self._shown = now
                self._path.parent.mkdir(parents=True, exist_ok=True)
                state = {"done_bytes": self._done, "total_bytes": self._total, "started": self._started}
                scratch = self._path.with_name(f".{self._path.name}.new")
                scratch.write_text(json.dumps(state))  # no fsync: it is of no use after a power loss
                scratch.rename(self._path)
