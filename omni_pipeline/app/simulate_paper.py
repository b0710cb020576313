"""The published workloads over the mixture sweep, every strategy simulated on the same packs."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace

from balancer.cost import LLM, RECOMPUTED, CostModel
from balancer.hardware import HardwareProfile, load_hardware
from balancer.lssp import LsspConfig
from balancer.planner import BalanceConfig, GroupPlanner
from balancer.simulator.compare import STRATEGY_NAMES, Compared, compare
from balancer.simulator.setup import Setup, Sharding, profile_of
from balancer.simulator.workloads import MIXTURES, RANKS_PER_NODE, WORKLOADS, Workload
from omni_pipeline.app.follow import Progress, no_progress
from omni_pipeline.app.paper_results import FIXED_AT_LAUNCH, LAUNCH_MIXTURE, Data, Paper, Point
from omni_pipeline.app.synthetic import num_lanes, workload_packs
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import Pack

LLM_SHARDING = Sharding(reshard="step")
ENCODER_SHARDING = Sharding(dp_shard=RANKS_PER_NODE)
"""Not published, our choice: the LLM's optimizer state is shared by the replicas, its parameters are whole;
the encoders' parameters are shared by the ranks of a node and gathered for each microbatch."""


def simulate_paper(
    names: Sequence[str] | None = None,
    *,
    hardware: str,
    num_steps: int,
    data: Data,
    progress: Progress = no_progress,
) -> Paper:
    """Return the workloads over the mixtures, every strategy on the same packs.

    Args:
        names: Workloads; None: all.
        hardware: Name or path of the machine.
        num_steps: Steps at each point, from 0.
        data: What the samples are.
        progress: Told how many points are done.

    Raises:
        ConfigError: No such workload or machine.
    """
    workloads = [_known(name) for name in names or WORKLOADS]
    machine = load_hardware(hardware)
    tasks = [
        (workload.name, mixture, machine, num_steps, data) for workload in workloads for mixture in MIXTURES
    ]
    found: dict[tuple[str, tuple[int, int]], Point] = {}
    # Fresh processes: some hundred thousand operations a point, on as many cores as there are.
    num_workers = min(len(tasks), os.cpu_count() or 1)
    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        # The largest first, so that no long point is left alone at the end.
        waiting = [pool.submit(simulate_point, *task) for task in reversed(tasks)]
        for number, future in enumerate(as_completed(waiting), 1):
            point = future.result()
            found[point.workload.name, point.mixture] = point
            progress(number, len(tasks))
    points = [found[name, mixture] for name, mixture, *_ in tasks]
    return Paper(points, machine.name, machine.memory_bytes, num_steps, data)


def simulate_point(
    name: str, mixture: tuple[int, int], machine: HardwareProfile, num_steps: int, data: Data
) -> Point:
    """Return one workload at one mixture.

    Args:
        name: Of the workload.
        mixture: (media, text).
        machine: The hardware.
        num_steps: Steps, from 0.
        data: What the samples are.
    """
    workload = WORKLOADS[name]
    model = CostModel(
        encoders=workload.encoders,
        llm=workload.llm,
        encoder_of=workload.encoder_of,
        hardware=machine,
        passes=dict.fromkeys((*workload.encoders, LLM), RECOMPUTED),
    )
    setup = Setup(
        topology=workload.topology,
        cost_model=model,
        seq_len=workload.seq_len,
        llm=LLM_SHARDING,
        encoder=ENCODER_SHARDING,
    )

    def packs_of(wanted: tuple[int, int]) -> list[list[Pack]]:
        return workload_packs(workload, wanted, num_steps=num_steps, **asdict(data))

    steps = packs_of(mixture)

    def results(strategies: Sequence[str], made_for: tuple[int, int]) -> dict[str, Compared]:
        mean_of = steps if made_for == mixture else packs_of(made_for)
        profile = profile_of([pack for step in mean_of for pack in step], model)
        return compare(
            steps,
            planner_of=lambda balance: _planner(workload, model, balance),
            balance=BalanceConfig(lssp=LsspConfig(kind="auto")),
            setup=replace(setup, profile=profile),
            strategies=strategies,
        )

    by_strategy = results(STRATEGY_NAMES, mixture)
    if mixture == LAUNCH_MIXTURE:
        return Point(workload, mixture, by_strategy, {name: by_strategy[name] for name in FIXED_AT_LAUNCH})
    return Point(workload, mixture, by_strategy, results(FIXED_AT_LAUNCH, LAUNCH_MIXTURE))


def _planner(workload: Workload, model: CostModel, balance: BalanceConfig) -> GroupPlanner:
    return GroupPlanner(
        workload.topology,
        cost_model=model,
        config=balance,
        num_lanes=num_lanes(workload),
        packs_per_step=workload.packs_per_step,
        encoders=tuple(workload.encoders),
        seq_len=workload.seq_len,
    )


def _known(name: str) -> Workload:
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}", fix=f"choose one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name]
