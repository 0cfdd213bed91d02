"""What a host knew when its rank failed: a dated folder, written before the stop, bounded in size and number.

``python3 -m gb10.evidence`` saves it and ends the rank at once, for a launch that is lost: an order on standard input
({"evidence": the reason, "user": the engine's}), the outcome on standard output ({"evidence": the folder, "stay": what
could not be ended}), both JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import processes, rank, roce
from .compare import MASK, masked, masked_words
from .systemd import SystemdError, show

FOLDER = Path("/var/lib/gb10/evidence")
KEPT = 10
LARGEST = 512 * 1024  # bytes of one file; the end of a log says more than its beginning
FAULTS = (rank.RankError, SystemdError, OSError, ValueError)
PARTIAL = ".partial-"


def _output(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    return result.stdout or result.stderr


def _document(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _processes() -> str:
    lines = sorted(processes.all_of_host(), key=lambda process: -process.memory_mib)[:40]
    return "".join(f"{process}\n" for process in lines)


def read_text(path: Path) -> str:
    """Content of a small file, "-" where there is none."""
    return path.read_text(errors="replace") if path.exists() else "-"


def gather(reason: str) -> dict[str, Callable[[], str]]:
    """File name to what makes its text."""
    found = rank.state()
    started = rank.running()
    unit = show(rank.UNIT)[rank.UNIT]
    return {
        "reason.txt": lambda: reason + "\n",
        "state.json": lambda: _document({key: value for key, value in found.items() if key != "process"}),
        "argv.json": lambda: _document(
            {
                "running": masked_words(found["process"].get("argv") or []),
                "given": masked_words(started.get("argv") or []),
                "wanted": masked_words(_wanted("argv") or []),
            }
        ),
        "environment.json": lambda: _document(
            {
                "running": found["process"].get("environment"),
                "given": masked(started.get("environment") or {}),
                "wanted": masked(_wanted("environment") or {}),
            }
        ),
        "launch.json": lambda: _document(rank.launch()),
        "unit.txt": lambda: _output("systemctl", "show", "--no-pager", rank.UNIT),
        "journal.txt": lambda: rank.journal(unit, 4000),
        "kernel.txt": lambda: _output("journalctl", "--no-pager", "-q", "-k", "-b", "--lines=400", "-o", "short-iso"),
        "meminfo.txt": lambda: rank.MEMINFO.read_text(),
        "processes.txt": _processes,
        "gids.txt": lambda: roce.gid_table(roce.read_ports()) + "\n",
        "guard.txt": lambda: read_text(rank.GUARD_RECORD) + "\n",
    }


def _wanted(key: str) -> Any:
    try:
        return rank.configuration().get(key)
    except rank.RankError:
        return None


def scrub(text: str, secrets: list[str]) -> str:
    """TEXT with every one of SECRETS replaced, as it is and as JSON writes it."""
    for secret in secrets:
        for form in {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}:
            text = text.replace(form, MASK)
    return text


def save(reason: str) -> Path:
    """Write the evidence of this host now and return its folder; only root can read it. Never raises for one part."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    FOLDER.chmod(0o700)
    for left in FOLDER.glob(f"{PARTIAL}*"):
        shutil.rmtree(left)  # of a run that was killed
    name = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    partial = FOLDER / f"{PARTIAL}{name}"
    partial.mkdir(mode=0o700)
    key = rank.read_api_key(rank.API_KEY)
    for file, make in gather(reason).items():
        try:
            text = make()
        except Exception as error:  # what cannot be read is itself evidence, and the rest is still wanted
            text = f"could not be read: {error!r}\n"
        data = scrub(text, [key] if key else []).encode("utf-8", "replace")
        descriptor = os.open(partial / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(data[-LARGEST:])
    final = FOLDER / name
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    prune()
    return final


def prune() -> None:
    """Keep the last KEPT folders."""
    for old in sorted(path for path in FOLDER.iterdir() if not path.name.startswith("."))[:-KEPT]:
        shutil.rmtree(old)


def main() -> int:
    order, outcome = json.load(sys.stdin), {"evidence": "", "stay": ""}
    try:
        outcome["evidence"] = str(save(order["evidence"]))
    except FAULTS as error:  # a full disk keeps no rank from being ended
        outcome["evidence"] = f"none: {error}"
    try:
        rank.stop(order["user"], 120, at_once=True)
    except FAULTS as error:
        outcome["stay"] = str(error)
    print(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
