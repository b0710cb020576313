"""Fitting: what a pack can hold, in whole arrays, says the same as a look at each sample; cutting text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.fitting import (
    DENIED,
    FILTERED,
    UNUSABLE,
    Oversize,
    cut_text,
    fit,
    media_units,
    misfit,
    sizes_of,
)
from loaders.packing import Budgets
from omni_pipeline.core.sample import Modality, Sample, Segment
from tests.support.strategies import make_sample, media_segment, sample_lists, samples, text_segment

FAST = settings(deadline=None, max_examples=60)
BUDGETS = Budgets(tokens=500, patches=600, mel_frames=700)


def reason_for(sample: Sample, budgets: Budgets, *, oversize: Oversize) -> str:
    """Why the sample does not fit; the array version must agree."""
    sizes = sizes_of([sample])
    reason = misfit(sizes, 0, budgets=budgets, oversize=oversize)
    tokens, fits = fit(sizes, budgets, oversize=oversize)
    assert bool(fits[0]) == (reason == "")
    assert tokens[0] == min(sample.num_tokens, budgets.tokens)
    return reason


def test_media_units_adds_images_and_videos_and_counts_audio_apart() -> None:
    sample = make_sample(
        [
            media_segment(Modality.IMAGE, (1, 4, 6)),
            text_segment(9),
            media_segment(Modality.VIDEO, (3, 2, 2)),
            media_segment(Modality.AUDIO, (50, 1, 1)),
        ]
    )
    assert media_units(sample) == (36, 50)


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ([media_segment(Modality.VIDEO, (7, 10, 10))], "700 patches, limit 600 (order.max_patches)"),
        ([media_segment(Modality.AUDIO, (800, 1, 1))], "800 mel frames, limit 700 (order.max_mel_frames)"),
        ([text_segment(500)], "501 tokens, limit 500 (order.seq_len)"),
    ],
)
def test_an_oversize_sample_is_dropped_with_value_limit_and_setting(
    segments: list[Segment], reason: str
) -> None:
    sample = make_sample(segments)
    assert reason_for(sample, BUDGETS, oversize="drop") == reason


def test_a_sample_of_exactly_the_budget_is_kept_whole() -> None:
    sample = make_sample([text_segment(499)])
    assert reason_for(sample, BUDGETS, oversize="drop") == ""


def test_a_sample_without_tokens_is_dropped() -> None:
    empty = Sample(make_sample([]).id, "key", "shard", (), num_tokens=0, num_labels=0)
    assert reason_for(empty, BUDGETS, oversize="cut") == "no tokens"


@FAST
@given(sample=samples(), max_tokens=st.integers(1, 300))
def test_cut_shortens_only_trailing_text_and_keeps_counts_right(sample: Sample, max_tokens: int) -> None:
    last = sample.segments[-1]
    if sample.num_tokens <= max_tokens:
        assert cut_text(sample, max_tokens=max_tokens) is sample
        return
    if last.is_media or last.num_tokens - (sample.num_tokens - max_tokens) < 1:
        assert reason_for(sample, Budgets(tokens=max_tokens), oversize="cut").endswith("could be cut")
        with pytest.raises(ValueError, match="cannot be cut"):
            cut_text(sample, max_tokens=max_tokens)
        return
    assert reason_for(sample, Budgets(tokens=max_tokens), oversize="cut") == ""
    shorter = cut_text(sample, max_tokens=max_tokens)
    assert shorter.segments[:-1] == sample.segments[:-1]
    assert shorter.id == sample.id
    kept = text_segment(last.num_tokens - (sample.num_tokens - max_tokens), loss=last.loss)
    recounted = make_sample([*sample.segments[:-1], kept])
    assert (shorter.num_tokens, shorter.num_labels) == (max_tokens, recounted.num_labels)
    assert recounted.num_tokens == max_tokens
    end = shorter.segments[-1]
    assert (end.grid, end.num_tokens) == ((kept.num_tokens, 1, 1), kept.num_tokens)
    assert (end.offset, end.length) == (last.offset, last.length)


@pytest.mark.parametrize(("loss", "labels"), [(True, 49), (False, 0)])
def test_cut_takes_labels_away_only_where_the_text_had_them(loss: bool, labels: int) -> None:
    shorter = cut_text(make_sample([text_segment(90, loss=loss)]), max_tokens=50)
    assert shorter.num_labels == labels


def test_cut_never_reaches_into_media() -> None:
    picture = media_segment(Modality.IMAGE, (1, 40, 40))
    budgets = Budgets(tokens=100)
    for parts in ([text_segment(9), picture], [picture, text_segment(9)]):
        sample = make_sample(parts)
        reason = reason_for(sample, budgets, oversize="cut")
        assert reason.endswith("limit 100 (order.seq_len); no text at its end that could be cut")


@FAST
@given(drawn=sample_lists(min_size=1), status=st.sampled_from([FILTERED, DENIED, UNUSABLE]))
def test_a_row_that_is_left_out_never_fits(drawn: list[Sample], status: int) -> None:
    sizes = sizes_of(drawn)
    assert fit(sizes, Budgets(tokens=10**9), oversize="drop")[1].all()
    left_out = replace(sizes, status=np.full(len(drawn), status, dtype=np.int8))
    assert not fit(left_out, Budgets(tokens=10**9), oversize="cut")[1].any()
