"""Modelled work, against sums written out by hand and by brute force."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from balancer.cost import CostModel
from balancer.shapes import TransformerShape, audio_shape, position_grid, vision_shape
from balancer.work import media_flops, sequence_flops
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.sizes import audio_rows
from tests.support.hardware import flat_hardware
from tests.support.strategies import make_sample, media_segment, text_segment

LLM = TransformerShape(
    hidden=8, layers=3, ffn=16, heads=4, kv_heads=2, head_dim=2, causal=True, output_widths=(8, 50)
)
VISION = vision_shape(
    layers=4,
    hidden=8,
    ffn=12,
    heads=2,
    patch_values=24,
    merge=2,
    window_patches=4,
    full_attention_layers=1,
    llm_hidden=8,
)
AUDIO = audio_shape(layers=2, hidden=8, ffn=32, heads=2, num_mels=16, chunk_frames=20, llm_hidden=8)
MODEL = CostModel(
    encoders={"vision": VISION, "audio": AUDIO},
    llm=LLM,
    encoder_of={Modality.IMAGE: "vision", Modality.VIDEO: "vision", Modality.AUDIO: "audio"},
    hardware=flat_hardware(flops_per_s=1e6, bytes_per_s=1e3, latency_s=0.5),
)


def forward_flops(shape: TransformerShape, positions: int, pairs: int) -> int:
    """Forward operations of all layers, written out matrix by matrix; ``pairs`` summed over layers."""
    query = shape.hidden * shape.heads * shape.head_dim
    key_value = 2 * shape.hidden * shape.kv_heads * shape.head_dim
    output = shape.heads * shape.head_dim * shape.hidden
    feed_forward = (3 if shape.gated else 2) * shape.hidden * shape.ffn
    matrices = shape.layers * (query + key_value + output + feed_forward)
    # Two matrix products per pair and head; two operations per multiply-add.
    return 2 * matrices * positions + 2 * 2 * shape.heads * shape.head_dim * pairs


def test_llm_operations_are_those_of_its_matrices() -> None:
    tokens = 10
    attended = forward_flops(LLM, tokens, pairs=3 * tokens**2) - forward_flops(LLM, tokens, pairs=0)
    head = 2 * 8 * 50 * tokens
    expected = 3 * (forward_flops(LLM, tokens, pairs=0) + attended // 2 + head)
    assert sequence_flops(LLM, tokens) == expected


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
def test_window_attention_counts_each_pair_inside_a_window_once(frames: int, rows: int, columns: int) -> None:
    grid = (frames, 2 * rows, 2 * columns)
    window_of = [
        (t, r // 4, c // 4) for t in range(frames) for r in range(2 * rows) for c in range(2 * columns)
    ]
    windowed = sum(window_of.count(window) ** 2 for window in set(window_of))
    full = frames * (4 * rows * columns) ** 2
    positions = len(window_of)
    first = 2 * 24 * 8 * positions
    merger = 2 * (32 * 32 + 32 * 8) * (positions // 4)
    expected = 3 * (forward_flops(VISION, positions, pairs=full + 3 * windowed) + first + merger)
    assert media_flops(VISION, grid) == expected


@settings(max_examples=40)
@given(st.integers(4, 200))
def test_audio_attends_in_chunks_of_positions_after_the_convolution(mel_frames: int) -> None:
    positions = -(-mel_frames // 2)
    chunks = [min(10, positions - start) for start in range(0, positions, 10)]
    convolutions = 2 * positions * (2 * 3 * 16 * 8 + 3 * 8 * 8)
    projector = 2 * 8 * 8 * audio_rows(mel_frames)
    pairs = 2 * sum(chunk**2 for chunk in chunks)
    expected = 3 * (forward_flops(AUDIO, positions, pairs=pairs) + convolutions + projector)
    assert media_flops(AUDIO, (mel_frames, 1, 1)) == expected
    assert position_grid(AUDIO, (mel_frames, 1, 1)) == (1, positions, 1)


def test_attention_of_a_video_does_not_cross_frames() -> None:
    assert media_flops(VISION, (5, 8, 8)) == 5 * media_flops(VISION, (1, 8, 8))


def test_a_pack_costs_its_samples_because_they_are_isolated() -> None:
    one, two = make_sample([text_segment(99)]), make_sample([text_segment(49)])
    pack = Pack(lane=0, number=0, samples=(one, two))
    assert MODEL.pack_cost(pack) == pytest.approx((sequence_flops(LLM, 100) + sequence_flops(LLM, 50)) / 1e6)
    joined = Pack(lane=0, number=0, samples=(make_sample([text_segment(149)]),))
    assert MODEL.pack_cost(joined) > MODEL.pack_cost(pack)
    assert MODEL.pack_cost(Pack(lane=0, number=0, samples=())) == 0


def test_padding_costs_as_much_as_tokens() -> None:
    one, two = make_sample([text_segment(99)]), make_sample([text_segment(49)])
    pack = Pack(lane=0, number=0, samples=(one, two), padded_len=128)
    assert MODEL.pack_cost(pack) == pytest.approx(2 * sequence_flops(LLM, 128) / 1e6)


def test_media_are_priced_by_the_encoder_of_their_modality() -> None:
    image = media_segment(Modality.IMAGE, (1, 4, 4))
    sound = media_segment(Modality.AUDIO, (40, 1, 1))
    assert MODEL.media_cost(image) == pytest.approx(media_flops(VISION, (1, 4, 4)) / 1e6)
    assert MODEL.media_cost(sound) == pytest.approx(media_flops(AUDIO, (40, 1, 1)) / 1e6)
    assert MODEL.encoder_name(sound) == "audio"


def test_a_modality_without_encoder_says_so() -> None:
    model = CostModel(
        encoders={"vision": VISION},
        llm=LLM,
        encoder_of={Modality.IMAGE: "vision"},
        hardware=flat_hardware(),
    )
    with pytest.raises(ConfigError) as caught:
        model.media_cost(media_segment(Modality.AUDIO, (40, 1, 1)))
    assert str(caught.value) == (
        "member 'audio' is audio, and the run has no encoder for it\n"
        "  fix:   add an encoder for this modality, or leave it out of the source's layout"
    )


def test_an_encoder_without_shape_says_so() -> None:
    with pytest.raises(ConfigError) as caught:
        CostModel(
            encoders={"vision": VISION},
            llm=LLM,
            encoder_of={Modality.AUDIO: "ears"},
            hardware=flat_hardware(),
        )
    assert str(caught.value) == (
        "modality 'audio' is read by encoder 'ears', which has no shape\n"
        "  fix:   describe it; known encoders: vision"
    )
