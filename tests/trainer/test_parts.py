"""Frozen parts: no work, no message and no state for them, and the gradients of all others as without."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from balancer.lssp import LsspConfig
from omni_pipeline.core.batch import Batch
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sizes import audio_rows
from omni_pipeline.core.topology import Topology
from tests.support import parity
from tests.support.ranks import run_ranks
from tests.support.steps import Recorder
from trainer.colocation import ColocatedModel, colocate, omni_anchors, parameters_by_part
from trainer.model.omni import OmniModel, build_model
from trainer.parallel.config import ParallelConfig
from trainer.parallel.mesh import make_rank_groups, pick_device
from trainer.parts import freeze
from trainer.parts_config import PART_NAMES
from trainer.step import Learner, StepResult, train_step

Frozen = tuple[str, ...]
ENCODERS: Frozen = ("vision", "vision_projector", "audio", "audio_projector")
FROZEN: tuple[Frozen, ...] = (
    ("audio", "audio_projector"),
    ("vision", "audio_projector"),
    ("llm",),
    ENCODERS,
    ("llm", "vision", "vision_projector", "audio"),
)
MIXED = [parity.mixed_sample(row) for row in range(6)]
TEXT = [parity.text_sample(row) for row in range(100, 103)]
CONTENTS = {
    # Two microbatches on two ranks, the second without any row on one of them.
    "media": (MIXED[:2], MIXED[2:4], [MIXED[4]], TEXT[:1]),
    "no media": (TEXT[1:2], TEXT[2:3]),
}


def _packs(name: str) -> tuple[Pack, ...]:
    return tuple(Pack(lane, 0, tuple(samples)) for lane, samples in enumerate(CONTENTS[name]))


def _frozen_model(frozen: Sequence[str]) -> OmniModel:
    model = build_model(parity.CONFIG, seed=3).double()
    freeze(parameters_by_part(omni_anchors(model), model.llm), frozen)
    return model


def _colocated(frozen: Sequence[str], world_size: int, layout: ParallelConfig) -> ColocatedModel:
    return colocate(
        _frozen_model(frozen),
        groups=make_rank_groups(Topology(world_size), device=pick_device()),
        parallel=dict.fromkeys(("vision", "audio", "llm"), layout),
        precision="fp32",
    )


def _batch(name: str, world_size: int, **settings: Any) -> Batch:
    packs = _packs(name)
    planner = parity.make_planner(Topology(world_size), num_packs=len(packs), balance=True, **settings)
    return parity.build_batch(planner.plan(packs, step=0, group=0), planner, rank=dist.get_rank())


def _learner(model: ColocatedModel, optimizer: torch.optim.Optimizer) -> Learner:
    return Learner(model, optimizer, learning_rate_at=lambda step: 0.1, grad_clip=math.inf, settings={})


def _run(
    rank: int, world_size: int, layout: ParallelConfig, sets: Sequence[Frozen]
) -> dict[tuple[Frozen, str], tuple[StepResult, dict[str, torch.Tensor]]]:
    results = {}
    for frozen in sets:
        model = _colocated(frozen, world_size, layout)
        for name in CONTENTS:
            recorder = Recorder(model.module)
            result = train_step(_learner(model, recorder), _batch(name, world_size), step=0)
            results[frozen, name] = result, (recorder.gradients if rank == 0 else {})
            _assert_nothing_is_left(model)
    return results


def _assert_nothing_is_left(model: ColocatedModel) -> None:
    """FSDP keeps a list of what ran forward until a backward, which a frozen encoder never has."""
    for name, module in model.parts.items():
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        assert not state._comm_ctx.post_forward_order, name


@functools.cache
def _reference(name: str) -> parity.Reference:
    return parity.reference_step(build_model(parity.CONFIG, seed=3).double(), _packs(name))


@pytest.mark.parametrize(
    ("world_size", "layout", "sets"),
    [
        (1, ParallelConfig(), FROZEN[2:4]),
        (2, ParallelConfig(), FROZEN),
        pytest.param(2, ParallelConfig(reshard="step"), FROZEN, marks=pytest.mark.slow),
    ],
    ids=["one rank", "two ranks", "two ranks, gradients once per step"],
)
def test_the_gradients_of_trained_parts_are_those_of_a_step_without_frozen_ones(
    world_size: int, layout: ParallelConfig, sets: Sequence[Frozen]
) -> None:
    parts = _names_by_part()
    for (frozen, name), (result, gradients) in run_ranks(world_size, _run, args=(world_size, layout, sets))[
        0
    ].items():
        expected = _reference(name)
        trained = {path for part in PART_NAMES if part not in frozen for path in parts[part]}
        assert gradients.keys() == trained, frozen
        torch.testing.assert_close(result.loss, expected.loss, rtol=1e-12, atol=0)
        square = sum(float(expected.gradients[path].square().sum()) for path in sorted(trained))
        assert result.grad_norm == pytest.approx(math.sqrt(square), rel=1e-10), (frozen, name)
        for path in trained:
            error = (gradients[path] - expected.gradients[path]).norm()
            assert error <= 1e-11 * expected.gradients[path].norm() + 1e-15, (frozen, name, path)


def _names_by_part() -> dict[str, list[str]]:
    model = build_model(parity.CONFIG)
    names = {parameter: name for name, parameter in model.named_parameters()}
    parts = parameters_by_part(omni_anchors(model), model.llm)
    return {part: [names[parameter] for parameter in parameters] for part, parameters in parts.items()}


def test_every_parameter_is_of_one_part() -> None:
    parts = _names_by_part()
    assert tuple(parts) == PART_NAMES
    of_parts = [name for names in parts.values() for name in names]
    assert sorted(of_parts) == sorted(name for name, _ in build_model(parity.CONFIG).named_parameters())
    assert parts["vision_projector"] == [
        "encoders.vision.merger.ln_q.weight",
        *(f"encoders.vision.merger.mlp.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")),
    ]
    assert parts["audio_projector"] == [
        f"encoders.audio.{layer}.{kind}" for layer in ("ln_post", "proj") for kind in ("weight", "bias")
    ]
    assert all(name.startswith("llm.") for name in parts["llm"])


def _messages(rank: int, frozen: Frozen) -> tuple[list[int], list[int]]:
    """Return the sizes of what a step exchanges between ranks, and of the gradients that it sums."""
    exchanged, summed = [], []
    all_to_all, reduce_scatter = dist.all_to_all_single, dist.reduce_scatter_single

    def count_exchange(*arguments: Any, **named: Any) -> Any:
        exchanged.append(len(arguments[1]))
        return all_to_all(*arguments, **named)

    def count_sum(*arguments: Any, **named: Any) -> Any:
        summed.append(named["input"].numel())
        return reduce_scatter(*arguments, **named)

    model = _colocated(frozen, 2, ParallelConfig())
    batch = _batch("media", 2, lssp=LsspConfig(kind="off"))
    dist.all_to_all_single = count_exchange  # in this process of one rank only
    dist.reduce_scatter_single = count_sum
    train_step(_learner(model, Recorder(model.module)), batch, step=0)
    return exchanged, summed


def test_no_rank_sends_anything_for_what_is_frozen() -> None:
    num_microbatches = 2
    num_values = {
        part: sum(parameter.numel() for parameter in parameters)
        for part, parameters in parameters_by_part(*_anchors_and_llm(build_model(parity.CONFIG))).items()
    }
    for frozen, passes in ((("llm",), 2), (ENCODERS, 1)):
        for exchanged, summed in run_ranks(2, _messages, args=(frozen,)):
            assert len(exchanged) == passes * num_microbatches, frozen
            trained = sum(count for part, count in num_values.items() if part not in frozen)
            # Shards are padded to equal sizes.
            assert trained <= sum(summed) / num_microbatches <= 1.02 * trained, frozen


def _anchors_and_llm(model: OmniModel) -> tuple[Any, nn.Module]:
    return omni_anchors(model), model.llm


def _product_flops(_: Any, left: Sequence[int], right: Sequence[int], **named: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _matmul_flops(run: Callable[[], Any]) -> int:
    """Return the operations of matrix products, without those of attention and of convolutions."""
    products = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
    # The loss adds up the gradient of the head in place, which is not counted by itself.
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _product_flops}) as counter:
        run()
    counts = counter.get_flop_counts()["Global"]
    return sum(counts.get(product, 0) for product in products)


def _count_flops(rank: int) -> tuple[dict[Frozen, int], dict[str, int]]:
    """Return the operations of a step by what is frozen, and those of a forward by layers."""
    packs = (Pack(0, 0, (MIXED[1],)),)
    planner = parity.make_planner(Topology(1), num_packs=1, balance=True)
    batch = parity.build_batch(planner.plan(packs, step=0, group=0), planner, rank=0)
    steps = {}
    for frozen in ((), ("llm",), ("vision",), ("vision_projector", "audio_projector"), ENCODERS):
        model = _colocated(frozen, 1, ParallelConfig())
        learner = _learner(model, Recorder(model.module))
        steps[frozen] = _matmul_flops(functools.partial(train_step, learner, batch, step=0))
    forward = {"llm": 0, "embed": 0, "merger": 0, "vision": 0, "audio": 0, "proj": 0}
    built = build_model(parity.CONFIG)
    for item in batch.microbatches:
        for anchor in omni_anchors(built):
            inputs = item.inputs[anchor.name]
            values = torch.from_numpy(inputs.values)
            with torch.no_grad():
                forward[anchor.name] += _matmul_flops(lambda: anchor.module(values, inputs.grids))  # noqa: B023
        forward["embed"] += 2 * len(item.inputs["vision"].values) * _matrix_values(built, "patch_embed")
        merged = len(item.inputs["vision"].values) // parity.CONFIG.sizes.vision.merge**2
        forward["merger"] += 2 * merged * _matrix_values(built, "merger")
        forward["proj"] += (
            2
            * sum(audio_rows(grid[0]) for grid in item.inputs["audio"].grids.tolist())
            * built.encoders["audio"].proj.weight.numel()
        )
        forward["llm"] += 2 * len(item.tokens) * _matrix_values(built, "llm.l")
    return steps, forward


def _matrix_values(model: OmniModel, part: str) -> int:
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if part in name and parameter.dim() == 2
    )


def test_no_backward_is_computed_for_what_is_frozen() -> None:
    ((steps, forward),) = run_ranks(1, _count_flops)
    saved = {frozen: steps[()] - flops for frozen, flops in steps.items()}
    # A backward has two products for each of the forward: the gradient of the input and that of the weight.
    assert saved[("llm",)] == forward["llm"]
    assert saved[("vision_projector", "audio_projector")] == forward["merger"] + forward["proj"]
    # Patches need no gradient.
    vision = 2 * (forward["vision"] - forward["merger"]) - forward["embed"]
    assert saved[("vision",)] == vision
    assert saved[ENCODERS] == vision + 2 * forward["merger"] + 2 * forward["audio"]
