"""A run whose data ends: the same last step on any ranks, and every sample seen or counted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from loaders.index import index_shards
from omni_pipeline.app import rank as rank_module
from omni_pipeline.app.data_end import data_end
from omni_pipeline.app.find_sample import find_sample
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.run_dir import Event, RunDir
from omni_pipeline.app.sinks import read_metrics
from omni_pipeline.core.config import load_config
from omni_pipeline.core.errors import DataError
from tests.support.ranks import RanksFailedError, run_ranks
from tests.support.runs import be_rank
from tests.support.shards import caption_members, talk_members, write_tar

RUN_FILE = """
[run]
dir = "{root}/run"
steps = 100
gallery_packs = 1

[[sources]]
name = "captions"
shards = "{root}/captions-*.tar"
layout = {{ kind = "fields", fields = ["jpg", "txt"] }}
weight = 0.7

[[sources]]
name = "talks"
shards = "{root}/talks-*.tar"
layout = {{ kind = "fields", fields = ["wav", "txt"] }}
weight = 0.3

[order]
lanes = 4
packs_per_step = 4
seq_len = 48
look_ahead = 2
epochs = 1

[model]
size = "tiny"

[balance]
group = 1

[loader]
num_workers = 0

[optimizer]
warmup_steps = 1

[checkpoint]
every_steps = 0
"""
TOTALS = {"captions": 27, "talks": 6}
OUT = "a lane is out of "
# Ranks and replicas per group: one group, groups of one, groups of two.
OTHERS = ("pad", 2, 1), ("pad", 3, 1), ("pad", 4, 2), ("drop", 2, 2), ("drop", 3, 1), ("drop", 4, 2)


class Ended(NamedTuple):
    """What a run left in its folder."""

    samples: dict[str, list[int]]
    left: dict[str, list[int]]
    empty_packs: list[int]
    told: str
    events: list[Event]
    checkpoints: list[str]

    @property
    def num_steps(self) -> int:
        return len(self.empty_packs)

    def seen(self) -> dict[str, int]:
        return {name: sum(counts) for name, counts in self.samples.items()}

    def left_at_the_end(self) -> dict[str, int]:
        return {name: counts[-1] for name, counts in self.left.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources: one of three shards, one of few samples."""
    root = tmp_path_factory.mktemp("data")
    for shard, (first, count) in enumerate(((0, 9), (9, 2), (11, 16))):
        write_tar(root / f"captions-{shard}.tar", caption_members(count, first=first))
    write_tar(root / "talks-0.tar", talk_members(6))
    assert not any(report.error for report in index_shards([str(path) for path in root.glob("*.tar")]))
    (root / "run.toml").write_text(RUN_FILE.format(root=root))
    return root


def _used_up(run_dir: Path) -> dict[str, int]:
    """By source, the step at which the first lane was told to be out of it."""
    events = [event for event in RunDir(run_dir).events() if event.text.startswith(OUT)]
    assert len({event.text for event in events}) == len(events)
    return {event.text.removeprefix(OUT): event.step for event in events}


def _train(data: Path, run_dir: Path, world_size: int, *flags: str) -> Ended:
    arguments = data / "run.toml", world_size, ("--run.dir", str(run_dir), *flags)
    run_ranks(world_size, be_rank, args=arguments)
    return _ended(run_dir)


def _ended(run_dir: Path) -> Ended:
    folder = RunDir(run_dir)
    metrics = read_metrics(folder.metrics_path)
    numbers = {
        name: values.astype(int).tolist() for name, (_, values) in metrics.items() if "loss" not in name
    }
    return Ended(
        samples={name: numbers[f"loader/samples/{name}"] for name in TOTALS},
        left={name: numbers[f"loader/left/{name}"] for name in TOTALS},
        empty_packs=numbers["loader/empty_packs"],
        told=str(data_end(metrics)),
        events=[event for event in folder.events() if "ended" in event.text],
        checkpoints=sorted(path.name for path in folder.checkpoints.iterdir()),
    )


def _check(ended: Ended) -> None:
    """Every sample of the data is seen or left, at every step."""
    assert ended.events == [Event(ended.num_steps, f"the data ended at step {ended.num_steps}")]
    assert ended.checkpoints == [f"step-{ended.num_steps:08d}"]
    for name, total in TOTALS.items():
        seen = 0
        for count, left in zip(ended.samples[name], ended.left[name], strict=True):
            seen += count
            assert seen + left == total, name


def _check_drop(ended: Ended) -> None:
    _check(ended)
    assert sum(ended.empty_packs) == 0
    left = ended.left_at_the_end()
    assert 0 < sum(left.values()) < sum(TOTALS.values())
    assert f"talks {6 - left['talks']} seen, {left['talks']} left; 0 packs (0 positions)" in ended.told


def _check_pad(ended: Ended) -> None:
    _check(ended)
    assert ended.seen() == TOTALS
    num_empty = sum(ended.empty_packs)
    assert ended.empty_packs[-1] > 0
    told = f"captions 27 seen, 0 left; talks 6 seen, 0 left; {num_empty} packs ({48 * num_empty} positions)"
    assert told in ended.told


@pytest.fixture(scope="module")
def alone_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def alone(data: Path, alone_dir: Path) -> dict[str, Ended]:
    """The run on one rank, by ``order.end``."""
    return {end: _train(data, alone_dir / end, 1, "--order.end", end) for end in ("pad", "drop")}


def test_every_sample_is_seen_or_left_and_counted(alone: dict[str, Ended]) -> None:
    _check_pad(alone["pad"])
    _check_drop(alone["drop"])
    assert alone["pad"].num_steps > alone["drop"].num_steps


def test_a_source_that_is_used_up_is_told_once(alone: dict[str, Ended], alone_dir: Path) -> None:
    steps = _used_up(alone_dir / "pad")
    assert set(steps) == set(TOTALS)
    assert steps["talks"] < steps["captions"] < alone["pad"].num_steps


@pytest.mark.parametrize(
    ("end", "world_size", "per_group"),
    [("drop", 3, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
)
def test_the_last_step_and_all_counts_are_the_same_on_any_ranks(
    data: Path, tmp_path: Path, alone: dict[str, Ended], end: str, world_size: int, per_group: int
) -> None:
    flags = "--order.end", end, "--balance.group", str(per_group)
    assert _train(data, tmp_path, world_size, *flags) == alone[end]


def _visits(data: Path, run_dir: Path, end: str) -> dict[str, dict[str, int]]:
    """By state, the visits of each source that are told of the samples of a run."""
    config = load_config(RunConfig, data / "run.toml", ["--run.dir", str(run_dir), "--order.end", end])
    found: dict[str, dict[str, int]] = {}
    for source, total in TOTALS.items():
        for number in range(total):
            (history,) = find_sample(config, f"{source}/{number:06d}").samples
            for visit in history.visits:
                counts = found.setdefault(visit.state, dict.fromkeys(TOTALS, 0))
                counts[source] += 1
    return found


def test_an_ended_run_ends_at_once_and_then_goes_on_with_what_it_dropped(data: Path, tmp_path: Path) -> None:
    dropped = _train(data, tmp_path, 2, "--order.end", "drop")
    assert _train(data, tmp_path, 1, "--order.end", "drop") == dropped
    assert _visits(data, tmp_path, "drop") == {
        "trained": dropped.seen(),
        "not reached": dropped.left_at_the_end(),
    }
    assert _visits(data, tmp_path, "pad") == {"trained": dropped.seen(), "ahead": dropped.left_at_the_end()}
    padded = _train(data, tmp_path, 3, "--order.end", "pad")
    assert padded.num_steps > dropped.num_steps
    assert padded.seen() == TOTALS
    assert padded.left_at_the_end() == dict.fromkeys(TOTALS, 0)
    assert [event.step for event in padded.events] == [dropped.num_steps, padded.num_steps]
    assert _train(data, tmp_path, 1, "--order.end", "pad") == padded


def test_a_run_that_ends_by_its_steps_counts_what_is_left(data: Path, tmp_path: Path) -> None:
    ended = _train(data, tmp_path, 2, "--order.end", "drop", "--run.steps", "2")
    assert ended.num_steps == 2
    assert ended.events == []
    for name, total in TOTALS.items():
        assert ended.seen()[name] + ended.left_at_the_end()[name] == total


def _no_step(rank: int, data: Path, run_dir: Path) -> str:
    with pytest.raises(DataError) as caught:
        be_rank(rank, data / "run.toml", 2, ["--run.dir", str(run_dir), *FEW])
    return str(caught.value)


FEW = "--order.end", "drop", "--order.lanes", "64", "--order.packs_per_step", "64"


def test_lanes_without_a_sample_leave_no_step_to_drop_none(data: Path, tmp_path: Path) -> None:
    messages = run_ranks(2, _no_step, args=(data, tmp_path))
    assert messages[0] == messages[1]
    assert "lower order.lanes" in messages[0]


EVALUATED = (
    "--evaluation.every_steps",
    "2",
    "--checkpoint.every_steps",
    "2",
    "--run.steps",
    "4",
    "--evaluation.sources",
)
HELD_OUT = (
    '[{{ name = "held", shards = "{root}/talks-0.tar", '
    'layout = {{ kind = "fields", fields = ["wav", "txt"] }} }}]'
)


def _killed_in_evaluation(rank: int, data: Path, run_dir: Path, flags: tuple[str, ...]) -> None:
    def die(*arguments: object, **options: object) -> None:
        os._exit(9)

    rank_module.evaluate = die  # type: ignore[assignment]  # in this process only
    be_rank(rank, data / "run.toml", 1, flags)


def test_an_evaluation_in_which_a_kill_came_is_done_after_the_resume(data: Path, tmp_path: Path) -> None:
    flags = "--run.dir", str(tmp_path), *EVALUATED, HELD_OUT.format(root=data)
    with pytest.raises(RanksFailedError, match="ended without a word"):
        run_ranks(1, _killed_in_evaluation, args=(data, tmp_path, flags))
    run_ranks(1, be_rank, args=(data / "run.toml", 1, flags))
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert metrics["trainer/loss"][0].tolist() == [0, 1, 2, 3]
    assert metrics["evaluation/held/loss"][0].tolist() == [1, 3]
    assert metrics["evaluation/held/seen"][1].tolist() == [6, 6]
