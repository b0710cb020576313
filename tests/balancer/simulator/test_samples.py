"""Synthetic samples: their sizes add up, are those of the stated distributions, and come again."""

from __future__ import annotations

import numpy as np
import pytest

from balancer.simulator.samples import SAMPLES, VISION, image_samples, speech_samples, text_samples
from omni_pipeline.core.sample import Modality, Sample


def media_rows(samples: list[Sample]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([sample.segments[0].num_rows for sample in samples])


@pytest.mark.parametrize("name", list(SAMPLES))
def test_sizes_of_a_sample_add_up(name: str) -> None:
    for sample in SAMPLES[name](200, seed=1):
        assert sample.id.source == name
        assert sample.num_tokens == 1 + sum(segment.num_tokens for segment in sample.segments)
        begins_with_text = sample.segments[0].modality is Modality.TEXT
        assert sample.num_labels == sample.segments[-1].num_tokens + (not begins_with_text)


@pytest.mark.parametrize("name", list(SAMPLES))
def test_equal_seeds_give_equal_samples_and_others_do_not(name: str) -> None:
    make = SAMPLES[name]
    assert make(50, seed=3) == make(50, seed=3)
    assert make(50, seed=3) != make(50, seed=4)


def test_pictures_have_the_sides_of_their_sets() -> None:
    samples = image_samples(4000, seed=0)
    grids = np.array([sample.segments[0].grid for sample in samples])
    assert (grids[:, 0] == 1).all()
    assert (grids[:, 1:] % VISION.merge == 0).all()
    longer = grids[:, 1:].max(axis=1)
    # 640 and 1024 pixels in 14-pixel patches, rounded to whole rows.
    assert np.mean(longer == 46) == pytest.approx(0.4, abs=0.05)
    assert np.mean(longer == 74) == pytest.approx(0.4, abs=0.05)
    assert np.mean(grids[:, 1] > grids[:, 2]) == pytest.approx(1 / 3, abs=0.05)
    rows = media_rows(samples)
    assert rows.max() <= 4096
    assert (rows * 4 == grids.prod(axis=1)).all()


def test_recordings_and_texts_have_the_stated_means() -> None:
    speech = media_rows(speech_samples(8000, seed=0)) / 25
    # 0.45 x 12.3 s + 0.45 x 4.1 s + 0.1 x about 78 s
    assert speech.mean() == pytest.approx(15.2, rel=0.05)
    assert speech.max() <= 300
    assert np.median(speech) < 12
    tokens = np.array([sample.num_tokens for sample in text_samples(8000, seed=0)])
    assert np.median(tokens) == pytest.approx(600, rel=0.06)
    assert tokens.mean() == pytest.approx(1230, rel=0.08)


def test_public_sizes_only_leave_out_what_is_assumed_beside_them() -> None:
    images = np.array([sample.segments[0].grid for sample in image_samples(2000, seed=0, public_only=True)])
    longer = images[:, 1:].max(axis=1)
    assert set(longer.tolist()) == {46, 74}
    assert np.mean(longer == 46) == pytest.approx(0.5, abs=0.05)
    speech = media_rows(speech_samples(2000, seed=0, public_only=True)) / 25
    assert speech.max() <= 20
    assert text_samples(50, seed=0, public_only=True) == text_samples(50, seed=0)
