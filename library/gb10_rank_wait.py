#!/usr/bin/python
"""Documentation of the action of the same name, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gb10_rank_wait
short_description: Follow all ranks of a launch until the model generates a token
description:
  - Shows each rank's phase while it waits, never more than ten seconds without a line.
  - Fails on every host as soon as one rank ends, with the last lines of that rank.
options:
  fleet: {description: All hosts in the order to show them., type: list, elements: str, required: true}
  head: {description: The host that answers the API., type: str, required: true}
  launch_id: {description: The launch that every rank has to be in., type: str, required: true}
  completion: {description: "The completion that proves readiness, as for M(gb10_rank_info).", type: dict, required: true}
  timeout: {description: Seconds until the first token., type: float, required: true}
  poll: {description: Seconds that one look waits on a host for something to happen., type: float, default: 45}
author: [gb10-fleet maintainers (@gb10-fleet)]
"""

EXAMPLES = r"""
- name: Follow the ranks until the model generates a token
  gb10_rank_wait:
    fleet: "{{ groups['fleet'] }}"
    head: spark-a
    launch_id: 0123456789ab
    completion: {base_url: "http://127.0.0.1:8000", model: tiny, prompt: "the"}
    timeout: 900
"""

RETURN = r"""
seconds: {description: Seconds from the call to the first token., returned: success, type: int}
text: {description: The generated text., returned: success, type: str}
"""
