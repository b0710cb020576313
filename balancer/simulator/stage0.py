"""Baseline: the encoders are in pipeline stage 0 (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053)."""

from __future__ import annotations

from collections.abc import Sequence

from balancer.simulator.schedule import first_stage
from balancer.simulator.seats import Prepared, placed_packs, seats_of, stage_team, step_work
from balancer.simulator.setup import Setup
from balancer.simulator.shards import encoder_shards, llm_shards
from balancer.simulator.teams import encode_in_teams, given_to
from balancer.simulator.work import llm_work, planned_segments
from omni_pipeline.core.plan import StepPlan


def encoders_in_stage_0(plans: Sequence[StepPlan], setup: Setup) -> Prepared:
    """Megatron-LM: stage 0 of each replica encodes the replica's own packs, before its own LLM layers.

    Assumes: the encoders have the LLM's tensor parallelism (see ``teams``), so rows need no exchange; packs
    run where they fall; the LLM's layers are divided evenly over all stages. Encoder parameters lie on the
    ranks of stage 0 and are sharded as the setup says.
    """
    topology, num_microbatches = setup.topology, plans[0].num_microbatches
    teams = [stage_team(topology, replica, 0) for replica in range(topology.num_replicas)]
    segments = [given_to(item, teams[item.replica]) for item in planned_segments(plans, setup)]
    encoding = encode_in_teams(segments, teams, setup, tp=topology.tp, num_microbatches=num_microbatches)
    no_exchange = dict.fromkeys(range(topology.num_replicas), 0)
    work = step_work(
        seats_of(setup, first_stage(topology.pp, num_microbatches), no_exchange, alone=()),
        encoding,
        llm_work(placed_packs(plans), setup, num_microbatches=num_microbatches),
        setup=setup,
        exchanges={},
        shards=(encoder_shards(setup, encoding.hosts, tp=topology.tp), llm_shards(setup)),
    )
    return Prepared(work, encoding)
