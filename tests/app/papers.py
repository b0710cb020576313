"""A sweep with made-up results, for tables and pages."""

from __future__ import annotations

from collections.abc import Sequence

from balancer.simulator.compare import STRATEGY_NAMES, Compared
from balancer.simulator.workloads import MIXTURES, WORKLOADS
from omni_pipeline.app.paper_results import FIXED_AT_LAUNCH, Data, Paper, Point


def compared(strategy: str, *, step_s: float = 1.0, peak_bytes: float = 6e10) -> Compared:
    """Return a result on ranks of 80 GB."""
    return Compared(
        strategy=strategy,
        step_s=step_s,
        tokens_per_s=1e6 / step_s,
        mfu=0.4 / step_s,
        bubble_fraction=0.1 * step_s,
        encoder_imbalance=step_s,
        llm_imbalance=1.01,
        exchange_s=0.01,
        collective_s=0.1,
        peak_bytes=peak_bytes,
        out_of_memory=peak_bytes > 8e10,
    )


def paper(workloads: Sequence[str] = ("A", "three")) -> Paper:
    """Return a sweep in which strategy n takes 1 + n * media / 20 s, and stage 0 overflows at 9:1."""
    points = [
        Point(
            WORKLOADS[name],
            mixture,
            {
                strategy: compared(
                    strategy,
                    step_s=1 + number * mixture[0] / 20,
                    peak_bytes=9e10 if (strategy, mixture) == ("stage0", (9, 1)) else 6e10,
                )
                for number, strategy in enumerate(STRATEGY_NAMES)
            },
            {strategy: compared(strategy, step_s=3.0) for strategy in FIXED_AT_LAUNCH},
        )
        for name in workloads
        for mixture in MIXTURES
    ]
    return Paper(points, hardware="h100", memory_bytes=8e10, num_steps=2, data=Data())
