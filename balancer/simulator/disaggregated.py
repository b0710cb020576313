"""Baseline: encoders on a pool of their own (DistTrain, Zhang et al. 2024, arXiv 2408.04275)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from balancer.simulator.build import Seat
from balancer.simulator.exchanges import Exchange, exchange_s, moved_rows
from balancer.simulator.placing import places_by_cost
from balancer.simulator.schedule import pool
from balancer.simulator.seats import Prepared, all_packs, seats_of, stage_team, step_work
from balancer.simulator.setup import Profile, Setup, profile_of
from balancer.simulator.shards import encoder_shards, llm_shards
from balancer.simulator.teams import Team, encode_in_teams, given_to, tensor_parallel_s
from balancer.simulator.work import PlacedSegment, llm_work, planned_segments
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import Pack, StepPlan
from omni_pipeline.core.topology import Topology


@dataclass(frozen=True, slots=True)
class Split:
    """Who does what for ever.

    Args:
        llm: Layout of the LLM, on the first ranks.
        teams: The other ranks, in tensor-parallel teams that each hold the encoders.
    """

    llm: Topology
    teams: tuple[Team, ...]


def disaggregated(plans: Sequence[StepPlan], setup: Setup) -> Prepared:
    """A pool of whole nodes encodes, the other ranks run the LLM; the pool is one more stage, before stage 0.

    Assumes: the best split for the profile (see ``best_split``), whatever this step holds. Packs fill the
    replicas in their order; those that run together are one microbatch of the pool. Its teams get whole
    segments by cost, longest first. Rows cross the network; 1F1B lets the pool run one microbatch more ahead
    than stage 0.
    """
    packs = all_packs(plans)
    split = best_split(packs, setup)
    llm = replace(setup, topology=split.llm)
    num_replicas = split.llm.num_replicas
    num_microbatches = -(-len(packs) // num_replicas)
    places = [(index % num_replicas, index // num_replicas) for index in range(len(packs))]
    together = dict.fromkeys(range(num_replicas), 0)
    segments = _moved(plans, setup, packs, places)
    costs = [setup.cost_model.media_cost(item.segment) for item in segments]
    numbers = places_by_cost(segments, costs, group_of=together, num_places=len(split.teams))
    segments = [given_to(item, split.teams[number]) for item, number in zip(segments, numbers, strict=True)]
    tp = len(split.teams[0])
    encoding = encode_in_teams(segments, split.teams, setup, tp=tp, num_microbatches=num_microbatches)
    owners = tuple(rank for replica in range(num_replicas) for rank in stage_team(split.llm, replica, 0))
    exchanges = {}
    for microbatch, moves in enumerate(moved_rows(segments, llm, num_microbatches=num_microbatches)):
        seconds = exchange_s(moves, setup) / 2
        exchanges[0, microbatch] = Exchange(encoding.hosts, owners, seconds, seconds)
    encoders, *stages = pool(split.llm.pp, num_microbatches)
    work = step_work(
        (*seats_of(llm, stages, together, alone=()), *(Seat(team, encoders) for team in split.teams)),
        encoding,
        llm_work(dict(zip(places, packs, strict=True)), llm, num_microbatches=num_microbatches),
        setup=setup,
        exchanges=exchanges,
        shards=(encoder_shards(setup, encoding.hosts, tp=tp), llm_shards(llm)),
    )
    return Prepared(work, encoding)


def best_split(packs: Sequence[Pack], setup: Setup) -> Split:
    """Return the split that makes the shortest step of ``setup.profile``.

    All pools of whole nodes (of single ranks inside one node), all tensor-parallel degrees of the encoders in
    a node, and all numbers of stages up to twice the given are compared, by the time of a pipeline whose
    first stage is the pool. Splits whose parameters and activations do not fit are taken only if none fits.

    Args:
        packs: Their number, and the most activations of one of them, are those of the split's steps.
        setup: The run.

    Raises:
        ConfigError: No split leaves the LLM a whole replica.
    """
    given, per_node = setup.topology, setup.hardware.ranks_per_node
    profile = setup.profile or profile_of(packs, setup.cost_model)
    unit = per_node if given.world_size > per_node else 1
    pack_bytes = max((setup.cost_model.pack_bytes(pack) for pack in packs), default=0)
    found = []
    for num_hosts, tp, pp in itertools.product(
        range(unit, given.world_size, unit), (1, 2, 4, 8), range(1, 2 * given.pp + 1)
    ):
        num_ranks = given.world_size - num_hosts
        if num_ranks % (given.tp * given.cp * pp) or num_hosts % tp or tp > per_node:
            continue
        ranks = range(num_ranks, given.world_size)
        teams = tuple(tuple(ranks[start : start + tp]) for start in range(0, num_hosts, tp))
        per_group = 0
        nodes = per_node if num_ranks > per_node else 0
        split = Split(Topology(num_ranks, given.tp, given.cp, pp, per_group, nodes), teams)
        seconds = _step_s(split, profile, setup, num_packs=len(packs))
        found.append((not _fits(split, pack_bytes, setup), seconds, num_hosts, tp, pp, split))
    if not found:
        raise ConfigError(
            f"{given.world_size} ranks cannot be split into encoders and replicas of {given.tp * given.cp}",
            fix="simulate more ranks, or another strategy than 'disaggregated'",
        )
    return min(found, key=lambda item: item[:-1])[-1]


def _moved(
    plans: Sequence[StepPlan], setup: Setup, packs: Sequence[Pack], places: Sequence[tuple[int, int]]
) -> list[PlacedSegment]:
    """All media with the places that their packs have in the split layout."""
    place_of: Mapping[tuple[int, int], tuple[int, int]] = {
        (pack.lane, pack.number): place for pack, place in zip(packs, places, strict=True)
    }
    packs_of_media = [plan.packs[item.pack] for plan in plans for item in plan.media]
    moved = []
    for item, pack in zip(planned_segments(plans, setup), packs_of_media, strict=True):
        replica, microbatch = place_of[pack.lane, pack.number]
        moved.append(replace(item, replica=replica, microbatch=microbatch))
    return moved


def _step_s(split: Split, profile: Profile, setup: Setup, *, num_packs: int) -> float:
    """Time of a pipeline of equal microbatches whose first stage is the pool."""
    replicas, tp = split.llm.num_replicas, len(split.teams[0])
    num_microbatches = -(-num_packs // replicas)
    slot_s = profile.llm_s / split.llm.ranks_per_replica
    per_team = replicas / len(split.teams)
    exchanged = tensor_parallel_s(profile.positions, setup, tp=tp) * (2 + setup.cost_model.encoders_again)
    # The longest segment of a microbatch bounds its team, however many teams there are.
    pool_s = max(per_team * (profile.encoder_s / tp + exchanged), profile.largest_s / tp)
    return (num_microbatches - 1) * max(slot_s, pool_s) + pool_s + split.llm.pp * slot_s


def _fits(split: Split, pack_bytes: int, setup: Setup) -> bool:
    hosts = [rank for team in split.teams for rank in team]
    encoders = encoder_shards(setup, hosts, tp=len(split.teams[0]))
    llm_bytes = llm_shards(replace(setup, topology=split.llm)).held_bytes
    llm_bytes += split.llm.pp * pack_bytes / split.llm.ranks_per_replica
    encoder_bytes = encoders.held_bytes if encoders else 0.0
    return max(llm_bytes, encoder_bytes) <= setup.hardware.memory_bytes
