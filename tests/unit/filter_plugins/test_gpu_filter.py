"""The GPU probes of a fleet side by side."""

from __future__ import annotations

import gb10_gpu

HEALTHY = {
    "state": "healthy",
    "memory": "fast",
    "figures": {"tflops": 81.26, "sm_mhz": 2177.0, "watts": 81.3, "gemv_gb_s": 224.0, "copy_gb_s": 231.4},
    "timeline": [[100, 224.0], [101, 70.0], [103, 224.0]],
}
WEDGED = {"msg": "GPU wedged", "faults": ["GPU wedged"]}


def test_hosts_share_one_clock_and_one_scale():
    late = HEALTHY | {"timeline": [[102, 112.0], [103, 224.0]]}
    header, first, second = gb10_gpu.gb10_gpu_table({"spark-a": HEALTHY, "spark-b": late})
    assert header.split()[:3] == ["host", "GPU", "memory"]
    assert first.split() == ["spark-a", "healthy", "fast", "81.3", "2177", "81", "224.0", "231.4", "█▃·█"]
    assert second.endswith("··▅█")


def test_host_without_a_measurement_has_dashes():
    _, line = gb10_gpu.gb10_gpu_table({"spark-c": WEDGED})
    assert line.split() == ["spark-c", "unknown", "unknown", "-", "-", "-", "-", "-"]


def test_figures_of_a_processor_keep_their_digits():
    slow = HEALTHY | {"figures": HEALTHY["figures"] | {"tflops": 0.0277}}
    assert "  0.0277  " in gb10_gpu.gb10_gpu_table({"spark-a": slow})[1]
