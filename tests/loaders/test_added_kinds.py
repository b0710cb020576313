"""A kind of media from a file, from members of a shard to tokens and units: all but the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loaders.decode.segment import DecodeRequest, DecodeSettings, decode_segment
from loaders.decode.text import ByteTokenizer, load_tokenizer, with_markers
from loaders.index import build_index, index_shards
from loaders.positions import sample_positions
from loaders.source import Source, open_source
from loaders.source_config import SourceConfig
from loaders.workers import Failure, InlineDecoder, WorkerPool
from omni_pipeline.core.encoder_file import load_encoder
from omni_pipeline.core.errors import ConfigError, SampleError
from omni_pipeline.core.media import KINDS, MediaEncoder
from omni_pipeline.core.sample import Modality, Sample
from omni_pipeline.core.sizes import ModelSizes
from tests.loaders.decode.test_text import SPECIALS, write_tokenizer
from tests.support.depth import ENCODER_FILE, changed_file, depth_map, depth_members, kinds_restored
from tests.support.shards import write_tar

MARKERS = ["<|depth_start|>", "<|depth_pad|>", "<|depth_end|>"]


@pytest.fixture(autouse=True)
def _own_kinds() -> Iterator[None]:
    with kinds_restored():
        yield


@pytest.fixture
def encoder() -> MediaEncoder:
    return load_encoder(ENCODER_FILE)


def open_depth(shard: Path) -> Source:
    layout = {"fields": ["depth.png", "txt"]}
    config = SourceConfig.model_validate({"name": "s", "shards": str(shard), "layout": layout})
    return open_source(config, ModelSizes(), ByteTokenizer())


def write_shard(folder: Path, members: dict[str, bytes]) -> Path:
    return write_tar(folder / "s.tar", members)


def indexed(folder: Path, members: dict[str, bytes]) -> Source:
    shard = write_shard(folder, members)
    build_index(str(shard), tokenizer=ByteTokenizer())
    return open_depth(shard)


def request_of(sample: Sample, *, units: tuple[int, int] | None = None) -> DecodeRequest:
    depth = sample.segments[0]
    return DecodeRequest(
        sample.shard, depth.offset, depth.length, depth.modality, depth.member, depth.grid, "s", units
    )


def test_samples_have_the_sizes_that_the_file_says(tmp_path: Path, encoder: MediaEncoder) -> None:
    members = {"a.depth.png": depth_map(32, 70, millimetres=900), "a.txt": b"wall"}
    sample = indexed(tmp_path, members).sample(0)
    depth = sample.segments[0]
    assert depth.modality is encoder.kind.modality
    assert (depth.grid, depth.num_rows, depth.num_tokens) == ((1, 2, 4), 8, 10)
    assert (sample.num_tokens, sample.num_labels) == (15, 5)
    # Like text and sound: every row the next position, on the three axes alike.
    assert sample_positions(sample, merge=2).tolist() == [list(range(15))] * 3


def test_pack_budgets_of_patches_and_sound_do_not_count_its_units(
    tmp_path: Path, encoder: MediaEncoder
) -> None:
    sizes = indexed(tmp_path, depth_members(3)).sizes(np.arange(3))
    assert sizes.patches.tolist() == sizes.mel_frames.tolist() == [0, 0, 0]


def test_a_member_that_the_file_refuses_is_a_bad_one(tmp_path: Path, encoder: MediaEncoder) -> None:
    members = {"a.depth.png": depth_map(8, 40, millimetres=1), "a.txt": b"a", **depth_members(2)}
    report = build_index(str(write_shard(tmp_path, members)), tokenizer=ByteTokenizer())
    assert report.bad == (("a.depth.png", "depth map of 40 x 8 pixels"),)


def test_a_decode_worker_gives_the_units_that_were_planned(tmp_path: Path, encoder: MediaEncoder) -> None:
    source = indexed(tmp_path, depth_members(7))
    settings = DecodeSettings(encoder_files=KINDS.files)
    sample = source.sample(6)
    rows = sample.segments[0].num_rows
    with WorkerPool(1, settings=settings, deadline_s=30) as pool:
        found = pool.submit(request_of(sample)).result(timeout=60)
        share = pool.submit(request_of(sample, units=(1, rows - 1))).result(timeout=60)
    assert found.failure is None, found.failure
    assert found.array is not None
    assert (found.array.dtype, found.array.shape) == (np.float32, (rows, 256))
    assert np.array_equal(share.array, found.array[1:-1])  # type: ignore[arg-type]
    assert 0.5 <= found.array.min() < found.array.max() <= 5.05
    assert np.array_equal(decode_segment(request_of(sample), settings), found.array)


def test_a_decode_of_another_size_than_planned_is_a_failed_sample(tmp_path: Path) -> None:
    wrong = changed_file(tmp_path, ("PATCH * PATCH)\n\n\ndef build", "PATCH * PATCH)[1:]\n\n\ndef build"))
    load_encoder(wrong)
    sample = indexed(tmp_path, depth_members(8)).sample(7)
    rows = sample.segments[0].num_rows
    what = f"depth decodes to float32 ({rows - 1}, 256), planned is float32 ({rows}, 256)"
    settings = DecodeSettings(encoder_files=KINDS.files)
    with pytest.raises(SampleError) as caught:
        decode_segment(request_of(sample, units=(0, 1)), settings)
    assert caught.value.what == what
    found = InlineDecoder(settings).submit(request_of(sample)).result()
    assert found.failure == Failure("decode", what)


def test_an_index_made_without_the_file_is_told_and_made_again(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, depth_members(4))
    build_index(str(shard), tokenizer=ByteTokenizer())
    assert open_depth(shard).sample(0).segments[0].modality is Modality.IMAGE
    load_encoder(ENCODER_FILE)
    with pytest.raises(ConfigError) as caught:
        open_depth(shard)
    assert caught.value.what == "members 'depth.png' are indexed as image, and this run reads them as depth"
    assert caught.value.fix == f"run `omni data index --encoder {ENCODER_FILE} SHARDS`"
    assert not build_index(str(shard), tokenizer=ByteTokenizer()).is_unchanged
    assert build_index(str(shard), tokenizer=ByteTokenizer()).is_unchanged
    assert open_depth(shard).sample(0).segments[0].modality is Modality("depth")


def test_an_index_made_with_a_file_is_told_where_the_run_names_none(tmp_path: Path) -> None:
    with kinds_restored():
        load_encoder(ENCODER_FILE)
        shard = write_shard(tmp_path, depth_members(4))
        build_index(str(shard), tokenizer=ByteTokenizer())
    with pytest.raises(ConfigError) as caught:
        open_depth(shard)
    assert caught.value.what == "members 'depth.png' are indexed as depth, and this run reads them as image"
    assert caught.value.fix == "name its file in encoders.depth.file"
    # Nor does indexing without the file undo it.
    assert build_index(str(shard), tokenizer=ByteTokenizer()).is_unchanged


def test_index_workers_know_the_kind(tmp_path: Path, encoder: MediaEncoder) -> None:
    shards = [str(write_tar(tmp_path / f"{name}.tar", depth_members(2))) for name in "ab"]
    reports = index_shards(shards, num_workers=2)
    assert [(report.error, report.bad) for report in reports] == [("", ()), ("", ())]
    assert open_depth(Path(shards[1])).sample(0).segments[0].modality is encoder.kind.modality


def test_a_condition_can_ask_for_its_tokens_and_modality(tmp_path: Path, encoder: MediaEncoder) -> None:
    shard = write_shard(tmp_path, depth_members(10))
    build_index(str(shard), tokenizer=ByteTokenizer())
    layout = {"fields": ["depth.png", "txt"]}
    where = 'member["depth.png"].modality == "depth" and member["depth.png"].num_tokens >= 6'
    content = {"name": "s", "shards": str(shard), "layout": layout, "where": where}
    source = open_source(SourceConfig.model_validate(content), ModelSizes(), ByteTokenizer())
    rows = [source.sample(row).segments[0].num_rows for row in range(10)]
    expected = [0 if num >= 4 else 1 for num in rows]
    assert source.sizes(np.arange(10)).status.tolist() == expected
    assert 0 < sum(expected) < 10


def test_markers_are_the_ids_behind_the_bytes(tmp_path: Path, encoder: MediaEncoder) -> None:
    with_name = changed_file(tmp_path, ('name="depth"', 'name="range"'), ("depth.png", "range.png"))
    other = load_encoder(with_name)
    special = with_markers(ByteTokenizer(), [encoder.kind, other.kind])
    assert special.around(Modality("depth")) == (264, 265, 266)
    assert special.around(Modality("range")) == (267, 268, 269)
    assert special.around(Modality.VIDEO) == (257, 260, 258)
    assert special.around(Modality.AUDIO) == (261, 263, 262)


def test_markers_of_a_tokenizer_file_have_names(tmp_path: Path, encoder: MediaEncoder) -> None:
    named = load_tokenizer(write_tokenizer(tmp_path / "named.json", specials=[*SPECIALS, *MARKERS]))
    special = with_markers(named, [encoder.kind])
    last = named.vocab_size
    assert special.around(Modality("depth")) == (last - 3, last - 2, last - 1)
    for number, options in enumerate(({}, {"specials": [*SPECIALS, *MARKERS], "special": False})):
        lacking = load_tokenizer(write_tokenizer(tmp_path / f"{number}.json", **options))  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as caught:
            with_markers(lacking, [encoder.kind])
        assert caught.value.what == (
            "tokenizer has no special token '<|depth_start|>', which an encoder's file names"
        )
