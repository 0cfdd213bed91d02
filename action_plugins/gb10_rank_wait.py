"""Follow all ranks of a launch from the controller until the head generates a token, or one of them dies."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

SILENCE_S = 8  # the longest time without a line on the operator's screen

display = Display()


class Board:
    """What the hosts' processes on the controller tell each other: one small file a host.

    Ansible runs this action once a host, each in a process of its own; they share the run's temporary folder, which
    Ansible removes at its end.
    """

    def __init__(self, launch_id: str) -> None:
        self.directory = Path(constants.DEFAULT_LOCAL_TMP) / f"launch-{launch_id}"
        self.directory.mkdir(exist_ok=True)

    def post(self, host: str, note: dict[str, Any]) -> None:
        partial = self.directory / f".{host}"
        partial.write_text(json.dumps(note))
        partial.rename(self.directory / f"{host}.json")

    def read(self) -> dict[str, dict[str, Any]]:
        return {path.stem: json.loads(path.read_text()) for path in self.directory.glob("*.json")}


def progress_line(fleet: list[str], notes: dict[str, dict[str, Any]], elapsed: float) -> str:
    """One line for the operator: every rank's phase."""
    phases = " | ".join(f"{host} {notes.get(host, {}).get('phase', 'no word yet')}" for host in fleet)
    return f"  {elapsed:4.0f} s  {phases}"


class Ticker(threading.Thread):
    """Shows the board while the action waits for its host: at every change, and at least every SILENCE_S."""

    def __init__(self, board: Board, fleet: list[str]) -> None:
        super().__init__(daemon=True)
        self.board, self.fleet = board, fleet
        self.over = threading.Event()

    def run(self) -> None:
        started = last = time.monotonic()
        shown = ""
        while not self.over.wait(1):
            line = progress_line(self.fleet, self.board.read(), time.monotonic() - started)
            if line[8:] != shown or time.monotonic() - last >= SILENCE_S:
                display.display(line, color=constants.COLOR_VERBOSE)
                shown, last = line[8:], time.monotonic()


def verdict(host: str, head: str, notes: dict[str, dict[str, Any]]) -> str | None:
    """None: go on waiting. Empty text: the model serves. Other text: why the launch is lost."""
    own = notes.get(host, {})
    if own.get("fault"):
        return str(own["fault"])
    lost = [f"{other}: {note['fault']}" for other, note in sorted(notes.items()) if note.get("fault")]
    if lost:
        return f"given up because of {lost[0].splitlines()[0]}"
    return "" if notes.get(head, {}).get("text") else None


class ActionModule(ActionBase):
    """Action of gb10_rank_wait; its options are documented in the module of the same name."""

    TRANSFERS_FILES = False
    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        arguments = self._task.args
        host = (task_vars or {})["inventory_hostname"]
        fleet, head, launch_id = list(arguments["fleet"]), arguments["head"], arguments["launch_id"]
        board = Board(launch_id)
        ticker = Ticker(board, fleet)
        if host == head:
            ticker.start()
        try:
            return self._follow(arguments, host, head, launch_id, board, task_vars)
        finally:
            ticker.over.set()

    def _follow(
        self,
        arguments: dict[str, Any],
        host: str,
        head: str,
        launch_id: str,
        board: Board,
        task_vars: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Look at this host and at the board until one of them decides.

        The look blocks on the host for as long as nothing happens there, so it has a thread of its own: news from
        another host end this action at once, and the look that is under way is left to end by itself.
        """
        started = time.monotonic()
        state: dict[str, Any] = {}

        def look() -> None:
            nonlocal state
            while True:
                note, state = self._look(arguments, host == head, launch_id, state, task_vars)
                board.post(host, note)
                if note.get("fault") or note.get("text"):
                    return

        threading.Thread(target=look, daemon=True).start()
        while True:
            notes = board.read()
            outcome = verdict(host, head, notes)
            elapsed = time.monotonic() - started
            if outcome is None and elapsed > float(arguments["timeout"]):
                outcome = f"no token {elapsed:.0f} s after the start, wanted one in {arguments['timeout']} s"
                board.post(host, notes.get(host, {}) | {"fault": outcome})
            if outcome:
                return {"failed": True, "changed": True, "msg": outcome, "rank": state}
            if outcome == "":
                return {"changed": True, "seconds": round(elapsed), "text": notes[head]["text"], "rank": state}
            time.sleep(0.5)

    def _look(
        self,
        arguments: dict[str, Any],
        is_head: bool,
        launch_id: str,
        before: dict[str, Any],
        task_vars: dict[str, Any] | None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """One look at this host's rank; blocks on the host until its phase changes or the poll time is over."""
        serving = is_head and before.get("phase") == "serving"
        options: dict[str, Any] = {
            "wait": 0 if serving else float(arguments["poll"]),
            "phase": before.get("phase", ""),
            "phase_order": before.get("phase_order", -2),
        }
        if serving:
            options["completion"] = arguments["completion"]
        try:
            result = self._execute_module(module_name="gb10_rank_info", module_args=options, task_vars=task_vars)
        except AnsibleConnectionFailure as error:
            return {"fault": f"does not answer any more: {error}"}, before
        if result.get("failed"):
            return {"fault": f"its state cannot be read: {result.get('msg')}"}, before
        state = result["rank"]
        note = {"phase": state["phase"], "text": result["completion"]["text"]}
        if not state["active"]:
            lines = "\n".join(state["last_lines"])
            note["fault"] = (
                f"the rank ended ({state['unit']}, exit status {state['exit_status']}); its last lines:\n{lines}"
            )
        elif state["launch_id"] and state["launch_id"] != launch_id:
            note["fault"] = f"the rank runs in launch {state['launch_id']}, wanted {launch_id}; was it started by hand?"
        elif result["completion"]["fault"]:
            note["fault"] = f"the first completion failed: {result['completion']['fault']}"
        return note, state
