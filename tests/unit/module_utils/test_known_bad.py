"""Conditions of known-bad combinations, and the data file that ships."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.gb10.host_info import FACTS
from ansible.module_utils.gb10.known_bad import KnownBadError, find, holds, parse_rules

DATA = yaml.safe_load((Path(__file__).resolve().parents[3] / "roles/host_parity/files/known_bad.yml").read_text())
HOSTS = {
    "a": {
        "kernel": {"value": "7.0.0-1019-nvidia"},
        "words": {"value": "ro kho=on"},
        "total": {"value": 0},
        "free": {"value": 220924},
        "list": {"value": ["x"]},
        "keys": {"value": ["k1", "k2"]},
        "gone": {"value": None, "unknown": "why"},
    },
    "b": {
        "kernel": {"value": "6.17.0-1032-nvidia"},
        "words": {"value": "ro kho=off"},
        "total": {"value": 131072},
        "free": {"value": 69320},
        "list": {"value": []},
        "keys": {"value": ["k2"]},
        "gone": {"value": 99999},
    },
}

# condition -> the fact that shows it on host a, and on host b
CONDITIONS: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({"fact": "kernel", "equals": "6.17.0-1032-nvidia"}, None, "kernel"),
    ({"fact": "kernel", "in": ["7.0.0-1019-nvidia"]}, "kernel", None),
    ({"fact": "kernel", "matches": r"^7\.0\.0-(1019|31)(-|$)"}, "kernel", None),
    ({"fact": "words", "has_word": "kho=off"}, None, "words"),
    ({"fact": "words", "lacks_word": "kho=off"}, "words", None),
    ({"fact": "free", "above": 100000}, "free", None),
    ({"fact": "free", "magnitude_above": 69319}, "free", "free"),
    ({"fact": "free", "above_fact": "total"}, "free", None),
    ({"fact": "free", "above_fact": "gone"}, None, None),
    ({"fact": "kernel", "not_fact": "words"}, "kernel", "kernel"),
    ({"fact": "list", "nonempty": True}, "list", None),
    ({"fact": "keys", "shared": True}, "keys", "keys"),
    ({"fact": "kernel", "shared": True}, None, None),
    ({"fact": "kernel", "odd": True}, "kernel", None),
    ({"fact": "gone", "unknown": True}, "gone", None),
    ({"fact": "gone", "lacks_word": "x"}, None, "gone"),
    ({"all": [{"fact": "kernel", "matches": "^7"}, {"fact": "words", "lacks_word": "kho=off"}]}, "kernel", None),
    ({"all": [{"fact": "kernel", "matches": "^7"}, {"fact": "words", "has_word": "kho=off"}]}, None, None),
    ({"any": [{"fact": "gone", "unknown": True}, {"fact": "list", "nonempty": False}]}, "gone", "list"),
]


@pytest.mark.parametrize(("condition", "on_a", "on_b"), CONDITIONS)
def test_condition(condition: dict[str, Any], on_a: str | None, on_b: str | None) -> None:
    found = [holds(condition, host, HOSTS, lambda host, _fact: host == "a") for host in ("a", "b")]
    assert found == [on_a, on_b]


def rule(**parts: Any) -> dict[str, Any]:
    return {"id": "r", "when": {"fact": "kernel", "equals": 1}, "wanted": "w", "remedy": "r", "source": "s"} | parts


WRONG = [
    ([rule(when={"fact": "kernle", "equals": 1})], "rule r: no fact kernle"),
    ([rule(when={"fact": "kernel", "equal": 1})], "rule r: want one test of"),
    ([rule(when={"fact": "kernel", "equals": 1, "above": 2})], "rule r: want one test of"),
    ([rule(when={"any": [{"fact": "kernel"}]})], "rule r: want one test of"),
    ([rule(severity="warn")], "rule r: severity warn, want refuse or report"),
    ([rule(remdy="x")], "rule r: .*remdy"),
    ([{"id": "r"}], "rule r: .*missing"),
    ([rule(), rule()], "rule r is defined 2 times"),
]


@pytest.mark.parametrize(("document", "message"), WRONG)
def test_a_rule_that_could_never_hold_is_refused(document: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(KnownBadError, match=message):
        parse_rules(document, ["kernel"])


def test_the_shipped_rules_are_well_formed_and_none_holds_on_unknown_facts() -> None:
    rules = parse_rules(DATA, FACTS)
    hosts = {"a": {name: {"value": None, "unknown": "test"} for name in FACTS}}
    hits = {hit.rule.id for hit in find(rules, hosts, lambda _host, _fact: False)}
    assert hits == {"no-time-source", "vendor-unknown"}
    assert all(rule.remedy and rule.source for rule in rules)
    explained = {fact for rule in rules for fact in rule.explains}
    assert explained <= set(FACTS)


KHO = [
    ("7.0.0-1019-nvidia", "ro quiet", True),
    ("7.0.0-31-generic", "ro quiet", True),
    ("7.0.0-1019-nvidia", "ro kho=off quiet", False),
    ("7.0.0-310-generic", "ro quiet", False),
    ("6.17.0-1032-nvidia", "ro quiet", False),
]


@pytest.mark.parametrize(("kernel", "command_line", "bad"), KHO)
def test_the_kexec_handover_kernels(kernel: str, command_line: str, bad: bool) -> None:
    facts = {name: {"value": None} for name in FACTS}
    facts |= {"kernel_release": {"value": kernel}, "kernel_command_line": {"value": command_line}}
    facts["time_source"] = facts["product_name"] = {"value": "x"}
    hits = find(parse_rules(DATA, FACTS), {"a": facts}, lambda _host, _fact: False)
    assert [hit.rule.id for hit in hits] == (["kernel-kho"] if bad else [])
