"""loaders.decode.track: the sound of clips is measured from headers and decoded to the planned frames."""

from __future__ import annotations

import io

import numpy as np
import pytest

from loaders.decode.audio import mel_filters
from loaders.decode.segment import DecodeRequest, DecodeSettings, decode_bytes
from loaders.decode.track import decode_track, track_size
from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.sample import Modality, RawSize
from omni_pipeline.core.sizes import AudioSizes, ModelSizes, media_grid
from tests.support.shards import audio_bytes, video_bytes

SIZES = AudioSizes()


@pytest.mark.parametrize("kind", ["mp4", "mov", "mkv", "webm"])
@pytest.mark.parametrize("seconds", [0.3, 2.7])
def test_headers_say_about_what_the_decode_gives(kind: str, seconds: float) -> None:
    data = video_bytes(8, fps=8, kind=kind, sound_s=seconds)
    rate, num_samples = track_size(io.BytesIO(data))
    assert rate == 48_000
    # One AAC frame and a lead-in of two, at most.
    assert abs(num_samples - seconds * rate) <= 3 * 1024
    raw = RawSize(sample_rate=rate, num_samples=num_samples)
    mel_frames = media_grid(Modality.AUDIO, raw, ModelSizes())[0]
    mel = decode_track(data, mel_frames, SIZES)
    assert mel.shape == (mel_frames, 128)
    peak = int(mel[4:25].mean(axis=0).argmax())
    assert abs(int(mel_filters(128)[:, peak].argmax()) * 40 - 440) <= 40


def test_a_silent_clip_has_no_track() -> None:
    data = video_bytes(4)
    assert track_size(io.BytesIO(data)) == (0, 0)
    with pytest.raises(SampleError, match="file has no audio"):
        decode_track(data, 100, SIZES)


def test_a_track_is_cut_or_filled_with_silence_to_the_planned_frames() -> None:
    data = video_bytes(8, fps=4, sound_s=2.0)
    whole = decode_track(data, 200, SIZES)
    assert decode_track(data, 150, SIZES).shape == (150, 128)
    filled = decode_track(data, 280, SIZES)
    np.testing.assert_array_equal(filled[:195], whole[:195])
    # Silence is 8 orders of magnitude below the loudest value.
    assert filled[210:].max() == pytest.approx(filled.max() - 2.0)


@pytest.mark.parametrize("planned", [95, 310])
def test_more_than_a_second_from_the_planned_length_is_damage(planned: int) -> None:
    data = video_bytes(8, fps=4, sound_s=2.0)
    with pytest.raises(SampleError, match=rf"recording gives 20\d mel frames, the index says {planned}"):
        decode_track(data, planned, SIZES)


def test_a_long_track_may_be_off_by_a_tenth() -> None:
    data = video_bytes(8, fps=1, sound_s=14.0)
    assert decode_track(data, 1550, SIZES).shape == (1550, 128)
    with pytest.raises(SampleError, match="the index says 1570"):
        decode_track(data, 1570, SIZES)


def test_bytes_of_a_clip_are_decoded_as_its_sound_where_asked() -> None:
    data = video_bytes(8, fps=4, sound_s=2.0, kind="mkv")
    request = DecodeRequest(
        url="s.tar",
        offset=0,
        length=len(data),
        modality=Modality.AUDIO,
        member="k.mkv",
        grid=(200, 1, 1),
        where="",
        units=(40, 80),
        is_track=True,
    )
    found = decode_bytes(data, request, DecodeSettings())
    np.testing.assert_array_equal(found, decode_track(data, 200, SIZES)[40:80])


def test_a_recording_is_still_held_to_its_header() -> None:
    data = audio_bytes(1.0)
    request = DecodeRequest("s.tar", 0, len(data), Modality.AUDIO, "k.wav", (140, 1, 1), "")
    with pytest.raises(SampleError, match="recording gives 100 mel frames, the index says 140"):
        decode_bytes(data, request, DecodeSettings())
