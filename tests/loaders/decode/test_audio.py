"""loaders.decode.audio: Whisper's log-mel, at 16 kHz, with exactly the planned frames."""

from __future__ import annotations

import io
import struct

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from loaders.decode.audio import audio_size, decode_audio, log_mel, mel_filters
from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.sizes import AudioSizes, ModelSizes, media_grid
from tests.support.shards import audio_bytes, m4a_bytes, tone, video_bytes

SIZES = AudioSizes()


def slow_log_mel(waves: npt.NDArray[np.float32], num_frames: int) -> npt.NDArray[np.float64]:
    """The definition, with a DFT written out and the filters of the Slaney scale made point by point."""

    def mel(hertz: float) -> float:
        return hertz / (200 / 3) if hertz < 1000 else 15 + 27 * np.log(hertz / 1000) / np.log(6.4)

    long = np.concatenate([waves[200:0:-1], waves, np.zeros(2000)]).astype(np.float64)
    n = np.arange(400)
    window = 0.5 * (1 - np.cos(2 * np.pi * n / 400))
    basis = np.exp(-2j * np.pi * np.outer(n, np.arange(201)) / 400)
    power = [np.abs((long[160 * t : 160 * t + 400] * window) @ basis) ** 2 for t in range(num_frames)]
    steps = np.linspace(0, mel(8000), 130)
    corners = [s * 200 / 3 if s < 15 else 1000 * 6.4 ** ((s - 15) / 27) for s in steps]
    filters = np.zeros((201, 128))
    for band in range(128):
        low, middle, high = corners[band : band + 3]
        for place in range(201):
            hertz = 40.0 * place
            height = min((hertz - low) / (middle - low), (high - hertz) / (high - middle))
            filters[place, band] = max(0.0, height) * 2 / (high - low)
    logs = np.log10(np.maximum(np.array(power) @ filters, 1e-10))
    scaled: npt.NDArray[np.float64] = (np.maximum(logs, logs.max() - 8) + 4) / 4
    return scaled


def test_the_spectrum_is_that_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    waves = (tone(0.35)[:, 0] + 0.01 * rng.standard_normal(5600)).astype(np.float32)
    np.testing.assert_allclose(log_mel(waves, 35, num_mels=128), slow_log_mel(waves, 35), atol=2e-5)


def test_a_tone_is_loudest_in_its_own_band() -> None:
    mel = log_mel(tone(1.0, hertz=1000.0)[:, 0], 100, num_mels=128)
    peak = mel.mean(axis=0).argmax()
    assert abs(int(mel_filters(128)[:, peak].argmax()) * 40 - 1000) <= 40


def test_long_recordings_are_worked_in_blocks_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    waves = np.random.default_rng(0).standard_normal(16_000).astype(np.float32) * 0.1
    whole = log_mel(waves, 100, num_mels=128)
    monkeypatch.setattr("loaders.decode.audio.BLOCK_FRAMES", 7)
    np.testing.assert_allclose(log_mel(waves, 100, num_mels=128), whole, atol=1e-6)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "MP3", "OGG"])
@pytest.mark.parametrize("rate", [8000, 16000, 44100])
@pytest.mark.parametrize("seconds", [0.01, 0.5, 1.237])
def test_the_header_promises_what_the_decode_gives(kind: str, rate: int, seconds: float) -> None:
    data = audio_bytes(seconds, rate=rate, kind=kind)
    raw = audio_size(io.BytesIO(data), suffix=kind.lower())
    assert raw.num_samples == len(soundfile.read(io.BytesIO(data))[0])
    grid = media_grid(Modality.AUDIO, raw, ModelSizes(audio=SIZES))
    mel = decode_audio(data, grid[0], SIZES, suffix=kind.lower())
    assert mel.shape == (grid[0], 128)
    assert mel.dtype == np.float32
    assert np.isfinite(mel).all()


def test_an_mp3_without_its_info_frame_is_counted_right() -> None:
    data = audio_bytes(3.0, rate=32000, kind="MP3")
    at = max(data.find(b"Xing"), data.find(b"Info"))
    assert at > 0
    bare = data[data.index(data[:2], at) :]
    # The trap: the library itself stops after a fifth of it, without an error.
    assert len(soundfile.read(io.BytesIO(bare))[0]) < 30_000
    tagged = b"ID3\x04\0\0\0\0\x02\x00" + bytes(256) + bare
    for file in (bare, tagged):
        raw = audio_size(io.BytesIO(file), suffix="mp3")
        assert abs(raw.num_samples - 96_000) <= 2 * 1152
        planned = media_grid(Modality.AUDIO, raw, ModelSizes(audio=SIZES))[0]
        mel = decode_audio(file, planned, SIZES, suffix="mp3")
        assert mel.shape == (planned, 128)
        assert mel[planned - 20].max() > 0.5
    with_tag = b"ID3\x04\0\0\0\0\x02\x00" + bytes(256) + data
    assert audio_size(io.BytesIO(with_tag), suffix="mp3").num_samples == 96_000


def test_m4a_is_read_by_pyav() -> None:
    data = m4a_bytes(1.0)
    raw = audio_size(io.BytesIO(data), suffix="m4a")
    mel = decode_audio(data, media_grid(Modality.AUDIO, raw, ModelSizes(audio=SIZES))[0], SIZES, suffix="m4a")
    direct = log_mel(tone(1.0)[:, 0], 100, num_mels=128)
    assert mel[20:80].mean(axis=0).argmax() == direct[20:80].mean(axis=0).argmax()


def test_channels_are_averaged_and_each_file_is_resampled_from_its_own_rate() -> None:
    stereo = audio_bytes(0.5, channels=2)
    waves = tone(0.5, channels=2).mean(axis=1, dtype=np.float32)
    np.testing.assert_allclose(
        decode_audio(stereo, 50, SIZES, suffix="wav"), log_mel(waves, 50, num_mels=128), atol=0.05
    )
    for rate in (32000, 16000, 48000):
        mel = decode_audio(audio_bytes(0.5, rate=rate, hertz=1000), 50, SIZES, suffix="wav")
        assert abs(int(mel_filters(128)[:, mel[10:40].mean(axis=0).argmax()].argmax()) * 40 - 1000) <= 40


def test_two_frames_of_difference_are_evened_out_and_three_are_an_error() -> None:
    data = audio_bytes(0.5)
    for planned in (48, 52):
        assert decode_audio(data, planned, SIZES, suffix="wav").shape == (planned, 128)
    with pytest.raises(SampleError, match="recording gives 50 mel frames, the index says 53"):
        decode_audio(data, 53, SIZES, suffix="wav")


def test_values_that_are_not_finite_are_a_sample_error() -> None:
    sink = io.BytesIO()
    soundfile.write(sink, np.array([0.0, np.nan] * 800), 16000, format="WAV", subtype="FLOAT")
    with pytest.raises(SampleError, match="not finite"):
        decode_audio(sink.getvalue(), 10, SIZES, suffix="wav")


def test_a_cut_recording_is_a_sample_error() -> None:
    data = audio_bytes(1.0)
    with pytest.raises(SampleError, match="the index says 100"):
        decode_audio(data[: len(data) // 2], 100, SIZES, suffix="wav")


@pytest.mark.parametrize("suffix", ["wav", "mp3", "m4a"])
def test_what_is_no_recording_is_a_sample_error(suffix: str) -> None:
    for data in (b"", b"no recording at all" * 20):
        with pytest.raises(SampleError, match="recording cannot be decoded"):
            decode_audio(data, 10, SIZES, suffix=suffix)
        with pytest.raises(SampleError, match="recording"):
            audio_size(io.BytesIO(data), suffix=suffix)


def test_a_video_without_sound_is_no_recording() -> None:
    with pytest.raises(SampleError, match="file has no audio"):
        decode_audio(video_bytes(), 10, SIZES, suffix="m4a")


def test_a_header_without_samples_is_refused() -> None:
    header = (
        b"RIFF" + struct.pack("<I", 36) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16)
    )
    with pytest.raises(SampleError, match="recording has no samples"):
        audio_size(io.BytesIO(header + b"data" + struct.pack("<I", 0)), suffix="wav")
