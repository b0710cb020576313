"""Segments that several ranks share: the step still equals one plain process, in loss and every gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from balancer.lssp import LsspConfig
from omni_pipeline.core.batch import Batch, JoinedSegment
from omni_pipeline.core.errors import OmniError, PlanError
from omni_pipeline.core.plan import MediaPlacement, Pack, StepPlan
from omni_pipeline.core.sample import Modality, Sample
from omni_pipeline.core.topology import Topology
from tests.support import parity
from tests.support.ranks import run_ranks
from tests.support.steps import Recorder
from tests.support.strategies import clip_with_sound, make_sample, media_segment, text_segment
from trainer.colocation import ColocatedModel, colocate, omni_anchors
from trainer.model.omni import build_model
from trainer.parallel.config import ParallelConfig
from trainer.parallel.mesh import make_rank_groups, pick_device
from trainer.step import Learner, StepResult, train_step

# Rows of segments: 24 in ragged windows, 5 frames of 6, 108 in three chunks of at most 50.
PICTURE = media_segment(Modality.IMAGE, (1, 12, 8))
CLIP = media_segment(Modality.VIDEO, (5, 4, 6))
TALK = media_segment(Modality.AUDIO, (431, 1, 1))
LONG = make_sample([PICTURE, text_segment(3), CLIP, TALK, text_segment(4), PICTURE], source="long", row=40)
WIDE = make_sample([media_segment(Modality.IMAGE, (1, 4, 10)), text_segment(3)], source="long", row=41)
CUT = make_sample([CLIP, text_segment(3), TALK, text_segment(2)], source="long", row=42)
# Its rows by turns: 12, 50, 12, 50, 6, 8.
JOINT = make_sample([*clip_with_sound((5, 4, 6), 431), text_segment(2)], source="long", row=43)
MIXED = [parity.mixed_sample(row) for row in range(4)]
TEXT = [parity.text_sample(row) for row in range(100, 104)]

# By (row of the sample, segment): ranks, shares, whether they are joined.
Shares = Mapping[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...], bool]]
SAMPLES = (LONG, WIDE, CUT, JOINT)


def _packs(*contents: list[Sample]) -> tuple[Pack, ...]:
    return tuple(Pack(lane, 0, tuple(samples)) for lane, samples in enumerate(contents))


SCENARIOS: dict[int, dict[str, tuple[tuple[Pack, ...], Shares]]] = {
    2: {
        "all kinds, ranks in any order": (
            _packs([LONG, MIXED[1]], [MIXED[0]], [TEXT[0]], [CUT]),
            {
                (40, 0): ((1, 0), (11, 13), True),
                (40, 2): ((0, 1), (18, 12), False),
                (40, 3): ((1, 0), (50, 58), False),
                (40, 5): ((0, 1), (1, 23), True),
                (42, 0): ((1, 0), (6, 24), True),
            },
        ),
        "a clip and its sound, each cut inside a turn of the other": (
            _packs([JOINT, TEXT[0]], [MIXED[3]]),
            {(43, 0): ((1, 0), (17, 13), True), (43, 1): ((0, 1), (50, 58), False)},
        ),
        "nothing but cuts": (
            _packs([CUT], TEXT[:1]),
            {(42, 0): ((1, 0), (24, 6), False), (42, 2): ((0, 1), (100, 8), False)},
        ),
    },
    4: {
        "degrees two and four at once": (
            _packs([LONG], [MIXED[2], WIDE], TEXT[:2], [CUT], [MIXED[3]], TEXT[2:3]),
            {
                (40, 0): ((2, 0, 3, 1), (6, 6, 7, 5), True),
                (40, 5): ((3, 1), (12, 12), True),
                (41, 0): ((0, 1), (3, 7), True),
                (40, 2): ((0, 3, 2), (6, 12, 12), False),
                (42, 2): ((1, 2, 3), (50, 50, 8), False),
            },
        ),
        "two ranks without anything": (
            _packs([WIDE], TEXT[:1], TEXT[1:2], TEXT[2:3]),
            {(41, 0): ((1, 2), (5, 5), True)},
        ),
    },
}


def _shared(plan: StepPlan, shares: Shares) -> StepPlan:
    def place(item: MediaPlacement) -> MediaPlacement:
        sample = plan.packs[item.pack].samples[item.sample]
        found = shares.get((sample.id.row, item.segment)) if sample.id.source == "long" else None
        if found is None:
            return item
        ranks, rows, joined = found
        return replace(item, ranks=ranks, shares=rows, joined=joined)

    return replace(plan, media=tuple(map(place, plan.media)))


def _batch(packs: tuple[Pack, ...], shares: Shares, topology: Topology) -> Batch:
    planner = parity.make_planner(topology, num_packs=len(packs), balance=False)
    group = topology.group_of(dist.get_rank())
    own = tuple(pack for pack in packs if pack.lane % topology.num_groups == group)
    plan = _shared(planner.plan(own, step=0, group=group), shares)
    return parity.build_batch(plan, planner, rank=dist.get_rank())


def _colocated(topology: Topology, *, layouts: Mapping[str, ParallelConfig] | None = None) -> ColocatedModel:
    """In float64, sharded like any other."""
    return colocate(
        build_model(parity.CONFIG, seed=3).double(),
        groups=make_rank_groups(topology, device=pick_device()),
        parallel=layouts or {},
        precision="fp32",
    )


def _learner(model: ColocatedModel, recorder: Recorder) -> Learner:
    return Learner(model, recorder, learning_rate_at=lambda step: 0.5, grad_clip=math.inf, settings={})


def _run(
    rank: int, world_size: int, names: list[str], layouts: dict[str, ParallelConfig]
) -> dict[str, tuple[StepResult, dict[str, torch.Tensor]]]:
    topology = Topology(world_size)
    model = _colocated(topology, layouts=layouts)
    results = {}
    for name in names:
        recorder = Recorder(model.module)
        batch = _batch(*SCENARIOS[world_size][name], topology)
        result = train_step(_learner(model, recorder), batch, step=0)
        results[name] = result, (recorder.gradients if rank == 0 else {})
    return results


@functools.cache
def _reference(world_size: int, name: str) -> parity.Reference:
    return parity.reference_step(build_model(parity.CONFIG, seed=3).double(), SCENARIOS[world_size][name][0])


def assert_equals_one_process(
    world_size: int, names: list[str], *, layouts: dict[str, ParallelConfig] | None = None
) -> None:
    by_rank = run_ranks(world_size, _run, args=(world_size, names, layouts or {}))
    for name in names:
        result, gradients = by_rank[0][name]
        _compare(result, gradients, _reference(world_size, name), name)


def _compare(
    result: StepResult, gradients: Mapping[str, torch.Tensor], expected: parity.Reference, name: str
) -> None:
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-12, atol=0, msg=name)
    torch.testing.assert_close(result.grad_norm, expected.grad_norm, rtol=1e-11, atol=0, msg=name)
    for parameter, gradient in expected.gradients.items():
        error = (gradients[parameter] - gradient).norm()
        assert error <= 1e-11 * gradient.norm() + 1e-15, f"{name}: {parameter} is off by {error}"


@pytest.mark.parametrize("world_size", [2, 4])
def test_shared_segments_give_the_step_of_one_plain_process(world_size: int) -> None:
    assert_equals_one_process(world_size, list(SCENARIOS[world_size]))


def test_shared_segments_with_gradients_summed_once_and_meshes_of_two() -> None:
    once = ParallelConfig(reshard="step", dp_shard=2)
    assert_equals_one_process(4, ["degrees two and four at once"], layouts={"vision": once, "audio": once})


def _run_planned(
    rank: int, world_size: int, packs: tuple[Pack, ...], lssp: LsspConfig
) -> tuple[StepResult, dict[str, torch.Tensor], set[tuple[int, bool]]]:
    """Run a step as the planner makes it; also return the degrees of its long segments, and if joined."""
    topology = Topology(world_size)
    model = _colocated(topology)
    recorder = Recorder(model.module)
    planner = parity.make_planner(topology, num_packs=len(packs), balance=True, lssp=lssp)
    plan = planner.plan(packs, step=0, group=0)
    batch = parity.build_batch(plan, planner, rank=rank)
    result = train_step(_learner(model, recorder), batch, step=0)
    long = {(len(item.ranks), item.joined) for item in plan.media if item.is_long}
    return result, (recorder.gradients if rank == 0 else {}), long


MANY = _packs([LONG], MIXED[2:4], TEXT[:2], [CUT, WIDE], [MIXED[1]], TEXT[2:3])


@pytest.mark.parametrize(
    ("world_size", "packs", "lssp", "kinds"),
    [
        (2, _packs([WIDE], TEXT[:1]), LsspConfig(kind="auto"), {(2, True)}),
        (2, MANY, LsspConfig(kind="fixed", min_rows=10), {(2, True), (2, False)}),
        (4, MANY, LsspConfig(kind="fixed", min_rows=10), {(4, True), (4, False), (2, False)}),
    ],
    ids=["auto", "degree two", "degree four"],
)
def test_plans_of_the_planner_with_long_segments_give_the_step_of_one_plain_process(
    world_size: int, packs: tuple[Pack, ...], lssp: LsspConfig, kinds: set[tuple[int, bool]]
) -> None:
    by_rank = run_ranks(world_size, _run_planned, args=(world_size, packs, lssp))
    result, gradients, long = by_rank[0]
    assert long == kinds
    expected = parity.reference_step(build_model(parity.CONFIG, seed=3).double(), packs)
    _compare(result, gradients, expected, str(lssp))


def _count_exchanges(rank: int, kind: str) -> tuple[int, int]:
    """Return how many all-to-alls a step makes with joined shares, or with other samples."""
    topology = Topology(4)
    packs, shares = SCENARIOS[4]["two ranks without anything"]
    if kind == "none joined":
        packs, shares = _packs([CUT], TEXT[:1], TEXT[1:2], TEXT[2:3]), {(42, 0): ((1, 2), (12, 18), False)}
    counted = []
    plain = dist.all_to_all_single

    def counting(*arguments: Any, **named: Any) -> Any:
        counted.append(arguments)
        return plain(*arguments, **named)

    model = _colocated(topology)
    batch = _batch(packs, shares, topology)
    dist.all_to_all_single = counting  # in this process of one rank only
    train_step(_learner(model, Recorder(model.module)), batch, step=0)
    return len(counted), sum(len(arguments[1]) for arguments in counted)


def test_all_members_take_part_twice_per_layer_where_one_has_a_joined_share_and_else_never() -> None:
    layers = parity.CONFIG.vision.layers
    joined = run_ranks(4, _count_exchanges, args=("joined",))
    # Forward and backward of the rows, and of both exchanges of every layer.
    assert [number for number, _ in joined] == [2 * (1 + 2 * layers)] * 4
    assert [sent > 0 for _, sent in joined] == [True, True, True, False]
    assert [number for number, _ in run_ranks(4, _count_exchanges, args=("none joined",))] == [2] * 4


def _failing(rank: int, kind: str) -> str:
    """Return the error of a step whose plan or input cannot run."""
    topology = Topology(4 if kind == "heads" else 2)
    model = _colocated(topology)
    samples = {"heads": WIDE, "chunks": CUT, "told": LONG}
    packs = _packs([samples[kind]], *([text] for text in TEXT[: topology.world_size - 1]))
    shares: dict[str, Shares] = {
        "heads": {(41, 0): ((0, 1, 2), (3, 3, 4), True)},
        "chunks": {(42, 2): ((0, 1), (60, 48), False)},
        "told": {(40, 0): ((0, 1), (12, 12), True)},
    }
    batch = _batch(packs, shares[kind], topology)
    if kind == "told" and rank == 1:
        microbatch = batch.microbatches[0]
        vision = replace(microbatch.inputs["vision"], joined=())
        inputs = {**microbatch.inputs, "vision": vision}
        batch = replace(batch, microbatches=(replace(microbatch, inputs=inputs),))
    with pytest.raises(OmniError) as caught:
        train_step(_learner(model, Recorder(model.module)), batch, step=0)
    return caught.value.what


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("heads", "3 ranks join vision shares with 4 heads"),
        ("chunks", "audio shares of (60, 48) rows are not joined, and attention goes over runs of 50 rows"),
        ("told", "vision input has other joined segments than the plan"),
    ],
)
def test_shares_that_cannot_run_are_an_error_on_all_ranks_before_any_exchange(
    kind: str, message: str
) -> None:
    for what in run_ranks(4 if kind == "heads" else 2, _failing, args=(kind,)):
        assert what.startswith("step 0 cannot run: rank ")
        assert f"microbatch 0: {message}" in what


def test_an_encoder_whose_attention_cannot_be_joined_says_so() -> None:
    _, audio = omni_anchors(build_model(parity.CONFIG))
    joined = JoinedSegment((400, 1, 1), members=(0, 1), shares=(50, 50), place=0)
    inputs = replace(audio.empty_input(), joined=(joined,))
    told = "audio shares are joined, and its attention cannot be"
    assert audio.problem(inputs, member=2) == told
    groups: Any = SimpleNamespace(device=torch.device("cpu"), members=(0, 1), rank=0, group=None)
    with pytest.raises(PlanError, match=told):
        audio.encode(inputs, groups=groups)
