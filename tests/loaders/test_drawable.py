"""Sources of which nothing can be drawn are refused before the run starts, with the reason."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from loaders import drawable
from loaders.drawable import check_drawable
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.sample import Modality, Segment
from tests.support.orders import PartlyUsableSource, StatusSource, build, config
from tests.support.strategies import MemorySource, media_segment, text_segment, text_source


def test_a_source_of_which_all_rows_are_left_out_says_how_many_and_why() -> None:
    source = PartlyUsableSource("text", [4], [[text_segment(30)]])
    status = np.array([1, 1, 2, 3], dtype=np.int8)
    nothing = StatusSource(source.name, source.shard_sizes, source.segments, status=status)
    with pytest.raises(ConfigError) as caught:
        build(config(), [nothing])
    assert str(caught.value) == (
        "no sample can be drawn: of 4 rows 2 left out by `where`, 1 denied, 1 unusable "
        "(text-00000.tar, sample 0000-000003: row 3 is bad)\n"
        "  where: source 'text'\n"
        "  fix:   widen its `where` and deny-lists, mend its shards, or remove the source"
    )


@pytest.mark.parametrize("epochs", [None, 1])
@pytest.mark.parametrize(
    ("oversize", "parts", "reason"),
    [
        ("drop", [[text_segment(699)], [text_segment(499)]], "500 tokens, limit 400 (order.seq_len)"),
        (
            "cut",
            [[media_segment(Modality.IMAGE, (1, 24, 24)), text_segment(3)]],
            "576 patches, limit 500 (order.max_patches)",
        ),
        (
            "drop",
            [[media_segment(Modality.AUDIO, (1200, 1, 1)), text_segment(3)]],
            "1200 mel frames, limit 900 (order.max_mel_frames)",
        ),
        (
            "cut",
            [[text_segment(500), text_segment(9)]],
            "510 tokens, limit 400 (order.seq_len); no text at its end that could be cut",
        ),
    ],
)
def test_a_source_of_which_no_sample_fits_is_refused_before_the_run_starts(
    epochs: int | None, oversize: Literal["drop", "cut"], parts: list[list[Segment]], reason: str
) -> None:
    bad = MemorySource("bad", [2], parts)
    settings_ = config(oversize=oversize, epochs=epochs)
    with pytest.raises(ConfigError) as caught:
        build(settings_, [text_source("good", [9], [10]), bad])
    number = len(parts) - 1
    assert str(caught.value) == (
        f"none of 2 samples fits a pack; the smallest has {reason}\n"
        f"  where: source 'bad', bad-00000.tar, sample 0000-{number:06d}\n"
        "  fix:   raise the limit named above, or remove the source"
    )
    build(settings_, [text_source("good", [9], [10]), bad], weights={"good": 1, "bad": 0})


def test_one_sample_that_fits_all_budgets_at_once_is_enough_and_needed() -> None:
    many_patches = [media_segment(Modality.IMAGE, (1, 24, 24)), text_segment(3)]
    long = [text_segment(600)]
    with pytest.raises(ConfigError, match="none of 2 samples fits"):
        check_drawable([MemorySource("s", [2], [many_patches, long])], config(oversize="drop"))
    check_drawable([MemorySource("s", [2], [many_patches, long])], config(oversize="cut"))
    check_drawable([MemorySource("s", [3], [many_patches, long, [text_segment(399)]])], config())


def test_a_large_source_is_taken_to_be_good_after_the_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    status = np.array([1] * 8 + [0], dtype=np.int8)
    source = StatusSource("text", [9], [[text_segment(30)]], status=status)
    build(config(), [source])
    monkeypatch.setattr(drawable, "MOST_ROWS", 4)
    build(config(), [source])
    with pytest.raises(ConfigError, match="of 4 rows 4 left out"):
        build(config(), [StatusSource("text", [4], [[text_segment(30)]], status=status)])
