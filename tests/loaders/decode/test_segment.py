"""loaders.decode.segment: what a decode worker does, end to end and free of torch."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loaders.decode.segment import DecodeRequest, DecodeSettings, decode_segment
from loaders.decode.text import ByteTokenizer
from loaders.index import build_index
from loaders.source import open_source
from loaders.source_config import SourceConfig
from omni_pipeline.core.errors import SampleError, ShardError
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.sizes import ModelSizes
from tests.support.shards import caption_members, clip_members, talk_members, write_tar

SETTINGS = DecodeSettings()


def requests_of(path: Path, suffix: str, members: dict[str, bytes]) -> list[DecodeRequest]:
    """Return a request for every segment of a shard written from ``members``."""
    write_tar(path, members)
    build_index(str(path), tokenizer=ByteTokenizer())
    config = SourceConfig.model_validate(
        {"name": "s", "shards": str(path), "layout": {"fields": [suffix, "txt"]}}
    )
    source = open_source(config, ModelSizes(), ByteTokenizer())
    return [
        DecodeRequest(
            url=sample.shard,
            offset=segment.offset,
            length=segment.length,
            modality=segment.modality,
            member=segment.member,
            grid=segment.grid,
            where=f"source 's', {segment.member}",
        )
        for sample in map(source.sample, range(len(source)))
        for segment in sample.segments
    ]


@pytest.mark.parametrize(
    ("suffix", "members"), [("jpg", caption_members(4)), ("wav", talk_members(4)), ("mp4", clip_members(3))]
)
def test_every_segment_has_exactly_the_planned_size(
    tmp_path: Path, suffix: str, members: dict[str, bytes]
) -> None:
    for request in requests_of(tmp_path / "s.tar", suffix, members):
        array = decode_segment(pickle.loads(pickle.dumps(request)), SETTINGS)
        units = request.grid[0] * request.grid[1] * request.grid[2]
        if request.modality is Modality.TEXT:
            assert bytes(array.astype(np.uint8)) == members[request.member]
        elif request.modality is Modality.AUDIO:
            assert array.shape == (units, 128)
            assert array.dtype == np.float32
        else:
            assert array.shape == (units, 3 * 2 * 14 * 14)
            assert array.dtype == np.uint8


def test_text_is_cut_at_the_planned_tokens_and_never_stretched(tmp_path: Path) -> None:
    path = tmp_path / "s.txt"
    path.write_bytes(b"hello")
    for planned in (5, 3):
        request = DecodeRequest(str(path), 0, 5, Modality.TEXT, "s.txt", (planned, 1, 1), "here")
        assert len(decode_segment(request, SETTINGS)) == planned
    request = DecodeRequest(str(path), 0, 5, Modality.TEXT, "s.txt", (6, 1, 1), "here")
    with pytest.raises(SampleError) as caught:
        decode_segment(request, SETTINGS)
    assert str(caught.value) == (
        "text has 5 tokens, the index says at least 6\n"
        "  where: here, byte 0\n"
        "  fix:   run `omni data index` again: the shard or the tokenizer has changed"
    )


def test_errors_say_where(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    path.write_bytes(b"0123456789")
    request = DecodeRequest(str(path), 2, 4, Modality.IMAGE, "a.jpg", (1, 4, 4), "source 's', a.jpg")
    with pytest.raises(SampleError) as caught:
        decode_segment(request, SETTINGS)
    assert caught.value.where == "source 's', a.jpg, byte 2"
    with pytest.raises(ShardError, match="ends 2 bytes early"):
        decode_segment(DecodeRequest(str(path), 8, 4, Modality.IMAGE, "a.jpg", (1, 4, 4), "x"), SETTINGS)


def test_importing_the_decoders_loads_no_heavy_library() -> None:
    heavy = ("torch", "av", "decord", "soundfile", "soxr", "fsspec", "pyarrow", "tokenizers", "webdataset")
    code = f"import sys, loaders.decode.segment; print([m for m in {heavy!r} if m in sys.modules])"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=root
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("suffix", "members"), [("jpg", caption_members(1)), ("wav", talk_members(1)), ("mp4", clip_members(1))]
)
def test_a_share_is_those_units_of_the_whole_and_keeps_nothing_else(
    tmp_path: Path, suffix: str, members: dict[str, bytes]
) -> None:
    for request in requests_of(tmp_path / "s.tar", suffix, members):
        if request.modality is not Modality.TEXT:
            whole = decode_segment(request, SETTINGS)
            share = decode_segment(replace(request, units=(4, 12)), SETTINGS)
            np.testing.assert_array_equal(share, whole[4:12])
            assert share.base is None
