"""Filter: the verdict on the facts of all hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ansible.module_utils
from ansible.errors import AnsibleFilterError

PACKAGES = str(Path(__file__).resolve().parent.parent / "module_utils")
if PACKAGES not in ansible.module_utils.__path__:  # Ansible finds the project's folder for modules, not for filters
    ansible.module_utils.__path__.append(PACKAGES)

from ansible.module_utils.gb10.host_parity import ParityError, judge_documents  # noqa: E402
from ansible.module_utils.gb10.known_bad import KnownBadError  # noqa: E402

DOCUMENTATION = r"""
name: gb10_parity
short_description: Compare the hosts of a fleet with each other and with what is known to be bad
description: A pure function of the facts that M(gb10_host_info) gathered.
options:
  _input: {description: Names of the hosts., type: list, elements: str, required: true}
  hostvars: {description: The variables of all hosts., type: dict, required: true}
  known_bad: {description: Rules of known-bad combinations., type: list, elements: dict, required: true}
  baseline: {description: Wanted values by fact., type: dict, default: {}}
  waivers: {description: Reasons by fact or rule id., type: dict, default: {}}
  kernel_pin: {description: The kernel release that every host has to run., type: str, default: ''}
author: gb10-fleet
"""
EXAMPLES = r"""
verdict: "{{ ansible_play_hosts_all | gb10_parity(hostvars, known_bad=rules, waivers={'cpu_governor': 'on trial'}) }}"
"""
RETURN = r"""
_value:
  description: C(findings), C(waived), C(notes), C(table) and all of them as C(report).
  type: dict
"""


def gb10_parity(
    hosts: Sequence[str],
    hostvars: Mapping[str, Mapping[str, Any]],
    known_bad: Sequence[Mapping[str, Any]],
    baseline: Mapping[str, Any] | None = None,
    waivers: Mapping[str, str] | None = None,
    kernel_pin: str = "",
) -> dict[str, Any]:
    """Verdict of host_parity.judge_documents on the named hosts; one without facts was not reached."""
    facts = {host: hostvars[host].get("ansible_facts", {}).get("gb10_host") for host in hosts}
    addresses = {}
    for host in hosts:
        for name in ("fabric_address", "ansible_host"):
            if name in hostvars[host]:
                addresses[str(hostvars[host][name]).partition("/")[0]] = host
    try:
        return judge_documents(facts, known_bad, baseline, waivers, addresses, kernel_pin)
    except (ParityError, KnownBadError) as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Any]:
        return {"gb10_parity": gb10_parity}
