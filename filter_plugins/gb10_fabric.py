"""Judgements over the fabric of all hosts, as filters over what the modules returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ansible.module_utils

# Modules get the project's module_utils from Ansible; plugins, which run on the controller, do not.
MODULE_UTILS = str(Path(__file__).resolve().parent.parent / "module_utils")
if MODULE_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(MODULE_UTILS)

from ansible.module_utils.gb10 import allreduce, fabric_judge, fabric_path, fabric_perftest  # noqa: E402 the path above


def peers(hosts: Mapping[str, Mapping[str, Any]], host: str) -> list[dict[str, Any]]:
    """All hosts but ``host``, as gb10_fabric_path wants them."""
    names = ("address", "mtu", "mac")
    return [{"host": name} | {k: found[k] for k in names} for name, found in hosts.items() if name != host]


def perftest_verdict(results: Mapping[str, Mapping[str, Any]], share: float, latency_us: float) -> dict[str, list[str]]:
    """results: host -> what gb10_fabric_perftest measured. Returns ``faults`` and the ``table``'s lines."""
    measured = {host: result["results"] for host, result in results.items()}
    bounds = {host: (float(result["bound"][0]), str(result["bound"][1])) for host, result in results.items()}
    return {
        "faults": fabric_perftest.judge(measured, bounds, share=share, latency_us=latency_us),
        "table": [
            f"{host} -> {row['to']}: {row['gbps']:g} Gb/s, {row['latency_us']:g} us"
            for host, rows in measured.items()
            for row in rows
        ],
    }


def allreduce_verdict(
    results: Mapping[str, Mapping[str, Any]], hosts: Sequence[str], require_rdma: bool, thresholds: Mapping[str, float]
) -> dict[str, Any]:
    """results: host -> what gb10_fabric_allreduce returned. Returns ``faults``, ``notes`` and the ``table``'s lines."""
    measured = {host: result["result"] for host, result in results.items()}
    verdict = allreduce.judge(
        measured,
        hosts,
        require_rdma=require_rdma,
        hcas={host: result["hca"] for host, result in results.items()},
        thresholds=thresholds,
    )
    return verdict | {"table": allreduce.table(measured).splitlines()}


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {
            "gb10_fabric_peers": peers,
            "gb10_fabric_key": fabric_path.key,
            "gb10_fabric_remembered": fabric_path.remembered,
            "gb10_fabric_links": fabric_judge.judge_links,
            "gb10_fabric_unfit": fabric_judge.unfit,
            "gb10_fabric_paths": fabric_judge.judge_paths,
            "gb10_fabric_matrix": fabric_judge.matrix,
            "gb10_fabric_perftest": perftest_verdict,
            "gb10_fabric_allreduce": allreduce_verdict,
        }
