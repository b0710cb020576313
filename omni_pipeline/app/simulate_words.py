"""What people call the strategies and workloads of the simulator; used by tables and pages."""

from __future__ import annotations

from balancer.simulator.compare import OURS
from balancer.simulator.workloads import Workload

NAMES = {
    OURS: "multiplexed",
    "stage0": "stage 0",
    "disaggregated": "own pool",
    "bubble_filling": "bubble filling",
    "static": "static plan",
    "no_multiplexing": "no multiplexing",
    "no_balancing": "no balancing",
    "no_lssp": "no LSSP",
    "upfront": "upfront",
}
MODELLED_AFTER = {
    "stage0": "Megatron-LM",
    "disaggregated": "Megatron-Dist",
    "bubble_filling": "Optimus",
    "static": "made from averages",
}
"""Of each baseline."""
PUBLISHED_ABLATIONS = {
    "no_multiplexing": "-52.9 to -60.6 %",
    "no_balancing": "-45.9 to -50.7 %",
    "no_lssp": "-18.7 %",
    "upfront": "not published",
}
"""Change of throughput; second-hand figures."""


def label_of(workload: Workload) -> str:
    """Return what people call a workload."""
    return "Three modalities" if workload.name == "three" else f"Workload {workload.name}"
