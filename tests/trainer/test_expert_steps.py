"""A step of a model with experts: the same for any packing, microbatches and ranks, the same numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Sample, SampleId
from omni_pipeline.core.topology import Topology
from tests.support import parity
from tests.support.ranks import run_ranks
from tests.support.steps import Recorder
from trainer.colocation import colocate
from trainer.config import ModelConfig
from trainer.model.omni import OmniModel, build_model
from trainer.objective import Objective
from trainer.optimizer import build_optimizer
from trainer.optimizer_config import OptimizerConfig
from trainer.parallel.config import Precision
from trainer.parallel.mesh import make_rank_groups, pick_device
from trainer.step import Learner, StepResult, train_step

BALANCE = 0.5  # far above the published 0.001, so that its gradient shows
# Three experts on two or four ranks: the parts of their tensors are uneven, and one is empty.
EXPERTS = {"count": 3, "top_k": 2, "intermediate": 8, "balance_loss": BALANCE}
CONFIG = ModelConfig.model_validate(
    parity.CONFIG.model_dump()
    | {"llm": parity.CONFIG.llm.model_dump() | {"experts": EXPERTS, "qk_norm": True}}
)

MIXED = [parity.mixed_sample(row) for row in range(4)]
TEXT = [parity.text_sample(row) for row in range(100, 103)]
SILENT = parity.text_sample(200, loss=False)
SAMPLES = [*MIXED, *TEXT, SILENT]
NOBODY: frozenset[SampleId] = frozenset()
FAILED = frozenset({MIXED[1].id, TEXT[2].id})

Contents = Sequence[Sequence[Sample]]
PACKINGS: dict[str, Contents] = {
    "two packs": (SAMPLES[:4], SAMPLES[4:]),
    "other neighbours": (SAMPLES[::2], SAMPLES[1::2]),
    "four packs": ([SAMPLES[5], SAMPLES[0]], SAMPLES[1:4], [SAMPLES[4]], SAMPLES[6:]),
    "an empty pack": (SAMPLES[:4], [], SAMPLES[4:6], SAMPLES[6:]),
}


def _packs(contents: Contents, *, padded: bool = False) -> tuple[Pack, ...]:
    packs = [Pack(lane, 0, tuple(samples)) for lane, samples in enumerate(contents)]
    if padded:
        longest = max(sample.num_tokens for sample in SAMPLES)
        packs = [replace(pack, padded_len=longest + pack.lane) for pack in packs]
    return tuple(packs)


def _model() -> OmniModel:
    return build_model(CONFIG, seed=3)


@functools.cache
def _reference(failed: frozenset[SampleId]) -> parity.Reference:
    """Return the step of one plain process in float64, every sample alone in its pack."""
    alone = _packs([[sample] for sample in SAMPLES])
    return parity.reference_step(_model().double(), alone, failed=failed, balance_loss=BALANCE)


def _steps(
    rank: int, topology: Topology, packings: dict[str, tuple[Pack, ...]], failed: frozenset[SampleId]
) -> dict[str, tuple[StepResult, dict[str, torch.Tensor]]]:
    model = _colocated(topology)
    found = {}
    for name, packs in packings.items():
        planner = parity.make_planner(topology, num_packs=len(packs), balance=True)
        plan = planner.plan(packs, step=0, group=0)
        own = failed if rank == 0 else NOBODY
        recorder = Recorder(model.module)
        learner = Learner(
            model=model,
            optimizer=recorder,
            learning_rate_at=lambda step: 0.5,
            grad_clip=math.inf,
            settings={},
            objective=Objective.of(CONFIG, OptimizerConfig()),
        )
        batch = parity.build_batch(plan, planner, rank=rank, failed=own)
        found[name] = train_step(learner, batch, step=0), recorder.gradients
    return found


def _colocated(topology: Topology, *, precision: Precision = "fp32") -> Any:
    groups = make_rank_groups(topology, device=pick_device())
    return colocate(_model(), groups=groups, parallel={}, precision=precision)


@pytest.mark.parametrize(
    ("world_size", "failed"),
    [
        pytest.param(1, FAILED, id="1-two failed"),
        pytest.param(2, NOBODY, id="2-all sound"),
        pytest.param(2, FAILED, id="2-two failed"),
        pytest.param(4, NOBODY, id="4-all sound"),
    ],
)
def test_a_step_is_the_same_however_its_samples_are_packed(
    world_size: int, failed: frozenset[SampleId]
) -> None:
    packings = {name: _packs(contents) for name, contents in PACKINGS.items()}
    packings["buckets"] = _packs(PACKINGS["two packs"], padded=True)
    if world_size == 4:
        packings = {name: packings[name] for name in ("four packs", "buckets")}
    expected = _reference(failed)
    by_rank = run_ranks(world_size, _steps, args=(Topology(world_size), packings, failed))
    counts = expected.expert_counts
    imbalance = float((counts.amax(dim=1) / counts.mean(dim=1)).mean())
    for name, (result, gradients) in by_rank[0].items():
        assert all(other[name][0].experts == result.experts for other in by_rank), name
        assert result.experts is not None
        assert result.loss == pytest.approx(expected.loss, rel=1.3e-6), name
        assert result.experts.balance_loss == pytest.approx(expected.balance_loss, rel=1.3e-6), name
        assert result.experts.imbalance == pytest.approx(imbalance, rel=1e-12), name
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5), name
        for parameter, gradient in expected.gradients.items():
            error = (gradients[parameter].double() - gradient).norm()
            assert error <= 2e-5 * gradient.norm() + 1e-9, f"{name}: {parameter} is off by {error}"


def test_the_balancing_loss_moves_the_routers_and_is_left_out_of_the_loss() -> None:
    packs = _packs(PACKINGS["two packs"])
    with_it = _reference(NOBODY)
    without = parity.reference_step(_model().double(), packs)
    assert without.loss == pytest.approx(with_it.loss, rel=1e-12)
    name = "llm.layers.0.mlp.gate.weight"
    difference = (with_it.gradients[name] - without.gradients[name]).norm()
    assert difference > 0.05 * without.gradients[name].norm()


def _half_precision(rank: int) -> tuple[dict[str, torch.Tensor], float]:
    """Return gradients of bfloat16 on two ranks, one of which has no row at all."""
    model = _colocated(Topology(2), precision="bf16")
    packs = _packs([SAMPLES, []])
    planner = parity.make_planner(Topology(2), num_packs=2, balance=False)
    recorder = Recorder(model.module)
    learner = Learner(
        model, recorder, lambda step: 0.5, math.inf, {}, Objective.of(CONFIG, OptimizerConfig())
    )
    batch = parity.build_batch(planner.plan(packs, step=0, group=0), planner, rank=dist.get_rank())
    result = train_step(learner, batch, step=0)
    return recorder.gradients, result.loss


def test_half_precision_runs_with_rows_on_one_rank_only() -> None:
    expected = _reference(NOBODY)
    gradients, loss = run_ranks(2, _half_precision)[0]
    assert loss == pytest.approx(expected.loss, rel=1e-2)
    for kind in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        name = f"llm.layers.0.mlp.{kind}"
        error = (gradients[name].double() - expected.gradients[name]).norm()
        # A router's gradient is made of differences, and near a tie another expert is chosen.
        bound = 0.5 if "gate" in kind else 0.2
        assert error < bound * expected.gradients[name].norm(), f"{name} is off by {error}"


def test_experts_and_routers_decay_and_norms_of_queries_and_keys_do_not() -> None:
    llm = _model().llm
    groups = build_optimizer({"llm": llm.parameters()}, OptimizerConfig(weight_decay=0.3)).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    of_name = {name: decays[id(p)] for name, p in llm.layers[0].named_parameters()}
    assert {name: of_name[name] for name in of_name if "mlp" in name or "_norm" in name} == {
        "mlp.gate.weight": 0.3,
        "mlp.experts.gate_up_proj": 0.3,
        "mlp.experts.down_proj": 0.3,
        "self_attn.q_norm.weight": 0.0,
        "self_attn.k_norm.weight": 0.0,
    }
