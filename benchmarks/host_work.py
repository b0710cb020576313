"""What a step costs the host beside its arithmetic: sharding's messages, and the optimizer's walk.

    python -m benchmarks.host_work --json

One rank, one thread, the tiny model, so that little but the host's work is left. Variants run in turn within
one process, and times are CPU times, so other work on the machine does not count. The last line of
``--json`` is one object: ``step_ms`` by ``reshard`` setting, ``reshard_speedup`` (microbatch / step),
``adamw_ms`` by implementation, ``adamw_speedup`` (default / fused); times as median, min and max.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from omni_pipeline.core.plan import Pack
from omni_pipeline.core.topology import Topology
from tests.support import parity
from trainer.colocation import ColocatedModel, colocate
from trainer.model.omni import build_model
from trainer.optimizer import build_optimizer
from trainer.optimizer_config import OptimizerConfig
from trainer.parallel.config import ParallelConfig
from trainer.parallel.mesh import make_rank_groups
from trainer.step import Learner, train_step

PARTS = ("vision", "audio", "llm")


@click.command()
@click.option("--repeats", default=7, show_default=True, help="Steps of each variant.")
@click.option("--packs", default=8, show_default=True, help="Packs, and so microbatches, of a step.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(*, repeats: int, packs: int, as_json: bool) -> None:
    """Measure the host's work of a step.

    Example: python -m benchmarks.host_work --json
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'meet'}", rank=0, world_size=1)
        try:
            result = _measure(repeats, packs)
        finally:
            dist.destroy_process_group()
    if as_json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:20} {value}")


def _measure(repeats: int, num_packs: int) -> dict[str, Any]:
    topology = Topology(1)
    groups = make_rank_groups(topology, device=torch.device("cpu"))
    planner = parity.make_planner(topology, num_packs=num_packs, balance=True)
    content = [
        Pack(lane, 0, tuple(parity.mixed_sample(12 * lane + row) for row in range(12)))
        for lane in range(num_packs)
    ]
    batch = parity.build_batch(planner.plan(content, step=0, group=0), planner, rank=0)
    models = {
        name: colocate(
            build_model(parity.CONFIG),
            groups=groups,
            parallel={part: ParallelConfig(reshard=name) for part in PARTS},  # type: ignore[arg-type]
            precision="fp32",
        )
        for name in ("microbatch", "step")
    }
    learners = {name: _learner(model) for name, model in models.items()}
    steps = _in_turn(
        {name: functools.partial(train_step, learner, batch, step=0) for name, learner in learners.items()},
        repeats,
    )
    optimizers = _in_turn(_optimizer_steps(models["step"]), repeats)
    return {
        "step_ms": steps,
        "reshard_speedup": steps["microbatch"]["median"] / steps["step"]["median"],
        "adamw_ms": optimizers,
        "adamw_speedup": optimizers["default"]["median"] / optimizers["fused"]["median"],
    }


def _learner(model: ColocatedModel) -> Learner:
    return Learner(
        model=model,
        optimizer=build_optimizer(model.parameters_by_part, OptimizerConfig()),
        learning_rate_at=lambda step: 1e-5,
        grad_clip=1.0,
        settings={},
    )


def _optimizer_steps(model: ColocatedModel) -> dict[str, Callable[[], object]]:
    fused = build_optimizer(model.parameters_by_part, OptimizerConfig())
    default = torch.optim.AdamW([{"params": group["params"]} for group in fused.param_groups])
    for parameter in model.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return {"default": default.step, "fused": fused.step}


def _in_turn(variants: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Run all variants ``repeats`` times in turn, after one warm-up each; CPU milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(repeats + 1):
        for name, variant in variants.items():
            start = time.process_time()
            variant()
            if number:
                times[name].append(1e3 * (time.process_time() - start))
    return {
        name: {"median": statistics.median(found), "min": min(found), "max": max(found)}
        for name, found in times.items()
    }


if __name__ == "__main__":
    main()
