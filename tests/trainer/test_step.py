"""A step on any number of ranks equals one plain process: loss, gradient norm and every gradient."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from balancer.exchange import ExchangeSetting
from omni_pipeline.core.batch import Batch
from omni_pipeline.core.errors import OmniError
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Sample, SampleId
from omni_pipeline.core.topology import Topology
from tests.support import parity
from tests.support.ranks import run_ranks
from tests.support.steps import Recorder
from trainer.agreement import Requests
from trainer.colocation import ColocatedModel, colocate
from trainer.model.omni import build_model
from trainer.objective import Objective
from trainer.parallel.config import ParallelConfig
from trainer.parallel.mesh import make_rank_groups, pick_device
from trainer.step import Learner, StepResult, train_step

NO_FAILURES: frozenset[SampleId] = frozenset()
EOS = 0


def _packs(*contents: Sequence[Sample]) -> tuple[Pack, ...]:
    return tuple(Pack(lane, 0, tuple(samples)) for lane, samples in enumerate(contents))


def _padded(*contents: Sequence[Sample]) -> tuple[Pack, ...]:
    """Return packs in which every sample takes more positions than the longest of its pack needs."""
    return tuple(
        replace(pack, padded_len=max(sample.num_tokens for sample in pack.samples) + pack.lane)
        for pack in _packs(*contents)
    )


MIXED = [parity.mixed_sample(row) for row in range(9)]
TEXT = [parity.text_sample(row) for row in range(100, 106)]
SILENT = [parity.text_sample(row, loss=False) for row in range(200, 202)]

SCENARIOS: dict[str, tuple[tuple[Pack, ...], frozenset[SampleId]]] = {
    "full packs": (_packs(MIXED[:2], MIXED[2:4], [MIXED[4], TEXT[0]], MIXED[5:7]), NO_FAILURES),
    "ranks without media": (_packs([MIXED[4]], TEXT[:2], TEXT[2:3], TEXT[3:5]), NO_FAILURES),
    "no media at all": (_packs(TEXT[:1], TEXT[1:2], TEXT[2:3], TEXT[3:4]), NO_FAILURES),
    "a pack without labels": (_packs([MIXED[0]], SILENT[:1], SILENT[1:], [MIXED[1]]), NO_FAILURES),
    "empty slots": (_packs([MIXED[3]], TEXT[:1], [MIXED[7]]), NO_FAILURES),
    "empty packs": (_packs([MIXED[3]], [], [], [MIXED[7]]), NO_FAILURES),
    "failed samples": (_packs(MIXED[:2], MIXED[2:4], [MIXED[8]], TEXT), frozenset({MIXED[1].id, TEXT[2].id})),
    "buckets": (_padded(MIXED[:2], MIXED[2:4], [MIXED[8]], TEXT), frozenset({MIXED[1].id, TEXT[2].id})),
}
MOVING = "full packs", "ranks without media", "failed samples", "buckets"


def _colocated(topology: Topology, *, layouts: Mapping[str, ParallelConfig] | None = None) -> ColocatedModel:
    return colocate(
        build_model(parity.CONFIG, seed=3),
        groups=make_rank_groups(topology, device=pick_device()),
        parallel=layouts or {},
        precision="fp32",
    )


def _learner(
    model: ColocatedModel, optimizer: torch.optim.Optimizer | None = None, **changes: Any
) -> Learner:
    values: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer or Recorder(model.module),
        "learning_rate_at": lambda step: 0.5,
        "grad_clip": math.inf,
        "settings": {"model": "ab"},
    }
    return Learner(**{**values, **changes})


def _batch(
    packs: tuple[Pack, ...],
    topology: Topology,
    *,
    balance: bool = True,
    exchange: ExchangeSetting = "auto",
    failed: frozenset[SampleId] = NO_FAILURES,
    step: int = 0,
) -> Batch:
    """Return this rank's batch. A failure is seen by a rank that does not own the text of the sample."""
    rank = dist.get_rank()
    planner = parity.make_planner(topology, num_packs=len(packs), balance=balance, exchange=exchange)
    group = topology.group_of(rank)
    own = tuple(pack for pack in packs if pack.lane % topology.num_groups == group)
    plan = planner.plan(own, step=step, group=group)
    seen = set()
    for slot in plan.slots:
        other = plan.ranks[(plan.ranks.index(slot.replica) + 1) % len(plan.ranks)]
        if rank == other:
            seen |= {sample.id for sample in plan.packs[slot.pack].samples} & failed
    return parity.build_batch(plan, planner, rank=rank, failed=frozenset(seen), state={})


def _num_moved(batch: Batch) -> int:
    """Return how many media segments another rank than the owner of their rows encodes."""
    replica_of = {slot.pack: slot.replica for slot in batch.plan.slots}
    return sum(item.ranks != (replica_of[item.pack],) for item in batch.plan.media)


def _run_scenarios(
    rank: int,
    topology: Topology,
    names: list[str],
    balance: bool,
    layouts: dict[str, ParallelConfig],
    exchange: ExchangeSetting,
) -> dict[str, tuple[StepResult, dict[str, torch.Tensor]]]:
    model = _colocated(topology, layouts=layouts)
    results = {}
    for name in names:
        packs, failed = SCENARIOS[name]
        recorder = Recorder(model.module)
        batch = _batch(packs, topology, balance=balance, exchange=exchange, failed=failed)
        if balance and topology.world_size > topology.num_groups == 1 and name in MOVING:
            assert _num_moved(batch) > 0, name
            assert exchange == "auto" or exchange in batch.plan.exchanges, name
        result = train_step(_learner(model, recorder), batch, step=0)
        results[name] = result, (recorder.gradients if rank == 0 else {})
    return results


@functools.cache
def _reference(name: str) -> parity.Reference:
    """Return the step of one plain process, in float64 and without padding."""
    packs, failed = SCENARIOS[name]
    whole = [replace(pack, padded_len=0) for pack in packs]
    return parity.reference_step(build_model(parity.CONFIG, seed=3).double(), whole, failed=failed)


def _check_parity(
    topology: Topology,
    names: Sequence[str] = tuple(SCENARIOS),
    *,
    balance: bool = True,
    layouts: dict[str, ParallelConfig] | None = None,
    exchange: ExchangeSetting = "auto",
) -> None:
    arguments = topology, list(names), balance, layouts or {}, exchange
    by_rank = run_ranks(topology.world_size, _run_scenarios, args=arguments)
    for name, (result, gradients) in by_rank[0].items():
        expected = _reference(name)
        for other in by_rank:
            assert (other[name][0].loss, other[name][0].grad_norm) == (result.loss, result.grad_norm), name
        assert result.num_labels == expected.num_labels, name
        assert result.num_tokens == sum(pack.num_tokens for pack in SCENARIOS[name][0]), name
        torch.testing.assert_close(result.loss, expected.loss, rtol=1.3e-6, atol=0, msg=name)
        torch.testing.assert_close(result.grad_norm, expected.grad_norm, rtol=1e-5, atol=0, msg=name)
        for parameter, gradient in expected.gradients.items():
            torch.testing.assert_close(
                gradients[parameter].double(), gradient, rtol=1.3e-6, atol=1e-5, msg=f"{name}: {parameter}"
            )
            # The default tolerance says little of small gradients: bound the error relative to their size.
            error = (gradients[parameter].double() - gradient).norm()
            assert error <= 2e-5 * gradient.norm() + 1e-9, f"{name}: {parameter} is off by {error}"


def test_a_step_of_one_rank_equals_a_plain_loop() -> None:
    _check_parity(Topology(1), ["full packs", "failed samples", "no media at all", "buckets"])


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_of_many_ranks_equals_one_plain_process(world_size: int) -> None:
    _check_parity(Topology(world_size))


Z_LOSS = 0.02


def _with_z_loss(rank: int) -> tuple[StepResult, dict[str, torch.Tensor]]:
    topology = Topology(2)
    model = _colocated(topology)
    recorder = Recorder(model.module)
    packs, failed = SCENARIOS["failed samples"]
    learner = _learner(model, recorder, objective=Objective(z_loss=Z_LOSS))
    return train_step(learner, _batch(packs, topology, failed=failed), step=0), recorder.gradients


def test_the_z_loss_of_many_ranks_equals_that_of_one_and_is_told_apart() -> None:
    packs, failed = SCENARIOS["failed samples"]
    model = build_model(parity.CONFIG, seed=3).double()
    expected = parity.reference_step(model, packs, failed=failed, z_loss=Z_LOSS)
    for result, gradients in run_ranks(2, _with_z_loss):
        assert result.z_loss == pytest.approx(expected.z_loss, rel=1e-5)
        assert result.loss == pytest.approx(expected.loss, rel=1.3e-6)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        for parameter, gradient in expected.gradients.items():
            error = (gradients[parameter].double() - gradient).norm()
            assert error <= 2e-5 * gradient.norm() + 1e-9, f"{parameter} is off by {error}"


def test_a_step_without_balancing_equals_one_plain_process() -> None:
    _check_parity(Topology(2), ["full packs", "ranks without media"], balance=False)


@pytest.mark.parametrize("exchange", ["exact", "symmetric", "two_level"])
def test_the_way_that_rows_travel_changes_nothing(exchange: ExchangeSetting) -> None:
    names = [*MOVING, "no media at all", "empty slots"]
    _check_parity(Topology(4, ranks_per_node=2), names, exchange=exchange)


def test_groups_and_a_mesh_for_each_module_change_nothing() -> None:
    _check_parity(
        Topology(4, replicas_per_group=2),
        ["full packs", "ranks without media"],
        layouts={name: ParallelConfig(dp_shard=n) for name, n in {"vision": 2, "audio": 1, "llm": 4}.items()},
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_summed_once_per_step_are_the_same(world_size: int) -> None:
    once = ParallelConfig(reshard="step")
    _check_parity(
        Topology(world_size),
        ["full packs", "ranks without media", "no media at all"],
        layouts={"vision": once, "audio": ParallelConfig(), "llm": once},
    )


def _skips(rank: int) -> tuple[StepResult, bool]:
    topology = Topology(2)
    model = _colocated(topology)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=0.1)
    before = [parameter.full_tensor().clone() for parameter in model.module.parameters()]  # type: ignore[attr-defined]
    packs = _packs(SILENT[:1], [MIXED[0]])
    result = train_step(
        _learner(model, optimizer), _batch(packs, topology, failed=frozenset({MIXED[0].id})), step=0
    )
    after = [parameter.full_tensor() for parameter in model.module.parameters()]  # type: ignore[attr-defined]
    unchanged = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return result, unchanged and not optimizer.state


def test_a_step_without_labels_is_skipped_on_all_ranks_and_changes_nothing() -> None:
    for result, unchanged in run_ranks(2, _skips):
        assert result.skipped
        assert not result.ended
        assert (result.num_labels, result.num_failed, unchanged) == (0, 1, True)
        assert result.num_tokens == SILENT[0].num_tokens + MIXED[0].num_tokens


def _misfit(model: ColocatedModel, topology: Topology, kind: str) -> tuple[str, str, float]:
    """Return the error of a step in which rank 1 differs from the three others."""
    differs = dist.get_rank() == 1
    batch: Batch | None = _batch(SCENARIOS["full packs"][0], topology)
    assert batch is not None
    settings, step, problem = {"model": "ab", "order": "cd"}, 0, ""
    if kind == "settings" and differs:
        settings["order"] = "other"
    elif kind == "step" and differs:
        step = 3
    elif kind == "plan" and differs:
        batch = _batch(SCENARIOS["no media at all"][0], topology)
    elif kind == "media" and differs:
        batch = replace(batch, microbatches=(replace(batch.microbatches[0], inputs={}),))
    elif kind == "loader" and differs:
        batch, problem = None, "shard gone"
    elif kind == "late loader":
        step = 2
    start = time.monotonic()
    with pytest.raises(OmniError) as caught:
        train_step(_learner(model, settings=settings), batch, step=step, problem=problem)
    return type(caught.value).__name__, caught.value.what, time.monotonic() - start


MISFITS = {
    "settings": ("StateMismatchError", "ranks have other settings than rank 0: rank 1 in 'order'"),
    "step": ("StateMismatchError", "ranks disagree on the step: rank 1 has 3; the others have 0"),
    "plan": ("StateMismatchError", "ranks disagree on the plan digest (group 0): rank 1 has "),
    "media": ("RankError", "step 0 cannot run: rank 1: microbatch 0: inputs for encoders [], the model has"),
    "loader": ("RankError", "step 0 cannot run: rank 1: shard gone"),
    "late loader": ("StateMismatchError", "the loader is at step 0, the trainer at step 2"),
}


def _misfits(rank: int) -> dict[str, tuple[str, str, float]]:
    topology = Topology(4)
    model = _colocated(topology)
    return {kind: _misfit(model, topology, kind) for kind in MISFITS}


def test_a_rank_that_differs_is_named_on_all_ranks_at_once() -> None:
    results = run_ranks(4, _misfits)
    for kind, (name, message) in MISFITS.items():
        assert len({result[kind][:2] for result in results}) == 1, kind
        for result in results:
            found, what, seconds = result[kind]
            assert found == name, kind
            assert what.startswith(message), kind
            assert seconds < 10, kind


def _bad_number(rank: int) -> tuple[str, bool]:
    topology = Topology(2)
    model = _colocated(topology)
    recorder = Recorder(model.module)
    packs = _packs([TEXT[1], MIXED[2]], [TEXT[0]])
    batch = _batch(packs, topology, balance=False, step=5)
    audio = batch.microbatches[0].inputs["audio"]
    if len(audio.values):
        audio.values[0, 0] = math.nan
    with pytest.raises(OmniError) as caught:
        train_step(_learner(model, recorder), batch, step=5)
    return caught.value.what, bool(recorder.gradients)


def test_a_loss_that_is_not_finite_names_the_sample_on_all_ranks() -> None:
    results = run_ranks(2, _bad_number)
    assert len(set(results)) == 1
    what, has_stepped = results[0]
    assert what == (
        "step 5: loss sum is nan, squared gradient norm is nan: "
        f"rank 0: the loss of 'mixed' shard 0 sample {MIXED[2].key} (microbatch 0)"
    )
    assert not has_stepped


BAD_TOKEN = 9


class _BadBackward(torch.autograd.Function):
    """The identity, whose gradient is no number where there is one and ``is_bad``."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, is_bad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(is_bad)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (is_bad,) = ctx.saved_tensors
        return torch.where(is_bad[:, None] & (gradient != 0), math.nan, gradient), None


def _bad_gradient(rank: int) -> tuple[str, bool]:
    """Samples MIXED[3] and TEXT[3] begin with a token that spoils the gradient of what it embeds."""
    topology = Topology(2)
    model = _colocated(topology)
    embed: torch.nn.Module = model.llm.embed_tokens  # type: ignore[assignment]
    embed.register_forward_hook(lambda module, inputs, rows: _BadBackward.apply(rows, inputs[0] == BAD_TOKEN))
    batch = _batch(_packs(MIXED[:2], MIXED[2:4], TEXT[:2], TEXT[2:5]), topology, step=5)
    for microbatch in batch.microbatches:
        microbatch.tokens[microbatch.tokens == BAD_TOKEN] = BAD_TOKEN + 1
        for span in microbatch.spans:
            if span.id in (MIXED[3].id, TEXT[3].id):
                microbatch.tokens[span.end - 3] = BAD_TOKEN
    recorder = Recorder(model.module)
    with pytest.raises(OmniError) as caught:
        train_step(_learner(model, recorder), batch, step=5)
    return caught.value.what, bool(recorder.gradients)


def test_a_gradient_that_is_not_finite_names_the_samples_on_all_ranks() -> None:
    results = run_ranks(2, _bad_gradient)
    assert len(set(results)) == 1
    what, has_stepped = results[0]
    assert re.fullmatch(r"step 5: loss sum is [\d.]+, squared gradient norm is nan: rank .*", what), what
    named = re.findall(r"sample (\S+) \(microbatch \d\)", what)
    assert sorted(named) == sorted([MIXED[3].key, TEXT[3].key]), what
    assert not has_stepped


def _ends_early(rank: int) -> tuple[StepResult, StepResult, dict[str, torch.Tensor]]:
    """Group 1 has no data: its rank must help the other, and then both see the end."""
    topology = Topology(2, replicas_per_group=1)
    model = _colocated(topology)
    recorder = Recorder(model.module)
    planner = parity.make_planner(topology, num_packs=2, balance=True)
    batch = None
    if rank == 0:
        plan = planner.plan(_packs(MIXED[:2]), step=0, group=0)
        batch = parity.build_batch(plan, planner, rank=rank)
    learner = _learner(model, recorder)
    return train_step(learner, batch, step=0), train_step(learner, None, step=1), recorder.gradients


def test_a_group_without_data_helps_the_others_to_finish() -> None:
    (result, last, gradients), (other, other_last, _) = run_ranks(2, _ends_early)
    expected = parity.reference_step(build_model(parity.CONFIG, seed=3), _packs(MIXED[:2]))
    assert (result.ended, last.ended, other.ended, other_last.ended) == (False, True, False, True)
    assert result.loss == other.loss
    torch.testing.assert_close(result.loss, expected.loss)
    torch.testing.assert_close(gradients, expected.gradients)


def _requests(rank: int) -> Requests:
    topology = Topology(2)
    batch = _batch(_packs(TEXT[:1], TEXT[1:2]), topology)
    wish = Requests(stop=rank == 1, checkpoint=rank == 0)
    return train_step(_learner(_colocated(topology)), batch, step=0, requests=wish).requests


def test_the_wish_of_one_rank_reaches_all() -> None:
    assert run_ranks(2, _requests) == [Requests(stop=True, checkpoint=True)] * 2
