"""The cause of a slow step: the slowest rank and its heaviest samples, found in what all ranks told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from omni_pipeline.core.plan import Balance, MediaPlacement, Pack, PackSlot, StepPlan
from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment
from tests.support.strategies import make_sample, media_segment, text_segment
from trainer.stage_times import ENCODER, LLM, StageTimes
from trainer.step_causes import (
    NUM_HEAVY,
    HeavySample,
    flops_of_rank,
    imbalance,
    part_causes,
    rank_numbers,
    samples_of_rank,
)

SOURCES = ("captions", "talks")
IMBALANCES = {"encoder": (2.0, 1.2), "llm": (1.5, 1.1)}
SMALL, LARGE = (1, 2, 2), (1, 20, 20)


class UnitCosts:
    """A second per encoder unit, a second per token."""

    def media_cost(self, segment: Segment) -> float:
        return float(segment.num_units)

    def pack_cost(self, pack: Pack) -> float:
        return float(pack.num_positions)

    media_flops = media_cost
    pack_flops = pack_cost


def picture(row: int, *grids: tuple[int, int, int]) -> Sample:
    media = [media_segment(Modality.IMAGE, grid) for grid in grids]
    return make_sample([*media, text_segment(3)], source="captions", row=row)


def plan_of(*packs: tuple[Sample, ...], ranks: dict[tuple[int, int, int], tuple[int, ...]]) -> StepPlan:
    """A microbatch per pack, all on replica 0 of two; ``ranks`` encode (pack, sample, segment)."""
    media = []
    for (pack, sample, segment), members in ranks.items():
        rows = packs[pack][sample].segments[segment].num_rows
        shares = (rows,) if len(members) == 1 else (rows - rows // 4, rows // 4)
        media.append(
            MediaPlacement(pack, sample, segment, pack, "vision", members, shares, False, 1, sum(shares))
        )
    nothing = Balance(0.0, 0.0, 0.0)
    return StepPlan(
        step=0,
        group=0,
        ranks=(0, 1),
        replicas=(0, 1),
        num_microbatches=len(packs),
        packs=tuple(Pack(lane, 0, samples) for lane, samples in enumerate(packs)),
        slots=tuple(PackSlot(pack, 0, pack) for pack in range(len(packs))),
        media=tuple(media),
        exchanges=("exact",) * len(packs),
        encoder_balance=nothing,
        llm_balance=nothing,
    )


def test_the_samples_of_a_rank_are_those_it_encodes_and_those_it_reads() -> None:
    plan = plan_of(
        (picture(0, SMALL, SMALL), picture(1, LARGE)),
        (picture(2, SMALL),),
        ranks={(0, 0, 0): (1,), (0, 0, 1): (1,), (0, 1, 0): (0, 1), (1, 0, 0): (0,)},
    )
    first = samples_of_rank(plan, rank=0, replica=0, costs=UnitCosts())
    second = samples_of_rank(plan, rank=1, replica=1, costs=UnitCosts())
    split = HeavySample(SampleId("captions", 0, 1), 0, units=300, modelled_s=300.0, num_ranks=2)
    assert first["encoder"] == (split, HeavySample(SampleId("captions", 0, 2), 1, 4, 4.0, 1))
    # Two pictures of one sample count together, and the split one by the rows that the rank makes.
    assert second["encoder"] == (
        replace(split, units=100, modelled_s=100.0),
        HeavySample(SampleId("captions", 0, 0), 0, 8, 8.0, 1),
    )
    assert [item.id.row for item in first["llm"]] == [1, 0, 2]
    assert first["llm"][0].units == plan.packs[0].samples[1].num_tokens
    assert second["llm"] == ()


def test_the_operations_of_all_ranks_are_those_of_the_step() -> None:
    plan = plan_of(
        (picture(0, SMALL), picture(1, LARGE)),
        (picture(2, SMALL),),
        ranks={(0, 0, 0): (1,), (0, 1, 0): (0, 1), (1, 0, 0): (0,)},
    )
    costs = UnitCosts()
    of_ranks = [flops_of_rank(plan, rank=rank, replica=rank, costs=costs) for rank in (0, 1)]
    tokens = sum(costs.pack_flops(pack) for pack in plan.packs)
    assert of_ranks == [300 + 4 + tokens, 4 + 100]
    assert flops_of_rank(plan, rank=0, replica=None, costs=costs) == 304


def test_padding_counts_for_the_llm() -> None:
    plan = plan_of((picture(0, SMALL), picture(1, SMALL)), ranks={})
    padded = replace(plan, packs=(replace(plan.packs[0], padded_len=64),))
    found = samples_of_rank(padded, rank=0, replica=0, costs=UnitCosts())["llm"]
    assert [item.modelled_s for item in found] == [64.0, 64.0]


def heavy(row: int, microbatch: int, seconds: float, *, source: str = "talks") -> HeavySample:
    return HeavySample(SampleId(source, 3, row), microbatch, 7 * row, seconds, 1)


def own_times(encoder: tuple[float, ...], llm: tuple[float, ...]) -> StageTimes:
    return StageTimes(wall={}, own={ENCODER: encoder, LLM: llm})


def test_the_slowest_rank_is_found_by_its_own_work_and_names_its_samples() -> None:
    samples = {"encoder": [heavy(9, 0, 5.0), heavy(8, 1, 4.0), heavy(7, 0, 3.0), heavy(6, 1, 2.0)]}
    table = [
        rank_numbers({}, own_times((1.0, 1.0), (2.0, 2.0)), sources=SOURCES),
        rank_numbers(samples, own_times((1.0, 4.0), (2.0, 2.0)), sources=SOURCES),
        rank_numbers({"llm": [heavy(5, 0, 1.0)]}, own_times((1.0, 1.0), (5.0, 2.0)), sources=SOURCES),
    ]
    encoder, llm = part_causes(np.array(table), sources=SOURCES, imbalances=IMBALANCES)
    assert (encoder.rank, encoder.microbatch, encoder.own_s, encoder.mean_s) == (1, 1, 4.0, 2.0)
    assert encoder.imbalance_measured == pytest.approx((1.0 + 4.0) / (1.0 + 2.0))
    # Those of the microbatch come first; no more than a few are told.
    assert [item.id.row for item in encoder.samples] == [8, 9, 7]
    assert len(encoder.samples) == NUM_HEAVY
    assert encoder.samples[0] == heavy(8, 1, 4.0)
    assert (llm.rank, llm.microbatch, llm.samples) == (2, 0, (heavy(5, 0, 1.0),))
    assert (llm.imbalance_before, llm.imbalance_after) == IMBALANCES["llm"]


def test_without_measured_work_the_modelled_load_decides() -> None:
    table = [
        rank_numbers({"encoder": [heavy(1, 0, 1.0)]}, StageTimes(), sources=SOURCES),
        rank_numbers({"encoder": [heavy(2, 0, 2.0), heavy(3, 1, 2.0)]}, StageTimes(), sources=SOURCES),
    ]
    encoder, llm = part_causes(np.array(table), sources=SOURCES, imbalances=IMBALANCES)
    assert (encoder.rank, encoder.microbatch, encoder.imbalance_measured) == (1, -1, None)
    assert (encoder.own_s, encoder.mean_s) == (4.0, 2.5)
    assert llm.samples == ()


def test_every_rank_tells_as_many_numbers() -> None:
    many = {part: [heavy(row, 0, 1.0) for row in range(20)] for part in ("encoder", "llm")}
    lengths = {len(rank_numbers(samples, StageTimes(), sources=SOURCES)) for samples in ({}, many)}
    assert len(lengths) == 1


def test_imbalance_is_summed_over_microbatches() -> None:
    assert imbalance(np.array([[1.0, 3.0], [3.0, 1.0]])) == 1.5
    assert imbalance(np.zeros((2, 3))) == 1.0
