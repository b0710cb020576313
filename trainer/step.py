"""One optimizer step, and one evaluation step, of all ranks together.

The loss is one sum over the labels of the global batch divided by one global count, so where a sample runs
cannot change it, nor what is added to it (``trainer.objective``). Every rank enters the same collectives in
the same order whatever its data: agreement, then per microbatch encoders, one exchange and the LLM, forward
and backward, then one gathering of losses and norms. Decisions (skip, fail, clip) come from gathered values,
so they are the same on every rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from omni_pipeline.core.batch import IGNORE_LABEL, Batch, EndRule, MicroBatch
from omni_pipeline.core.sample import SampleId
from trainer.agreement import Requests, agree, global_sums, raise_together, unite_failed
from trainer.batches import batch_problem, idle_batch, rows_by_plan
from trainer.colocation import ColocatedModel
from trainer.culprits import Rerun, find_culprits
from trainer.expert_numbers import ExpertNumbers, expert_numbers
from trainer.measure import StageClock
from trainer.model.llm import LlmOutput
from trainer.objective import Counts, Objective, Sums
from trainer.optimizer import clip_gradients, local_square_sum, set_learning_rate
from trainer.reshard import reshard
from trainer.stage_times import ENCODER, EXCHANGE, LLM, StageTimes


@dataclass(frozen=True)
class Learner:
    """What a step changes, and how.

    Args:
        model: Encoders and LLM.
        optimizer: See ``trainer.optimizer.build_optimizer``.
        learning_rate_at: Learning rate by step.
        grad_clip: Largest global gradient norm.
        settings: Digests of the settings that must be equal on all ranks, by section.
        objective: What is minimised.
    """

    model: ColocatedModel
    optimizer: torch.optim.Optimizer
    learning_rate_at: Callable[[int], float]
    grad_clip: float
    settings: Mapping[str, str]
    objective: Objective = field(default_factory=Objective)


@dataclass(frozen=True)
class StepResult:
    """What a step did. Equal on all ranks but for ``failed`` (of the group), and the seconds of the rank.

    Args:
        step: Its number.
        ended: The data ended before this step, nothing was done.
        loss: Cross entropy, mean over the labels of the global batch; NaN if skipped.
        grad_norm: Global norm before clipping; NaN if skipped.
        lr: Learning rate used.
        num_tokens: Sequence positions of the global batch that hold a token of a sample.
        num_labels: Labels of the global batch, without those of failed samples.
        num_failed: Failed samples of the global batch.
        failed: Failed samples of this group.
        skipped: There was no label, so neither weights nor optimizer changed.
        requests: Wishes of all ranks.
        timings: Seconds of the step's parts: ``agree_s``, ``compute_s``, ``optimizer_s``.
        stages: Seconds of what ``compute_s`` holds, by stage and microbatch; nothing if skipped.
        experts: How evenly they were used; None without experts, or if skipped.
        z_loss: Mean over the same labels, without its weight; None if that is 0, or if skipped.
        part_lrs: Learning rates of parts that have one of their own; nothing if skipped.
    """

    step: int
    ended: bool
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    num_labels: int
    num_failed: int
    failed: frozenset[SampleId]
    skipped: bool
    requests: Requests
    timings: Mapping[str, float]
    stages: StageTimes = field(default_factory=StageTimes)
    experts: ExpertNumbers | None = None
    z_loss: float | None = None
    part_lrs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedStep:
    """A step that all ranks have agreed on; the counts are those of the global batch.

    Args:
        batch: Of this rank; empty if only others have data; None if the data has ended.
        failed: Failed samples of the group.
        num_labels: Labels without those of failed samples.
        num_tokens: Sequence positions that hold a token of a sample.
        num_sound_tokens: Those of samples that have not failed.
        num_failed: Failed samples.
        requests: Wishes of all ranks.
    """

    batch: Batch | None
    failed: frozenset[SampleId]
    num_labels: int
    num_tokens: int
    num_sound_tokens: int
    num_failed: int
    requests: Requests

    @property
    def counts(self) -> Counts:
        """What the objective divides its sums by."""
        return Counts(self.num_labels, self.num_sound_tokens)


def train_step(
    learner: Learner,
    batch: Batch | None,
    *,
    step: int,
    requests: Requests | None = None,
    problem: str = "",
    end: EndRule = "pad",
) -> StepResult:
    """Do one step; a collective of all ranks.

    Args:
        learner: Changed in place.
        batch: Of this rank; None or an exhausted one if its data has ended: it helps the others with empty
            microbatches.
        step: Its number, from 0.
        requests: Wishes of this rank.
        problem: Why this rank has no batch, if its loader failed; told to all ranks.
        end: See ``agree``.

    Raises:
        StateMismatchError: Ranks differ in step, settings or plan.
        RankError: A batch cannot run, or a loss or the gradient norm is not finite. Both are raised on all
            ranks before the weights change, and name the rank.
    """
    model = learner.model
    clock = _Clock()
    prepared = prepare_step(
        model, batch, step=step, settings=learner.settings, requests=requests, problem=problem, end=end
    )
    clock.lap("agree_s")
    if prepared.batch is None or prepared.num_labels == 0:
        return _result_without_update(prepared, step=step, timings=clock.laps)
    stages = StageClock(model.groups.device)
    sums = [
        _forward_backward(learner, microbatch, prepared, stages) for microbatch in prepared.batch.microbatches
    ]
    totals = _gather_and_check(learner, sums, prepared, step=step)
    experts = expert_numbers(sums, num_tokens=prepared.num_sound_tokens)
    clock.lap("compute_s")
    lr = learner.learning_rate_at(step)
    clip_gradients(model.module.parameters(), norm=totals.grad_norm, limit=learner.grad_clip)
    part_lrs = set_learning_rate(learner.optimizer, lr)
    learner.optimizer.step()
    learner.optimizer.zero_grad()
    clock.lap("optimizer_s")
    return StepResult(
        step=step,
        ended=False,
        loss=totals.cross_entropy / prepared.num_labels,
        z_loss=totals.z / prepared.num_labels if learner.objective.z_loss else None,
        grad_norm=totals.grad_norm,
        lr=lr,
        num_tokens=prepared.num_tokens,
        num_labels=prepared.num_labels,
        num_failed=prepared.num_failed,
        failed=prepared.failed,
        skipped=False,
        requests=prepared.requests,
        timings=clock.laps,
        stages=stages.times(),
        experts=experts,
        part_lrs=part_lrs,
    )


def run_microbatch(
    model: ColocatedModel,
    microbatch: MicroBatch,
    *,
    num_rows: int,
    failed: frozenset[SampleId],
    with_losses: bool = False,
    z_loss: float = 0.0,
    stages: StageClock | None = None,
) -> LlmOutput:
    """Encoders, exchange, LLM: the forward of one microbatch; a collective of all ranks.

    Args:
        model: Encoders and LLM.
        microbatch: Of this rank.
        num_rows: Embedding rows that its encoders must make.
        failed: Samples without loss, of any kind.
        with_losses: Return the loss at each position, and no gradient.
        z_loss: Weight of the z-loss in the sum of losses.
        stages: Times the stages of this microbatch, and of its backward.
    """
    device = model.groups.device
    stages = stages or StageClock(device)
    stages.begin()
    rows = model.encode(microbatch, num_rows=num_rows)
    stages.mark(ENCODER)
    media_rows, media_positions = reshard(rows, microbatch.reshard, groups=model.groups.exchange)
    stages.mark(EXCHANGE)
    stages.watch_backward(rows, media_rows)
    output: LlmOutput = model.llm(
        torch.from_numpy(microbatch.tokens).to(device, non_blocking=True),
        torch.from_numpy(microbatch.positions).to(device, non_blocking=True),
        microbatch.cu_seqlens,
        media_rows,
        media_positions,
        torch.from_numpy(microbatch.labels_without(failed)).to(device, non_blocking=True),
        spans=microbatch.spans_without(failed),
        with_losses=with_losses,
        z_loss=z_loss,
    )
    stages.mark(LLM)
    return output


def prepare_step(
    model: ColocatedModel,
    batch: Batch | None,
    *,
    step: int,
    settings: Mapping[str, str],
    requests: Requests | None = None,
    problem: str = "",
    end: EndRule = "pad",
) -> PreparedStep:
    """Agree on the step: three small collectives on every rank, whatever its data; one if the data has ended.

    Raises:
        StateMismatchError, RankError: See ``train_step``.
    """
    groups = model.groups
    agreement = agree(
        batch,
        step=step,
        settings=settings,
        problem=problem if batch is None else batch_problem(batch, model.anchors, groups),
        requests=requests or Requests(),
        groups=groups,
        end=end,
    )
    if agreement.num_microbatches == 0:
        return PreparedStep(None, frozenset(), 0, 0, 0, 0, agreement.requests)
    failed = unite_failed(batch, groups)
    microbatches = () if batch is None else batch.microbatches
    spans = [span for microbatch in microbatches for span in microbatch.spans]
    num_labels, num_tokens, num_sound_tokens, num_failed = global_sums(
        [
            sum(int((item.labels_without(failed) != IGNORE_LABEL).sum()) for item in microbatches),
            sum(span.end - span.start for span in spans),
            sum(span.end - span.start for span in spans if span.id not in failed),
            sum(span.id in failed for span in spans),
        ]
    )
    if batch is None:
        batch = idle_batch(
            step=step, num_microbatches=agreement.num_microbatches, anchors=model.anchors, groups=groups
        )
    return PreparedStep(
        batch, failed, num_labels, num_tokens, num_sound_tokens, num_failed, agreement.requests
    )


def _forward_backward(
    learner: Learner, microbatch: MicroBatch, prepared: PreparedStep, stages: StageClock
) -> Sums:
    """Add the gradients of one microbatch; return its sums, on the device."""
    assert prepared.batch is not None, "agreed steps have a batch"
    model = learner.model
    num_rows = rows_by_plan(prepared.batch.plan, microbatch.index, rank=model.groups.rank)
    output = run_microbatch(
        model,
        microbatch,
        num_rows=num_rows,
        failed=prepared.failed,
        z_loss=learner.objective.z_loss,
        stages=stages,
    )
    model.begin_backward(is_last=microbatch is prepared.batch.microbatches[-1])
    torch.autograd.backward(learner.objective.part(output, prepared.counts))
    stages.end()
    return learner.objective.sums(output)


@dataclass(frozen=True)
class _Totals:
    """Over all ranks: sums over labels, and the gradient norm."""

    cross_entropy: float
    z: float
    grad_norm: float


def _gather_and_check(
    learner: Learner, sums: Sequence[Sums], prepared: PreparedStep, *, step: int
) -> _Totals:
    """Return global sums and gradient norm; the one place where the host waits for the device.

    Every rank adds the same gathered numbers in the same order, so all get the same bits.

    Raises:
        RankError: One of them is not finite; names the step and the samples, on all ranks.
    """
    assert prepared.batch is not None, "agreed steps have a batch"
    model, groups = learner.model, learner.model.groups
    squares = local_square_sum(model.module.parameters(), world_size=groups.topology.world_size)
    columns = [
        torch.stack(column).double().sum().cpu()
        for column in ([s.z for s in sums], [s.cross_entropy for s in sums])
    ]
    own = torch.stack([squares, *columns])
    gathered = [torch.empty_like(own) for _ in range(groups.topology.world_size)]
    dist.all_gather(gathered, own)
    rows: list[list[float]] = torch.stack(gathered).tolist()
    grad_square, z_sum, loss_sum = (sum(column) for column in zip(*rows, strict=True))
    if not all(math.isfinite(value) for value in (grad_square, z_sum, loss_sum)):
        culprits = find_culprits(prepared.batch, _rerun(learner, prepared), failed=prepared.failed)
        what = f"step {step}: loss sum is {loss_sum}, squared gradient norm is {grad_square}"
        fix = (
            "look at these samples (`omni plan --rebuild` gives their arrays) and deny them; if all are at "
            "fault, the weights are: go back a checkpoint and lower the learning rate"
        )
        raise_together(culprits, what=what, groups=groups, fix=fix, nobody="no single sample, only their sum")
    return _Totals(loss_sum, z_sum, math.sqrt(grad_square))


def _rerun(learner: Learner, prepared: PreparedStep) -> Rerun:
    """Return how microbatches of this step run again, without any effect on the weights."""
    assert prepared.batch is not None, "agreed steps have a batch"
    model, batch, plan = learner.model, prepared.batch, prepared.batch.plan
    parameters = list(model.module.parameters())

    def losses(microbatch: MicroBatch, failed: frozenset[SampleId]) -> Tensor:
        num_rows = rows_by_plan(plan, microbatch.index, rank=model.groups.rank)
        with torch.no_grad():
            output = run_microbatch(model, microbatch, num_rows=num_rows, failed=failed, with_losses=True)
        model.release()
        assert output.losses is not None, "losses were asked for"
        return output.losses

    def grad_square(microbatch: MicroBatch, failed: frozenset[SampleId]) -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        alone = replace(batch, microbatches=(microbatch,))
        _forward_backward(
            learner,
            microbatch,
            replace(prepared, batch=alone, failed=failed),
            StageClock(model.groups.device),
        )
        return local_square_sum(parameters, world_size=model.groups.topology.world_size)

    return Rerun(losses, grad_square)


def _result_without_update(prepared: PreparedStep, *, step: int, timings: Mapping[str, float]) -> StepResult:
    return StepResult(
        step=step,
        ended=prepared.batch is None,
        loss=math.nan,
        grad_norm=math.nan,
        lr=0.0,
        num_tokens=prepared.num_tokens,
        num_labels=prepared.num_labels,
        num_failed=prepared.num_failed,
        failed=prepared.failed,
        skipped=prepared.batch is not None,
        requests=prepared.requests,
        timings=timings,
    )


class _Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
