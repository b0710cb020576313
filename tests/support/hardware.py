"""Machines for tests: one rate for everything, so that expected costs can be written down."""

from __future__ import annotations

from balancer.hardware import HardwareProfile


def flat_hardware(
    *,
    flops_per_s: float = 1e9,
    bytes_per_s: float = 1e9,
    latency_s: float = 0.0,
    hbm_bytes_per_s: float = 1e30,
) -> HardwareProfile:
    """Return a machine whose kernels all run at ``flops_per_s``; memory traffic is free unless asked for."""
    return HardwareProfile(
        name="flat",
        ranks_per_node=8,
        memory_bytes=1e12,
        flops_per_s=flops_per_s,
        hbm_bytes_per_s=hbm_bytes_per_s,
        node_bytes_per_s=bytes_per_s,
        node_latency_s=latency_s,
        network_bytes_per_s=bytes_per_s,
        network_latency_s=latency_s,
    )
