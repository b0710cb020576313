"""How long a plan takes by size of the group, and what it buys by mixture and by size of the group.

    python -m benchmarks.balance --json

Packs are made of synthetic samples before the clock starts (``benchmarks.synthetic``), priced as
Qwen2.5-Omni-3B on H100-class ranks; each replica is one rank and has 8 microbatches. Times are processor
time of one rank, one thread, the median of some repeats: on an idle machine it is the time that passes.
``before`` and ``after`` are makespan / mean of the modelled loads, in order and under the plan. The last line
of ``--json`` is one object:

``plan_ms``, ``step_s`` (modelled step: encoders and LLM, without exchange or collectives) and
``plan_fraction`` (the one over the other) by ranks of the group, ``plan`` (more of the same);
``imbalance`` by mixture, of ``encoder`` and ``llm``; ``mixture`` (rows moved, modelled speed-up, ``plan_ms``)
and ``mixture_without_lssp`` (the same with every segment encoded by one rank);
``world_plan_ms``: the plan of one group of 64 ranks in worlds of several sizes; ``groups``: by ranks of the
world, the imbalance and the modelled step if replicas balance in groups of none, one node (8 ranks), two,
four, or all, no segment shared. All ranks of the run meet in every microbatch (their parameters are sharded
over the run).
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import click
import numpy as np

from balancer.cost import CostModel
from balancer.lssp import LsspConfig
from balancer.partition import FloatArray
from balancer.planner import BalanceConfig, GroupPlanner
from balancer.report import exchange_rows, moved_rows_fraction
from benchmarks.synthetic import ENCODERS, SEQ_LEN, Mixture, cost_model, make_packs
from omni_pipeline.core.plan import Pack, StepPlan
from omni_pipeline.core.topology import Topology

NUM_MICROBATCHES = 8
GROUP_RANKS = (8, 64, 256)
WORLD_RANKS = (256, 4096, 16384)
WORLD_GROUP = 64
MIXTURE_RANKS = 64
MIXTURE_REPEATS = 3
EVEN: Mixture = {"page": 0.5, "text": 0.5}
MIXTURES: dict[str, Mixture] = {
    **{f"{images}:{10 - images}": {"page": images / 10, "text": 1 - images / 10} for images in range(1, 10)},
    "video": {"video": 0.7, "text": 0.3},
    "three modalities": {"page": 0.3, "video": 0.2, "speech": 0.2, "text": 0.3},
}
NODE = 8
GROUP_WORLDS = (64, 128, 256)
GROUP_MIXTURES = ("5:5", "video", "three modalities")


@click.command()
@click.option("--repeats", default=5, show_default=True, help="Repeats of each timing.")
@click.option("--seed", default=0, show_default=True, help="Seed of the synthetic packs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(*, repeats: int, seed: int, as_json: bool) -> None:
    """Measure planning and what it buys.

    Example: python -m benchmarks.balance --json
    """
    plan = [measure_plan(num_ranks, repeats=repeats, seed=seed) for num_ranks in GROUP_RANKS]
    for row in plan:
        print(
            f"{row['ranks']:4d} ranks, {row['media']:5d} media: plan {row['plan_ms']:.1f} ms "
            f"(best {row['plan_best_ms']:.1f}), {row['plan_fraction']:.2%} of the modelled step of "
            f"{row['step_s']:.2f} s; reshard {row['reshard_ms']:.1f} ms"
        )
    world_ms = {str(ranks): measure_world(ranks, repeats=repeats, seed=seed) for ranks in WORLD_RANKS}
    print(
        f"one group of {WORLD_GROUP} in worlds of", ", ".join(f"{k}: {v:.1f} ms" for k, v in world_ms.items())
    )
    mixtures = {name: measure_mixture(mixture, seed=seed) for name, mixture in MIXTURES.items()}
    for name, row in mixtures.items():
        encoder, llm = row["encoder"], row["llm"]
        print(
            f"{name:16}: encoders {encoder['before']:.2f} -> {encoder['after']:.2f}, "
            f"LLM {llm['before']:.2f} -> {llm['after']:.2f}, {row['moved_rows_fraction']:.0%} of rows moved, "
            f"modelled step {row['step_speedup']:.2f}x, plan {row['plan_ms']:.0f} ms"
        )
    whole = {name: measure_mixture(mixture, seed=seed, lssp="off") for name, mixture in MIXTURES.items()}
    for name, row in whole.items():
        print(
            f"{name:16}, no segment shared: encoders {row['encoder']['after']:.2f}, "
            f"LLM {row['llm']['after']:.2f}, modelled step {row['step_speedup']:.2f}x, "
            f"plan {row['plan_ms']:.0f} ms"
        )
    groups = [row for name in GROUP_MIXTURES for row in measure_groups(name, seed=seed)]
    for row in groups:
        print(
            f"{row['ranks']:3d} ranks, {row['mixture']:16}, groups of {row['group']:3d}: encoders "
            f"{row['encoder']:.3f}, LLM {row['llm']:.3f}, modelled step {row['step_s']:.3f} s"
        )
    if as_json:
        result = {
            **{
                key: {str(row["ranks"]): row[key] for row in plan}
                for key in ("plan_ms", "step_s", "plan_fraction")
            },
            "imbalance": {
                name: {part: row[part] for part in ("encoder", "llm")} for name, row in mixtures.items()
            },
            "world_plan_ms": world_ms,
            "groups": groups,
            "plan": plan,
            "mixture": mixtures,
            "mixture_without_lssp": whole,
        }
        print(json.dumps(result))


def measure_plan(num_ranks: int, *, repeats: int, seed: int) -> dict[str, Any]:
    """Time planning and routing of a group of ``num_ranks`` ranks at half images, half text."""
    planner, packs = make_planner(num_ranks), step_packs(num_ranks, EVEN, seed=seed)
    plan = planner.plan(packs, step=0, group=0)

    def route() -> None:
        for microbatch in range(plan.num_microbatches):
            planner.reshard(plan, microbatch=microbatch, rank=0)

    planning = timings_ms(lambda: planner.plan(packs, step=0, group=0).digest, repeats=repeats)
    return {
        "ranks": num_ranks,
        "microbatches": plan.num_microbatches,
        "packs": len(packs),
        "media": len(plan.media),
        "plan_ms": statistics.median(planning),
        "plan_best_ms": min(planning),
        "step_s": step_s(plan),
        "plan_fraction": statistics.median(planning) / 1000 / step_s(plan),
        "reshard_ms": statistics.median(timings_ms(route, repeats=repeats)),
    }


def measure_world(world_size: int, *, repeats: int, seed: int) -> float:
    """Return the milliseconds of planning the same packs of one group in a world of ``world_size`` ranks."""
    planner = make_planner(world_size, group_ranks=WORLD_GROUP)
    packs = [
        dataclasses.replace(pack, lane=pack.lane * planner.topology.num_groups)
        for pack in step_packs(WORLD_GROUP, EVEN, seed=seed)
    ]
    return statistics.median(timings_ms(lambda: planner.plan(packs, step=0, group=0).digest, repeats=repeats))


def measure_mixture(
    mixture: Mixture, *, seed: int, num_ranks: int = MIXTURE_RANKS, lssp: Literal["auto", "off"] = "auto"
) -> dict[str, Any]:
    """Return the imbalance before and after, and the time of the plan."""
    planner, packs = make_planner(num_ranks, lssp=lssp), step_packs(num_ranks, mixture, seed=seed)
    plan = planner.plan(packs, step=0, group=0)
    planning = timings_ms(lambda: planner.plan(packs, step=0, group=0).digest, repeats=MIXTURE_REPEATS)
    encoder, llm = plan.encoder_balance, plan.llm_balance
    return {
        "media": len(plan.media),
        "plan_ms": statistics.median(planning),
        "long": sum(item.is_long for item in plan.media),
        "encoder": {"before": encoder.imbalance_before, "after": encoder.imbalance_after},
        "llm": {"before": llm.imbalance_before, "after": llm.imbalance_after},
        "moved_rows_fraction": moved_rows_fraction(
            exchange_rows(plan, layout=planner.layout, encoders=ENCODERS, cost_model=planner.cost_model)
        ),
        "step_speedup": (encoder.makespan_before + llm.makespan_before) / step_s(plan),
    }


def measure_groups(name: str, *, seed: int, worlds: Sequence[int] = GROUP_WORLDS) -> list[dict[str, Any]]:
    """Return what groups of several sizes reach on the same packs, in worlds of several sizes."""
    rows = []
    for num_ranks in worlds:
        packs = step_packs(num_ranks, MIXTURES[name], seed=seed)
        for size in sorted({min(num_ranks, size) for size in (1, NODE, 2 * NODE, 4 * NODE, num_ranks)}):
            planner = make_planner(num_ranks, group_ranks=size, lssp="off")
            num_groups = planner.topology.num_groups
            plans = [
                planner.plan([p for p in packs if p.lane % num_groups == group], step=0, group=group)
                for group in range(num_groups)
            ]
            rows.append({"mixture": name, "ranks": num_ranks, "group": size, **_joined(plans)})
    return rows


def _joined(plans: list[StepPlan]) -> dict[str, float]:
    """Return imbalances and step of all groups together: all ranks meet in every microbatch."""
    model = cost_model()
    loads = {
        "encoder": np.concatenate([encoder_loads(plan, model) for plan in plans], axis=1),
        "llm": np.concatenate([llm_loads(plan, model) for plan in plans], axis=1),
    }
    makespans = {part: float(table.max(axis=1).sum()) for part, table in loads.items()}
    means = {part: float(table.mean(axis=1).sum()) for part, table in loads.items()}
    return {
        **{part: makespans[part] / means[part] for part in loads},
        "step_s": sum(makespans.values()),
    }


def encoder_loads(plan: StepPlan, model: CostModel) -> FloatArray:
    """Return the modelled seconds of encoding, float64 [microbatches, ranks of the group]."""
    place = {rank: number for number, rank in enumerate(plan.ranks)}
    loads = np.zeros((plan.num_microbatches, len(plan.ranks)))
    for item in plan.media:
        segment = plan.packs[item.pack].samples[item.sample].segments[item.segment]
        split = model.split(segment, len(item.ranks)) if item.is_long else None
        costs = split.costs if split else (model.media_cost(segment),)
        for rank, cost in zip(item.ranks, costs, strict=True):
            loads[item.microbatch, place[rank]] += cost
    return loads


def llm_loads(plan: StepPlan, model: CostModel) -> FloatArray:
    """Return the modelled seconds of the LLM, float64 [microbatches, replicas of the group]."""
    place = {replica: number for number, replica in enumerate(plan.replicas)}
    loads = np.zeros((plan.num_microbatches, len(plan.replicas)))
    for slot in plan.slots:
        loads[slot.microbatch, place[slot.replica]] += model.pack_cost(plan.packs[slot.pack])
    return loads


def step_s(plan: StepPlan) -> float:
    """Return the modelled seconds of the encoders and the LLM."""
    return plan.encoder_balance.makespan_after + plan.llm_balance.makespan_after


def make_planner(
    num_ranks: int, *, group_ranks: int = 0, lssp: Literal["auto", "off"] = "auto"
) -> GroupPlanner:
    """Return the planner of a world of one-rank replicas, one lane each, in groups of so many; 0 is all."""
    return GroupPlanner(
        Topology(num_ranks, replicas_per_group=group_ranks),
        cost_model=cost_model(),
        config=BalanceConfig(lssp=LsspConfig(kind=lssp)),
        num_lanes=num_ranks,
        packs_per_step=num_ranks * NUM_MICROBATCHES,
        encoders=ENCODERS,
        seq_len=SEQ_LEN,
    )


def step_packs(num_ranks: int, mixture: Mixture, *, seed: int) -> list[Pack]:
    """Return the packs of a step of ``num_ranks`` lanes."""
    return make_packs(mixture, num_lanes=num_ranks, packs_per_lane=NUM_MICROBATCHES, seed=seed)


def timings_ms(function: Callable[[], object], *, repeats: int) -> list[float]:
    """Return the processor time of each call in milliseconds."""
    found = []
    for _ in range(repeats):
        gc.collect()
        start = time.process_time()
        function()
        found.append(1000 * (time.process_time() - start))
    return found


if __name__ == "__main__":
    main()
