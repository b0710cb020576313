"""Steps made by hand: a pipeline of equal stages with given times, without plans and without parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from balancer.simulator.build import Seat, StepWork, build_programs
from balancer.simulator.engine import Timeline, run
from balancer.simulator.exchanges import Exchange
from balancer.simulator.schedule import Stage
from balancer.simulator.setup import Setup
from balancer.simulator.shards import Shards
from balancer.simulator.work import EncoderPart, LlmWork
from omni_pipeline.core.topology import Topology
from tests.balancer.worlds import cost_model

NO_SHARDS = Shards("llm", True, 0.0, 0.0, 0.0, {}, {}, 0.0, 1, 1.0)


def run_stages(
    stages: Sequence[Stage],
    *,
    num_microbatches: int,
    llm_s: tuple[float, float],
    encoder_s: Sequence[tuple[float, float]] = (),
    exchange_s: float | None = None,
    message_s: float = 0.0,
) -> Timeline:
    """Run one replica with one rank per stage.

    Args:
        stages: Slots of each.
        num_microbatches: Of the step.
        llm_s: Forward and backward of a stage.
        encoder_s: Forward and backward of the encoders on each stage, for one microbatch.
        exchange_s: Rows to stage 0, and as long back; all stages take part. None: nobody waits for rows.
        message_s: From stage to stage.
    """
    full = np.ones((1, num_microbatches))
    ranks = tuple(range(len(stages)))
    num_stages = sum(any(slot.task == "forward" for slot in slots) for slots in stages)
    first = len(stages) - num_stages
    seats = tuple(
        Seat((rank,), slots, 0, rank - first, (rank,)) if rank >= first else Seat((rank,), slots)
        for rank, slots in enumerate(stages)
    )
    exchange = Exchange(ranks, ranks, exchange_s or 0.0, exchange_s or 0.0)
    work = StepWork(
        seats=seats,
        num_stages=num_stages,
        llm=LlmWork(full * llm_s[0], full * llm_s[1], full * message_s, full, full),
        parts={
            (rank, microbatch): (EncoderPart((rank,), *seconds),)
            for rank, seconds in enumerate(encoder_s)
            for microbatch in range(num_microbatches)
        },
        exchanges={(0, index): exchange for index in range(num_microbatches)}
        if exchange_s is not None
        else {},
        encoder_shards=None,
        llm_shards=NO_SHARDS,
        update_s=dict.fromkeys(ranks, 0.0),
    )
    return run(build_programs(work, Setup(Topology(1), cost_model())))
