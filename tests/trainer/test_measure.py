"""Stages are timed in the order they run, and waiting is not work."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from trainer.measure import StageClock
from trainer.stage_times import ENCODER, EXCHANGE, LLM, StageTimes

CPU = torch.device("cpu")
WORK_S, WAIT_S = 0.05, 0.12


def work() -> None:
    """Compute for ``WORK_S`` of this thread's time, however busy the machine is."""
    end = time.thread_time() + WORK_S
    while time.thread_time() < end:
        pass


def wait() -> None:
    """Wait for something that does not come, as a rank waits in a collective."""
    threading.Event().wait(WAIT_S)


class Stage(torch.autograd.Function):
    """Passes its input on; works or waits, forward and backward."""

    @staticmethod
    def forward(ctx, value, act):  # type: ignore[no-untyped-def]
        ctx.act = act
        act()
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.act()
        return gradient, None


def run(clock: StageClock, leaf: torch.Tensor) -> None:
    """Encoders that work, an exchange that waits, an LLM that works twice as long."""
    clock.begin()
    encoded = Stage.apply(leaf, work)  # type: ignore[no-untyped-call]
    clock.mark(ENCODER)
    received = Stage.apply(encoded, wait)  # type: ignore[no-untyped-call]
    clock.mark(EXCHANGE)
    clock.watch_backward(encoded, received)
    out = Stage.apply(Stage.apply(received, work), work)  # type: ignore[no-untyped-call]
    clock.mark(LLM)
    if out.requires_grad:
        out.sum().backward()
    clock.end()


def test_own_work_is_told_from_waiting_by_stage_and_microbatch() -> None:
    clock = StageClock(CPU)
    begin = time.perf_counter()
    for _ in range(2):
        run(clock, torch.ones(3, requires_grad=True))
    total = time.perf_counter() - begin
    times = clock.times()
    for microbatch in range(2):
        # Each stage runs twice, forward and backward; margins are for the marks themselves.
        assert times.own[ENCODER][microbatch] == pytest.approx(2 * WORK_S, rel=0.25)
        assert times.own[LLM][microbatch] == pytest.approx(4 * WORK_S, rel=0.25)
        assert times.own[EXCHANGE][microbatch] < 0.25 * WORK_S
        assert times.wall[EXCHANGE][microbatch] >= 2 * WAIT_S
    assert sum(map(times.wall_s, (ENCODER, EXCHANGE, LLM))) == pytest.approx(total, rel=0.02)
    assert times.own_s(LLM) == sum(times.own[LLM])


def test_without_a_backward_all_time_is_that_of_the_forward() -> None:
    clock = StageClock(CPU)
    run(clock, torch.ones(3))
    assert clock.times().own[ENCODER][0] == pytest.approx(WORK_S, rel=0.25)


def test_encoders_that_do_not_learn_leave_the_backward_to_the_llm() -> None:
    clock = StageClock(CPU)
    clock.begin()
    clock.mark(ENCODER)
    clock.mark(EXCHANGE)
    clock.watch_backward(torch.ones(1), torch.ones(1))
    clock.mark(LLM)
    work()
    clock.end()
    own = clock.times().own
    assert own[LLM][0] >= WORK_S
    assert own[ENCODER][0] < WORK_S / 2


def test_a_step_without_microbatches_took_no_time() -> None:
    times = StageClock(CPU).times()
    assert (times.wall_s(LLM), times.own_s(LLM)) == (0, 0)
    assert StageTimes().wall_s(LLM) == 0
