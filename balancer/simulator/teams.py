"""Tensor-parallel encoders: some ranks encode whatever is theirs together, as the LLM's stages compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from balancer.simulator.network import gather_s, spread_of
from balancer.simulator.setup import Setup
from balancer.simulator.work import (
    GATHERS_PER_LAYER,
    VALUE_BYTES,
    EncoderPart,
    EncoderWork,
    PlacedSegment,
    encoder_seconds,
)
from balancer.split import even_runs
from balancer.work import media_sizes

Team = tuple[int, ...]


def encode_in_teams(
    segments: Sequence[PlacedSegment], teams: Sequence[Team], setup: Setup, *, tp: int, num_microbatches: int
) -> EncoderWork:
    """Return the encoders' work if each segment is encoded by all ranks of a team.

    The matrices are cut over ``tp`` ranks, the segments dealt evenly over what is left of a team; both are
    taken to be perfect. A tensor-parallel layer gathers and scatters its positions as the LLM's does, in the
    backward as in the forward.

    Args:
        segments: The ranks of each are a team.
        teams: All that hold the encoders, ascending.
        setup: The run.
        tp: Tensor-parallel degree; divides the ranks of a team.
        num_microbatches: Of the step.
    """
    model = setup.cost_model
    load, kept = (np.zeros((setup.topology.world_size, num_microbatches)) for _ in range(2))
    grids: dict[tuple[Team, int], dict[str, list[tuple[int, int, int]]]] = defaultdict(dict)
    for item in segments:
        name = model.encoder_name(item.segment)
        grids[item.ranks, item.microbatch].setdefault(name, []).append(item.segment.grid)
        kept[list(item.ranks), item.microbatch] += model.media_bytes(item.segment) / len(item.ranks)
    parts = {}
    idle = encoder_seconds(model, {})
    for team in teams:
        for microbatch in range(num_microbatches):
            found = grids.get((team, microbatch), {})
            forward, backward = encoder_seconds(model, found) if found else idle
            positions = {
                name: sum(media_sizes(model.encoders[name], grid).positions for grid in own)
                for name, own in found.items()
            }
            exchanged = tensor_parallel_s(positions, setup, tp=tp, split=len(team) // tp)
            forward = forward / len(team) + exchanged
            backward = backward / len(team) + exchanged * (1 + model.encoders_again)
            parts[team[0], microbatch] = (EncoderPart(team, forward, backward),)
            load[list(team), microbatch] = forward + backward
    return EncoderWork(parts, load, kept, tuple(rank for team in teams for rank in team))


def given_to(item: PlacedSegment, team: Team) -> PlacedSegment:
    """Return a segment that ``team`` encodes together; its rows come out evenly over their ranks."""
    return replace(item, ranks=team, shares=even_runs(item.segment.num_rows, len(team)), joined=False)


def tensor_parallel_s(positions: Mapping[str, float], setup: Setup, *, tp: int, split: int = 1) -> float:
    """Return the seconds of the tensor-parallel collectives of one forward; nothing hides them.

    Args:
        positions: Attention positions of what is encoded, by encoder.
        setup: The run.
        tp: Neighbouring ranks that share the matrices.
        split: How many such sets of ranks share the segments.
    """
    if tp == 1:
        return 0.0
    spread = spread_of(range(tp), setup.hardware)
    seconds = 0.0
    for name, count in positions.items():
        shape = setup.cost_model.encoders[name]
        num_bytes = VALUE_BYTES * shape.hidden * count / split
        seconds += shape.layers * GATHERS_PER_LAYER * gather_s(num_bytes, spread, setup.hardware)
    return seconds
