"""Slots of a step: hand-computed times, nothing lost, nothing kept longer than promised."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from balancer.simulator.bubbles import bubble_slots
from balancer.simulator.memory import activations_peak
from balancer.simulator.schedule import (
    Slot,
    Stage,
    clocks,
    first_stage,
    on_demand,
    one_f_one_b,
    pool,
    upfront,
)
from omni_pipeline.core.errors import PlanError
from tests.balancer.simulator.pipelines import run_stages

stages_and_microbatches = st.tuples(st.integers(1, 6), st.integers(1, 12))
fractions = st.sampled_from([0.2, 0.25, 1 / 3, 0.5, 0.6])


def tasks(slots: Stage, task: str) -> list[int]:
    return [slot.microbatch for slot in slots if slot.task == task]


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), [(1, 1), (1, 5), (2, 3), (4, 8), (8, 4), (8, 32)]
)
def test_the_bubble_of_1f1b_is_what_the_books_say(num_stages: int, num_microbatches: int) -> None:
    stages = one_f_one_b(num_stages, num_microbatches)
    timeline = run_stages(stages, num_microbatches=num_microbatches, llm_s=(1, 2))
    assert timeline.step_s == 3 * (num_microbatches + num_stages - 1)
    assert timeline.idle_fraction == pytest.approx(
        (num_stages - 1) / (num_microbatches + num_stages - 1), abs=1e-15
    )


def test_1f1b_of_three_stages_in_full() -> None:
    stages = [[f"{slot.task[0]}{slot.microbatch}" for slot in slots] for slots in one_f_one_b(3, 4)]
    assert stages == [
        ["f0", "f1", "f2", "b0", "f3", "b1", "b2", "b3"],
        ["f0", "f1", "b0", "f2", "b1", "f3", "b2", "b3"],
        ["f0", "b0", "f1", "b1", "f2", "b2", "f3", "b3"],
    ]


def test_on_demand_of_two_stages_in_full() -> None:
    """E: encode, X: dispatch, C: collect, B: encoders backward; what stage 0 needs comes first."""
    letters = {"encode": "E", "dispatch": "X", "collect": "C", "encode_backward": "B"}
    stages = [
        " ".join(f"{letters.get(slot.task, slot.task[0])}{slot.microbatch}" for slot in slots)
        for slots in on_demand(2, 3, forward_fraction=1 / 3)
    ]
    assert stages == [
        "E0 X0 f0 E1 X1 f1 b0 C0 E2 X2 B0 f2 b1 C1 B1 b2 C2 B2",
        "E0 X0 E1 X1 f0 b0 f1 C0 E2 X2 b1 B0 f2 C1 b2 C2 B1 B2",
    ]


def test_messages_delay_only_the_way_through_the_pipeline() -> None:
    times = [
        run_stages(one_f_one_b(4, 1), num_microbatches=1, llm_s=(1, 2), message_s=seconds).step_s
        for seconds in (0, 5)
    ]
    assert times == [12, 12 + 6 * 5]


def test_encoders_spread_over_the_stages_lengthen_a_slot_by_their_part() -> None:
    """Per microbatch T + E / P on demand, T + E in stage 0; T = 12 + 24, E = 4 x (2 + 4)."""

    def step_s(stages: tuple[Stage, ...], count: int, encoder_s: list[tuple[float, float]]) -> float:
        return run_stages(
            stages, num_microbatches=count, llm_s=(12, 24), encoder_s=encoder_s, exchange_s=exchange_s
        ).step_s

    spread, whole = [(2.0, 4.0)] * 4, [(8.0, 16.0)]
    exchange_s: float | None = 0.0
    demand = [step_s(on_demand(4, count, forward_fraction=1 / 3), count, spread) for count in (20, 21)]
    exchange_s = None
    stage0 = [step_s(first_stage(4, count), count, whole) for count in (20, 21)]
    assert demand[1] - demand[0] == 36 + 24 / 4
    assert stage0[1] - stage0[0] == 36 + 24
    # Stage 0 is never idle but once: its four forwards end at 80, the first backward comes back at 128.
    assert stage0[0] == 20 * (36 + 24) + 48


def test_on_demand_with_one_stage_is_encode_exchange_llm_and_back() -> None:
    timeline = run_stages(
        on_demand(1, 2, forward_fraction=1 / 3),
        num_microbatches=2,
        llm_s=(10, 20),
        encoder_s=[(3, 6)],
        exchange_s=1,
    )
    first = [("encode", 0, 1, 0, 1), ("dispatch", 0, 0), ("forward", 0, 0, 0), ("backward", 0, 0, 0)]
    assert [timeline.ends[name] for name in first] == [3, 4, 14, 34]
    assert timeline.ends["collect", 0, 0] == 35
    assert timeline.step_s == 2 * (3 + 1 + 30 + 1 + 6)


def test_an_exchange_waits_for_the_slowest_stage() -> None:
    timeline = run_stages(
        on_demand(2, 1, forward_fraction=0.5),
        num_microbatches=1,
        llm_s=(1, 1),
        encoder_s=[(1, 1), (7, 1)],
        exchange_s=2,
    )
    assert timeline.starts["dispatch", 0, 0] == 7
    assert timeline.starts["forward", 0, 0, 0] == 9


@given(stages_and_microbatches, fractions, st.integers(0, 5), st.integers(0, 3))
def test_on_demand_never_blocks_and_does_all_work_once(
    size: tuple[int, int], fraction: float, encoder_s: int, exchange_s: int
) -> None:
    num_stages, num_microbatches = size
    stages = on_demand(num_stages, num_microbatches, forward_fraction=fraction)
    for slots in stages:
        for task in ("encode", "dispatch", "forward", "backward", "collect", "encode_backward"):
            assert tasks(slots, task) == list(range(num_microbatches))
    timeline = run_stages(
        stages,
        num_microbatches=num_microbatches,
        llm_s=(10 * fraction, 10 - 10 * fraction),
        encoder_s=[(encoder_s, 2 * encoder_s)] * num_stages,
        exchange_s=exchange_s,
    )
    assert timeline.step_s >= num_microbatches * (10 + 3 * encoder_s) * (1 - 1e-12)
    assert timeline.step_s >= num_stages * 10 * (1 - 1e-12)


@given(stages_and_microbatches, fractions)
def test_all_stages_have_encoder_work_in_one_order(size: tuple[int, int], fraction: float) -> None:
    orders = {
        tuple((slot.task, slot.microbatch) for slot in slots if slot.task.startswith("encode"))
        for slots in on_demand(*size, forward_fraction=fraction)
    }
    assert len(orders) == 1


@given(stages_and_microbatches, fractions)
def test_activations_in_flight(size: tuple[int, int], fraction: float) -> None:
    """1F1B: P - s at stage s. On demand the encoders add a few; up front all are kept."""
    num_stages, num_microbatches = size
    one, none = np.ones((1, num_microbatches)), np.zeros((1, num_microbatches))
    for stage, slots in enumerate(one_f_one_b(num_stages, num_microbatches)):
        peak = activations_peak(slots, llm=one, encoders=none)
        assert peak.tolist() == [min(num_stages - stage, num_microbatches)]
    for slots in on_demand(num_stages, num_microbatches, forward_fraction=fraction):
        peak = activations_peak(slots, llm=none, encoders=one)
        assert peak <= min(num_stages + 2, num_microbatches)
    for slots in upfront(num_stages, num_microbatches):
        assert activations_peak(slots, llm=none, encoders=one) == num_microbatches


@given(stages_and_microbatches)
def test_a_pool_is_a_stage_before_the_first(size: tuple[int, int]) -> None:
    num_stages, num_microbatches = size
    timeline = run_stages(
        pool(num_stages, num_microbatches),
        num_microbatches=num_microbatches,
        llm_s=(1, 2),
        encoder_s=[(1, 2)],
    )
    assert timeline.busy_s["encoder"][0] == 3 * num_microbatches


def test_encoder_work_that_fits_the_bubbles_costs_only_what_no_bubble_can_take() -> None:
    """The first forward is needed at once, and the last backward comes when the step is over."""
    filled = bubble_slots(4, 8, llm_s=(10, 20), encoder_s=(2, 4))
    timeline = run_stages(
        filled.stages, num_microbatches=8, llm_s=(10, 20), encoder_s=[(2, 4)] * 4, exchange_s=0
    )
    assert timeline.step_s == pytest.approx(30 * (8 + 3) + 2 + 4)


def test_encoder_work_beyond_the_bubbles_runs_before_and_after() -> None:
    filled = bubble_slots(2, 4, llm_s=(10, 20), encoder_s=(100, 200))
    for slots in filled.stages:
        work = [slot.task for slot in slots if slot.task not in ("dispatch", "collect")]
        assert (work[0], work[-1]) == ("encode", "encode_backward")
    timeline = run_stages(filled.stages, num_microbatches=4, llm_s=(10, 20), encoder_s=[(100, 200)] * 2)
    assert timeline.step_s >= 2 * 300 + 4 * 30


@given(stages_and_microbatches, st.floats(0, 50), st.floats(0, 50))
def test_bubble_filling_does_all_work_once(size: tuple[int, int], forward: float, backward: float) -> None:
    num_stages, num_microbatches = size
    filled = bubble_slots(num_stages, num_microbatches, llm_s=(10, 20), encoder_s=(forward, backward))
    for task in ("encode", "encode_backward"):
        for microbatch, stage in enumerate(filled.stage_of):
            shares = [
                sum(slot.share for slot in slots if (slot.task, slot.microbatch) == (task, microbatch))
                for slots in filled.stages
            ]
            expected = [1.0 if index == stage else 0.0 for index in range(num_stages)]
            assert shares == pytest.approx(expected)
    timeline = run_stages(
        filled.stages,
        num_microbatches=num_microbatches,
        llm_s=(10, 20),
        encoder_s=[(forward, backward)] * num_stages,
        exchange_s=1,
    )
    assert timeline.busy_s["encoder"].sum() == pytest.approx(num_microbatches * (forward + backward))


@given(stages_and_microbatches, st.floats(0, 50), st.floats(0, 50))
def test_no_bubble_gets_more_than_it_holds(size: tuple[int, int], forward: float, backward: float) -> None:
    num_stages, num_microbatches = size
    filled = bubble_slots(num_stages, num_microbatches, llm_s=(10, 20), encoder_s=(forward, backward))
    times = clocks(one_f_one_b(num_stages, num_microbatches), forward=10, backward=20)
    for slots, clock in zip(filled.stages, times, strict=True):
        # What comes before the first slot of the LLM, or behind its last, may be more than a bubble holds.
        between = [0.0]
        for slot in slots:
            if slot.task in ("forward", "backward"):
                between.append(0.0)
            elif slot.task.startswith("encode"):
                between[-1] += slot.share * (forward if slot.task == "encode" else backward)
        for index in range(1, len(clock.starts)):
            assert between[index] <= clock.starts[index] - clock.ends[index - 1] + 1e-6


def test_stages_that_wait_for_each_other_are_refused() -> None:
    crossed: tuple[Stage, ...] = (
        (Slot("forward", 0), Slot("backward", 0), Slot("forward", 1), Slot("backward", 1)),
        (Slot("forward", 1), Slot("backward", 1), Slot("forward", 0), Slot("backward", 0)),
    )
    with pytest.raises(PlanError, match=r"stages \[0, 1\] wait for each other in a circle"):
        clocks(crossed, forward=1, backward=1)
    with pytest.raises(
        PlanError, match="ranks wait for each other in a circle: rank 0 waits for send backward"
    ):
        run_stages(crossed, num_microbatches=2, llm_s=(1, 1))


def test_a_pipeline_without_microbatches_is_refused() -> None:
    with pytest.raises(PlanError, match="a pipeline of 2 stages and 0 microbatches"):
        one_f_one_b(2, 0)
