"""A step in seconds: what each rank encodes, what each stage computes, how rows and activations travel.

All prices are those of the cost model the plans are made with; nothing here decides anything. Where the
cost model prices a whole microbatch of an encoder (weights are read, kernels are started, whatever there is
to encode), that price is taken, so spreading small media thinly costs what it costs.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from balancer.cost import LLM, CostModel
from balancer.layout import SequenceLayout
from balancer.partition import FloatArray
from balancer.simulator.network import gather_s, message_s, spread_of
from balancer.simulator.setup import Setup
from balancer.split import cut_segment
from omni_pipeline.core.interleave import Runs
from omni_pipeline.core.plan import Pack, StepPlan
from omni_pipeline.core.sample import Segment
from omni_pipeline.core.topology import Topology

VALUE_BYTES = 2
GATHERS_PER_LAYER = 4  # attention and feed-forward: gather the sequence before, scatter sums after


@dataclass(frozen=True, slots=True)
class EncoderPart:
    """Encoder work of one microbatch that some ranks do together.

    Args:
        members: One rank, or those that share a joined segment or a tensor-parallel encoder.
        forward_s: Seconds of the slowest.
        backward_s: Seconds of the slowest.
    """

    members: tuple[int, ...]
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class EncoderWork:
    """What the ranks encode.

    Args:
        parts: By (rank, microbatch), in an order that all members of a part share.
        load_s: float64 [ranks, microbatches]; forward and backward.
        kept_bytes: float64 [ranks, microbatches]; activations from forward to backward.
        hosts: Ranks that hold the encoders, ascending.
    """

    parts: Mapping[tuple[int, int], tuple[EncoderPart, ...]]
    load_s: FloatArray
    kept_bytes: FloatArray
    hosts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LlmWork:
    """What one stage of each replica computes, float64 [replicas, microbatches] each.

    Args:
        forward_s: Seconds of a stage's forward, its ranks together.
        backward_s: The same of the backward, with the forward done again if activations are not kept.
        message_s: Seconds from the end of a stage's slot to the arrival at the next stage.
        kept_bytes: Activations per rank of a stage, from forward to backward.
        num_tokens: Tokens of samples.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    message_s: FloatArray
    kept_bytes: FloatArray
    num_tokens: FloatArray


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """One media segment: where its rows go, and who encodes it.

    Args:
        segment: What is encoded.
        replica: Of its pack.
        microbatch: Of its pack.
        position: First sequence position of its rows.
        length: Positions of its pack's sequence.
        ranks: Who encodes it, in the order of their shares.
        shares: Rows that each of them makes.
        joined: Whether attention crosses the shares.
        runs: As in ``MediaPlacement``.
    """

    segment: Segment
    replica: int
    microbatch: int
    position: int
    length: int
    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    joined: bool = False
    runs: Runs = ()

    def moved_to(self, *ranks: int) -> PlacedSegment:
        """Return the segment encoded by ``ranks``: whole by one, or in its shares by as many as now."""
        if len(ranks) == 1:
            return replace(self, ranks=ranks, shares=(self.segment.num_rows,), joined=False)
        return replace(self, ranks=ranks)


def planned_segments(plans: Sequence[StepPlan], setup: Setup) -> list[PlacedSegment]:
    """Return all media segments as the plans place them, by plan, then in its order."""
    layout = SequenceLayout(setup.topology, setup.seq_len, setup.sequence)
    found = []
    for plan in plans:
        lengths = [layout.length(pack) for pack in plan.packs]
        for item in plan.media:
            found.append(
                PlacedSegment(
                    segment=plan.packs[item.pack].samples[item.sample].segments[item.segment],
                    replica=plan.slots[item.pack].replica,
                    microbatch=item.microbatch,
                    position=item.position,
                    length=lengths[item.pack],
                    ranks=item.ranks,
                    shares=item.shares,
                    joined=item.joined,
                    runs=item.runs,
                )
            )
    return found


def llm_work(packs: Mapping[tuple[int, int], Pack], setup: Setup, *, num_microbatches: int) -> LlmWork:
    """Return the LLM's work.

    Args:
        packs: By (replica, microbatch); a place without a pack runs empty.
        setup: The run, ``topology`` the layout that the replicas are of.
        num_microbatches: Of the step.
    """
    topology, model = setup.topology, setup.cost_model
    shape = (topology.num_replicas, num_microbatches)
    forward, backward, message, kept, tokens = (np.zeros(shape) for _ in range(5))
    fraction = model.forward_fraction(LLM)
    same_node = topology.pp == 1 or _stages_share_nodes(topology, setup)
    for place, pack in packs.items():
        seconds = model.pack_cost(pack) / topology.ranks_per_replica
        positions = setup.seq_len if setup.seq_len and pack.samples else pack.num_positions
        once = _parallel_s(positions, topology, setup)
        forward[place] = seconds * fraction + once
        backward[place] = seconds * (1 - fraction) + once * (1 + model.passes_of(LLM).num_again)
        per_rank = positions / (topology.tp * topology.cp)
        num_bytes = VALUE_BYTES * model.llm.hidden * per_rank
        message[place] = message_s(num_bytes, same_node=same_node, hardware=setup.hardware)
        kept[place] = model.pack_bytes(pack) / topology.ranks_per_replica
        tokens[place] = pack.num_tokens
    return LlmWork(forward, backward, message, kept, tokens)


def encode(
    segments: Sequence[PlacedSegment], setup: Setup, *, hosts: Iterable[int], num_microbatches: int
) -> EncoderWork:
    """Return the encoders' work; every host runs its encoders in each microbatch, whatever it has to encode.

    Args:
        segments: Who encodes what.
        setup: The run.
        hosts: Ranks that hold the encoders.
        num_microbatches: Of the step.
    """
    model, hosts = setup.cost_model, tuple(hosts)
    kept, positions = (np.zeros((setup.topology.world_size, num_microbatches)) for _ in range(2))
    for item in segments:
        of_row = model.encoders[model.encoder_name(item.segment)].positions_per_row
        for rank, rows in zip(item.ranks, item.shares, strict=True):
            positions[rank, item.microbatch] += rows * of_row
    grids: dict[tuple[int, int], dict[str, list[tuple[int, int, int]]]] = {}
    joined: dict[tuple[int, tuple[int, ...]], tuple[float, float]] = {}
    for item in segments:
        name, microbatch = model.encoder_name(item.segment), item.microbatch
        for rank, rows in zip(item.ranks, item.shares, strict=True):
            kept[rank, microbatch] += model.media_bytes(item.segment, rows)
        if item.joined:
            fewest = int(min(positions[rank, microbatch] for rank in item.ranks))
            forward, backward = _joined_s(item, model, num_positions=fewest)
            before = joined.get((microbatch, item.ranks), (0.0, 0.0))
            joined[microbatch, item.ranks] = before[0] + forward, before[1] + backward
            continue
        for rank, grid in zip(item.ranks, _grids(item.segment, item.shares, model), strict=True):
            grids.setdefault((rank, microbatch), {}).setdefault(name, []).append(grid)
    parts: dict[tuple[int, int], list[EncoderPart]] = defaultdict(list)
    # Sorted, so that all members of overlapping subgroups have them in one order.
    for (microbatch, ranks), (forward, backward) in sorted(joined.items()):
        part = EncoderPart(ranks, forward, backward)
        for rank in ranks:
            parts[rank, microbatch].append(part)
    idle = encoder_seconds(model, {})
    for place in itertools.product(hosts, range(num_microbatches)):
        forward, backward = encoder_seconds(model, grids[place]) if place in grids else idle
        parts[place].append(EncoderPart((place[0],), forward, backward))
    load = np.zeros(kept.shape)
    for place, items in parts.items():
        load[place] = sum(part.forward_s + part.backward_s for part in items)
    return EncoderWork({place: tuple(items) for place, items in parts.items()}, load, kept, hosts)


def encoder_seconds(
    model: CostModel, grids: Mapping[str, Sequence[tuple[int, int, int]]]
) -> tuple[float, float]:
    """Return the seconds (forward, backward) of one microbatch of all encoders on one rank."""
    forward = backward = 0.0
    for name in model.encoders:
        seconds = model.encoder_cost(name, grids.get(name, ()))
        fraction = model.forward_fraction(name)
        forward += seconds * fraction
        backward += seconds * (1 - fraction)
    return forward, backward


def _joined_s(item: PlacedSegment, model: CostModel, *, num_positions: int) -> tuple[float, float]:
    """Seconds (forward, backward) of the slowest share of a joined segment, in kernels of ``num_positions``.

    The rank with the fewest positions in the microbatch has the smallest kernels.
    """
    split = model.split(item.segment, len(item.ranks), num_positions=num_positions)
    assert split is not None, f"a plan splits {item.segment.grid} into {item.shares}"
    forward = max(split.costs) * model.forward_fraction(model.encoder_name(item.segment))
    return forward, max(split.costs) - forward


def _grids(segment: Segment, shares: tuple[int, ...], model: CostModel) -> tuple[tuple[int, int, int], ...]:
    """The smaller segment that each share is."""
    if len(shares) == 1:
        return (segment.grid,)
    cut = cut_segment(model.encoders[model.encoder_name(segment)], segment.grid, len(shares))
    assert cut is not None, f"a plan splits {segment.grid} into {shares} without joining"
    assert cut.rows == shares, f"a plan cuts {segment.grid} into {shares}, not {cut.rows}"
    return cut.grids


def _parallel_s(positions: int, topology: Topology, setup: Setup) -> float:
    """Seconds of the tensor- and context-parallel collectives of one stage's forward; nothing hides them.

    Tensor parallel with sequence parallel (Korthikanti et al. 2022): twice a gather and a scatter of the
    sequence per layer. Context parallel: a gather of keys and values per layer.
    """
    llm, hardware = setup.cost_model.llm, setup.hardware
    layers = llm.layers / topology.pp
    seconds = 0.0
    if topology.tp > 1:
        num_bytes = VALUE_BYTES * llm.hidden * positions / topology.cp
        spread = spread_of(range(topology.tp), hardware)
        seconds += layers * GATHERS_PER_LAYER * gather_s(num_bytes, spread, hardware)
    if topology.cp > 1:
        num_bytes = VALUE_BYTES * 2 * llm.kv_heads * llm.head_dim * positions / topology.tp
        spread = spread_of(range(0, topology.tp * topology.cp, topology.tp), hardware)
        seconds += layers * gather_s(num_bytes, spread, hardware)
    return seconds


def _stages_share_nodes(topology: Topology, setup: Setup) -> bool:
    """Whether the next stage of a replica is on the same node."""
    per_stage = topology.world_size // topology.pp
    return per_stage < setup.hardware.ranks_per_node and setup.hardware.ranks_per_node % per_stage == 0
