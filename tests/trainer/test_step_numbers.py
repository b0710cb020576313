"""The numbers of a step over ranks: what is largest, summed, mean, and who held the others up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omni_pipeline.core.batch import Batch
from omni_pipeline.core.metrics import MemoryMetrics
from omni_pipeline.core.plan import Balance, Pack
from omni_pipeline.core.topology import Topology
from tests.support import parity
from tests.support.ranks import run_ranks
from tests.trainer.test_step_causes import UnitCosts
from trainer.agreement import Requests
from trainer.expert_numbers import ExpertNumbers
from trainer.parallel.mesh import make_rank_groups, pick_device
from trainer.stage_times import ENCODER, EXCHANGE, LLM, StageTimes
from trainer.step import StepResult
from trainer.step_causes import StepCause
from trainer.step_numbers import StepRecorder, StepTimes, StepWatcher

SOURCES = ("mixed", "text")
TOPOLOGY = Topology(2, replicas_per_group=1)
PACKS = (Pack(0, 0, (parity.text_sample(1),)), Pack(1, 0, (parity.mixed_sample(5), parity.mixed_sample(7))))
Told = tuple[dict[str, float], list[StepCause]]


def result_of(stages: StageTimes, *, skipped: bool = False) -> StepResult:
    return StepResult(
        step=3,
        ended=False,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        num_tokens=80,
        num_labels=40,
        num_failed=0,
        failed=frozenset(),
        skipped=skipped,
        requests=Requests(),
        timings={"agree_s": 1.0, "compute_s": 2.0, "optimizer_s": 0.5},
        stages=stages,
        part_lrs={"vision": 0.01},
    )


def stages_of(rank: int) -> StageTimes:
    return StageTimes(
        wall={ENCODER: (4.0,), EXCHANGE: (1.0 + rank,), LLM: (2.0,)},
        own={ENCODER: (1.0 + 2 * rank,), EXCHANGE: (0.0,), LLM: (2.0,)},
    )


def batch_of(rank: int) -> Batch:
    """The part of a rank in groups of one: rank 1 has all media."""
    planner = parity.make_planner(TOPOLOGY, num_packs=2, balance=True)
    plan = planner.plan([PACKS[rank]], step=3, group=rank)
    plan = replace(plan, encoder_balance=Balance(rank * 1.0, 4.0 * rank, 3.0 * rank))
    return parity.build_batch(plan, planner, rank=rank)


def _record(rank: int, kind: str) -> Told:
    metrics, told = MemoryMetrics(), list[StepCause]()
    recorder = StepRecorder(
        metrics,
        sources=SOURCES,
        seq_len=64,
        groups=make_rank_groups(TOPOLOGY, device=pick_device()),
        watcher=None if kind == "unwatched" else StepWatcher(UnitCosts(), told.append),
    )
    batch = None if kind == "one has ended" and rank == 1 else batch_of(rank)
    stages = StageTimes() if kind in ("skipped", "not measured") else stages_of(rank)
    result = result_of(stages, skipped=kind == "skipped")
    if kind == "experts":
        result = replace(result, experts=ExpertNumbers(balance_loss=2.5, imbalance=1.25))
    recorder.record(result, batch, times=StepTimes(wait_s=0.5 * rank, step_s=7.0 + rank))
    return {name: values[3] for name, values in metrics.values.items()}, told


def record(kind: str) -> Told:
    (values, told), others = run_ranks(2, _record, args=(kind,))
    assert others == ({}, [])
    return values, told


def test_stages_are_means_over_ranks_and_the_measured_imbalance_is_of_own_work() -> None:
    values, _ = record("unwatched")
    assert values["trainer/mean/step_s"] == 7.5
    assert values["trainer/mean/wait_s"] == 0.25
    assert values["trainer/mean/exchange_s"] == 1.5
    assert values["trainer/mean/encoder_s"] == 4.0
    assert values["trainer/mean/encoder_own_s"] == 2.0
    assert values["trainer/step_s"] == 8.0
    assert values["loader/wait_s"] == 0.5
    assert values["trainer/num_ranks"] == 2
    assert (values["trainer/lr"], values["trainer/lr/vision"]) == (0.1, 0.01)
    assert values["balancer/encoder_imbalance_measured"] == 1.5
    assert values["balancer/llm_imbalance_measured"] == 1.0
    assert values["balancer/encoder_mean_s"] == 0.5
    assert values["balancer/encoder_imbalance_after"] == 6.0
    assert "trainer/flops" not in values
    assert not [name for name in values if "balance_loss" in name or "expert" in name]


def test_the_use_of_experts_is_recorded_beside_the_loss() -> None:
    values, _ = record("experts")
    names = "trainer/loss", "trainer/balance_loss", "trainer/expert_imbalance"
    assert [values[name] for name in names] == [1.0, 2.5, 1.25]


def test_the_cause_is_told_with_samples_of_another_group() -> None:
    values, told = record("watched")
    (cause,) = told
    assert (cause.step, cause.step_s, cause.wait_s) == (3, 8.0, 0.5)
    encoder, llm = cause.parts
    assert (encoder.rank, encoder.microbatch, encoder.own_s, encoder.mean_s) == (1, 0, 3.0, 2.0)
    assert (encoder.imbalance_before, encoder.imbalance_after) == (8.0, 6.0)
    assert {item.id.row for item in encoder.samples} == {5, 7}
    assert {item.id.source for item in encoder.samples} == {"mixed"}
    lost_s = (encoder.imbalance_after - 1) * values["balancer/encoder_mean_s"]
    lost_s += (llm.imbalance_after - 1) * values["balancer/llm_mean_s"]
    assert cause.modelled_loss_s == pytest.approx(lost_s)
    costs = UnitCosts()
    media = [segment for pack in PACKS for item in pack.samples for segment in item.segments]
    flops = sum(costs.pack_flops(pack) for pack in PACKS)
    flops += sum(costs.media_flops(segment) for segment in media if segment.is_media)
    assert values["trainer/flops"] == flops


def test_what_is_not_measured_is_not_recorded_and_the_model_decides() -> None:
    values, told = record("not measured")
    assert not [name for name in values if "measured" in name or "own" in name]
    assert told[0].parts[0].rank == 1
    assert told[0].parts[0].imbalance_measured is None
    assert {item.id.row for item in told[0].parts[0].samples} == {5, 7}


def test_a_rank_without_data_tells_no_samples() -> None:
    _, told = record("one has ended")
    encoder, llm = told[0].parts
    assert (encoder.rank, encoder.samples) == (1, ())
    assert {item.id.source for item in llm.samples} == {"text"}


def test_a_skipped_step_has_no_cause() -> None:
    values, told = record("skipped")
    assert told == []
    assert values["trainer/skipped"] == 1
