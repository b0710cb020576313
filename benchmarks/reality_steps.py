"""The ranks of ``benchmarks.reality``: measure the machine, train every setting, simulate the same plans."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from balancer.cost import CostModel
from balancer.planner import BalanceConfig, GroupPlanner
from balancer.simulator.setup import Setup, Sharding
from balancer.simulator.simulate import SimulatedStep, simulate_step
from benchmarks.made_batches import make_batch
from loaders.assemble import ModelInputs
from loaders.decode.text import ByteTokenizer
from omni_pipeline.app.calibrate import COSTS_FILE, HARDWARE_FILE, calibrate
from omni_pipeline.app.costs import cost_model
from omni_pipeline.app.environment import Environment
from omni_pipeline.app.run_config import ENCODERS, RunConfig
from omni_pipeline.core.batch import Batch
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment
from omni_pipeline.core.seeding import generator
from omni_pipeline.core.sizes import media_rows
from omni_pipeline.core.topology import Topology
from trainer.colocation import colocate
from trainer.config import ModelConfig
from trainer.model.omni import build_model
from trainer.optimizer import build_optimizer
from trainer.optimizer_config import OptimizerConfig
from trainer.parallel.config import ParallelConfig
from trainer.parallel.mesh import make_rank_groups
from trainer.stage_times import ENCODER, EXCHANGE, LLM, StageTimes
from trainer.step import Learner, StepResult, train_step

SEQ_LEN = 512
PACKS_PER_RANK = 2
MODALITIES = {"vision": (Modality.IMAGE, Modality.VIDEO), "audio": (Modality.AUDIO,)}
VISION = {"layers": 5, "hidden": 192, "intermediate": 576, "heads": 4, "window": 112}
MODELS = {
    "small": {"vision": VISION, "llm": {"layers": 3, "hidden": 192, "heads": 6, "intermediate": 512}},
    "wide": {"vision": VISION, "llm": {"layers": 4, "hidden": 384, "heads": 12, "intermediate": 1024}},
}

Reshard = Literal["microbatch", "step"]


@dataclass(frozen=True)
class Setting:
    """One run to compare.

    Args:
        mixture: Share of packs that are pictures and clips; the others are text.
        model: A name of ``MODELS``.
        reshard: When gathered parameters are freed; see ``ParallelConfig``.
        balance: Whether plans balance (and share long segments).
    """

    mixture: float
    model: str
    reshard: Reshard
    balance: bool


@dataclass(frozen=True)
class Seen:
    """One setting on one rank: seconds are sums over the different steps of the setting.

    Args:
        setting: Which.
        step_s: Measured, from the first rank's start to the last rank's end; medians of repeats.
        outside_s: Of these, agreeing on the step and the optimizer, on this rank.
        own_s: float [microbatches of all steps] by stage: this rank's own work, medians of repeats.
        ranks_per_core: Ranks that share a core, at least 1.
        simulated: What the simulator says of each step, with ranks that share cores; equal on all ranks.
    """

    setting: Setting
    step_s: float
    outside_s: float
    own_s: Mapping[str, tuple[float, ...]]
    ranks_per_core: float
    simulated: tuple[SimulatedStep, ...]


def run_settings(
    rank: int,
    num_ranks: int,
    folder: Path,
    settings: Sequence[Setting],
    seeds: int,
    repeats: int,
    budget_s: float,
) -> list[Seen]:
    """Return what a rank saw; a collective of all ranks, which measure the machine together first."""
    found = []
    for name in dict.fromkeys(setting.model for setting in settings):
        config = run_config(name, num_ranks)
        model = measured_costs(config, folder / name, rank=rank, num_ranks=num_ranks, budget_s=budget_s)
        for setting in (item for item in settings if item.model == name):
            found.append(_run_setting(setting, config, model, rank=rank, seeds=seeds, repeats=repeats))
    return found


def run_config(model: str, num_ranks: int) -> RunConfig:
    """Return the settings of a run of one of ``MODELS``; it has no data."""
    num_packs = PACKS_PER_RANK * num_ranks
    return RunConfig.model_validate(
        {
            "run": {"dir": "unused", "steps": 1},
            "sources": [{"name": "unused", "shards": "unused", "layout": {"fields": ["txt"]}}],
            "order": {"seq_len": SEQ_LEN, "lanes": num_packs, "packs_per_step": num_packs},
            "model": {
                "size": "demo",
                "sizes": {"vision": {"max_pixels": 441 * 28 * 28, "video_max_frames": 64}},
                **MODELS[model],
            },
            "balance": {"hardware": "cpu"},
        }
    )


def measured_costs(
    config: RunConfig, folder: Path, *, rank: int, num_ranks: int, budget_s: float
) -> CostModel:
    """Return the costs of the model, measured on this machine by all ranks at the same time."""
    place = Environment(rank=rank, world_size=num_ranks, local_rank=rank, local_world_size=num_ranks)
    calibrate(config, folder, place=place, budget_s=budget_s)
    dist.barrier()
    files = {"hardware": str(folder / HARDWARE_FILE), "costs": folder / COSTS_FILE}
    return cost_model(config.model_copy(update={"balance": config.balance.model_copy(update=files)}))


def make_packs(config: RunConfig, mixture: float, *, seed: int) -> tuple[Pack, ...]:
    """Return the full packs of one step; each is of captioned pictures and clips, or of text, by chance."""
    rng = generator(seed, "benchmark.reality")
    packs = []
    for lane in range(config.order.lanes):
        make = _media if rng.random() < mixture else _text
        contents: list[list[Segment]] = []
        left = SEQ_LEN
        while (num := _num_tokens(made := make(rng, config))) <= left - 2:
            contents.append(made)
            left -= num
        # The last one is text of what is left: its tokens, and the one that ends a sample.
        contents.append([_words(left - 1)])
        samples = (_sample(segments, lane, row) for row, segments in enumerate(contents))
        packs.append(Pack(lane, 0, tuple(samples)))
    return tuple(packs)


def slowed(model: CostModel, times: float) -> CostModel:
    """Return costs of ranks that get one core between so many: what is measured is their own CPU time."""
    seconds = ("pair_s", "position_s", "segment_s", "microbatch_s")
    fits = {
        name: fit.model_copy(update={field: times * getattr(fit, field) for field in seconds})
        for name, fit in model.fits.items()
    }
    return replace(model, fits=fits)


def _media(rng: np.random.Generator, config: RunConfig) -> list[Segment]:
    """A picture of log-normal sides, or every fourth time a clip, with a caption."""
    if rng.random() < 0.25:
        modality, grid = Modality.VIDEO, (int(rng.integers(2, 7)), 8, 8)
    else:
        sides = [int(np.clip(2 * round(rng.lognormal(1.7, 0.3)), 6, 20)) for _ in range(2)]
        modality, grid = Modality.IMAGE, (1, sides[0], sides[1])
    rows = media_rows(modality, grid, config.model.sizes)
    return [Segment(modality, str(modality), 0, 0, grid, num_rows=rows, num_tokens=rows + 2), _words(12)]


def _text(rng: np.random.Generator, config: RunConfig) -> list[Segment]:
    return [_words(int(np.clip(rng.lognormal(4.0, 0.7), 8, 300)))]


def _words(num_tokens: int) -> Segment:
    return Segment(Modality.TEXT, "txt", 0, 0, (num_tokens, 1, 1), 0, num_tokens, loss=True)


def _num_tokens(segments: Sequence[Segment]) -> int:
    return sum(segment.num_tokens for segment in segments) + 1


def _sample(segments: list[Segment], lane: int, row: int) -> Sample:
    # A text that begins a sample has no label for its first token; the end of a sample is one more.
    num_labels = sum(segment.num_tokens for segment in segments if segment.loss) + 1 - segments[0].loss
    return Sample(
        id=SampleId("made up", lane, row),
        key=f"{lane}-{row}",
        shard="made up",
        segments=tuple(segments),
        num_tokens=_num_tokens(segments),
        num_labels=num_labels,
    )


def _run_setting(
    setting: Setting, config: RunConfig, model: CostModel, *, rank: int, seeds: int, repeats: int
) -> Seen:
    num_ranks = dist.get_world_size()
    topology = Topology(num_ranks)
    planner = GroupPlanner(
        topology,
        cost_model=model,
        config=BalanceConfig(enabled=setting.balance, group="all"),
        num_lanes=config.order.lanes,
        packs_per_step=config.order.packs_per_step,
        encoders=ENCODERS,
    )
    sharding = Sharding(reshard=setting.reshard)
    ranks_per_core = max(1.0, num_ranks / (os.cpu_count() or 1))
    costs = slowed(model, ranks_per_core)
    setup = Setup(topology=topology, cost_model=costs, llm=sharding, encoder=sharding)
    learner = _learner(config, topology, setting.reshard)
    inputs = ModelInputs(config.model.sizes, ByteTokenizer.special, MODALITIES)
    step_s, outside_s = 0.0, 0.0
    own, simulated = list[Mapping[str, tuple[float, ...]]](), list[SimulatedStep]()
    for seed in range(seeds):
        packs = make_packs(config, setting.mixture, seed=seed)
        batch = make_batch(planner, packs, rank=rank, model=inputs)
        # The first step on new sizes allocates, and does not count.
        timed = [_timed(learner, batch) for _ in range(repeats + 1)][1:]
        step_s += float(np.median([seconds for seconds, _ in timed]))
        outside_s += float(np.median([_outside_s(result) for _, result in timed]))
        own.append(_median_own([result.stages for _, result in timed]))
        simulated.append(simulate_step([batch.plan], setup=setup))
    stages = {
        stage: tuple(value for item in own for value in item[stage]) for stage in (ENCODER, EXCHANGE, LLM)
    }
    return Seen(setting, step_s, outside_s, stages, ranks_per_core, tuple(simulated))


def _timed(learner: Learner, batch: Batch) -> tuple[float, StepResult]:
    dist.barrier()
    start = time.perf_counter()
    result = train_step(learner, batch, step=0)
    dist.barrier()
    return time.perf_counter() - start, result


def _outside_s(result: StepResult) -> float:
    return result.timings["agree_s"] + result.timings["optimizer_s"]


def _median_own(steps: Sequence[StageTimes]) -> dict[str, tuple[float, ...]]:
    return {
        stage: tuple(np.median([item.own[stage] for item in steps], axis=0).tolist())
        for stage in (ENCODER, EXCHANGE, LLM)
    }


def _learner(config: RunConfig, topology: Topology, reshard: Reshard) -> Learner:
    parallel = {name: ParallelConfig(reshard=reshard) for name in (*ENCODERS, "llm")}
    groups = make_rank_groups(topology, device=torch.device("cpu"))
    built = build_model(ModelConfig.model_validate(config.model), seed=1)
    model = colocate(built, groups=groups, parallel=parallel, precision="fp32")
    return Learner(
        model=model,
        optimizer=build_optimizer(model.parameters_by_part, OptimizerConfig()),
        learning_rate_at=lambda step: 0.0,
        grad_clip=1.0,
        settings={},
    )
