"""``find_sample`` against a walk through every step of the run."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest

from loaders.quarantine import Quarantine, QuarantineRecord
from omni_pipeline.app import find_rows
from omni_pipeline.app import find_sample as module
from omni_pipeline.app.data_end import DATA_ENDED
from omni_pipeline.app.explain import explain_step
from omni_pipeline.app.find_sample import FoundSample, SampleHistory, find_sample
from omni_pipeline.app.follow import Start
from omni_pipeline.app.lane_walk import is_ahead
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.run_dir import Event, RunDir
from omni_pipeline.app.wire import build_tokenizer, training_stream
from omni_pipeline.core.errors import ConfigError
from tests.support.run_folder import config_of, load_steps, write_metrics
from tests.support.runs import make_run

STEPS = 40
TRAINED = 9
# (source, shard, row) -> {(step, lane, number of the pack)}
Walk = dict[tuple[str, int, int], set[tuple[int, int, int]]]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty steps, many epochs of small sources; nine steps trained, with checkpoints."""
    run_file = make_run(tmp_path_factory.mktemp("find"), steps=STEPS)
    load_steps(config_of(run_file), TRAINED, world_size=2, checkpoints=(4, 8))
    return run_file


def walk(run_file: Path, *flags: str) -> Walk:
    """Every pack of the run, in the plainest way."""
    config = config_of(run_file, *flags)
    stream = training_stream(config, build_tokenizer(config))
    order = stream.order_of_lanes(range(config.order.lanes))
    seen: Walk = defaultdict(set)
    for step in range(config.run.steps):
        for pack in order.next_step(step):
            for sample in pack.samples:
                seen[sample.id.source, sample.id.shard, sample.id.row].add((step, pack.lane, pack.number))
    return seen


def visits_of(found: FoundSample) -> dict[tuple[str, int, int], set[tuple[int, int, int]]]:
    return {
        (item.row.id.source, item.row.id.shard, item.row.id.row): {
            (visit.step, visit.lane, visit.pack) for visit in item.visits if visit.state != "after the end"
        }
        for item in found.samples
    }


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--order.lanes", "2"),
        ("--order.epochs", "2"),
        ("--order.lanes", "12", "--order.packs_per_step", "12", "--run.steps", "10"),
    ],
)
def test_it_agrees_with_a_walk_through_all_steps(run_file: Path, flags: tuple[str, ...]) -> None:
    seen = walk(run_file, *flags)
    numbers = random.Random(str(flags)).sample(range(26), 5)
    found: Walk = {}
    for number in numbers:
        found |= visits_of(find_sample(config_of(run_file, *flags), f"{number:06d}"))
    assert len(found) == sum((number < 26) + (number < 10) + (number < 6) for number in numbers)
    assert found == {row: seen[row] for row in found}


def test_with_many_lanes_the_search_ends_early_and_says_so(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEW_LANES", 0)
    flags = ("--order.lanes", "16", "--order.packs_per_step", "16", "--run.steps", "3")
    seen = walk(run_file, *flags)
    shortened = 0
    for number in range(0, 26, 2):
        (history,) = find_sample(config_of(run_file, *flags), f"captions/{number:06d}").samples
        expected = seen["captions", history.row.id.shard, history.row.id.row]
        visits = {(visit.step, visit.lane, visit.pack) for visit in history.visits if visit.step < 3}
        assert visits <= expected
        if "were not looked at" in history.note:
            shortened += 1
        elif history.visits and history.visits[0].step < 3:
            assert visits == expected
    assert shortened


def test_visits_say_what_is_trained(run_file: Path) -> None:
    (history,) = find_sample(config_of(run_file, "--run.steps", "14"), "talks/000007").samples
    assert [visit.state for visit in history.visits] == [
        "trained" if visit.step < TRAINED else "ahead" for visit in history.visits
    ]
    assert {visit.state for visit in history.visits} == {"trained", "ahead"}
    assert all(visit.place is None for visit in history.visits)


def test_visits_say_where_they_run(run_file: Path) -> None:
    config = config_of(run_file, "--run.steps", "14", "--balance.group", "2")
    (history,) = find_sample(config, "talks/000007", world_size=4).samples
    # A pack may hold a sample of a small source twice, encoded on different ranks.
    encoded: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    planned: dict[tuple[int, int, int], list[int]] = {}
    for visit in history.visits:
        assert visit.place is not None
        encoded[visit.step, visit.lane, visit.pack] += visit.place.encoded_by
        plan = explain_step(config, step=visit.step, world_size=4, groups=None).groups[visit.place.group].plan
        pack = [(pack.lane, pack.number) for pack in plan.packs].index((visit.lane, visit.pack))
        slot = plan.slots[pack]
        assert (visit.place.replica, visit.place.microbatch) == (slot.replica, slot.microbatch)
        assert visit.place.ranks == (slot.replica,)
        ids = [sample.id for sample in plan.packs[pack].samples]
        ranks = [
            item.ranks[0] for item in plan.media if item.pack == pack and ids[item.sample] == history.row.id
        ]
        planned[visit.step, visit.lane, visit.pack] = ranks
    assert {key: sorted(ranks) for key, ranks in encoded.items()} == {
        key: sorted(ranks) for key, ranks in planned.items()
    }
    assert {visit.place.group for visit in history.visits if visit.place} == {0, 1}


def test_a_failure_of_a_trained_visit_is_told(run_file: Path, tmp_path: Path) -> None:
    config = config_of(run_file, "--run.dir", str(tmp_path))
    write_metrics(config, TRAINED)
    (history,) = find_sample(config, "talks/000007").samples
    with Quarantine(RunDir(config.run.dir).quarantine_path, rank=0) as quarantine:
        for visit in history.visits:
            quarantine.add(record_of(history, step=visit.step))
    (again,) = find_sample(config, "talks/000007").samples
    failed = [visit.step for visit in again.visits if visit.failure]
    assert failed == [visit.step for visit in again.visits if visit.step < TRAINED]
    assert {visit.failure for visit in again.visits} == {"", "cut short"}


def record_of(history: SampleHistory, *, step: int) -> QuarantineRecord:
    row = history.row
    return QuarantineRecord(
        step=step,
        source=row.id.source,
        shard=row.shard,
        shard_index=row.id.shard,
        row=row.id.row,
        key=row.key,
        member=f"{row.key}.wav",
        offset=0,
        length=1,
        stage="decode",
        reason="cut short",
        rank=0,
    )


def test_a_sample_that_is_not_seen_in_the_run_is_looked_for_after_its_end(run_file: Path) -> None:
    seen = walk(run_file)
    late = 0
    for number in range(0, 26, 3):
        (history,) = find_sample(config_of(run_file, "--run.steps", "1"), f"captions/{number:06d}").samples
        first = min(seen["captions", history.row.id.shard, history.row.id.row])
        if first[0] == 0:
            assert history.note == ""
            continue
        late += 1
        # Lanes are not equally fast, so the first visit may be one of a later epoch.
        if history.visits:
            assert [visit.state for visit in history.visits] == ["after the end"]
            assert history.visits[0].step >= first[0]
            assert history.note.startswith("not seen in the 1 step of the run; it would be at step ")
        else:
            assert history.note == "not seen in the 1 step of the run, nor before step 5"
    assert late


def test_what_is_never_drawn_says_why(run_file: Path, tmp_path: Path) -> None:
    def note(*flags: str) -> str:
        (history,) = find_sample(config_of(run_file, *flags), "captions/000011").samples
        assert not history.visits
        return history.note

    assert note("--order.seq_len", "25") == "never drawn: 32 tokens, limit 25 (order.seq_len)"
    condition = "num_tokens < 30"
    assert note("--sources.0.where", condition) == f"never drawn: left out by `where`: {condition}"
    denied = tmp_path / "denied.txt"
    denied.write_text("000011\n")
    assert note("--sources.0.deny", f'["{denied}"]') == "never drawn: named by a deny-list of source captions"
    assert note("--sources.0.weight", "0") == "never drawn: its source has weight 0 throughout"


def test_an_end_before_the_last_visits_is_told(run_file: Path) -> None:
    def is_told(*flags: str) -> bool:
        notes = find_sample(config_of(run_file, *flags), "clips/000003").notes
        return any("order.end = 'drop' ends the run before" in note for note in notes)

    assert is_told("--order.epochs", "2", "--order.end", "drop")
    assert not is_told("--order.epochs", "2")
    assert not is_told("--order.end", "drop")


ENDING = "--order.epochs", "2", "--order.end", "drop"


def write_end(config: RunConfig, num_steps: int) -> None:
    """Say that so many steps were trained, and that the data ended there."""
    write_metrics(config, num_steps)
    folder = RunDir(config.run.dir)
    folder.write_settings(config.model_dump(mode="json"))
    folder.add_event(Event(num_steps, f"{DATA_ENDED} at step {num_steps}"))


def test_visits_after_the_recorded_end_of_the_data_are_not_reached(run_file: Path, tmp_path: Path) -> None:
    flags = "--run.dir", str(tmp_path), *ENDING
    visits = find_sample(config_of(run_file, *flags), "captions/000003").samples[0].visits
    steps = [visit.step for visit in visits]
    assert len(steps) == 2
    write_end(config_of(run_file, *flags), steps[1])

    def states(*more: str) -> tuple[int | None, list[str]]:
        found = find_sample(config_of(run_file, *flags, *more), "captions/000003")
        return found.data_end, [visit.state for visit in found.samples[0].visits]

    assert states() == (steps[1], ["trained", "not reached"])
    assert states("--order.end", "pad") == (None, ["trained", "ahead"])
    # The run was started afresh, and has not come to the end.
    write_metrics(config_of(run_file, *flags), steps[1] - 1)
    assert states() == (None, ["trained", "ahead"])


def test_nothing_is_looked_for_after_the_recorded_end_of_the_data(run_file: Path, tmp_path: Path) -> None:
    flags = "--run.dir", str(tmp_path), *ENDING, "--run.steps", "1"
    config = config_of(run_file, *flags)
    late = next(
        history
        for number in range(26)
        for history in find_sample(config, f"captions/{number:06d}").samples
        if any(visit.state == "after the end" for visit in history.visits)
    )
    write_end(config, 1)
    (history,) = find_sample(config, f"captions/{late.row.key}").samples
    assert not history.visits
    assert history.note == "not seen in the 1 step of the run: the data ended at step 1"


def test_checkpoints_of_other_settings_are_named_since_they_saw_other_steps(run_file: Path) -> None:
    assert not find_sample(config_of(run_file), "clips/000003").notes
    assert find_sample(config_of(run_file, "--run.seed", "1"), "clips/000003").notes == [
        "the checkpoint at step 4 cannot be used: 'seed' was 0 when saved, is 1 here",
        "the checkpoint at step 8 cannot be used: 'seed' was 0 when saved, is 1 here",
    ]


def test_a_key_is_found_by_source_and_by_shard_and_shown_up_to_a_limit(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(run_file, "--run.steps", "1")

    def sources(key: str) -> list[str]:
        return [item.row.id.source for item in find_sample(config, key).samples]

    assert sources("000003") == ["captions", "talks", "clips"]
    assert sources("talks/000003") == ["talks"]
    assert sources("clips-000000.tar/000003") == ["clips"]
    assert sources("captions/captions-000001.tar/000020") == ["captions"]
    monkeypatch.setattr(find_rows, "MAX_MATCHES", 2)
    found = find_sample(config, "000003")
    assert (len(found.samples), found.num_matches) == (2, 3)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("00003", "000003"), ("captions/00003", "000003"), ("captions-000001.tar/000003", "000023")],
)
def test_an_unknown_key_names_the_nearest(run_file: Path, key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match="no sample has the key") as raised:
        find_sample(config_of(run_file), key)
    assert nearest in raised.value.fix


def test_what_a_lane_has_buffered_is_ahead_of_it() -> None:
    lane = {"sources": {"a": {"position": 7}}, "buffer": [["a", 5]]}
    start = Start(3, {"0": lane})
    assert [position for position in range(9) if is_ahead(start, 0, "a", position)] == [5, 7, 8]
    assert is_ahead(start, 0, "added since", 0)
    assert not is_ahead(start, 1, "a", 9)
    assert is_ahead(Start(), 1, "a", 0)
