"""The ways to place a step of a group: unbalanced, or the best of some balanced ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from balancer.encoding import Encoding, MediaLoad, fits, makespan, travel, whole
from balancer.media import place_media
from balancer.partition import FloatArray, IntArray
from balancer.reorder import PackPlacement, packs_by_cost, packs_in_order, step_makespan
from balancer.step_inputs import StepInputs, choose_exchange, media_loads
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import ExchangeKind

# A placement of packs that may shorten the step by at most this part is not tried.
WORTH_TRYING = 2e-3
# Placements of packs that are tried, if one of them is allowed.
MAX_TRIED = 3
# Microbatches that may be set apart for packs with long media.
MAX_FIRST = 4

# (segments of the step, their load) -> who encodes them; None if the memory cap cannot be kept.
EncodingChoice = Callable[[IntArray, MediaLoad], Encoding | None]


@dataclass(frozen=True, slots=True)
class StepPlacement:
    """One way to run the step.

    ``encoding`` says who encodes each segment of the step, ``exchanges`` how rows travel in each microbatch
    that has media; times are sums over the microbatches.
    """

    packs: PackPlacement
    encoding: Encoding
    exchanges: dict[int, ExchangeKind]
    encoder_ticks: float
    exchange_ticks: float
    llm_ticks: float

    @property
    def step_ticks(self) -> float:
        """Modelled time of the step."""
        return self.encoder_ticks + self.exchange_ticks + self.llm_ticks


def place_in_order(inputs: StepInputs) -> StepPlacement:
    """Return the unbalanced placement: packs in order, media at home. It may break the memory cap."""
    placement = _with_media(
        inputs, packs_in_order(len(inputs.packs), len(inputs.replicas)), lambda items, load: whole(load.home)
    )
    assert placement is not None
    return placement


def keeps_cap(inputs: StepInputs, placement: StepPlacement) -> bool:
    """Return whether no rank keeps more bytes of media in a microbatch than the cap."""
    if inputs.max_bytes == np.inf:
        return True
    return all(
        fits(load, Encoding(placement.encoding.members[items], placement.encoding.degrees[items]))
        for items, load in media_loads(inputs, placement.packs)
    )


def place_balanced(inputs: StepInputs, unbalanced: StepPlacement) -> StepPlacement:
    """Of some pack placements take the shortest step without a makespan above the unbalanced one.

    The unbalanced step is one of them unless it breaks the cap or leaves forced segments whole, so moving
    pays or nothing moves.

    Packs sorted by LLM cost are the optimum of the LLM, but they may spread media-heavy packs over more
    microbatches and so lengthen the encoders' part; the packs in order always qualify. The most promising
    are tried first, and none that could gain next to nothing. Only where a cap or a fixed threshold forces
    segments long may a makespan grow.

    Raises:
        ConfigError: No placement was found that keeps the memory cap.
    """
    search = inputs.lssp.kind == "auto"

    def price(maker: IntArray, owner: IntArray, rows: IntArray) -> float:
        return choose_exchange(inputs, maker, owner, rows)[1]

    def choose(items: IntArray, load: MediaLoad) -> Encoding | None:
        return place_media(load, price, forced=inputs.forced[items], search=search)

    least = _least_shares(inputs)
    found: list[StepPlacement] = []
    may_stay = not (inputs.forced > 1).any() and keeps_cap(inputs, unbalanced)
    best: StepPlacement | None = unbalanced if may_stay else None
    tried = 0
    for bound, packs in sorted(
        ((_bound(inputs, packs, least), packs) for packs in _pack_placements(inputs)),
        key=lambda pair: pair[0],
    ):
        if best and (tried >= MAX_TRIED or bound > best.step_ticks * (1 - WORTH_TRYING)):
            break
        # Under a cap "given up" and "does not fit" would be one answer.
        below = best.step_ticks if best and inputs.max_bytes == np.inf else np.inf
        choice = _with_media(inputs, packs, choose, least=least, below=below)
        tried += choice is not None or below < np.inf
        if choice is None:
            continue
        found.append(choice)
        is_allowed = (
            choice.encoder_ticks <= unbalanced.encoder_ticks and choice.llm_ticks <= unbalanced.llm_ticks
        )
        if is_allowed and (best is None or choice.step_ticks < best.step_ticks):
            best = choice
    if best is None and not found:
        raise does_not_fit(inputs)
    return best or min(found, key=lambda choice: choice.step_ticks)


def _pack_placements(inputs: StepInputs) -> list[PackPlacement]:
    """Packs in order; by LLM cost; by all cost; the same with the longest media in the first microbatches."""
    num_replicas, costs = len(inputs.replicas), inputs.pack_costs
    longest = np.zeros(len(costs))
    np.maximum.at(longest, inputs.media_packs, inputs.media_costs)
    media_of_pack = np.bincount(inputs.media_packs, weights=inputs.media_costs, minlength=len(costs))
    by_longest = np.argsort(-longest, kind="stable")
    found = [
        packs_in_order(len(costs), num_replicas),
        packs_by_cost(costs, costs, num_replicas),
        packs_by_cost(costs + media_of_pack / len(inputs.ranks), costs, num_replicas),
    ]
    for num_first in range(1, min(MAX_FIRST, (len(costs) - 1) // num_replicas) + 1):
        keys = costs.copy()
        keys[by_longest[: num_first * num_replicas]] += costs.max()
        found.append(packs_by_cost(keys, costs, num_replicas))
    # Small steps often come to the same by several ways, which would use up what may be tried.
    return list({(item.replicas.tobytes(), item.microbatches.tobytes()): item for item in found}.values())


def _bound(inputs: StepInputs, packs: PackPlacement, least: FloatArray) -> float:
    """What the step cannot go below with packs so placed, ticks."""
    encoders = float(_encoder_bounds(inputs, packs, least).sum())
    return step_makespan(inputs.pack_costs, packs.microbatches) + encoders


def _encoder_bounds(inputs: StepInputs, packs: PackPlacement, least: FloatArray) -> FloatArray:
    """The same for the encoders, by microbatch. ``least``: largest share of each segment."""
    microbatches = packs.microbatches[inputs.media_packs]
    totals = np.bincount(microbatches, weights=inputs.media_costs) / len(inputs.ranks)
    longest = np.zeros(len(totals))
    np.maximum.at(longest, microbatches, least)
    return np.maximum(totals, longest)


def _least_shares(inputs: StepInputs) -> FloatArray:
    """The largest share of each segment in its best division, at least; float64 [media], ticks.

    Only segments above the mean load of a rank and microbatch are divided to know it: others do not bound.
    """
    least = inputs.media_costs / max(inputs.subgroups, default=1)
    num_loads = len(inputs.ranks) * -(-len(inputs.packs) // len(inputs.replicas))
    for item in np.flatnonzero(inputs.media_costs * num_loads > inputs.media_costs.sum()).tolist():
        divided = [inputs.shares(item, degree) for degree in inputs.subgroups]
        largest = [float(shares.costs.max()) for shares in divided if shares]
        least[item] = min([float(inputs.media_costs[item]), *largest])
    return least


def does_not_fit(inputs: StepInputs) -> ConfigError:
    """Return the error of a step whose media are more than the ranks may keep."""
    total, num_ranks = float(inputs.media_bytes.sum()), len(inputs.ranks)
    remedies = ["raise balance.encoder_memory_bytes", "lower order.seq_len"]
    if inputs.lssp.kind != "auto":
        remedies.append("set balance.lssp.kind = 'auto'")
    return ConfigError(
        f"the media of a step keep {total:.0f} bytes on {num_ranks} ranks and do not divide so that each "
        f"rank keeps at most {inputs.max_bytes:.0f} of one microbatch",
        fix=", or ".join(remedies),
    )


def _with_media(
    inputs: StepInputs,
    packs: PackPlacement,
    choose: EncodingChoice,
    *,
    least: FloatArray | None = None,
    below: float = np.inf,
) -> StepPlacement | None:
    """The packs with their media encoded as chosen in each microbatch; None if one finds no choice.

    Also None as soon as it is certain that the step does not get below ``below`` ticks. ``least`` as
    in ``_encoder_bounds``.
    """
    exchanges: dict[int, ExchangeKind] = {}
    members = np.zeros(len(inputs.media), dtype=np.int64)
    degrees = np.ones(len(inputs.media), dtype=np.int64)
    encoder_total = exchange_total = 0.0
    llm_ticks = step_makespan(inputs.pack_costs, packs.microbatches)
    bounds = _encoder_bounds(inputs, packs, np.zeros(len(inputs.media)) if least is None else least)
    at_least = llm_ticks + float(bounds.sum())
    # Few segments are the hardest to even, so they tell most.
    for items, load in sorted(media_loads(inputs, packs), key=lambda pair: len(pair[0])):
        encoding = choose(items, load)
        if encoding is None:
            return None
        members[items], degrees[items] = encoding.members, encoding.degrees
        longest = makespan(load, encoding)
        kind, ticks = choose_exchange(inputs, *travel(load, encoding))
        encoder_total += longest
        exchange_total += ticks
        microbatch = int(packs.microbatches[inputs.media_packs[items[0]]])
        exchanges[microbatch] = kind
        at_least += longest + ticks - float(bounds[microbatch])
        if at_least >= below:
            return None
    return StepPlacement(
        packs=packs,
        encoding=Encoding(members, degrees),
        exchanges=exchanges,
        encoder_ticks=encoder_total,
        exchange_ticks=exchange_total,
        llm_ticks=llm_ticks,
    )
