"""The packed audio encoder against one recording at a time, chunk by chunk, without padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from omni_pipeline.core.sizes import audio_rows
from tests.trainer.model.reference import build, gradients, one_recording
from trainer.model.audio import AudioEncoder, sinusoids


def _encoder() -> AudioEncoder:
    encoder = build().encoders["audio"]
    assert isinstance(encoder, AudioEncoder)
    return encoder


def _frames(count: int, *, seed: int = 0) -> Tensor:
    return torch.randn(count, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _grids(counts: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.array([(count, 1, 1) for count in counts], dtype=np.int64).reshape(-1, 3)


@settings(max_examples=12, deadline=None)
@given(counts=st.lists(st.integers(4, 420), min_size=1, max_size=4))
def test_packed_recordings_equal_single_ones(counts: list[int]) -> None:
    encoder = _encoder()
    values = _frames(sum(counts))
    rows = encoder(values, _grids(counts))
    assert len(rows) == sum(map(audio_rows, counts))
    expected = torch.cat([one_recording(encoder, piece) for piece in torch.split(values, counts)])
    torch.testing.assert_close(rows, expected)


def test_gradients_equal_those_of_single_recordings() -> None:
    encoder = _encoder()
    counts = [437, 4, 200, 9]
    values = _frames(sum(counts))
    expected = torch.cat([one_recording(encoder, piece) for piece in torch.split(values, counts)])
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected.backward(upstream)
    expected_gradients = gradients(encoder)
    encoder.zero_grad()
    encoder(values, _grids(counts)).backward(upstream)
    torch.testing.assert_close(gradients(encoder), expected_gradients)


def test_one_recording_does_not_hear_another() -> None:
    encoder = _encoder()
    counts = [250, 60]
    values = _frames(310)
    changed = values.clone()
    changed[250:] = _frames(60, seed=3)
    before, after = encoder(values, _grids(counts)), encoder(changed, _grids(counts))
    assert torch.equal(before[:62], after[:62])
    assert not torch.isclose(before[62:], after[62:]).all(dim=1).any()


def test_no_recording_gives_no_rows_and_zero_gradients_everywhere() -> None:
    encoder = _encoder()
    rows = encoder(_frames(0), _grids([]))
    assert rows.shape == (0, 64)
    rows.sum().backward()
    assert all(not gradient.any() for gradient in gradients(encoder).values())


def test_positions_are_sines_then_cosines_of_falling_rates() -> None:
    table = sinusoids(3, hidden=4, device=torch.device("cpu"), dtype=torch.float64)
    expected = [[np.sin(p), np.sin(p / 10_000), np.cos(p), np.cos(p / 10_000)] for p in range(3)]
    torch.testing.assert_close(table, torch.tensor(expected, dtype=torch.float64))


def test_grids_that_do_not_count_the_frames_are_refused() -> None:
    with pytest.raises(ValueError, match="grids count 40 mel frames, there are 39"):
        _encoder()(_frames(39), _grids([40]))
