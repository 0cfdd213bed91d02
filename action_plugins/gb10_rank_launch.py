"""Start all ranks of a launch in order and follow them until the head generates a token; stop all when one dies."""

from __future__ import annotations

import json
import shlex
import threading
import time
from pathlib import Path
from typing import Any

import ansible.module_utils
from ansible import constants
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

PACKAGES = str(Path(__file__).resolve().parent.parent / "module_utils")
if PACKAGES not in ansible.module_utils.__path__:  # Ansible finds the project's folder for modules, not for actions
    ansible.module_utils.__path__.append(PACKAGES)

from ansible.module_utils.gb10 import launches, rank  # noqa: E402 the path above

SILENCE_S = 8  # the longest time without a line on the operator's screen
PATIENCE_S = 60  # a host that loads a model answers late; one without power never does
AWAY = "no power, or no way to it: look at its power and at the management network"
FAULT_KEYS = ("fault", "lost_at", "reached", "cause", "last", "away")
STOP_S = 90  # how long the unit's own time-out and all around it may take on the slowest host

display = Display()


class LookError(Exception):
    """Why a rank could not be started or looked at; `away` when its host did not answer."""

    def __init__(self, text: str, *, away: bool = False) -> None:
        super().__init__(text)
        self.away = away


class Board:
    """What the hosts' processes on the controller tell each other: one small file a host.

    Ansible runs this action once a host, each in a process of its own; they share the run's temporary folder, which
    Ansible removes at its end.
    """

    def __init__(self, launch_id: str) -> None:
        self.directory = Path(constants.DEFAULT_LOCAL_TMP) / f"launch-{launch_id}"
        self.directory.mkdir(exist_ok=True)
        self.lock = threading.Lock()

    def post(self, host: str, note: dict[str, Any]) -> None:
        """Replace HOST's note; its first fault stays, whatever the thread that still looks at the rank has to say."""
        partial, path = self.directory / f".{host}", self.directory / f"{host}.json"
        with self.lock:
            before = json.loads(path.read_text()) if path.exists() else {}
            kept = {key: before[key] for key in FAULT_KEYS if key in before} if before.get("fault") else {}
            partial.write_text(json.dumps(note | kept | {"at": time.time()}))
            partial.rename(path)

    def read(self) -> dict[str, dict[str, Any]]:
        return {path.stem: json.loads(path.read_text()) for path in self.directory.glob("*.json")}


def phases_text(fleet: list[str], notes: dict[str, dict[str, Any]]) -> str:
    """Every rank's phase."""
    return " | ".join(f"{host} {notes.get(host, {}).get('phase', 'no word yet')}" for host in fleet)


def estimate_text(notes: dict[str, dict[str, Any]], now: float) -> str:
    """Percentage and time left of the rank that is furthest behind, empty where no host has seen such a launch."""
    if first_lost(notes):
        return ""
    found = [
        launches.estimate(note["typical"], note["phase_name"], note["percent"], note["spent"] + now - note["at"])
        for note in notes.values()
        if note.get("typical")
    ]
    known = [one for one in found if one is not None]
    if not known:
        return ""
    left = max(seconds for _, seconds in known)
    return f"{min(percent for percent, _ in known):2d} %, about {left:.0f} s left" if left >= 1 else "any moment"


def progress_line(fleet: list[str], notes: dict[str, dict[str, Any]], elapsed: float, now: float) -> str:
    """One line for the operator: seconds so far, the estimate, every rank's phase."""
    parts = [f"  {elapsed:4.0f} s", estimate_text(notes, now), phases_text(fleet, notes)]
    return "  ".join(part for part in parts if part)


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
            notes = self.board.read()
            phases = phases_text(self.fleet, notes)
            if phases != shown or time.monotonic() - last >= SILENCE_S:
                line = progress_line(self.fleet, notes, time.monotonic() - started, time.time())
                display.display(line, color=constants.COLOR_VERBOSE)
                shown, last = phases, time.monotonic()


def lost(fault: str, **more: Any) -> dict[str, Any]:
    """What a note gains that ends the launch on all hosts; `away` in MORE: the host cannot be reached any more."""
    return {"fault": fault, "lost_at": time.time()} | more


def first_lost(notes: dict[str, dict[str, Any]]) -> str:
    """The host whose fault came first, empty while there is none; most likely the others failed because of it."""
    faults = [(note["lost_at"], host) for host, note in notes.items() if note.get("fault")]
    return min(faults)[1] if faults else ""


def verdict(head: str, notes: dict[str, dict[str, Any]]) -> bool | None:
    """None: go on waiting. True: the model serves. False: the launch is lost."""
    if first_lost(notes):
        return False
    return True if notes.get(head, {}).get("text") else None


def reason(host: str, notes: dict[str, dict[str, Any]]) -> str:
    """Why the rank of HOST is stopped, for its evidence."""
    culprit = first_lost(notes)
    note = notes[host] if notes.get(host, {}).get("fault") else notes[culprit]
    lines = [note["fault"], *([f"likely cause: {note['cause']}"] if note.get("cause") else []), *note.get("last", [])]
    return "\n".join([*([f"given up because of {culprit}"] if host != culprit else []), *lines])


def not_stopped(note: dict[str, Any]) -> str:
    """Why the rank of a lost launch may still run, empty when it is proven gone."""
    if note.get("away"):
        return "it cannot be reached; should it run, its rank does, too"
    return str(note.get("stay", "no word that its rank stopped"))


def row(label: str, *lines: str) -> list[str]:
    return [f"{'' if number else label:<13} {line}".rstrip() for number, line in enumerate(lines)]


def report(fleet: list[str], notes: dict[str, dict[str, Any]], seconds: float) -> str:
    """A lost launch in full: all that an operator needs of all hosts. SECONDS after its start it was lost."""
    culprit = first_lost(notes)
    note = notes[culprit]
    stay = {host: why for host in fleet if (why := not_stopped(notes.get(host, {})))}
    saved = {host: notes[host]["evidence"] for host in fleet if notes.get(host, {}).get("evidence")}
    step = "mend the cause, then run playbooks/serve.yml: it starts the whole group"
    lines = [
        *row("host", culprit),
        *row("when", f"{seconds:.0f} s after the start, {note.get('reached', 'starting')}"),
        *row("what", *note["fault"].splitlines()),
        *row("likely cause", *([note["cause"]] if note.get("cause") else [])),
        *row("last lines", *note.get("last", [])),
    ]
    for host in fleet:
        if host != culprit and (fault := notes.get(host, {}).get("fault")):
            lines += row("then", f"{host}: {fault.splitlines()[0]}")
    lines += row("stopped", *([f"not {host}: {why}" for host, why in stay.items()] or ["all ranks"]))
    lines += row("evidence", *(f"{host} {folder}" for host, folder in saved.items()))
    lines += row("next", *([f"playbooks/stop.yml as soon as {', '.join(stay)} can be stopped"] if stay else []), step)
    return "\n".join(lines)


def turn(host: str, order: list[str], notes: dict[str, dict[str, Any]]) -> bool | None:
    """Whether HOST starts its rank now; None when it never will, because a launch with a fault is lost."""
    if any(note.get("fault") for note in notes.values()):
        return None
    return all(notes.get(other, {}).get("started") for other in order[: order.index(host)])


def note_of(
    state: dict[str, Any], completion: dict[str, Any], launch_id: str, since: float = 0.0, reached: str = "starting"
) -> dict[str, Any]:
    """What one look at a rank tells the others.

    SINCE is its age when its phase was first seen, REACHED the phase of the look before.
    """
    note: dict[str, Any] = {
        "started": True,
        "phase": state["phase"],
        "phase_name": state["phase_name"],
        "percent": state["phase_percent"],
        "spent": max(0.0, state["age"] - since),
        "typical": state["typical"],
        "text": completion["text"],
    }
    if not state["active"]:
        note |= lost(
            f"rank {state.get('rank', '?')} ended ({state['unit_result']}, exit status {state['exit_status']})",
            reached=reached,
            cause=state["cause"] or "none that is known",
            last=state["last_lines"],
        )
    elif state["launch_id"] and state["launch_id"] != launch_id:
        note |= lost(f"the rank runs in launch {state['launch_id']}, wanted {launch_id}; was it started by hand?")
    elif completion["fault"]:
        note |= lost(f"the first completion failed: {completion['fault']}", reached=state["phase"])
    return note


class ActionModule(ActionBase):
    """Action of gb10_rank_launch; its options are documented in the module of the same name."""

    TRANSFERS_FILES = False
    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        arguments = self._task.args
        if self._task.check_mode:
            return {"changed": True}
        host = (task_vars or {})["inventory_hostname"]
        board = Board(arguments["launch"]["launch_id"])
        ticker = Ticker(board, list(arguments["fleet"]))
        if host == arguments["head"]:
            ticker.start()
        try:
            return self._follow(arguments, host, board, task_vars)
        finally:
            ticker.over.set()

    def _follow(
        self, arguments: dict[str, Any], host: str, board: Board, task_vars: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Work on this host and look at the board until one of them decides.

        A look blocks on the host for as long as nothing happens there, so it has a thread of its own: news from
        another host end this action at once, and the look that is under way is left to end by itself.
        """
        started, clock = time.time(), time.monotonic()
        timeout = float(arguments["timeout"])
        self._due = clock + timeout
        self._state: dict[str, Any] = {}
        self._since = 0.0
        self._over = threading.Event()
        threading.Thread(target=self._work, args=(arguments, host, board, task_vars), daemon=True).start()
        while (outcome := verdict(arguments["head"], notes := board.read())) is None:
            now = time.monotonic()
            # One host tells it for all: each would name itself.
            if now - clock > timeout + (0 if host == arguments["head"] else PATIENCE_S):
                fault = f"no token {now - clock:.0f} s after the start, wanted one in {timeout:.0f} s"
                board.post(host, notes.get(host, {}) | lost(fault, reached=phases_text(arguments["fleet"], notes)))
            elif now > self._due:
                fault = "gives no answer any more"
                board.post(host, notes.get(host, {}) | lost(fault, reached=self._reached(), away=True, cause=AWAY))
            else:
                time.sleep(0.5)
        self._over.set()
        if outcome:
            text = notes[arguments["head"]]["text"]
            return {"changed": True, "seconds": round(time.monotonic() - clock), "text": text}
        return self._give_up(arguments, host, board, started, task_vars)

    def _give_up(
        self, arguments: dict[str, Any], host: str, board: Board, started: float, task_vars: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Save the evidence and stop this host's rank; the host at fault then tells of all, once."""
        notes = board.read()
        note = notes.get(host, {}) | {"phase": "stopping"}
        board.post(host, note)
        note |= self._stop(arguments, reason(host, notes)) if not note.get("away") else {}
        board.post(host, note | {"phase": "not stopped" if not_stopped(note) else "stopped"})
        result = {"changed": True, "evidence": note.get("evidence", "")}
        notes = board.read()
        culprit = first_lost(notes)
        if host != culprit:
            fault = not_stopped(note)
            return result | ({"failed": True, "msg": f"given up because of {culprit}, and {fault}"} if fault else {})
        fleet, deadline = list(arguments["fleet"]), time.monotonic() + STOP_S
        while not all({"away", "stay"} & set(notes.get(other, {})) for other in fleet) and time.monotonic() < deadline:
            time.sleep(0.2)
            notes = board.read()
        return result | {
            "failed": True,
            "msg": f"the launch is lost because of {host}: {note['fault'].splitlines()[0]}",
            "report": report(fleet, notes, note["lost_at"] - started),
        }

    def _stop(self, arguments: dict[str, Any], why: str) -> dict[str, Any]:
        """What a note gains by the stop: `evidence` and `stay` (empty: the rank is gone), or `away`.

        No module: bringing one to the host takes longer than its work. A rank that loads takes all processors; stopped
        by a signal it leaves them to who looks at it.
        """
        look = f"PYTHONPATH={shlex.quote(arguments['library'])} /usr/bin/python3 -B -m gb10.evidence"
        order = json.dumps({"evidence": why, "user": arguments["user"]}).encode()
        try:
            command = f"systemctl kill --signal=STOP {rank.UNIT} >/dev/null 2>&1; {look}"
            answer = self._low_level_execute_command(command, in_data=order)
            return dict(json.loads(answer["stdout"].splitlines()[-1]))
        except AnsibleConnectionFailure:
            return {"away": True}
        except (ValueError, IndexError):
            return {"stay": f"its stop failed with {answer['rc']}: {answer['stderr'].strip()[-500:]}"}

    def _reached(self) -> str:
        return str(self._state.get("phase", "starting"))

    def _work(self, arguments: dict[str, Any], host: str, board: Board, task_vars: dict[str, Any] | None) -> None:
        """Start this host's rank in its turn, then look at it again and again."""
        launch_id = arguments["launch"]["launch_id"]
        try:
            while (now := turn(host, list(arguments["order"]), board.read())) is not True:
                if now is None:
                    return
                time.sleep(0.2)
            board.post(host, {"phase": "starting"})
            start = {"state": "started", "launch": arguments["launch"], "timeout": arguments["start_timeout"]}
            self._ask("gb10_rank", start, float(arguments["start_timeout"]), task_vars)
            board.post(host, {"phase": "starting", "started": True})
            while True:
                note = self._look(arguments, host == arguments["head"], launch_id, task_vars)
                if self._over.is_set():  # what it saw is the stop
                    return
                board.post(host, note)
                if note.get("fault") or note.get("text"):
                    return
        except LookError as error:
            if not self._over.is_set():
                more = {"away": True, "cause": AWAY} if error.away else {}
                board.post(host, {"phase": "lost"} | lost(str(error), reached=self._reached(), **more))
        except Exception as error:  # the action would wait for this thread to its very end
            if not self._over.is_set():
                board.post(host, {"phase": "lost"} | lost(f"its launch cannot be followed: {error!r}"))
            raise

    def _look(
        self, arguments: dict[str, Any], is_head: bool, launch_id: str, task_vars: dict[str, Any] | None
    ) -> dict[str, Any]:
        """One look at this host's rank; blocks on the host until its phase changes or the poll time is over."""
        before = self._state
        options: dict[str, Any] = {
            "wait": float(arguments["poll"]),
            "phase": before.get("phase", ""),
            "phase_order": before.get("phase_order", -2),
        }
        longest = float(arguments["poll"])
        if is_head and before.get("phase") == "serving":
            completion = arguments["completion"]
            longest = float(completion.get("timeout", 60)) * (1 + len(completion.get("warm_up", [])))
            options = {"completion": completion}
        result = self._ask("gb10_rank_info", options, longest, task_vars)
        self._state = result["rank"]
        if self._state["phase_name"] != before.get("phase_name", "starting"):
            self._since = self._state["age"]
        return note_of(self._state, result["completion"], launch_id, self._since, before.get("phase", "starting"))

    def _ask(
        self, module: str, options: dict[str, Any], longest: float, task_vars: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Result of MODULE on this host, which should take LONGEST seconds; raises LookError with the host's words."""
        self._due = time.monotonic() + longest + PATIENCE_S
        try:
            result = self._execute_module(module_name=module, module_args=options, task_vars=task_vars)
        except AnsibleConnectionFailure as error:
            raise LookError(f"does not answer any more: {error}", away=True) from error
        if result.get("failed"):
            raise LookError(str(result.get("msg")))
        return dict(result)
