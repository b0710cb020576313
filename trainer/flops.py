"""Floating point operations of the model from what a step really processed; for MFU. Free of torch.

Only matrix products count (2 per multiply-add), attention by its true segments, and a causal one half.
Padding does not count: a step that pads more has a lower MFU, as it should; with nominal sizes it could pass
100 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omni_pipeline.core.sizes import audio_rows
from trainer.config import ModelConfig
from trainer.model.layout import audio_layout, vision_layout

BACKWARD_AND_FORWARD = 3


def vision_flops(config: ModelConfig, grid: Sequence[int]) -> int:
    """Return the forward FLOPs of one picture of (temporal, rows, columns) patches."""
    vision, merge = config.vision, config.sizes.vision.merge
    layout = vision_layout([grid], merge=merge, window=vision.window // config.sizes.vision.factor)
    patches, merged = len(layout.patch_order), vision.hidden * merge**2
    block = 4 * vision.hidden**2 + 3 * vision.hidden * vision.intermediate
    linear = patches * (config.patch_values * vision.hidden + vision.layers * block)
    linear += len(layout.row_order) * merged * (merged + config.llm.hidden)
    num_full = len(set(vision.full_attention_layers))
    pairs = num_full * _pairs(layout.frame_lengths) + (vision.layers - num_full) * _pairs(
        layout.window_lengths
    )
    return 2 * linear + 4 * vision.hidden * pairs


def audio_flops(config: ModelConfig, mel_frames: int) -> int:
    """Return the forward FLOPs of one recording."""
    audio = config.audio
    layout = audio_layout([mel_frames], chunk=audio.chunk)
    rows = sum(layout.chunk_lengths)
    block = 4 * audio.hidden**2 + 2 * audio.hidden * audio.intermediate
    linear = mel_frames * 3 * config.sizes.audio.num_mels * audio.hidden
    linear += rows * (3 * audio.hidden**2 + audio.layers * block)
    linear += audio_rows(mel_frames) * audio.hidden * config.llm.hidden
    return 2 * linear + 4 * audio.hidden * audio.layers * _pairs(layout.chunk_lengths)


def llm_flops(config: ModelConfig, num_tokens: int) -> int:
    """Return the forward FLOPs of one sample of so many positions, head included."""
    llm = config.llm
    query, key_value = llm.heads * llm.head_dim, llm.kv_heads * llm.head_dim
    block = 2 * llm.hidden * (query + key_value) + 3 * llm.hidden * llm.intermediate
    linear = num_tokens * (llm.layers * block + llm.padded_vocab * llm.hidden)
    return 2 * linear + 2 * query * llm.layers * num_tokens**2


def training_flops(
    config: ModelConfig,
    *,
    grids: Iterable[Sequence[int]],
    mel_frames: Iterable[int],
    sample_tokens: Iterable[int],
) -> int:
    """Return the FLOPs of forward and backward (twice the forward); recomputation does not count.

    Args:
        config: The model.
        grids: (temporal, rows, columns) of every picture, in patches.
        mel_frames: Of every recording.
        sample_tokens: Positions of every sample.
    """
    forward = sum(vision_flops(config, grid) for grid in grids)
    forward += sum(audio_flops(config, count) for count in mel_frames)
    forward += sum(llm_flops(config, count) for count in sample_tokens)
    return BACKWARD_AND_FORWARD * forward


def _pairs(lengths: Iterable[int]) -> int:
    return sum(length * length for length in lengths)
