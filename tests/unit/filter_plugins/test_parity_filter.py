"""The filter takes facts and addresses from hostvars."""

from __future__ import annotations

from typing import Any

import gb10_parity
import pytest
from ansible.errors import AnsibleFilterError

RULES = [
    {
        "id": "old",
        "when": {"fact": "kernel_release", "equals": "6.14"},
        "wanted": "w",
        "remedy": "r",
        "source": "s",
        "explains": ["kernel_release"],
    }
]


def hostvars() -> dict[str, Any]:
    mount = {"path": "/srv/models", "server": "10.10.0.11", "export": "/m", "state": "no answer in 10 s"}
    facts = {"kernel_release": {"value": "6.17", "source": "t"}, "nfs_mounts": {"value": [], "source": "t"}}
    hung = facts | {"nfs_mounts": {"value": [mount], "source": "t"}}
    return {
        "a": {"fabric_address": "10.10.0.11/24"},
        "b": {"ansible_facts": {"gb10_host": hung}},
        "c": {"ansible_facts": {"gb10_host": facts | {"kernel_release": {"value": "6.14", "source": "t"}}}},
        "d": {"ansible_facts": {"gb10_host": facts}},
    }


def test_verdict() -> None:
    verdict = gb10_parity.gb10_parity(["a", "b", "c", "d"], hostvars(), RULES)
    assert [(one["name"], one["host"]) for one in verdict["findings"]] == [
        ("reached", "a"),
        ("old", "c"),
        ("nfs_mounts", "b"),
    ]
    assert "start the export on a, then remount" in verdict["report"]


def test_pin_and_waivers_reach_the_judge() -> None:
    verdict = gb10_parity.gb10_parity(["d"], hostvars(), [], waivers={"kernel_pin": "why"}, kernel_pin="7")
    assert [one["name"] for one in verdict["findings"]] == ["kernel_release"]
    assert [one["name"] for one in verdict["waived"]] == ["kernel_pin"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"waivers": {"x": "y"}}, "waiver x names nothing"), ({"known_bad": [{"id": "r"}]}, "rule r: .*missing")],
)
def test_wrong_documents_are_the_operators_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AnsibleFilterError, match=message):
        gb10_parity.gb10_parity(["d"], hostvars(), **({"known_bad": []} | options))
