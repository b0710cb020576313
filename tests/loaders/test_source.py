"""loaders.source: indexes to sized samples; what cannot be trained on has its reason in place of a size."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from loaders.decode.text import ByteTokenizer
from loaders.fitting import UNUSABLE, USABLE, cut_text, sizes_of
from loaders.index import REPEATED, build_index, index_shards
from loaders.index_file import index_path
from loaders.source import Source, count_labels, open_source
from loaders.source_config import SourceConfig
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.sample import Modality, SampleId, Segment
from omni_pipeline.core.sizes import AudioSizes, ModelSizes
from tests.support.shards import audio_bytes, caption_members, image_bytes, video_bytes, write_tar

BYTES = ByteTokenizer()
SIZES = ModelSizes()
Members = dict[str, bytes] | list[tuple[str, bytes]]


def config_of(shards: Any, fields: list[Any], **more: Any) -> SourceConfig:
    """Return the configuration of a source named "s"."""
    layout = {"kind": "fields", "fields": fields}
    return SourceConfig.model_validate({"name": "s", "shards": shards, "layout": layout, **more})


def opened(folder: Path, shards: list[Members], fields: list[Any]) -> Source:
    """Return a source over ``shards``, written and indexed."""
    paths = [str(write_tar(folder / f"{place}.tar", members)) for place, members in enumerate(shards)]
    index_shards(paths)
    return open_source(config_of(paths, fields), SIZES, BYTES)


def problems_of(source: Source) -> dict[str, str]:
    """Return why rows are unusable, by key; statuses and reasons must agree."""
    statuses = source.sizes(np.arange(len(source))).status.tolist()
    problems = [source.problem(ordinal) for ordinal in range(len(source))]
    assert [status == UNUSABLE for status in statuses] == [problem != "" for problem in problems]
    assert set(statuses) <= {USABLE, UNUSABLE}
    return {source.identify(ordinal)[1]: problem for ordinal, problem in enumerate(problems) if problem}


def test_a_sample_has_its_segments_in_layout_order_with_their_sizes(tmp_path: Path) -> None:
    members = {"k/1.txt": b"four", "k/1.jpg": image_bytes(84, 56), "k/1.question.txt": b"ab"}
    source = opened(tmp_path, [members], [{"member": "question.txt", "loss": False}, "jpg|png", "txt"])
    sample = source.sample(0)
    data = (tmp_path / "0.tar").read_bytes()
    assert (sample.id, sample.key, sample.shard) == (SampleId("s", 0, 0), "k/1", str(tmp_path / "0.tar"))
    assert [segment.member for segment in sample.segments] == ["k/1.question.txt", "k/1.jpg", "k/1.txt"]
    for segment in sample.segments:
        assert data[segment.offset : segment.offset + segment.length] == members[segment.member]
    question, image, text = sample.segments
    assert (question.grid, question.num_tokens, question.num_rows, question.loss) == ((2, 1, 1), 2, 0, False)
    assert (image.grid, image.num_rows, image.num_tokens, image.loss) == ((1, 4, 6), 6, 8, False)
    assert (text.grid, text.num_tokens, text.loss) == ((4, 1, 1), 4, True)
    assert (sample.num_tokens, sample.num_labels) == (2 + 8 + 4 + 1, 4 + 1)


def test_video_and_audio_are_sized_too(tmp_path: Path) -> None:
    members = {"a.mp4": video_bytes(8, width=56, height=56, fps=2), "a.wav": audio_bytes(1.0)}
    video, audio = opened(tmp_path, [members], ["mp4", "wav"]).sample(0).segments
    assert (video.grid, video.num_rows, video.num_tokens) == ((4, 24, 24), 576, 578)
    assert (audio.grid, audio.num_rows, audio.num_tokens) == ((100, 1, 1), 25, 27)


SOUND = {"member": "mp4", "sound": True}


def test_a_clip_brings_its_own_sound_where_the_layout_says_so(tmp_path: Path) -> None:
    clip = video_bytes(8, width=56, height=56, fps=2, sound_s=4.0)  # and the lead-in of AAC
    members = {
        "loud.mp4": clip,
        "loud.wav": audio_bytes(1.0),
        "mute.mp4": video_bytes(8, width=56, height=56, fps=2),
        "mute.wav": audio_bytes(1.0),
    }
    source = opened(tmp_path, [members], [SOUND, "wav"])
    loud, mute = source.sample(0), source.sample(1)
    video, track, audio = loud.segments
    assert (video.modality, video.patch_s, video.is_track) == (Modality.VIDEO, 1.0, False)
    assert (track.modality, track.is_track, track.grid) == (Modality.AUDIO, True, (403, 1, 1))
    assert (track.num_rows, track.num_tokens) == (101, 103)
    assert (track.member, track.offset, track.length) == (video.member, video.offset, len(clip))
    assert (audio.member, audio.is_track) == ("loud.wav", False)
    assert [segment.is_track for segment in mute.segments] == [False, False]
    assert (loud.num_tokens, mute.num_tokens) == (video.num_tokens + 103 + 27 + 1, video.num_tokens + 27 + 1)
    sizes, plain = source.sizes(np.arange(2)), sizes_of([loud, mute])
    assert sizes.tokens.tolist() == plain.tokens.tolist()
    assert sizes.mel_frames.tolist() == plain.mel_frames.tolist() == [503, 100]
    assert sizes.patches.tolist() == plain.patches.tolist() == [video.num_units] * 2
    assert problems_of(source) == {}


def test_without_it_the_sound_of_a_clip_is_left_out(tmp_path: Path) -> None:
    members = {"a.mp4": video_bytes(8, fps=2, sound_s=4.0)}
    assert [segment.modality for segment in opened(tmp_path, [members], ["mp4"]).sample(0).segments] == [
        "video"
    ]


def test_a_sound_longer_than_recordings_may_be_is_unusable_with_its_clip(tmp_path: Path) -> None:
    members = {"a.mp4": video_bytes(4, fps=2, sound_s=2.5), "b.mp4": video_bytes(4, fps=2, sound_s=1.5)}
    path = str(write_tar(tmp_path / "s.tar", members))
    index_shards([path])
    sizes = SIZES.model_copy(update={"audio": AudioSizes(max_duration_s=2.0)})
    source = open_source(config_of(path, [SOUND]), sizes, BYTES)
    assert problems_of(source) == {"a": "sound of the clip: recording lasts 2.5 s, limit 2.0 s"}
    assert open_source(config_of(path, ["mp4"]), sizes, BYTES).sample(0).num_tokens > 0


def test_other_members_of_a_field_with_sound_stay_as_they_are(tmp_path: Path) -> None:
    members = {
        "a.jpg": image_bytes(56, 56),
        "b.mp4": video_bytes(4, fps=2, sound_s=1.0),
        "c.txt": b"x",
        "d.wav": audio_bytes(1.0),
    }
    source = opened(tmp_path, [members], [{"member": "jpg|mp4|wav", "sound": True}])
    assert [segment.modality for segment in source.sample(0).segments] == ["image"]
    assert [segment.modality for segment in source.sample(1).segments] == ["video", "audio"]
    assert [segment.modality for segment in source.sample(3).segments] == ["audio"]
    assert problems_of(source) == {"c": "no member 'jpg|mp4|wav'"}


def test_conditions_see_the_clip_and_the_sums_of_both(tmp_path: Path) -> None:
    members = {f"{n}.mp4": video_bytes(4, fps=2, sound_s=float(n)) for n in (1, 2)}
    path = str(write_tar(tmp_path / "s.tar", members))
    index_shards([path])
    for condition, kept in {
        "mel_frames > 150": ["2"],
        "duration < 5": ["1", "2"],
        "mp4.modality == 'video'": ["1", "2"],
        "num_tokens - mp4.num_tokens > 40": ["2"],
    }.items():
        source = open_source(config_of(path, [SOUND], where=condition), SIZES, BYTES)
        status = source.sizes(np.arange(2)).status
        assert [key for key, found in zip("12", status, strict=True) if found == USABLE] == kept, condition


def test_only_clips_have_a_sound_of_their_own() -> None:
    with pytest.raises(ValidationError, match=r"only a clip has a sound of its own, and 'jpg\|txt' is none"):
        config_of("s.tar", [{"member": "jpg|txt", "sound": True}])


def test_ordinals_run_over_the_rows_of_all_shards_usable_or_not(tmp_path: Path) -> None:
    shards: list[Members] = [caption_members(3), {}, caption_members(4)]
    assert isinstance(shards[2], dict)
    del shards[2]["000001.txt"]
    source = opened(tmp_path, shards, ["jpg", "txt"])
    assert source.shard_sizes == (3, 0, 4)
    assert len(source) == 7
    places = [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2), (2, 3)]
    assert [source.identify(n) for n in range(7)] == [
        (SampleId("s", shard, row), f"{row:06d}", str(tmp_path / f"{shard}.tar")) for shard, row in places
    ]
    assert [source.problem(n) for n in range(7)] == ["", "", "", "", "no member 'txt'", "", ""]
    assert source.sizes(np.array([4, 0])).status.tolist() == [UNUSABLE, USABLE]
    for n in (0, 1, 2, 3, 5, 6):
        sample = source.sample(n)
        assert (sample.id, sample.key, sample.shard) == source.identify(n)
    with pytest.raises(ValueError, match="row 4 of source 's' is unusable: no member 'txt'"):
        source.sample(4)
    for ordinal in (-1, 7):
        for ask in (source.sample, source.identify, source.problem, lambda n: source.sizes(np.array([0, n]))):
            with pytest.raises(IndexError):
                ask(ordinal)


def test_whatever_cannot_be_trained_on_is_unusable_with_its_reason(tmp_path: Path) -> None:
    members = [
        ("good.png", image_bytes(kind="PNG")),
        ("good.txt", b"fine"),
        ("thin.png", image_bytes(2, 500, kind="PNG")),
        ("thin.txt", b"x"),
        ("broken.png", b"no picture"),
        ("broken.txt", b"x"),
        ("twice.png", image_bytes(kind="PNG")),
        ("twice.txt", b"x"),
        ("twice.txt", b"y"),
        ("README", b"x"),
    ]
    source = opened(tmp_path, [members], ["png", "txt"])
    reasons = problems_of(source)
    assert source.sample(0).key == "good"
    assert len(source) == 5
    assert reasons == {
        "thin": "aspect ratio of 2 x 500 pixels is above 200",
        "broken": reasons["broken"],
        "twice": f"member 'txt': {REPEATED}",
        "README": "no member 'png'",
    }
    assert reasons["broken"].startswith("member 'png': picture cannot be decoded")


def test_alternatives_are_taken_in_their_order_whatever_the_case(tmp_path: Path) -> None:
    members = {
        "a.JPG": image_bytes(),
        "a.png": image_bytes(kind="PNG"),
        "b.png": image_bytes(kind="PNG"),
        "c.mp4": video_bytes(),
    }
    source = opened(tmp_path, [members], ["jpg|png|mp4"])
    assert [source.sample(n).segments[0].member for n in range(3)] == ["a.JPG", "b.png", "c.mp4"]
    assert source.sample(2).segments[0].modality is Modality.VIDEO


def test_a_damaged_shard_serves_what_is_before_the_damage(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", caption_members(4))
    path.write_bytes(path.read_bytes()[:-12_000])
    index_shards([str(path)])
    source = open_source(config_of(str(path), ["jpg", "txt"]), SIZES, BYTES)
    assert 0 < len(source) < 4
    assert "byte" in source.damaged[0][1]


def test_a_field_without_any_member_says_which_suffixes_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path, [caption_members(2)], ["jpeg", "txt"])
    assert str(caught.value) == (
        "no member 'jpeg' in any sample; the shards hold: jpg (2), txt (2)\n"
        "  where: source 's'\n"
        "  fix:   name one of these in sources.layout.fields"
    )


def test_missing_files_and_indexes_are_setting_errors(tmp_path: Path) -> None:
    path = str(tmp_path / "0.tar")
    with pytest.raises(ConfigError, match="there is no such file"):
        open_source(config_of(path, ["txt"]), SIZES, BYTES)
    with pytest.raises(ConfigError, match="is a folder, not a shard") as folder:
        open_source(config_of(str(tmp_path), ["txt"]), SIZES, BYTES)
    assert folder.value.where == "source 's'"
    with pytest.raises(ConfigError, match="no shard matches"):
        open_source(config_of(str(tmp_path / "*.tar"), ["txt"]), SIZES, BYTES)
    write_tar(Path(path), {"a.txt": b"a"})
    with pytest.raises(ConfigError) as caught:
        open_source(config_of(path, ["txt"]), SIZES, BYTES)
    assert str(caught.value) == (
        f"shard has no index\n  where: source 's', {path}\n  fix:   run `omni data index {path}`"
    )


def test_an_empty_source_is_a_setting_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path, [{}], ["txt"])
    assert str(caught.value) == (
        "the source is empty: 0 samples in 1 shards\n"
        "  where: source 's'\n"
        f"  fix:   `omni data check {tmp_path / '0.tar'}` lists what is in it; or take the source out"
    )


def test_unusable_rows_of_a_small_source_are_counted_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    members = {"a.jpg": image_bytes(), "b.txt": b"x", "c.txt": b"x"}
    opened(tmp_path, [members], ["jpg", "txt"])
    assert caplog.messages == [
        "source s: 3 of 3 samples are unusable: 2 x no member 'jpg'; 1 x no member 'txt'"
    ]


def test_bad_members_of_a_large_source_are_counted_from_its_summaries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loaders.source.COUNTED_ROWS", 1)
    opened(tmp_path, [{"a.txt": b"\xff", "b.txt": b"x"}], ["txt"])
    assert caplog.messages == ["source s: 1 members of its shards are bad"]


def test_counts_of_another_tokenizer_are_not_used(tmp_path: Path) -> None:
    class Other(ByteTokenizer):
        """A tokenizer that no index knows."""

        fingerprint = "other"

    path = write_tar(tmp_path / "0.tar", {"a.txt": b"a"})
    build_index(str(path), tokenizer=BYTES)
    with pytest.raises(ConfigError, match="no token counts of this run's tokenizer") as caught:
        open_source(config_of(str(path), ["txt"]), SIZES, Other())
    assert "omni data index" in caught.value.fix
    assert "--tokenizer" in caught.value.fix


def test_the_fingerprint_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    prints = []
    for folder, members, fields in (
        ("a", caption_members(3), ["jpg", "txt"]),
        ("b", caption_members(3), ["jpg", "txt"]),
        ("c", caption_members(4), ["jpg", "txt"]),
        ("d", caption_members(3), ["txt", "jpg"]),
    ):
        (tmp_path / folder).mkdir()
        prints.append(opened(tmp_path / folder, [members], fields).fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_the_fingerprint_sees_rows_sizes_counts_and_keys_but_not_where_bytes_lie(tmp_path: Path) -> None:
    def print_of(folder: str, members: list[tuple[str, bytes]]) -> str:
        (tmp_path / folder).mkdir()
        return opened(tmp_path / folder, [members], ["png", "txt"]).fingerprint

    def pair(key: str, *, side: int = 56, text: bytes = b"four") -> list[tuple[str, bytes]]:
        return [(f"{key}.png", image_bytes(side, 168 - side, kind="PNG")), (f"{key}.txt", text)]

    no_picture = [("x.txt", b"x")]
    prints = [
        print_of("plain", pair("a") + pair("b")),
        print_of("grid", pair("a") + pair("b", side=112)),
        print_of("tokens", pair("a") + pair("b", text=b"more than four")),
        print_of("key", pair("a") + pair("c")),
        print_of("row", pair("a") + no_picture + pair("b")),
    ]
    assert len(set(prints)) == len(prints)
    moved = [("a.other", b"x" * 3000), *pair("a"), *pair("b", text=b"else")]
    assert print_of("moved", moved) == prints[0]


def test_the_fingerprint_sees_the_counts_of_its_tokenizer(tmp_path: Path) -> None:
    class Words(ByteTokenizer):
        """Counts words."""

        fingerprint = "words"

        def encode(self, text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
            return np.arange(len(text.split()), dtype=np.int32)

    prints: dict[str, list[str]] = {"bytes": [], "words": []}
    for number, text in enumerate((b"one two", b"one-two")):
        (tmp_path / str(number)).mkdir()
        path = str(write_tar(tmp_path / str(number) / "0.tar", {"a.txt": text}))
        for name, tokenizer in (("bytes", BYTES), ("words", Words())):
            build_index(path, tokenizer=tokenizer)
            prints[name].append(open_source(config_of(path, ["txt"]), SIZES, tokenizer).fingerprint)
    assert prints["bytes"][0] == prints["bytes"][1]
    assert len({*prints["bytes"], *prints["words"]}) == 3


def test_has_labels_wants_text_with_loss(tmp_path: Path) -> None:
    members = {"a.jpg": image_bytes(), "a.txt": b"x", "a.question.txt": b"?"}
    untrained = {"member": "txt", "loss": False}
    cases: list[tuple[list[Any], bool]] = [
        (["jpg", "txt"], True),
        (["jpg", untrained], False),
        (["jpg"], False),
        ([untrained, "jpg"], False),
        ([untrained, "question.txt"], True),
        (["jpg|txt"], False),
        (["mp4|txt"], True),
    ]
    for number, (fields, expected) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        source = opened(tmp_path / str(number), [members], fields)
        assert source.has_labels == expected, fields
        assert bool(source.sample(0).num_labels) == expected, fields


def test_pack_sizes_are_those_of_the_samples(tmp_path: Path) -> None:
    members = {
        "a.question.txt": b"ab",
        "a.jpg": image_bytes(84, 56),
        "a.wav": audio_bytes(1.0),
        "a.txt": b"four",
        "b.question.txt": b"",
        "b.jpg": image_bytes(112, 56),
        "b.wav": audio_bytes(2.0),
        "b.txt": b"",
    }
    for number, fields in enumerate(
        (["question.txt", "jpg", "wav", "txt"], ["txt", "wav", "jpg"], ["wav|jpg"], ["txt"])
    ):
        (tmp_path / str(number)).mkdir()
        source = opened(tmp_path / str(number), [members], fields)
        sizes = source.sizes(np.arange(2))
        samples = [source.sample(ordinal) for ordinal in range(2)]
        plain = sizes_of(samples)
        for name in ("tokens", "cut_tokens", "patches", "mel_frames", "status"):
            assert getattr(sizes, name).tolist() == getattr(plain, name).tolist(), name
        for sample, least in zip(samples, sizes.cut_tokens.tolist(), strict=True):
            assert cut_text(sample, max_tokens=least).num_tokens == least
            with pytest.raises(ValueError, match="cannot be cut"):
                cut_text(sample, max_tokens=least - 1)


def test_unknown_kinds_of_member_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="'xyz' is no known kind of member; known endings: txt, jpg"):
        config_of("s.tar", ["jpg|xyz"])
    with pytest.raises(ValidationError):
        config_of("s.tar", [])
    assert config_of("s.tar", ["txt"], weight=[[0, 0.5], [10, 1]]).weight == ((0, 0.5), (10, 1.0))


@given(st.lists(st.tuples(st.sampled_from(["loss", "text", "media"]), st.integers(0, 4)), max_size=5))
def test_labels_are_counted_as_a_walk_over_the_positions_counts_them(parts: list[tuple[str, int]]) -> None:
    segments = []
    trained: list[bool] = []
    for kind, amount in parts:
        count = amount + 2 if kind == "media" else amount
        modality = Modality.IMAGE if kind == "media" else Modality.TEXT
        segments.append(Segment(modality, "m", 0, 0, (count, 1, 1), 0, count, loss=kind == "loss"))
        trained += [kind == "loss"] * count
    trained.append(any(kind == "loss" for kind, _ in parts))
    assert count_labels(segments) == sum(trained[1:])


def test_opening_and_reading_many_samples_is_fast(tmp_path: Path) -> None:
    members = [(f"{n:06d}.txt", b"x" * (n % 9)) for n in range(5000)]
    start = time.perf_counter()
    source = opened(tmp_path, [members], ["txt"])
    Path(index_path(str(tmp_path / "0.tar"))).unlink()
    (tmp_path / "0.tar").unlink()
    begin = time.perf_counter()
    total = sum(source.sample(n).num_tokens for n in range(len(source)))
    assert total == sum(n % 9 for n in range(5000)) + 5000
    # Some microseconds each; the bound only catches a file that is opened per sample.
    assert time.perf_counter() - begin < 2.0
    assert begin - start < 20.0
