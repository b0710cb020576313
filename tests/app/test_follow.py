"""Where following begins, and that it leads to the same packs from anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omni_pipeline.app.explain import explain_step
from omni_pipeline.app.run_dir import RunDir
from omni_pipeline.app.wire import build_tokenizer, training_stream
from omni_pipeline.core.errors import ConfigError
from tests.support.run_folder import config_of, load_steps
from tests.support.runs import make_run
from trainer.checkpoint_files import LOADER_NAME, SEAL_NAME, path_of


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_file = make_run(tmp_path_factory.mktemp("follow"))
    load_steps(config_of(run_file), 7, world_size=2, checkpoints=(2, 4, 6))
    return run_file


def test_the_nearest_checkpoint_gives_the_plans_that_the_beginning_gives(
    run_file: Path, tmp_path: Path
) -> None:
    for step in range(8):
        near = explain_step(config_of(run_file), step=step, world_size=2)
        far = explain_step(config_of(run_file, "--run.dir", str(tmp_path)), step=step, world_size=2)
        assert near.start.step == step // 2 * 2
        assert far.start.step == 0
        assert near.groups[0].plan == far.groups[0].plan
        assert near.sources[0].epoch == far.sources[0].epoch


def test_all_groups_together_hold_the_packs_of_one_group_of_all_ranks(run_file: Path) -> None:
    whole = explain_step(config_of(run_file), step=5, world_size=4)
    parts = explain_step(config_of(run_file, "--balance.group", "1"), step=5, world_size=4, groups=None)
    assert [group.plan.group for group in parts.groups] == [0, 1, 2, 3]
    packs = [pack for group in parts.groups for pack in group.plan.packs]
    assert sorted(packs, key=lambda pack: pack.lane) == list(whole.groups[0].plan.packs)


def test_a_checkpoint_that_does_not_fit_is_told_and_not_used(run_file: Path, tmp_path: Path) -> None:
    config = config_of(run_file, "--run.dir", str(tmp_path))
    load_steps(config, 5, checkpoints=(1, 2, 3, 4))
    checkpoints = RunDir(config.run.dir).checkpoints
    (path_of(checkpoints, 4) / SEAL_NAME).unlink()
    broken = path_of(checkpoints, 3) / LOADER_NAME
    state = json.loads(broken.read_text())
    text = json.dumps({**state, "identity": {**state["identity"], "seed": 8}})
    broken.write_text(text)
    sizes = {"sizes_bytes": {LOADER_NAME: broken.stat().st_size}}
    (path_of(checkpoints, 3) / SEAL_NAME).write_text(json.dumps(sizes))
    explained = explain_step(config, step=4, world_size=1)
    assert explained.start.step == 2
    assert explained.notes[:2] == [
        "the checkpoint at step 3 cannot be used: 'seed' was 8 when saved, is 0 here",
        "the checkpoint at step 4 cannot be used: it is incomplete",
    ]
    assert not explain_step(config, step=2, world_size=1).notes


def test_steps_after_the_end_are_planned_with_a_note_and_failures_of_the_step_are_shown(
    run_file: Path,
) -> None:
    explained = explain_step(config_of(run_file), step=12, world_size=1)
    assert "the run ends before step 12: run.steps = 12" in explained.notes
    assert explained.groups[0].plan.packs


def test_sources_say_how_far_they_are_and_what_they_leave_out(run_file: Path) -> None:
    explained = explain_step(
        config_of(run_file, "--sources.0.where", "num_tokens < 30"), step=9, world_size=1
    )
    rows = {row.name: row for row in explained.sources}
    assert {name: (row.num_rows, row.share) for name, row in rows.items()} == {
        "captions": (26, 0.5),
        "clips": (6, pytest.approx(0.2)),
        "talks": (10, pytest.approx(0.3)),
    }
    assert rows["captions"].left_out.keys() == {"where"}
    assert 0 < rows["captions"].left_out["where"] < 26
    assert not rows["talks"].left_out
    lanes = follow_lanes(run_file, 10)
    drawn = sum(lane["sources"]["talks"]["position"] for lane in lanes.values())
    assert explain_step(config_of(run_file), step=9, world_size=1).sources[2].epoch == drawn / 10


def follow_lanes(run_file: Path, num_steps: int) -> dict[str, Any]:
    config = config_of(run_file)
    stream = training_stream(config, build_tokenizer(config))
    order = stream.order_of_lanes(range(config.order.lanes))
    for step in range(num_steps):
        order.next_step(step)
    return order.state_dict()


def test_packs_that_stay_empty_are_told(run_file: Path) -> None:
    flags = ("--order.epochs", "1")
    assert not [note for note in explained_notes(run_file, 1, *flags) if "empty" in note]
    told = "4 of 4 packs are empty, since their lanes have no samples left"
    assert told in explained_notes(run_file, 11, *flags)
    end = f"{told}; order.end = 'drop' ends the run before this step"
    assert end in explained_notes(run_file, 11, *flags, "--order.end", "drop")


def explained_notes(run_file: Path, step: int, *flags: str) -> list[str]:
    return explain_step(config_of(run_file, *flags), step=step, world_size=1).notes


def test_a_group_that_does_not_exist_is_named(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="there is no group 1: 2 ranks make 1"):
        explain_step(config_of(run_file), step=0, world_size=2, groups=[1])
