"""How long it takes to simulate a step, by the number of ranks: planning all groups, and the simulation.

    python -m benchmarks.simulator --json

Workload D (ViT-10B, GPT-175B, 8192 tokens) at image:text 5:5 on nodes of eight H100, tensor parallel over a
node and 8 pipeline stages, 16 microbatches for each replica, groups of one replica. Packs are made before the
clock starts. Seconds are processor time of one thread, so on an idle machine the time that passes. The last
line of ``--json`` is one object.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import click

from balancer.cost import LLM, RECOMPUTED, CostModel
from balancer.hardware import load_hardware
from balancer.lssp import LsspConfig
from balancer.planner import BalanceConfig, GroupPlanner
from balancer.simulator.samples import image_samples, text_samples
from balancer.simulator.setup import Setup, Sharding
from balancer.simulator.simulate import simulate_step
from balancer.simulator.workloads import WORKLOADS
from omni_pipeline.core.plan import Pack, StepPlan
from omni_pipeline.core.sample import Sample
from omni_pipeline.core.topology import Topology

RANKS = (64, 1024, 10_240)
TP, PP, RANKS_PER_NODE, NUM_MICROBATCHES = 8, 8, 8, 16
KNOWN_SAMPLES = 4000


@click.command()
@click.option("--ranks", multiple=True, type=int, default=RANKS, help="Numbers of ranks, multiples of 64.")
@click.option(
    "--strategy", default="multiplexed", show_default=True, help="See balancer.simulator.strategies."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(*, ranks: tuple[int, ...], strategy: str, as_json: bool) -> None:
    """Measure planning and simulation of one step.

    Example: python -m benchmarks.simulator --ranks 1024 --json
    """
    result = {"strategy": strategy, "steps": [measure(num_ranks, strategy) for num_ranks in ranks]}
    for row in result["steps"]:
        print(
            f"{row['ranks']:6d} ranks: plans {row['plan_s']:.2f} s, simulation {row['simulate_s']:.2f} s, "
            f"step {row['step_s']:.2f} s, MFU {row['mfu']:.1%}"
        )
    if as_json:
        print(json.dumps(result))


def measure(num_ranks: int, strategy: str) -> dict[str, Any]:
    """Time one step of ``num_ranks`` ranks."""
    workload = WORKLOADS["D"]
    topology = Topology(num_ranks, tp=TP, pp=PP, replicas_per_group=1, ranks_per_node=RANKS_PER_NODE)
    model = CostModel(
        encoders=workload.encoders,
        llm=workload.llm,
        encoder_of=workload.encoder_of,
        hardware=load_hardware("h100"),
        passes=dict.fromkeys((*workload.encoders, LLM), RECOMPUTED),
    )
    setup = Setup(
        topology, model, workload.seq_len, llm=Sharding(-1, "step"), encoder=Sharding(RANKS_PER_NODE)
    )
    planner = GroupPlanner(
        topology,
        cost_model=model,
        config=BalanceConfig(lssp=LsspConfig(kind="auto")),
        num_lanes=topology.num_replicas,
        packs_per_step=topology.num_replicas * NUM_MICROBATCHES,
        encoders=tuple(workload.encoders),
        seq_len=workload.seq_len,
    )
    packs = make_packs(topology.num_replicas, workload.seq_len)
    start = time.process_time()
    plans = [plan_group(planner, packs, group) for group in range(topology.num_groups)]
    planned = time.process_time()
    step = simulate_step(plans, setup=setup, strategy=strategy)
    return {
        "ranks": num_ranks,
        "plan_s": planned - start,
        "simulate_s": time.process_time() - planned,
        "step_s": step.step_s,
        "mfu": step.mfu,
    }


def plan_group(planner: GroupPlanner, packs: list[list[Pack]], group: int) -> StepPlan:
    """Return the plan of a group, which has one lane."""
    return planner.plan(packs[group], step=0, group=group)


def make_packs(num_lanes: int, seq_len: int) -> list[list[Pack]]:
    """Return the packs of each lane: images and texts in turn, by which has fewer tokens so far."""
    images, texts = (
        itertools.cycle([sample for sample in make(KNOWN_SAMPLES, seed=0) if sample.num_tokens <= seq_len])
        for make in (image_samples, text_samples)
    )
    samples = _evenly(images, texts)
    waiting = next(samples)
    packs: list[list[Pack]] = []
    for lane in range(num_lanes):
        packs.append([])
        for number in range(NUM_MICROBATCHES):
            chosen: list[Sample] = []
            room = seq_len
            while waiting.num_tokens <= room:
                chosen.append(waiting)
                room -= waiting.num_tokens
                waiting = next(samples)
            packs[-1].append(Pack(lane=lane, number=number, samples=tuple(chosen)))
    return packs


def _evenly(images: Iterator[Sample], texts: Iterator[Sample]) -> Iterator[Sample]:
    ahead = 0
    while True:
        sample = next(texts if ahead > 0 else images)
        ahead += -sample.num_tokens if ahead > 0 else sample.num_tokens
        yield sample


if __name__ == "__main__":
    main()
