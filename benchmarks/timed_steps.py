"""The ranks of ``benchmarks.step``: one model, and training steps of all variants in turn, each timed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from balancer.cost import CostModel
from benchmarks.step_worlds import MIXTURES, MODEL, NUM_RANKS, RUN, World, make_packs
from omni_pipeline.app.calibrate import COSTS_FILE, HARDWARE_FILE, calibrate
from omni_pipeline.app.costs import cost_model
from omni_pipeline.app.environment import Environment
from omni_pipeline.core.batch import Batch
from omni_pipeline.core.plan import StepPlan
from omni_pipeline.core.topology import Topology
from trainer.colocation import colocate
from trainer.measure import ENCODER, EXCHANGE, LLM
from trainer.model.omni import build_model
from trainer.optimizer import build_optimizer
from trainer.optimizer_config import OptimizerConfig
from trainer.parallel.config import ParallelConfig
from trainer.parallel.mesh import make_rank_groups
from trainer.step import Learner, StepResult, train_step


@dataclass(frozen=True)
class Timed:
    """One step of one variant.

    Args:
        mixture, seed, variant: What was trained on.
        step_s: From the start to the end of both ranks.
        modelled_s: What the plan promised: the encoders' part and the LLM's.
        own_s: This rank's own work, by stage then microbatch.
        loss: Of the step; equal for all variants of the same packs.
    """

    mixture: str
    seed: int
    variant: str
    step_s: float
    modelled_s: float
    own_s: Mapping[str, tuple[float, ...]]
    loss: float


def run_mixtures(rank: int, folder: Path, num_seeds: int, repeats: int, calibrate_s: float) -> list[Timed]:
    """Train on every mixture, ``repeats`` rounds of all seeds and variants; a collective of all ranks.

    Variants take turns, and each begins every second round. The first round on new packs is not counted.

    Args:
        rank: Of the process group.
        folder: Of all ranks; for the measured costs.
        num_seeds: Different steps of each mixture.
        repeats: Rounds.
        calibrate_s: Seconds of measuring this machine, before anything else.
    """
    world = World.of(measured_costs(folder, rank=rank, budget_s=calibrate_s))
    learner = _learner()
    found = []
    for mixture, seed in itertools.product(MIXTURES, range(num_seeds)):
        batches = _batches(world, mixture, seed, rank)
        for number in range(repeats + 1):
            names = list(batches) if number % 2 else list(reversed(batches))
            for variant in names:
                step_s, result = _timed(learner, batches[variant])
                if number:
                    modelled_s = _modelled_s(batches[variant].plan)
                    own_s = dict(result.stages.own)
                    found.append(Timed(mixture, seed, variant, step_s, modelled_s, own_s, result.loss))
    return found


def measured_costs(folder: Path, *, rank: int, budget_s: float) -> CostModel:
    """Return the costs of the model as measured on this machine by all ranks at the same time."""
    place = Environment(rank=rank, world_size=NUM_RANKS, local_rank=rank, local_world_size=NUM_RANKS)
    calibrate(RUN, folder, place=place, budget_s=budget_s)
    dist.barrier()
    files = {"hardware": str(folder / HARDWARE_FILE), "costs": folder / COSTS_FILE}
    return cost_model(RUN.model_copy(update={"balance": RUN.balance.model_copy(update=files)}))


def work_s(ranks: tuple[Timed, ...]) -> float:
    """Return the seconds of a step whose ranks never wait for a core: in each stage the slowest counts."""
    stages = (ENCODER, EXCHANGE, LLM)
    return sum(max(slot) for stage in stages for slot in zip(*(t.own_s[stage] for t in ranks), strict=True))


def _batches(world: World, mixture: str, seed: int, rank: int) -> dict[str, Batch]:
    packs = make_packs(mixture, seed=seed)
    return {variant: world.batch(variant, packs, rank=rank) for variant in MIXTURES[mixture]}


def _modelled_s(plan: StepPlan) -> float:
    return plan.encoder_balance.makespan_after + plan.llm_balance.makespan_after


def _timed(learner: Learner, batch: Batch) -> tuple[float, StepResult]:
    dist.barrier()
    start = time.perf_counter()
    result = train_step(learner, batch, step=0)
    dist.barrier()
    return time.perf_counter() - start, result


def _learner() -> Learner:
    groups = make_rank_groups(Topology(NUM_RANKS), device=torch.device("cpu"))
    model = colocate(build_model(MODEL, seed=1), groups=groups, parallel=_parallel(), precision="fp32")
    return Learner(
        model=model,
        optimizer=build_optimizer(model.parameters_by_part, OptimizerConfig()),
        # The weights stay, so that variants can be seen to have the same loss; the work is the same.
        learning_rate_at=lambda step: 0.0,
        grad_clip=1.0,
        settings={},
    )


def _parallel() -> dict[str, ParallelConfig]:
    return {name: ParallelConfig(reshard="step") for name in ("vision", "audio", "llm")}
