"""The whole loader over small real shards: nothing but the data and the place changes a batch."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from balancer.planner import GroupPlanner
from loaders.decode.segment import DecodeRequest
from loaders.decode.text import ByteTokenizer
from loaders.index import index_shards
from loaders.loader import OmniLoader, merge_states
from loaders.quarantine import QuarantineRecord, read_quarantine
from loaders.source import open_source
from loaders.source_config import SourceConfig
from loaders.workers import InlineDecoder
from omni_pipeline.core.batch import IGNORE_LABEL, MicroBatch
from omni_pipeline.core.errors import DataError, PlanError
from omni_pipeline.core.topology import Topology
from tests.support.loading import (
    BROKEN_KEY,
    MODEL,
    SIZES,
    Data,
    content,
    make_data,
    make_loader,
    take,
)
from tests.support.resume import assert_resumes_anywhere
from tests.support.shards import image_bytes, video_bytes, write_tar


def test_every_position_resumes_to_the_same_rest_even_with_a_broken_sample(
    damaged: Data, quarantine: Path
) -> None:
    def close(loader: OmniLoader) -> None:
        loader.close()

    assert_resumes_anywhere(
        lambda: make_loader(damaged, quarantine=quarantine),
        num_items=5,
        same=lambda left, right: content(left) == content(right),
        finish=close,
    )
    assert read_quarantine(quarantine)


def test_batches_hold_real_tokens_labels_and_media(good: Data, quarantine: Path) -> None:
    special = (ByteTokenizer.special.image, ByteTokenizer.special.audio)
    text = ""
    media_bytes = dict.fromkeys(MODEL.encoders, 0)
    with make_loader(good, quarantine=quarantine) as loader:
        for _ in range(4):
            batch = next(loader)
            num_labels = 0
            for microbatch in batch.microbatches:
                trained = microbatch.labels[microbatch.labels != IGNORE_LABEL]
                num_labels += len(trained)
                text += ByteTokenizer().decode(trained)
                placed = batch.plan.media_of(rank=0, microbatch=microbatch.index)
                assert int(np.isin(microbatch.tokens, special).sum()) == sum(item.num_rows for item in placed)
                for media in placed:
                    assert microbatch.tokens[media.position] in special
                    assert microbatch.tokens[media.position - 1] not in special
                for encoder, item in microbatch.inputs.items():
                    media_bytes[encoder] += int(np.count_nonzero(item.values))
            assert num_labels == sum(pack.num_labels for pack in batch.plan.packs)
            assert {"plan_s", "fetch_s", "decode_s", "assemble_s", "wait_s"} == batch.timings.keys()
    assert "picture number " in text
    assert "talk " in text
    assert all(media_bytes.values())
    assert not quarantine.exists()


def test_clips_with_their_sound_are_loaded_interleaved(tmp_path: Path, quarantine: Path) -> None:
    clips = {
        # 3 s in two chunks, 4 s of sound in two; a short sound; none.
        "long": video_bytes(24, width=56, height=56, fps=8, sound_s=4.0),
        "short": video_bytes(24, width=56, height=56, fps=8, sound_s=0.4, kind="mkv"),
        "mute": video_bytes(24, width=56, height=56, fps=8),
    }
    members = {f"{key}.{'mkv' if key == 'short' else 'mp4'}": clip for key, clip in clips.items()}
    shard = str(write_tar(tmp_path / "clips-0.tar", {**members, **{f"{key}.txt": b"words" for key in clips}}))
    index_shards([shard])
    fields = [{"member": "mp4|mkv", "sound": True}, "txt"]
    config = SourceConfig(name="clips", shards=shard, layout={"kind": "fields", "fields": fields})
    data = Data((open_source(config, SIZES, ByteTokenizer()),), tmp_path)
    loaded: dict[str, list[int]] = {}
    with make_loader(
        data, quarantine=quarantine, epochs=1, weights={"clips": 1.0}, order_settings={"seq_len": 200}
    ) as loader:
        for batch in loader:
            if batch.exhausted:
                break
            assert not batch.failed
            for microbatch in batch.microbatches:
                _check_joint_rows(microbatch)
                for span in microbatch.spans:
                    loaded[span.key] = microbatch.tokens[span.start : span.end].tolist()
    special = ByteTokenizer.special
    names = {
        getattr(special, name): name
        for name in ("vision_start", "vision_end", "audio_start", "audio_end", "video", "audio", "eos")
    }
    walked = {
        key: [
            (name, len(list(same)))
            for name, same in itertools.groupby([names.get(t, "text") for t in tokens])
        ]
        for key, tokens in loaded.items()
    }
    start, end = [("vision_start", 1), ("audio_start", 1)], [("audio_end", 1), ("vision_end", 1)]
    text = [("text", 5), ("eos", 1)]
    # Four rows a frame, a frame a second; the sound with the lead-in of AAC.
    assert walked == {
        "long": [*start, ("video", 8), ("audio", 50), ("video", 4), ("audio", 51), *end, *text],
        "short": [*start, ("video", 8), ("audio", 11), ("video", 4), *end, *text],
        "mute": [("vision_start", 1), ("video", 12), ("vision_end", 1), *text],
    }
    assert not quarantine.exists()


def _check_joint_rows(microbatch: MicroBatch) -> None:
    """Every row, those of pictures first, goes to a placeholder of its own kind; sounds are heard."""
    num_vision_rows = int(microbatch.inputs["vision"].grids.prod(axis=1).sum()) // 4
    is_vision = microbatch.reshard.take_rows < num_vision_rows
    special = ByteTokenizer.special
    placeholders = microbatch.tokens[microbatch.reshard.positions]
    assert (placeholders == np.where(is_vision, special.video, special.audio)).all()
    assert np.isin(microbatch.tokens, (special.video, special.audio)).sum() == len(placeholders)
    sounds = microbatch.inputs["audio"].values
    assert not len(sounds) or sounds.max() - sounds.min() > 1


def test_worker_count_and_prefetch_never_show(good: Data, quarantine: Path) -> None:
    plain = take(make_loader(good, quarantine=quarantine, prefetch_steps=1), 6)
    assert len({repr(item[0]) for item in plain}) == 6
    others = make_loader(good, quarantine=quarantine, num_workers=2, prefetch_steps=4, prefetch_bytes=1)
    assert take(others, 6) == plain


def decode_workers() -> list[psutil.Process]:
    """Decode processes of this one; other tests may have left a fork server beside them."""
    return [child for child in psutil.Process().children() if "loaders.worker_main" in child.cmdline()]


def test_a_killed_worker_changes_no_batch(good: Data, quarantine: Path) -> None:
    plain = take(make_loader(good, quarantine=quarantine), 8)
    with make_loader(good, quarantine=quarantine, num_workers=1, prefetch_steps=1) as loader:
        found = [content(next(loader))]
        (worker,) = decode_workers()
        os.kill(worker.pid, signal.SIGKILL)
        found.extend(content(next(loader)) for _ in range(7))
        assert decode_workers() != [worker]
    assert found == plain
    assert not quarantine.exists()


def test_a_broken_picture_keeps_its_place_without_labels_and_is_recorded_once(
    damaged: Data, quarantine: Path
) -> None:
    num_failures = 0
    with make_loader(damaged, quarantine=quarantine, epochs=1) as loader:
        for batch in loader:
            for microbatch in batch.microbatches:
                for span in microbatch.spans:
                    labels = microbatch.labels[span.start : span.end]
                    assert (span.id in batch.failed) == bool((labels == IGNORE_LABEL).all())
                    if span.id in batch.failed:
                        num_failures += 1
                        assert span.key == BROKEN_KEY
                        assert set(microbatch.tokens[span.start : span.end]) == {ByteTokenizer.special.eos}
            if batch.exhausted:
                break
    assert num_failures == 1
    (record,) = read_quarantine(quarantine)
    assert (record.source, record.key, record.member) == ("captions", BROKEN_KEY, f"{BROKEN_KEY}.jpg")
    assert (record.stage, record.rank) == ("decode", 0)
    assert record.length > 0
    assert record.reason


def mend(record: QuarantineRecord) -> None:
    """Put a whole picture of the same size in place of the one that ``record`` is of."""
    mended = image_bytes(84, 56, seed=4)
    assert len(mended) < record.length
    with open(record.shard, "r+b") as shard:
        shard.seek(record.offset)
        shard.write(mended)


def failing_step(batches: list[list[Any]]) -> int:
    """The first step that has a failed sample."""
    return next(step for step, item in enumerate(batches) if item[1])


def test_a_trained_failure_is_repeated_though_the_bytes_are_good_and_not_recorded_twice(
    tmp_path: Path, quarantine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoded: list[str] = []
    submit = InlineDecoder.submit

    def counting(decoder: InlineDecoder, request: DecodeRequest) -> Any:
        decoded.append(request.member)
        return submit(decoder, request)

    monkeypatch.setattr(InlineDecoder, "submit", counting)
    caplog.set_level("INFO")
    data = make_data(tmp_path / "data", broken=True)
    loader = make_loader(data, quarantine=quarantine, prefetch_steps=1)
    start = loader.state_dict()
    first = take(loader, 4)
    assert f"{BROKEN_KEY}.jpg" in decoded
    failed_at = failing_step(first)
    records = read_quarantine(quarantine)
    mend(records[0])

    decoded.clear()
    again = make_loader(data, quarantine=quarantine, prefetch_steps=1)
    again.load_state_dict(start, honour_until=failed_at + 1)
    assert take(again, failed_at + 1) == first[: failed_at + 1]
    assert read_quarantine(quarantine) == records
    assert f"{BROKEN_KEY}.jpg" not in decoded
    assert decoded
    assert "1 failure of steps from 0 on will be repeated" in caplog.messages

    caplog.clear()
    for honour_until in (None, failed_at):
        fresh = make_loader(data, quarantine=quarantine)
        fresh.load_state_dict(start, honour_until=honour_until)
        assert not any(item[1] for item in take(fresh, failed_at + 1))
    assert not any("will be repeated" in message for message in caplog.messages)


def test_a_fresh_start_honours_no_record_of_an_earlier_run(tmp_path: Path, quarantine: Path) -> None:
    data = make_data(tmp_path / "data", broken=True)
    assert any(item[1] for item in take(make_loader(data, quarantine=quarantine), 4))
    mend(read_quarantine(quarantine)[0])
    assert not any(item[1] for item in take(make_loader(data, quarantine=quarantine), 4))


def test_after_the_shards_are_mended_repeated_failures_do_not_stop_the_run(
    tmp_path: Path, quarantine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loaders.quarantine.MIN_JUDGED_SAMPLES", 1)
    data = make_data(tmp_path / "data", broken=True)
    loader = make_loader(data, quarantine=quarantine)
    start = loader.state_dict()
    failed_at = failing_step(take(loader, 4))
    broken = make_loader(data, quarantine=quarantine, max_bad_fraction=0.0)
    with pytest.raises(DataError, match=r"limit 0\.0%"):
        take(broken, failed_at + 1)
    mend(read_quarantine(quarantine)[0])
    mended = make_loader(data, quarantine=quarantine, max_bad_fraction=0.0)
    mended.load_state_dict(start, honour_until=failed_at + 1)
    assert take(mended, failed_at + 1)[failed_at][1]


def test_a_source_past_its_error_budget_stops_the_run_with_the_original_error(
    damaged: Data, quarantine: Path
) -> None:
    with make_loader(damaged, quarantine=quarantine, max_bad_fraction=0.0) as loader:
        with pytest.raises(DataError, match=r"limit 0\.0%") as caught:
            take(loader, 100)
        assert "loader.max_bad_fraction" in caught.value.fix
        with pytest.raises(RuntimeError, match="the loader is closed"):
            next(loader)


def test_an_error_in_planning_reaches_the_consumer_as_it_is(
    good: Data, quarantine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = PlanError("no such rank", where="here", fix="this way")

    def plan(*_: Any, **__: Any) -> None:
        raise broken

    monkeypatch.setattr(GroupPlanner, "plan", plan)
    with make_loader(good, quarantine=quarantine) as loader, pytest.raises(PlanError) as caught:
        next(loader)
    assert caught.value is broken


def test_the_next_steps_are_planned_while_a_step_is_trained(
    good: Data, quarantine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[int, int] = {}
    third_is_planned, make_plan = threading.Event(), GroupPlanner.plan

    def plan(self: GroupPlanner, packs: Any, *, step: int, group: int) -> Any:
        threads[step] = threading.get_ident()
        made = make_plan(self, packs, step=step, group=group)
        if step == 2:
            third_is_planned.set()
        return made

    monkeypatch.setattr(GroupPlanner, "plan", plan)
    with make_loader(good, quarantine=quarantine, prefetch_steps=2) as loader:
        assert next(loader).plan.step == 0
        # The consumer has step 0 and asks for nothing.
        assert third_is_planned.wait(timeout=60)
        assert threading.get_ident() not in threads.values()


def test_the_byte_budget_holds_and_one_step_above_it_passes_alone(good: Data, quarantine: Path) -> None:
    with make_loader(good, quarantine=quarantine) as loader:
        largest = max(next(loader).num_bytes for _ in range(8))
    limit = 2 * largest
    with make_loader(good, quarantine=quarantine, prefetch_steps=8, prefetch_bytes=limit) as loader:
        next(loader)
        deadline = time.monotonic() + 60
        while loader.peak_bytes <= largest:  # it runs ahead until the next step would not fit
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for _ in range(7):
            next(loader)
        assert loader.peak_bytes <= limit
    with make_loader(good, quarantine=quarantine, prefetch_steps=8, prefetch_bytes=1) as loader:
        sizes = [next(loader).num_bytes for _ in range(8)]
        assert loader.peak_bytes <= max(*sizes, largest)


def test_ranks_share_the_work_of_a_step_and_lose_nothing(good: Data, quarantine: Path) -> None:
    topology = Topology(world_size=4, tp=2, replicas_per_group=0)
    loaders = [make_loader(good, quarantine=quarantine, topology=topology, rank=rank) for rank in range(4)]
    alone = make_loader(good, quarantine=quarantine)
    try:
        for _ in range(3):
            batches = [next(loader) for loader in loaders]
            whole = next(alone)
            assert len({batch.plan.digest for batch in batches}) == 1
            assert len({json.dumps(batch.state["lanes"]) for batch in batches}) == 1
            for encoder in MODEL.encoders:
                parts = [microbatch.inputs[encoder] for batch in batches for microbatch in batch.microbatches]
                total = sum(len(microbatch.inputs[encoder].values) for microbatch in whole.microbatches)
                assert sum(len(part.values) for part in parts) == total
            # Tensor-parallel ranks of a replica see the same tokens; replicas see different ones.
            for left, right in (batches[:2], batches[2:]):
                for one, other in zip(left.microbatches, right.microbatches, strict=True):
                    np.testing.assert_array_equal(one.tokens, other.tokens)
                    np.testing.assert_array_equal(one.labels, other.labels)
            seen = [span.id for batch in batches[::2] for item in batch.microbatches for span in item.spans]
            assert sorted(seen) == sorted(span.id for item in whole.microbatches for span in item.spans)
    finally:
        for loader in [*loaders, alone]:
            loader.close()


def test_only_the_first_rank_of_a_group_tells_of_repeated_failures(
    damaged: Data, quarantine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed_at = failing_step(take(make_loader(damaged, quarantine=quarantine), 4))
    caplog.set_level("INFO")
    topology = Topology(world_size=2, replicas_per_group=0)
    for rank in (0, 1):
        caplog.clear()
        with make_loader(damaged, quarantine=quarantine, topology=topology, rank=rank) as loader:
            loader.load_state_dict(loader.state_dict(), honour_until=failed_at + 1)
            next(loader)
        assert any("will be repeated" in message for message in caplog.messages) == (rank == 0)


def test_states_of_groups_merge_and_load_at_another_number_of_groups(good: Data, quarantine: Path) -> None:
    two = Topology(world_size=2, replicas_per_group=1)
    loaders = [make_loader(good, quarantine=quarantine, topology=two, rank=rank) for rank in range(2)]
    for loader in loaders:
        take_two = [next(loader), next(loader)]
        assert take_two[-1].state["step"] == 2
    merged = json.loads(json.dumps(merge_states([loader.state_dict() for loader in loaders])))
    rest = {0: set(), 1: set()}  # type: dict[int, set[Any]]
    for loader in loaders:
        for number in range(2):
            rest[number] |= {(pack.lane, pack.number, pack.samples) for pack in next(loader).plan.packs}
        loader.close()
    with make_loader(good, quarantine=quarantine) as alone:
        alone.load_state_dict(merged)
        for number in range(2):
            batch = next(alone)
            assert {(pack.lane, pack.number, pack.samples) for pack in batch.plan.packs} == rest[number]
    with make_loader(good, quarantine=quarantine, topology=two, rank=1) as other:
        other.load_state_dict(merged)
        assert set(other.state_dict()["lanes"]) == {"1", "3"}
    assert set(merged["lanes"]) == {"0", "1", "2", "3"}


def test_after_the_last_sample_batches_are_empty_and_say_so(good: Data, quarantine: Path) -> None:
    with make_loader(good, quarantine=quarantine, epochs=1) as loader:
        seen: list[Any] = []
        for batch in loader:
            seen.extend(span.id for item in batch.microbatches for span in item.spans)
            if batch.exhausted:
                break
        assert len(seen) == len(set(seen)) == 18
        after = next(loader)
        assert after.exhausted
        assert after.microbatches
        for microbatch in after.microbatches:
            assert microbatch.tokens.tolist() == [ByteTokenizer.special.eos]
            assert [len(item.values) for item in microbatch.inputs.values()] == [0, 0]


def test_close_leaves_no_thread_and_no_process_at_any_moment(good: Data, quarantine: Path) -> None:
    before = set(threading.enumerate())
    for num_batches in (0, 2):
        loader = make_loader(good, quarantine=quarantine, num_workers=2, prefetch_steps=3)
        for _ in range(num_batches):
            next(loader)
        loader.close()
        loader.close()
        assert set(threading.enumerate()) <= before
        assert not decode_workers()
    blocked = make_loader(good, quarantine=quarantine, prefetch_steps=3, prefetch_bytes=1)
    next(blocked)
    blocked.close()
    assert set(threading.enumerate()) <= before
