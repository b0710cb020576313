"""Recordings against the published feature extractor: the same mel frames, and as many of them and of rows.

The extractor pads every recording with silence to its chunk of 300 s and marks the frames that count.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from loaders.decode.audio import log_mel, mel_filters
from omni_pipeline.core.sample import Modality, RawSize
from omni_pipeline.core.sizes import AudioSizes, ModelSizes, audio_rows, media_grid, media_grids
from tests.support.reference_library import transformers

SIZES = ModelSizes()
PUBLISHED_CHUNK_S = 300
# A shorter chunk, for time: it ends the silence earlier, which changes nothing before.
CHUNK_S = 8

Waves = npt.NDArray[np.float32]


@functools.cache
def extractor(chunk_s: int) -> Any:
    """Return the extractor with the published settings, but for the chunk."""
    return transformers.WhisperFeatureExtractor(
        feature_size=SIZES.audio.num_mels, chunk_length=chunk_s, return_attention_mask=True
    )


def reference(waves: Waves, *, chunk_s: int = CHUNK_S) -> npt.NDArray[np.float32]:
    """Return the frames that the extractor's mask counts, float32 [frames, mels]."""
    found = extractor(chunk_s)([waves], sampling_rate=16_000, return_attention_mask=True, return_tensors="np")
    frames: npt.NDArray[np.float32] = found["input_features"][0].T[found["attention_mask"][0] == 1]
    return frames


def planned_frames(num_samples: int) -> int:
    return media_grid(Modality.AUDIO, RawSize(sample_rate=16_000, num_samples=num_samples), SIZES)[0]


def voice(num_samples: int) -> Waves:
    """Return a tone that swells and falls over faint noise, float32 [samples]."""
    times = np.arange(num_samples) / 16_000
    noise = np.random.default_rng(num_samples).standard_normal(num_samples)
    waves: Waves = (0.4 * np.sin(2765.0 * times) * np.sin(3 * times) + 1e-3 * noise).astype(np.float32)
    return waves


def test_the_settings_are_those_of_the_extractor() -> None:
    published = extractor(PUBLISHED_CHUNK_S)
    assert published.n_samples == SIZES.audio.max_duration_s * published.sampling_rate
    np.testing.assert_allclose(mel_filters(128), published.mel_filters, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_samples", [321, 400, 640, 4000, 16_000, 16_001, 33_333, 96_159])
def test_mel_frames_are_those_of_the_extractor(num_samples: int) -> None:
    waves = voice(num_samples)
    expected = reference(waves)
    assert len(expected) == planned_frames(num_samples)
    # Its spectrum is of float32: 1e-7 of the loudest amplitude, where 1e-4 of it is the least that shows.
    np.testing.assert_allclose(log_mel(waves, len(expected), num_mels=128), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("num_samples", [33_333])
def test_mel_frames_are_those_of_the_extractor_in_double_precision(
    num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    feature_extraction = transformers.models.whisper.feature_extraction_whisper
    monkeypatch.setattr(feature_extraction, "is_torch_available", lambda: False)
    waves = voice(num_samples)
    expected = reference(waves)
    np.testing.assert_allclose(log_mel(waves, len(expected), num_mels=128), expected, rtol=0, atol=2e-6)


def test_the_published_chunk_changes_nothing() -> None:
    waves = voice(20_000)
    np.testing.assert_array_equal(reference(waves, chunk_s=PUBLISHED_CHUNK_S), reference(waves))


@pytest.mark.parametrize("level", [0.0, 1e-6, 1.0])
def test_silence_and_full_loudness_have_the_frames_of_the_extractor(level: float) -> None:
    waves = (level * np.sign(np.sin(np.arange(8000) / 5))).astype(np.float32)
    expected = reference(waves)
    np.testing.assert_allclose(log_mel(waves, 50, num_mels=128), expected, rtol=0, atol=2e-4)


def test_a_loud_end_that_only_the_next_frame_hears_counts_as_it_does_in_the_extractor() -> None:
    waves = 1e-3 * voice(8000)
    waves[-5:] = 1.0
    np.testing.assert_allclose(log_mel(waves, 50, num_mels=128), reference(waves), rtol=0, atol=2e-4)


def test_only_the_last_frame_of_a_recording_as_long_as_the_chunk_differs() -> None:
    waves = voice(CHUNK_S * 16_000)
    expected = reference(waves)
    found = log_mel(waves, len(expected), num_mels=128)
    np.testing.assert_allclose(found[:-1], expected[:-1], rtol=0, atol=2e-4)
    # There the extractor has no silence left and mirrors the end.
    assert np.abs(found[-1] - expected[-1]).max() > 1e-3


def test_frames_and_rows_of_every_length_are_those_of_the_processor() -> None:
    processor = SimpleNamespace(feature_extractor=extractor(PUBLISHED_CHUNK_S))
    count = transformers.Qwen2_5OmniProcessor._get_num_audio_tokens
    frames = np.arange(1, 2001)
    for num_samples in (160 * frames - 159, 160 * frames):
        raw = {"num_samples": num_samples, "sample_rate": np.full_like(frames, 16_000)}
        grids, problems = media_grids(Modality.AUDIO, raw, SIZES)
        # Of one or two frames the processor makes no row at all; here silence follows up to the third.
        assert grids[:, 0].tolist() == np.maximum(3, frames).tolist()
        expected = [count(processor, number) for number in num_samples.tolist()]
        assert audio_rows(grids[:, 0]).tolist() == [1, 1, *expected[2:]]
        assert (expected[:2], problems) == ([0, 0], {})


def test_rows_of_a_frame_count_are_those_of_the_audio_tower() -> None:
    modeling = transformers.models.qwen2_5_omni.modeling_qwen2_5_omni
    frames = torch.arange(3, 2001)
    _, rows = modeling.Qwen2_5OmniAudioEncoder._get_feat_extract_output_lengths(None, frames)
    assert audio_rows(frames.numpy()).tolist() == rows.tolist()
    assert AudioSizes().num_mels == transformers.Qwen2_5OmniAudioEncoderConfig().num_mel_bins
