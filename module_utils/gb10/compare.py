"""What a process was started with against what it should have been started with, without showing secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

SECRET = re.compile(r"API_?KEY|TOKEN(?!S|IZ)|SECRET|PASSW|CREDENTIAL(?!S_DIR)", re.IGNORECASE)
MASK = "(secret)"


def masked(environment: Mapping[str, str]) -> dict[str, str]:
    """ENVIRONMENT with the values of secrets replaced."""
    return {key: MASK if SECRET.search(key) else value for key, value in environment.items()}


def masked_words(words: Sequence[str]) -> list[str]:
    """Arguments with the value of each secret option replaced."""
    before = ["", *words]
    secret = [previous.startswith("--") and bool(SECRET.search(previous.replace("-", "_"))) for previous in before]
    return [MASK if hidden else word for hidden, word in zip(secret, words, strict=False)]


def options(words: Sequence[str]) -> dict[str, list[str]]:
    """Option to its values, the words before the first option under an empty name."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
            found.setdefault(name, [])
        else:
            found.setdefault(name, []).append(word)
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _option_fault(name: str, wanted: list[str] | None, found: list[str] | None) -> str:
    if wanted is None:
        return f"running with {name} {' '.join(found or [])}, not configured"
    if found is None:
        return f"running without {name}, configured {' '.join(wanted)}"
    said = f"{name or 'words'}: running {' '.join(found)}, configured {' '.join(wanted)}"
    if len(wanted) == 1 and isinstance(_json(wanted[0]), dict):
        try:
            if json.loads(" ".join(found)) == json.loads(wanted[0]):
                return ""
        except ValueError as error:
            said += f" (what the process got is no JSON: {error})"
    return said


def argument_faults(wanted: Sequence[str], found: Sequence[str]) -> list[str]:
    """How the words that a process got differ from those it should have, an option each. JSON is compared as JSON."""
    if list(wanted) == list(found):
        return []
    one, other = options(wanted), options(found)
    names = [*one, *(name for name in other if name not in one)]
    different = (
        _option_fault(name, one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)
    )
    return [fault for fault in different if fault]


def environment_faults(wanted: Mapping[str, str], found: Mapping[str, str], removed: Sequence[str] = ()) -> list[str]:
    """Variables of WANTED that a process has otherwise, and REMOVED ones that it still has."""
    before, after = masked(found), masked(wanted)
    return [
        f"running {key}={before.get(key, 'unset')}, configured {key}={after.get(key, 'unset')}"
        for key in sorted({*wanted, *removed})
        if found.get(key) != wanted.get(key)
    ]
