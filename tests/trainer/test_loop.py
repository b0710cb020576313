"""The loop: it learns, records, stops together, and continues exactly where it was."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from omni_pipeline.core.batch import Batch, EndRule
from omni_pipeline.core.errors import DataError, OmniError
from omni_pipeline.core.metrics import MemoryMetrics
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.topology import Topology
from tests.support import parity
from tests.support.ranks import run_ranks
from trainer.checkpoint import Checkpointer, Progress
from trainer.checkpoint_config import CheckpointConfig
from trainer.checkpoint_files import latest
from trainer.colocation import ColocatedModel, colocate
from trainer.evaluation import evaluate
from trainer.loop import LoopSettings, train
from trainer.model.omni import build_model
from trainer.optimizer import build_optimizer, learning_rate
from trainer.optimizer_config import OptimizerConfig
from trainer.parallel.mesh import make_rank_groups, pick_device
from trainer.step import Learner

NUM_STEPS = 4
NUM_PACKS = 2
SOURCES = ("mixed", "text")
OPTIMIZER = OptimizerConfig(lr=3e-3, warmup_steps=1)
SETTINGS = {"model": "ab"}


class ListLoader:
    """Batches of synthetic packs, from any step to any other; its state is the next step."""

    def __init__(
        self,
        topology: Topology,
        *,
        start: int = 0,
        stop: int = 1000,
        num_full: int = 1000,
        act: Any = None,
        padded_len: int = 0,
    ) -> None:
        self.topology = topology
        self.padded_len = padded_len
        self.steps = range(start, stop)
        self.num_full = num_full
        self.act = act

    def __iter__(self) -> Iterator[Batch]:
        planner = parity.make_planner(self.topology, num_packs=NUM_PACKS, balance=True)
        rank = dist.get_rank()
        group = self.topology.group_of(rank)
        for step in self.steps:
            if self.act is not None:
                self.act(step)
            exhausted = step >= self.num_full
            packs = [replace(pack, padded_len=self.padded_len) for pack in _packs(step, group, self.topology)]
            if exhausted:
                packs = [replace(pack, samples=()) for pack in packs]
            plan = planner.plan(packs, step=step, group=group)
            state = {"step": step + 1, "groups": [group]}
            batch = parity.build_batch(plan, planner, rank=rank, state=state)
            yield replace(batch, exhausted=exhausted)


def _packs(step: int, group: int, topology: Topology) -> list[Pack]:
    packs = [
        Pack(0, step, (parity.mixed_sample(step % 3), parity.text_sample(50))),
        Pack(1, step, (parity.text_sample(51 + step % 2),)),
    ]
    return [pack for pack in packs if pack.lane % topology.num_groups == group]


def _merge(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    (step,) = {state["step"] for state in states}
    return {"step": step, "groups": [group for state in states for group in state["groups"]]}


def _parts(topology: Topology) -> tuple[ColocatedModel, Learner]:
    model = colocate(
        build_model(parity.CONFIG, seed=3),
        groups=make_rank_groups(topology, device=pick_device()),
        parallel={},
        precision="fp32",
    )
    learner = Learner(
        model=model,
        optimizer=build_optimizer(model.parameters_by_part, OPTIMIZER),
        learning_rate_at=lambda step: learning_rate(step, config=OPTIMIZER, num_steps=NUM_STEPS),
        grad_clip=OPTIMIZER.grad_clip,
        settings=SETTINGS,
    )
    return model, learner


def _run(
    folder: Path,
    topology: Topology,
    *,
    loader: ListLoader | None = None,
    num_steps: int = NUM_STEPS,
    resume: bool = False,
    config: CheckpointConfig | None = None,
    end: EndRule = "pad",
) -> tuple[Progress, dict[str, dict[int, float]]]:
    model, learner = _parts(topology)
    checkpointer = Checkpointer(
        folder, module=model.module, optimizer=learner.optimizer, keep=9, identity={"seed": 3}
    )
    progress = Progress()
    path = latest(folder)
    if resume:
        assert path is not None
        restored = checkpointer.load(path)
        progress = restored.progress
        loader = ListLoader(topology, start=restored.loader_state["step"])
    metrics = MemoryMetrics()
    done = train(
        learner,
        loader or ListLoader(topology),
        settings=LoopSettings(
            num_steps=num_steps,
            seq_len=64,
            sources=SOURCES,
            checkpoint=config or CheckpointConfig(),
            end=end,
        ),
        metrics=metrics,
        checkpointer=checkpointer,
        merge_states=_merge,
        progress=progress,
    )
    return done.progress, metrics.values


def _unbroken(rank: int, folder: Path) -> tuple[Progress, dict[str, dict[int, float]]]:
    return _run(folder, Topology(2), config=CheckpointConfig(every_steps=2))


def _resumed(rank: int, folder: Path, world_size: int) -> tuple[Progress, dict[str, dict[int, float]]]:
    return _run(folder, Topology(world_size), resume=True)


def test_it_records_learns_and_resumes_on_other_ranks(tmp_path: Path) -> None:
    (progress, values), (_, nothing) = run_ranks(2, _unbroken, args=(tmp_path,))
    assert progress.num_steps == NUM_STEPS
    assert progress.num_tokens == sum(values["trainer/tokens"].values())
    assert nothing == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]
    _check_numbers(values)
    os.rename(tmp_path / "step-00000004", tmp_path / ".gone")
    for world_size, tolerance in ((2, 0.0), (1, 1e-4)):
        done, later = run_ranks(world_size, _resumed, args=(tmp_path, world_size))[0]
        assert done == progress
        for name in ("trainer/loss", "trainer/grad_norm", "trainer/lr"):
            assert later[name] == pytest.approx(
                {step: values[name][step] for step in (2, 3)}, rel=tolerance, abs=0
            ), name
        os.rename(tmp_path / "step-00000004", tmp_path / f".gone-{world_size}")


def _check_numbers(values: dict[str, dict[int, float]]) -> None:
    assert values["trainer/loss"][3] < values["trainer/loss"][0] - 0.02
    samples = [sample for group in [_packs(0, 0, Topology(1))] for pack in group for sample in pack.samples]
    expected = {
        "trainer/tokens": sum(sample.num_tokens for sample in samples),
        "trainer/labels": sum(sample.num_labels for sample in samples),
        "trainer/lr": OPTIMIZER.lr,
        "trainer/skipped": 0,
        "loader/bad_samples": 0,
        "loader/pack_fill": sum(sample.num_tokens for sample in samples) / (2 * 64),
        "loader/padding": 0,
        "loader/tokens/mixed": samples[0].num_tokens,
        "loader/samples/mixed": 1,
        "loader/samples/text": 2,
    }
    for name, value in expected.items():
        assert values[name][0] == pytest.approx(value), name
    assert (
        values["balancer/encoder_imbalance_before"][0] >= values["balancer/encoder_imbalance_after"][0] >= 1
    )
    assert values["trainer/step_s"][0] >= values["loader/wait_s"][0] > 0
    rate = values["trainer/tokens"][0] / values["trainer/step_s"][0]
    assert values["trainer/tokens_per_s"][0] == pytest.approx(rate)
    assert all(set(numbers) == set(range(NUM_STEPS)) for numbers in values.values())


def _with_padding(rank: int, folder: Path) -> dict[str, dict[int, float]]:
    return _run(folder, Topology(2), loader=ListLoader(Topology(2), padded_len=40), num_steps=1)[1]


def test_padding_is_recorded_as_its_share_of_the_positions(tmp_path: Path) -> None:
    values, _ = run_ranks(2, _with_padding, args=(tmp_path,))
    samples = [sample for pack in _packs(0, 0, Topology(1)) for sample in pack.samples]
    num_tokens = sum(sample.num_tokens for sample in samples)
    assert values["loader/padding"][0] == pytest.approx(1 - num_tokens / (len(samples) * 40))
    assert values["trainer/tokens"][0] == num_tokens


def _signalled(rank: int, folder: Path, number: int) -> tuple[Progress, bool]:
    """A signal to rank 1 only, before its batch of step 1 is ready."""

    def act(step: int) -> None:
        if rank == 1 and step == 1:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    done, _ = _run(folder, Topology(2), loader=ListLoader(Topology(2), act=act), num_steps=50)
    return done, signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_saves_and_stops_all_at_the_same_step(tmp_path: Path, number: int) -> None:
    results = run_ranks(2, _signalled, args=(tmp_path, number))
    assert [(done.num_steps, restored) for done, restored in results] == [(2, True), (2, True)]
    assert latest(tmp_path) == tmp_path / "step-00000002"


def _by_time(rank: int, folder: Path) -> None:
    loader = ListLoader(Topology(2), act=lambda step: time.sleep(0.02))
    _run(folder, Topology(2), loader=loader, num_steps=3, config=CheckpointConfig(every_minutes=1e-4))


def test_a_checkpoint_is_due_by_the_clock_of_rank_0(tmp_path: Path) -> None:
    run_ranks(2, _by_time, args=(tmp_path,))
    assert len(list(tmp_path.iterdir())) == 3


def _uneven_end(rank: int, folder: Path, end: EndRule) -> tuple[int, dict[int, float]]:
    """Group 1 has one step less than group 0; from then on its batches are exhausted."""
    topology = Topology(2, replicas_per_group=1)
    done, values = _run(folder, topology, loader=ListLoader(topology, num_full=3 - rank), end=end)
    return done.num_steps, values.get("loader/empty_packs", {})


def test_the_run_ends_with_the_data_of_the_last_group(tmp_path: Path) -> None:
    first, second = run_ranks(2, _uneven_end, args=(tmp_path, "pad"))
    assert first == (3, {0: 0, 1: 0, 2: 1})
    assert second == (3, {})
    assert latest(tmp_path) == tmp_path / "step-00000003"


def test_or_before_the_first_empty_pack_of_any_group(tmp_path: Path) -> None:
    first, second = run_ranks(2, _uneven_end, args=(tmp_path, "drop"))
    assert first == (2, {0: 0, 1: 0})
    assert second == (2, {})
    assert latest(tmp_path) == tmp_path / "step-00000002"


def _fails_in_the_dropped_step(rank: int, folder: Path) -> tuple[int, list[str]]:
    """Group 0 cannot load step 2, which is dropped because group 1 has no samples for it."""

    def act(step: int) -> None:
        if rank == 0 and step == 2:
            raise DataError("more bad samples than loader.max_bad_fraction")

    topology = Topology(2, replicas_per_group=1)
    loader = ListLoader(topology, num_full=3 - rank, act=act)
    handler = BufferingHandler(1000)
    handler.setLevel(logging.WARNING)
    logging.getLogger("trainer").addHandler(handler)
    done, _ = _run(folder, topology, loader=loader, end="drop")
    return done.num_steps, [record.getMessage() for record in handler.buffer]


def test_a_failure_in_the_dropped_step_is_none_but_told_where_it_was(tmp_path: Path) -> None:
    (steps, told), other = run_ranks(2, _fails_in_the_dropped_step, args=(tmp_path,))
    assert (steps, other) == (2, (2, []))
    (warning,) = told
    assert "step 2 is dropped" in warning
    assert "more bad samples than loader.max_bad_fraction" in warning


def _failing_loader(rank: int, folder: Path) -> str:
    def act(step: int) -> None:
        if rank == 1 and step == 1:
            raise DataError("more bad samples than loader.max_bad_fraction")

    with pytest.raises(OmniError) as caught:
        _run(folder, Topology(2), loader=ListLoader(Topology(2), act=act))
    return caught.value.what


def test_a_loader_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    message = "step 1 cannot run: rank 1: more bad samples than loader.max_bad_fraction"
    assert run_ranks(2, _failing_loader, args=(tmp_path,)) == [message, message]


def _evaluate(rank: int, world_size: int) -> dict[str, tuple[Any, ...]]:
    topology = Topology(world_size, replicas_per_group=1)
    model, _ = _parts(topology)
    own = ListLoader(topology, stop=2 if rank == 0 else 1) if world_size == 2 else _all_packs(topology)
    sums = evaluate(model, own, sources=("mixed", "text", "none"), eos=0, settings=SETTINGS)
    assert all(parameter.grad is None for parameter in model.module.parameters())
    assert math.isnan(sums["none"].loss)
    return {name: astuple(total) for name, total in sums.items()}


def _failing_evaluation(rank: int) -> str:
    def act(step: int) -> None:
        if rank == 1 and step == 1:
            raise DataError("more bad samples than loader.max_bad_fraction")

    topology = Topology(2, replicas_per_group=1)
    model, _ = _parts(topology)
    with pytest.raises(OmniError) as caught:
        evaluate(model, ListLoader(topology, act=act), sources=SOURCES, eos=0, settings=SETTINGS)
    return caught.value.what


def test_an_evaluation_whose_data_fails_on_one_rank_is_an_error_on_all() -> None:
    message = "step 1 cannot run: rank 1: more bad samples than loader.max_bad_fraction"
    assert run_ranks(2, _failing_evaluation) == [message, message]


def _all_packs(topology: Topology) -> list[Batch]:
    """The packs that two groups see, for one rank: lane 0 of steps 0 and 1, lane 1 of step 0."""
    planner = parity.make_planner(topology, num_packs=NUM_PACKS, balance=True)
    first, second = _packs(0, 0, topology), _packs(1, 0, topology)[:1]
    plans = [planner.plan(packs, step=step, group=0) for step, packs in enumerate((first, second))]
    return [parity.build_batch(plan, planner, rank=0) for plan in plans]


def test_evaluation_sums_by_source_and_judges_no_end_token() -> None:
    whole = run_ranks(1, _evaluate, args=(1,))[0]
    for parts in run_ranks(2, _evaluate, args=(2,)):
        assert parts == {name: pytest.approx(values, rel=1e-5) for name, values in whole.items()}
    samples = [parity.mixed_sample(0), parity.mixed_sample(1), parity.text_sample(50), parity.text_sample(51)]
    num_mixed = sum(sample.num_labels for sample in samples[:2])
    _, num_labels, num_correct, num_judged, *counts = whole["mixed"]
    assert counts == [2, 0, 0, 0]
    # One end token per sample is a label but not judged.
    assert (num_labels, num_judged) == (num_mixed, num_mixed - 2)
    assert 0 <= num_correct <= num_judged
