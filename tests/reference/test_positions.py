"""M-RoPE positions of any sample, made by the loader, are those that the reference makes: exactly.

Of clips without their sound; ``test_interleave`` has the others.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from loaders.positions import sample_positions
from omni_pipeline.core.sample import Modality, Sample
from tests.support.reference_library import transformers
from tests.support.reference_thinker import CONFIG, reference_config, reference_inputs
from tests.support.strategies import make_sample, media_segment, samples, text_segment


@functools.cache
def _reference() -> Any:
    with torch.device("meta"):
        return transformers.Qwen2_5OmniThinkerForConditionalGeneration(reference_config(CONFIG))


def assert_equals_reference(sample: Sample, *, fps: float) -> None:
    segments = [
        replace(segment, patch_s=2 / fps if segment.modality is Modality.VIDEO else 0.0, is_track=False)
        for segment in sample.segments
    ]
    sample = replace(sample, segments=tuple(segments))
    ours = sample_positions(sample, merge=CONFIG.sizes.vision.merge)
    inputs = reference_inputs(sample)
    seconds = inputs.pop("video_second_per_grid", None)
    frames = [segment.grid[0] for segment in sample.segments if segment.modality is Modality.AUDIO]
    theirs, _ = _reference().get_rope_index(
        **inputs, second_per_grids=seconds, audio_seqlens=torch.tensor(frames)
    )
    np.testing.assert_array_equal(ours, theirs[:, 0].numpy())


@given(sample=samples(), fps=st.sampled_from([0.3, 0.7, 1.0, 1.9, 2.0, 3.0, 24.0, 29.97, 60.0]))
def test_positions_of_any_sample_are_those_of_the_reference(sample: Sample, fps: float) -> None:
    assert_equals_reference(sample, fps=fps)


@pytest.mark.parametrize("fps", [1.3, 2.0, 23.976])
def test_long_videos_truncate_times_like_the_reference(fps: float) -> None:
    sample = make_sample([text_segment(3), media_segment(Modality.VIDEO, (700, 2, 4)), text_segment(2)])
    assert_equals_reference(sample, fps=fps)
