"""The worst steps: few, whole, named, and true after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from loaders.source import Source
from omni_pipeline.app.wire import build_tokenizer, training_stream
from omni_pipeline.app.worst_steps import (
    BY_IMBALANCE,
    BY_TIME,
    KEEP,
    SampleName,
    WorstSteps,
    namer,
    read_worst_steps,
)
from omni_pipeline.core.errors import ShardError
from omni_pipeline.core.sample import SampleId
from tests.support.run_folder import config_of
from tests.support.runs import make_run
from trainer.step_causes import HeavySample, PartCause, StepCause


def cause(step: int, *, step_s: float = 1.0, lost_s: float = 0.0) -> StepCause:
    sample = HeavySample(SampleId("captions", 0, step), 1, units=64, modelled_s=0.5, num_ranks=2)
    part = PartCause("encoder", 2.0, 1.5, None, 1, -1, 0.7, 0.4, (sample,))
    return StepCause(step, step_s, 0.1, lost_s, (part,))


def name_of(sample: SampleId) -> SampleName:
    return SampleName(sample, f"key-{sample.row}", "a.tar")


def keeper(path: Path, first_step: int = 0) -> WorstSteps:
    return WorstSteps(path / "worst.jsonl", first_step=first_step, name_of=name_of)


def kept(path: Path) -> dict[int, tuple[str, ...]]:
    return {item.cause.step: item.worst_by for item in read_worst_steps(path / "worst.jsonl")}


def test_the_worst_of_each_kind_are_kept_with_their_names(tmp_path: Path) -> None:
    worst = keeper(tmp_path)
    for step in range(100):
        worst.see(cause(step, step_s=1 + step % 50, lost_s=100 - step))
    found = kept(tmp_path)
    by_time = {step for step, kinds in found.items() if BY_TIME in kinds}
    assert by_time == {*range(46, 50), *range(96, 100)}
    assert {step for step, kinds in found.items() if BY_IMBALANCE in kinds} == set(range(KEEP))
    (last,) = [item for item in read_worst_steps(tmp_path / "worst.jsonl") if item.cause.step == 99]
    assert last.cause == cause(99, step_s=50, lost_s=1)
    assert last.name_of(SampleId("captions", 0, 99)) == SampleName(
        SampleId("captions", 0, 99), "key-99", "a.tar"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["worst.jsonl"]


def test_the_first_step_of_a_start_is_slow_because_it_is_the_first(tmp_path: Path) -> None:
    worst = keeper(tmp_path, 7)
    worst.see(cause(7, step_s=1000.0, lost_s=1.0))
    worst.see(cause(8))
    assert kept(tmp_path) == {7: (BY_IMBALANCE,), 8: (BY_TIME, BY_IMBALANCE)}


def test_a_resume_keeps_earlier_steps_and_drops_what_it_does_again(tmp_path: Path) -> None:
    worst = keeper(tmp_path)
    for step in range(6):
        worst.see(cause(step, step_s=step))
    worst = keeper(tmp_path, 4)
    assert list(kept(tmp_path)) == [0, 1, 2, 3]
    worst.see(cause(4))
    assert list(kept(tmp_path)) == [0, 1, 2, 3, 4]
    keeper(tmp_path, 0)
    assert kept(tmp_path) == {}


def test_a_damaged_line_is_left_out(tmp_path: Path) -> None:
    worst = keeper(tmp_path)
    for step in range(2):
        worst.see(cause(step))
    path = tmp_path / "worst.jsonl"
    first, second = path.read_bytes().splitlines()
    path.write_bytes(first[:50] + b"\n" + second + b"\n")
    assert list(kept(tmp_path)) == [1]
    assert read_worst_steps(tmp_path / "none.jsonl") == []


def test_samples_are_named_by_their_source(tmp_path: Path) -> None:
    config = config_of(make_run(tmp_path))
    stream = training_stream(config, build_tokenizer(config))
    find = namer(stream.sources)
    sample = SampleId("captions", 1, 2)
    shard = str(tmp_path / "captions-000001.tar")
    assert find(sample) == SampleName(sample, "000018", shard)


class GoneSource:
    """A source whose index cannot be read any more."""

    name = "captions"
    shards = ("a.tar", "b.tar")
    shard_sizes = (10, 10)

    def identify(self, ordinal: int) -> Any:
        assert ordinal == 12
        raise ShardError("the index is gone", where="b.tar", fix="index it")


def test_a_name_that_cannot_be_told_ends_no_run() -> None:
    find = namer([cast(Source, GoneSource())])
    assert find(SampleId("captions", 1, 2)) == SampleName(SampleId("captions", 1, 2), "", "b.tar")


@pytest.mark.parametrize("kind", [BY_TIME, BY_IMBALANCE])
def test_of_equal_steps_the_earliest_are_kept(tmp_path: Path, kind: str) -> None:
    worst = keeper(tmp_path, 100)
    for step in range(2 * KEEP):
        worst.see(replace(cause(step), modelled_loss_s=0.0))
    assert {step for step, kinds in kept(tmp_path).items() if kind in kinds} == set(range(KEEP))
