"""How far a step's plan is from the best of all plans, where all can be looked at.

    python -m benchmarks.joint --json

A step is short in two resources at once: which packs share a microbatch decides its longest pack, and which
media must be encoded for it. For a few packs all groupings into microbatches are priced, each with the exact
optimum of its media over the ranks (to a thousandth); no segment is split. ``ratio`` is encoders and LLM of
the plan over that of the best grouping, the mean over the draws, ``worst`` the largest; ``unbalanced`` the
mean ratio of the packs in order. The last line of ``--json`` is one object, ``joint``: one row by mixture,
replicas and microbatches.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import click
import numpy as np

from balancer.cost import CostModel
from balancer.lssp import LsspConfig
from balancer.partition import FloatArray
from balancer.planner import BalanceConfig, GroupPlanner
from benchmarks.rivals import optimal_makespan
from benchmarks.synthetic import ENCODERS, SEQ_LEN, Mixture, cost_model, make_packs
from omni_pipeline.core.plan import Pack, StepPlan
from omni_pipeline.core.topology import Topology

SHAPES = ((2, 2), (2, 3), (2, 4), (3, 2), (3, 3))
MIXTURES: dict[str, Mixture] = {
    "video": {"video": 0.7, "text": 0.3},
    "video and speech": {"video": 0.4, "speech": 0.2, "text": 0.4},
}


@click.command()
@click.option("--draws", default=20, show_default=True, help="Steps drawn for each row.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(*, draws: int, as_json: bool) -> None:
    """Measure plans against the best of all plans.

    Example: python -m benchmarks.joint --json
    """
    rows = [
        measure(name, num_replicas=replicas, num_microbatches=microbatches, draws=draws)
        for name in MIXTURES
        for replicas, microbatches in SHAPES
    ]
    for row in rows:
        print(
            f"{row['mixture']:16} {row['replicas']} replicas x {row['microbatches']} microbatches: "
            f"plan {row['ratio']:.4f} (worst {row['worst']:.4f}), in order {row['unbalanced']:.3f}"
        )
    if as_json:
        print(json.dumps({"joint": rows}))


def measure(name: str, *, num_replicas: int, num_microbatches: int, draws: int) -> dict[str, Any]:
    """Return the ratios of plans to best plans for one mixture and shape."""
    planner = GroupPlanner(
        Topology(num_replicas),
        cost_model=cost_model(),
        # The optimum is that of whole segments.
        config=BalanceConfig(group="all", lssp=LsspConfig(kind="off")),
        num_lanes=num_replicas,
        packs_per_step=num_replicas * num_microbatches,
        encoders=ENCODERS,
        seq_len=SEQ_LEN,
    )
    ratios, unbalanced = [], []
    for seed in range(draws):
        packs = make_packs(MIXTURES[name], num_lanes=num_replicas, packs_per_lane=num_microbatches, seed=seed)
        best = optimal_step(packs, planner.cost_model, num_replicas=num_replicas)
        plan = planner.plan(packs, step=0, group=0)
        ratios.append(_seconds(plan, "after") / best)
        unbalanced.append(_seconds(plan, "before") / best)
    return {
        "mixture": name,
        "replicas": num_replicas,
        "microbatches": num_microbatches,
        "ratio": statistics.mean(ratios),
        "worst": max(ratios),
        "unbalanced": statistics.mean(unbalanced),
    }


def optimal_step(packs: Sequence[Pack], model: CostModel, *, num_replicas: int) -> float:
    """Return the least sum over microbatches of encoders' makespan and longest pack, seconds.

    Args:
        packs: A multiple of ``num_replicas``.
        model: Prices packs and media; a replica is one rank.
        num_replicas: Packs of a microbatch, and ranks that encode.
    """
    llm = [model.pack_cost(pack) for pack in packs]
    media = [_media_costs(pack, model) for pack in packs]
    seconds = {
        chosen: max(llm[pack] for pack in chosen)
        + optimal_makespan(np.concatenate([media[pack] for pack in chosen]), num_replicas, gap=1e-3)
        for chosen in itertools.combinations(range(len(packs)), num_replicas)
    }
    return min(
        sum(seconds[chosen] for chosen in found) for found in _groupings(range(len(packs)), num_replicas)
    )


def _groupings(items: Sequence[int], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield every way to divide ``items`` (ascending) into sets of ``size``."""
    if not items:
        yield []
        return
    for others in itertools.combinations(items[1:], size - 1):
        rest = [item for item in items[1:] if item not in others]
        for found in _groupings(rest, size):
            yield [(items[0], *others), *found]


def _media_costs(pack: Pack, model: CostModel) -> FloatArray:
    segments = [segment for sample in pack.samples for segment in sample.segments if segment.is_media]
    return np.asarray([model.media_cost(segment) for segment in segments], dtype=np.float64)


def _seconds(plan: StepPlan, when: str) -> float:
    return sum(float(getattr(load, f"makespan_{when}")) for load in (plan.encoder_balance, plan.llm_balance))


if __name__ == "__main__":
    main()
