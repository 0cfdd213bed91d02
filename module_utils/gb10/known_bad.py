"""Known-bad combinations: conditions as data, evaluated over the facts of all hosts.

A rule is a mapping with ``id``, ``when``, ``wanted``, ``remedy``, ``source`` and optionally ``explains`` (facts that
are not compared between hosts where the rule holds: one fault, one finding) and ``severity`` (``refuse``, the default,
or ``report``). A condition is ``{any: [...]}``, ``{all: [...]}`` or one test: ``{fact: NAME, TEST: ARGUMENT}``.
A fact that is unknown passes no test but ``unknown``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Facts = Mapping[str, Mapping[str, Any]]
"""One host's facts: name -> {value, source, unknown}."""

REFUSE, REPORT = "refuse", "report"


class KnownBadError(Exception):
    """The data file is wrong; the message names the rule."""


@dataclass(frozen=True)
class Rule:
    """One known-bad combination."""

    id: str
    when: Mapping[str, Any]
    wanted: str
    remedy: str
    source: str
    explains: tuple[str, ...] = ()
    severity: str = REFUSE


@dataclass(frozen=True)
class Hit:
    """A rule that holds on a host, with the fact that shows it."""

    rule: Rule
    host: str
    fact: str


Odd = Callable[[str, str], bool]
"""Whether the named host's value of the named fact is the odd one out."""

_TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "equals": lambda value, argument: bool(value == argument),
    "in": lambda value, argument: value in argument,
    "matches": lambda value, argument: re.search(argument, str(value)) is not None,
    "has_word": lambda value, argument: argument in str(value).split(),
    "lacks_word": lambda value, argument: argument not in str(value).split(),
    "above": lambda value, argument: float(value) > argument,
    "magnitude_above": lambda value, argument: abs(float(value)) > argument,
    "nonempty": lambda value, argument: bool(value) is argument,
}
JOINT = frozenset({"odd", "shared"})
"""Tests that compare hosts: ``odd``, the host differs from most; ``shared``, another host has the value too."""
_RELATIONS = ("above_fact", "not_fact", "unknown", *sorted(JOINT))


def parse_rules(document: Sequence[Mapping[str, Any]], facts: Sequence[str]) -> list[Rule]:
    """Rules of the data file, checked against the facts that exist. Raises KnownBadError."""
    rules = []
    for entry in document:
        try:
            rule = Rule(**{**entry, "explains": tuple(entry.get("explains", ()))})
        except TypeError as error:
            raise KnownBadError(f"rule {entry.get('id', entry)}: {error}") from error
        if rule.severity not in (REFUSE, REPORT):
            raise KnownBadError(f"rule {rule.id}: severity {rule.severity}, want {REFUSE} or {REPORT}")
        _check(rule.id, rule.when, facts)
        rules.append(rule)
    ids = [rule.id for rule in rules]
    for repeated in sorted({name for name in ids if ids.count(name) > 1}):
        raise KnownBadError(f"rule {repeated} is defined {ids.count(repeated)} times")
    return rules


def _check(rule: str, condition: Mapping[str, Any], facts: Sequence[str]) -> None:
    """Refuse a condition that could never hold: a misspelt fact or test would look like a healthy fleet."""
    if set(condition) in ({"any"}, {"all"}):
        for part in next(iter(condition.values())):
            _check(rule, part, facts)
        return
    tests = set(condition) - {"fact"}
    if condition.get("fact") not in facts:
        raise KnownBadError(f"rule {rule}: no fact {condition.get('fact')}")
    if len(tests) != 1 or not tests <= {*_TESTS, *_RELATIONS}:
        raise KnownBadError(f"rule {rule}: want one test of {', '.join([*_TESTS, *_RELATIONS])}, found {sorted(tests)}")


def uses(condition: Mapping[str, Any], tests: frozenset[str]) -> bool:
    """Whether one of ``tests`` occurs in the condition."""
    parts = condition.get("any") or condition.get("all")
    return any(uses(part, tests) for part in parts) if parts else bool(tests & set(condition))


def value_of(facts: Facts, name: str) -> Any:
    """The fact's value, None where it is unknown or absent."""
    return facts.get(name, {}).get("value")


def holds(condition: Mapping[str, Any], host: str, hosts: Mapping[str, Facts], odd: Odd) -> str | None:
    """The fact that makes the condition true on ``host`` (the first of several), or None."""
    if "any" in condition:
        return next((fact for part in condition["any"] if (fact := holds(part, host, hosts, odd))), None)
    if "all" in condition:
        facts = [holds(part, host, hosts, odd) for part in condition["all"]]
        return facts[0] if all(facts) else None
    name = condition["fact"]
    test, argument = next((key, value) for key, value in condition.items() if key != "fact")
    value = value_of(hosts[host], name)
    if test == "unknown":
        return name if (value is None) is argument else None
    if value is None:
        return None
    if test in ("above_fact", "not_fact"):
        other = value_of(hosts[host], argument)
        true = other is not None and (value > other if test == "above_fact" else value != other)
    elif test == "odd":
        true = odd(host, name) is argument
    elif test == "shared":
        true = any(_overlap(value, value_of(facts, name)) for peer, facts in hosts.items() if peer != host) is argument
    else:
        true = _TESTS[test](value, argument)
    return name if true else None


def _overlap(one: Any, other: Any) -> bool:
    """Equal, or lists with a common element (a host has several ssh keys)."""
    if isinstance(one, list) and isinstance(other, list):
        return bool(set(one) & set(other))
    return bool(one == other)


def find(rules: Sequence[Rule], hosts: Mapping[str, Facts], odd: Odd) -> list[Hit]:
    """Every rule that holds, by rule and host."""
    return [Hit(rule, host, fact) for rule in rules for host in hosts if (fact := holds(rule.when, host, hosts, odd))]
