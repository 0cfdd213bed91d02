"""Run the module of the same name, and show while it pulls an image how much of it has come to this host."""

from __future__ import annotations

import json
import shlex
import threading
from typing import Any

from ansible import constants
from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

LOOK_S = 8  # the longest time without a line on the operator's screen
FILE = "/run/gb10/progress/image.json"  # the module's own default

display = Display()


def size_text(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def progress_line(host: str, state: dict[str, Any], before: dict[str, Any], seconds: float) -> str:
    """Bytes, and where the total is known percentage and time left at the rate of the last SECONDS."""
    done, total = state["done_bytes"], state["total_bytes"]
    if not total:
        return f"  {host}  {size_text(done)}"
    parts = [f"{size_text(done)} of {size_text(total)}", f"{min(99, 100 * done // total)} %"]
    rate = (done - before.get("done_bytes", 0)) / seconds
    if done >= total:
        parts.append("unpacking")
    elif rate > 0:
        parts.append(f"about {(total - done) / rate:.0f} s left")
    return f"  {host}  " + ", ".join(parts)


class ActionModule(ActionBase):
    """Action of gb10_container_image; its options are documented in the module of the same name."""

    TRANSFERS_FILES = False
    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        host = (task_vars or {})["inventory_hostname"]
        over = threading.Event()

        def watch() -> None:
            before: dict[str, Any] = {}
            while not over.wait(LOOK_S):
                state = self._look()
                if state and not over.is_set():
                    display.display(progress_line(host, state, before, LOOK_S), color=constants.COLOR_VERBOSE)
                before = state

        threading.Thread(target=watch, daemon=True).start()
        try:
            return dict(self._execute_module(task_vars=task_vars))
        finally:
            over.set()

    def _look(self) -> dict[str, Any]:
        """What the file says now; nothing where there is none, or no answer: the module's own result tells more."""
        path = shlex.quote(str(self._task.args.get("progress", FILE)))
        try:
            answer = self._low_level_execute_command(f"cat {path} 2>/dev/null")
            return dict(json.loads(answer["stdout"]))
        except (AnsibleError, ValueError):
            return {}
