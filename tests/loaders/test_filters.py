"""loaders.filters: what is left out is never seen, all else exactly once, and a run keeps its filter."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.decode.text import ByteTokenizer
from loaders.filters import count_left_out
from loaders.fitting import DENIED, FILTERED, UNUSABLE, USABLE
from loaders.index import index_shards
from loaders.index_file import open_index
from loaders.source import Source, open_source
from loaders.source_config import SourceConfig
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.wire import training_stream
from omni_pipeline.core.config import load_config, validate
from omni_pipeline.core.errors import ConfigError, StateMismatchError
from omni_pipeline.core.sample import SampleId
from tests.support.loading import BROKEN_KEY, SIZES, Data, content, make_data, make_loader
from tests.support.runs import make_run
from tests.support.shards import audio_bytes, caption_members, image_bytes, video_bytes, write_tar

BYTES = ByteTokenizer()


def opened(shards: Any, fields: Sequence[str], *, name: str = "s", **settings: Any) -> Source:
    """Return the source over indexed shards."""
    layout = {"kind": "fields", "fields": list(fields)}
    config = {"name": name, "shards": shards, "layout": layout, **settings}
    return open_source(SourceConfig.model_validate(config), SIZES, BYTES)


def statuses(source: Source) -> list[int]:
    """Return the status of every row."""
    found: list[int] = source.sizes(np.arange(len(source))).status.tolist()
    return found


def keys_of(source: Source, status: int) -> list[str]:
    """Return the keys of the rows with this status."""
    return [source.identify(row)[1] for row, found in enumerate(statuses(source)) if found == status]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One shard with a picture, a clip, a recording and a text in each of some samples."""
    members: dict[str, bytes] = {}
    for number, (width, height) in enumerate([(56, 84), (84, 56), (28, 112), (112, 112)]):
        members[f"k{number}.jpg"] = image_bytes(width, height)
        members[f"k{number}.mp4"] = video_bytes(4 + 2 * number, width=56 + 28 * number, height=56)
        members[f"k{number}.wav"] = audio_bytes(0.5 + number / 4, rate=16_000 if number % 2 else 8_000)
        members[f"k{number}.txt"] = ("\u00e4" * (number + 1)).encode()
    path = str(write_tar(tmp_path_factory.mktemp("mixed") / "mixed-0.tar", members))
    index_shards([path])
    return path


def test_every_name_has_the_value_that_index_and_sizes_have(mixed: str) -> None:
    fields = ["jpg", "mp4", "wav", "txt"]
    source, index = opened(mixed, fields), open_index(mixed).batch(0)
    suffixes = index.suffixes.to_pylist()
    conditions = 0
    for row in range(4):
        sample = source.sample(row)
        values: dict[str, Any] = {
            "key": repr(sample.key),
            "num_tokens": sample.num_tokens,
            "patches": sum(s.num_units for s in sample.segments[:2]),
            "mel_frames": sample.segments[2].num_units,
        }
        for member in range(int(index.starts[row]), int(index.starts[row + 1])):
            ending = suffixes[member]
            segment = sample.segments[fields.index(ending)]
            raw = {name: column[member].item() for name, column in index.numbers.items()}
            names = {
                "jpg": ["height", "width"],
                "mp4": ["height", "width", "num_frames", "duration_s"],
                "wav": ["duration_s", "sample_rate", "num_samples"],
                "txt": ["num_chars"],
            }[ending]
            values.update({f"{ending}.{name}": raw[name] for name in names})
            values[f"{ending}.num_bytes"] = segment.length
            values[f"{ending}.num_tokens"] = segment.num_tokens
            values[f"{ending}.modality"] = repr(str(segment.modality))
            if "duration_s" in names:
                values[f"{ending}.duration"] = raw["duration_s"]
            if "height" in names:
                sides = sorted([raw["height"], raw["width"]])
                values[f"{ending}.aspect_ratio"] = sides[1] / sides[0]
                values[f"{ending}.patches"] = segment.num_units
            if ending == "wav":
                values[f"{ending}.mel_frames"] = segment.num_units
        for name, value in values.items():
            conditions += 1
            found = opened(mixed, fields, where=f"{name} == {value} and key == {sample.key!r}")
            assert keys_of(found, USABLE) == [sample.key], (name, value)
    assert conditions == 4 * 33


def test_a_filter_moves_no_row(mixed: str) -> None:
    source = opened(mixed, ["jpg", "txt"])
    some = opened(mixed, ["jpg", "txt"], where="height > 60 and aspect_ratio < 3")
    assert statuses(source) == [USABLE] * 4
    assert statuses(some) == [USABLE, FILTERED, FILTERED, USABLE]
    assert some.shard_sizes == source.shard_sizes
    assert some.fingerprint == source.fingerprint
    assert [some.sample(row) for row in (0, 3)] == [source.sample(row) for row in (0, 3)]


def test_denied_goes_before_unusable_and_unusable_before_where(tmp_path: Path) -> None:
    members = {f"{key}.jpg": image_bytes(56, 56) for key in "abcdg"}
    members |= {f"{key}.txt": b"x" for key in "abef"} | {"g.txt": b"longer"}
    path = str(write_tar(tmp_path / "0.tar", members))
    index_shards([path])
    (tmp_path / "keys.txt").write_text("a\n0.tar/c\ne\n")
    source = opened(path, ["jpg", "txt"], where="num_chars > 5", deny=[tmp_path / "keys.txt"])
    assert keys_of(source, DENIED) == ["a", "c", "e"]
    assert keys_of(source, UNUSABLE) == ["d", "f"]
    assert keys_of(source, FILTERED) == ["b"]
    assert keys_of(source, USABLE) == ["g"]


def test_what_is_left_out_is_counted_and_told(
    mixed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "keys.txt").write_text("k3")
    with caplog.at_level(logging.INFO):
        source = opened(mixed, ["jpg", "txt"], where="height > 60", deny=[tmp_path / "keys.txt"])
    assert count_left_out(source, max_rows=100) == Counter({"where": 1, "deny": 1})
    assert count_left_out(source, max_rows=2) == Counter({"where": 1})
    assert "source s: of 4 samples, 1 left out by `height > 60`, 1 by deny-lists" in caplog.text


def test_a_filter_that_leaves_nothing_is_a_setting_error(mixed: str, tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("k3\nk2")
    with pytest.raises(ConfigError) as caught:
        opened(mixed, ["jpg", "txt"], where="num_chars > 2 and (width > 1000)", deny=[tmp_path / "keys.txt"])
    assert str(caught.value) == (
        "no sample is left: of 4, 2 left out by `num_chars > 2 and width > 1000`, 2 by deny-lists\n"
        "  where: source 's'\n"
        "  fix:   widen its `where` and deny-lists, or take the source out"
    )


def test_a_wrong_condition_is_told_with_its_setting(mixed: str) -> None:
    data = {"name": "s", "shards": mixed, "layout": {"fields": ["jpg", "txt"]}, "where": "hieght >= 64"}
    with pytest.raises(ConfigError) as caught:
        validate(SourceConfig, data, where="run.toml")
    assert caught.value.what == (
        "setting 'where': column 1: unknown name `hieght`; did you mean `height`? (conditions are made of "
        "names, numbers, 'texts', + - * / // %, < <= == != >= >, in [...], and, or, not, parentheses; for "
        "example `height >= 64 and duration < 30`), got 'hieght >= 64'"
    )


def seen(data: Data, *, quarantine: Path, **settings: Any) -> Counter[SampleId]:
    """Return how often each sample is in one epoch."""
    counts: Counter[SampleId] = Counter()
    with make_loader(data, quarantine=quarantine, epochs=1, **settings) as loader:
        for batch in loader:
            if batch.exhausted:
                return counts
            counts.update(sample.id for pack in batch.plan.packs for sample in pack.samples)
    raise AssertionError("a loader has no end")


def filtered(data: Data, **settings: Any) -> Data:
    """Return the sources of ``data`` opened again, "captions" with these settings."""
    captions = opened(list(data.sources[0].shards), ["jpg", "txt"], name="captions", **settings)
    return Data((captions, *data.sources[1:]), data.folder)


def rows_of(source: Source, status: int) -> set[SampleId]:
    """Return the rows with this status."""
    return {source.identify(row)[0] for row, found in enumerate(statuses(source)) if found == status}


def test_a_run_never_sees_a_filtered_sample_and_every_other_once_per_epoch(
    good: Data, quarantine: Path
) -> None:
    data = filtered(good, where="height > 60 or width == 84")
    captions, talks = data.sources
    assert len(rows_of(captions, FILTERED)) == 4
    wanted = rows_of(captions, USABLE) | rows_of(talks, USABLE)
    assert seen(data, quarantine=quarantine) == Counter(dict.fromkeys(wanted, 1))
    assert seen(good, quarantine=quarantine) == Counter(
        dict.fromkeys(wanted | rows_of(captions, FILTERED), 1)
    )
    assert not quarantine.exists()


def test_the_quarantine_of_a_run_is_the_deny_list_of_the_next(damaged: Data, tmp_path: Path) -> None:
    first, second = tmp_path / "1" / "quarantine.jsonl", tmp_path / "2" / "quarantine.jsonl"
    everything = seen(damaged, quarantine=first)
    assert [json.loads(line)["key"] for line in first.read_text().splitlines()] == [BROKEN_KEY]
    data = filtered(damaged, deny=[first])
    denied = rows_of(data.sources[0], DENIED)
    assert len(denied) == 1
    assert seen(data, quarantine=second) == everything - Counter(denied)
    assert not second.exists()


def test_a_filtered_run_resumes_exactly_anywhere(good: Data, quarantine: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("000003\ncaptions-0.tar/000006\n")
    data = filtered(good, where="width >= 60", deny=[tmp_path / "keys.txt"])
    with make_loader(data, quarantine=quarantine) as loader:
        batches = [next(loader) for _ in range(8)]
    for start in range(8):
        with make_loader(data, quarantine=quarantine) as loader:
            if start:
                loader.load_state_dict(json.loads(json.dumps(batches[start - 1].state)))
            assert [content(next(loader)) for _ in range(start, 8)] == [content(b) for b in batches[start:]]


FIX = "put its `{}` back, give the source another name to read it from its beginning, or start a new run.dir"


def refusal(saved: Data, present: Data, quarantine: Path) -> str:
    """Return why the state of one run does not fit the other; "" if it does."""
    with make_loader(saved, quarantine=quarantine) as loader:
        next(loader)
        state = json.loads(json.dumps(loader.state_dict()))
    with make_loader(present, quarantine=quarantine) as loader:
        before = loader.state_dict()
        try:
            loader.load_state_dict(state)
        except StateMismatchError as error:
            assert loader.state_dict() == before
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("before", "here", "what"),
    [
        ("height >= 60", "height >= 32", "was `height >= 60` when saved, is `height >= 32` here"),
        (None, "height >= 32", "was not set when saved, is `height >= 32` here"),
        ("height >= 60", None, "was `height >= 60` when saved, is not set here"),
        ("height >= 60", " (height>=60) ", ""),
    ],
)
def test_a_resume_with_another_condition_is_refused(
    good: Data, quarantine: Path, before: str | None, here: str | None, what: str
) -> None:
    message = f"the filter of source 'captions' {what}\n  where: loader state\n  fix:   {FIX.format('where')}"
    found = refusal(filtered(good, where=before), filtered(good, where=here), quarantine)
    assert found == (message if what else "")


def test_a_resume_with_another_deny_list_is_refused(good: Data, quarantine: Path, tmp_path: Path) -> None:
    for name, text in (("1", "000003"), ("same", "# moved\n000003\n"), ("2", "000003\n000004")):
        (tmp_path / name).write_text(text)
    one, same, two = (filtered(good, deny=[tmp_path / name]) for name in ("1", "same", "2"))
    digests = [data.sources[0].filter.deny.digest for data in (one, two)]
    assert refusal(one, same, quarantine) == ""
    assert refusal(one, two, quarantine) == (
        f"the deny-list of source 'captions' had 1 entry (digest {digests[0]}) when saved, has 2 entries "
        f"(digest {digests[1]}) here\n  where: loader state\n  fix:   {FIX.format('deny')}"
    )
    assert "had no entries when saved, has 1 entry (digest" in refusal(good, one, quarantine)


def test_sources_come_and_go_with_their_filters(good: Data, quarantine: Path) -> None:
    captions, talks = filtered(good, where="height >= 60").sources
    with make_loader(Data((talks,), good.folder), quarantine=quarantine, weights={"talks": 1}) as loader:
        next(loader)
        alone = loader.state_dict()
    with make_loader(Data((captions, talks), good.folder), quarantine=quarantine) as loader:
        loader.load_state_dict(alone)
        both = loader.state_dict()
    assert both["identity"]["filters"] == {"captions": {"where": "height >= 60"}}
    with make_loader(Data((talks,), good.folder), quarantine=quarantine, weights={"talks": 1}) as loader:
        loader.load_state_dict(both)


def test_a_state_with_a_damaged_filter_is_refused(good: Data, quarantine: Path) -> None:
    with make_loader(good, quarantine=quarantine) as loader:
        state = loader.state_dict()
    for broken in (5, {"captions": 5}):
        with (
            make_loader(good, quarantine=quarantine) as loader,
            pytest.raises(StateMismatchError, match="no readable identity"),
        ):
            loader.load_state_dict({**state, "identity": {**state["identity"], "filters": broken}})


def test_deny_lists_of_the_run_are_of_every_source_of_the_mixture(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    (tmp_path / "all.txt").write_text("000001\n")
    (tmp_path / "one.txt").write_text("000002\n")
    deny = [f'--deny=["{tmp_path}/all.txt"]', f'--sources.1.deny=["{tmp_path}/one.txt"]']
    stream = training_stream(load_config(RunConfig, path, deny), BYTES)
    assert [keys_of(source, DENIED) for source in stream.sources] == [
        ["000001"],
        ["000001", "000002"],
        ["000001"],
    ]
    assert stream.identity["filters"]["captions"] == stream.identity["filters"]["clips"]
    assert stream.identity["filters"]["talks"]["deny"]["entries"] == 2


def test_the_quarantine_that_a_run_writes_is_no_deny_list_of_it(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    own = tmp_path / "run" / ".." / "run" / "quarantine.jsonl"
    with pytest.raises(ConfigError) as caught:
        training_stream(load_config(RunConfig, path, [f'--deny=["{own}"]']), BYTES)
    assert str(caught.value) == (
        f"deny names this run's own quarantine, {own}, which grows while it runs\n"
        "  where: source 'captions'\n"
        "  fix:   copy that file and name the copy, and start a new run.dir"
    )


def test_a_picture_too_long_for_the_model_is_left_out_at_plan_time_and_recorded_unless_denied(
    tmp_path: Path,
) -> None:
    """Known fault: it stops training in mid-run (2U1/Qwen-VL-Series-Finetune#133)."""
    data = make_data(tmp_path / "data", broken=False, num_captions=5)
    members = {**caption_members(4), "long.jpg": image_bytes(2, 500), "long.txt": b"x"}
    shard = data.sources[0].shards[0]
    write_tar(Path(shard), members)
    index_shards([shard])
    data = filtered(data)
    recorded = tmp_path / "1" / "quarantine.jsonl"
    counts = seen(data, quarantine=recorded)
    assert {row.row for row in counts if row.source == "captions"} == {0, 1, 2, 3}
    records = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert [(item["key"], item["stage"], item["reason"]) for item in records] == [
        ("long", "plan", "aspect ratio of 2 x 500 pixels is above 200")
    ]
    (tmp_path / "keys.txt").write_text("long")
    quiet = tmp_path / "2" / "quarantine.jsonl"
    assert seen(filtered(data, deny=[tmp_path / "keys.txt"]), quarantine=quiet) == counts
    assert not quiet.exists()
