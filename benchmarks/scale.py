"""What a step's plan costs a rank in a run of 16,384 ranks in 2,048 groups, against a run of one group.

    python -m benchmarks.scale --json

Both runs have 8 replicas and 8 lanes per group, 4 packs per replica, the mixture of ``benchmarks.order`` and
the model of ``benchmarks.synthetic``. A rank orders and packs the samples of its group's lanes, plans the
step, routes its rows and takes the state. Times are processor times of one thread, medians over groups of all
parts of the run: ``start_ms`` of a new Order and planner with their first step, ``step_ms`` of a later one.
The last line of ``--json`` is one object: both runs, and the large over the small one, ``start_ratio`` and
``step_ratio`` (aim: 1).
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from balancer.cost import CostModel
from balancer.hardware import load_hardware
from balancer.planner import BalanceConfig, GroupPlanner
from balancer.reorder import lanes_of_group
from benchmarks.order import WEIGHTS, PooledSource, make_sources
from benchmarks.synthetic import LLM, VISION
from loaders.order import Order, OrderConfig
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.topology import Topology

REPLICAS_PER_GROUP = 8
SEQ_LEN = 8192


@click.command()
@click.option("--ranks", default=16_384, show_default=True, help="Ranks of the large run.")
@click.option("--lanes-per-group", default=8, show_default=True, help="Lanes of each group.")
@click.option("--packs-per-rank", default=4, show_default=True, help="Packs of a rank in a step.")
@click.option("--steps", default=8, show_default=True, help="Steps timed for each group.")
@click.option("--groups", default=5, show_default=True, help="Groups timed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(
    *, ranks: int, lanes_per_group: int, packs_per_rank: int, steps: int, groups: int, as_json: bool
) -> None:
    """Measure one group's plan in a small and in a large run.

    Example: python -m benchmarks.scale --json
    """
    sources = make_sources()
    runs = [
        Run(number, lanes_per_group, packs_per_rank, sources).measure(steps=steps, num_groups=groups)
        for number in (REPLICAS_PER_GROUP, ranks)
    ]
    result = {
        "small": runs[0],
        "large": runs[1],
        "step_ratio": round(runs[1]["step_ms"] / runs[0]["step_ms"], 3),
        "start_ratio": round(runs[1]["start_ms"] / runs[0]["start_ms"], 3),
    }
    for name, value in result.items():
        click.echo(f"{name}: {value}", err=as_json)
    if as_json:
        click.echo(json.dumps(result))


@dataclass(frozen=True)
class Run:
    """A run of ``ranks`` ranks, whose lanes and packs grow with them."""

    ranks: int
    lanes_per_group: int
    packs_per_rank: int
    sources: Sequence[PooledSource]

    def measure(self, *, steps: int, num_groups: int) -> dict[str, Any]:
        """Return ``start_ms`` and ``step_ms``; a run of one group is measured as often as others."""
        total = Topology(self.ranks, replicas_per_group=REPLICAS_PER_GROUP).num_groups
        timed = [(2 * index + 1) * total // (2 * num_groups) for index in range(num_groups)]
        found = [self._times_ms(group, steps=steps) for group in timed]
        return {
            "ranks": self.ranks,
            "groups": total,
            "start_ms": round(statistics.median(times[0] for times in found), 2),
            "step_ms": round(statistics.median(value for times in found for value in times[1:]), 2),
        }

    def _times_ms(self, group: int, *, steps: int) -> list[float]:
        """Processor time of the start with the first step, then of each step."""
        times = [time.process_time()]
        order, planner = self._build(group)
        for step in range(steps + 1):
            plan = planner.plan(order.next_step(step), step=step, group=group)
            for microbatch in range(plan.num_microbatches):
                planner.reshard(plan, microbatch=microbatch, rank=plan.ranks[0])
            order.state_dict()
            times.append(time.process_time())
        return [1000 * (end - begin) for begin, end in itertools.pairwise(times)]

    def _build(self, group: int) -> tuple[Order, GroupPlanner]:
        topology = Topology(self.ranks, replicas_per_group=REPLICAS_PER_GROUP)
        config = OrderConfig(
            lanes=self.lanes_per_group * topology.num_groups,
            packs_per_step=self.packs_per_rank * self.ranks,
            seq_len=SEQ_LEN,
            max_patches=4 * SEQ_LEN,
            oversize="cut",
        )
        order = Order(
            config,
            sources=self.sources,
            weights=WEIGHTS,
            seed=0,
            lanes=lanes_of_group(group, config.lanes, topology),
        )
        planner = GroupPlanner(
            topology,
            cost_model=CostModel(
                encoders={"vision": VISION},
                llm=LLM,
                encoder_of={Modality.IMAGE: "vision", Modality.VIDEO: "vision"},
                hardware=load_hardware("h100"),
            ),
            config=BalanceConfig(),
            num_lanes=config.lanes,
            packs_per_step=config.packs_per_step,
            encoders=("vision",),
            seq_len=SEQ_LEN,
        )
        return order, planner


if __name__ == "__main__":
    main()
