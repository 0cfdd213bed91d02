#!/usr/bin/python
"""Documentation of the action of the same name, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gb10_rank_launch
short_description: Start all ranks in order and follow them until the model generates a token
description:
  - Has to run on all hosts at once. Each starts its rank when the ranks before it in O(order) are started.
  - Shows each rank's phase while it waits, never more than ten seconds without a line, with percentage and time left where this
    profile was launched before.
  - As soon as one rank ends, or its host gives no answer, all hosts save their evidence and stop their ranks. The host at fault
    fails, with RV(report) for the whole group; another fails only where its rank could not be stopped, so run it with
    C(any_errors_fatal).
options:
  fleet: {description: All hosts in the order to show them., type: list, elements: str, required: true}
  order: {description: All hosts in the order to start them., type: list, elements: str, required: true}
  head: {description: The host that answers the API., type: str, required: true}
  library: {description: Directory on the hosts that holds the package gb10., type: path, required: true}
  launch: {description: The launch to join., type: dict, required: true}
  completion: {description: "The completion that proves readiness, as for M(gb10_rank_info).", type: dict, required: true}
  timeout: {description: Seconds until the first token., type: float, required: true}
  start_timeout: {description: Seconds that systemd may take to start one rank., type: float, default: 210}
  user: {description: User that the engine runs as; needed to clean up after it., type: str, required: true}
  poll: {description: Seconds that one look waits on a host for something to happen., type: float, default: 45}
author: [gb10-fleet maintainers (@gb10-fleet)]
"""

EXAMPLES = r"""
- name: Start the ranks and follow them until the model generates a token
  gb10_rank_launch:
    fleet: "{{ groups['fleet'] }}"
    order: "{{ groups['fleet'] | gb10_by_rank(hostvars) | reverse }}"
    head: spark-a
    launch: {launch_id: 0123456789ab, master_port: 21000}
    completion: {base_url: "http://127.0.0.1:8000", model: tiny, prompt: "the"}
    timeout: 900
    user: vllm
    library: /usr/local/lib/gb10-fleet
"""

RETURN = r"""
seconds: {description: Seconds from the call to the first token., returned: success, type: int}
text: {description: The generated text., returned: success, type: str}
evidence: {description: The folder of this host's evidence., returned: failure, type: str}
report:
  description: Host, time, phase, fault, likely cause and last lines of a lost launch; which ranks stopped, where the evidence is.
  returned: failure of the host at fault
  type: str
"""
