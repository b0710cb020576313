"""Modelled work of packs and media, in seconds, so that it compares with the time of moving rows.

Work is analytic: floating-point operations of forward and backward (three times the forward), summed over
attention segments as ``a L^2 + b L`` plus a constant per segment, separately for each encoder and the LLM.
What an attention segment is follows the Qwen2.5 family: in vision one frame (temporal patch), or one square
window of it in the windowed layers; in audio one chunk of positions after the convolutions; in the LLM one
sample, because packs isolate their samples. All operations are whole numbers and the only division is the
last step, so every machine gets the same float.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality, Segment

FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """The sizes of one transformer that decide how many operations it takes.

    A *position* is what attention sees: a patch, an audio frame after the strided convolution, or a token.

    Args:
        hidden: Width of the residual stream.
        layers: Transformer layers.
        ffn: Width of the feed-forward layer; with experts, that of all experts active for one position.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        gated: Whether the feed-forward layer has a gate (three matrices, not two).
        causal: Whether half of the attention pairs are masked and skipped.
        input_dim: Inputs of the first layer per position: the values of a patch; for convolutions the
            multiply-adds per position divided by ``hidden``; 0 for a table look-up.
        output_widths: Widths of the layers behind the last block, input first: ``(5120, 5120, 2048)`` is a
            merger of four patches with one inner layer; ``(hidden, vocabulary)`` the head of an LLM.
        units_per_position: Encoder input units (patches, mel frames) along time that make one position.
        positions_per_row: Positions that make one embedding row.
        window: Side of an attention window in positions, along rows and columns of a frame; 0 is full.
        full_attention_layers: Layers that see the whole frame although ``window`` is set.
    """

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = True
    causal: bool = False
    input_dim: int = 0
    output_widths: tuple[int, ...] = ()
    units_per_position: int = 1
    positions_per_row: int = 1
    window: int = 0
    full_attention_layers: int = 0

    @property
    def flops_per_pair(self) -> int:
        """Operations, forward and backward, of one layer for one (query, key) pair."""
        flops = FORWARD_AND_BACKWARD * 4 * self.heads * self.head_dim
        return flops // 2 if self.causal else flops

    @property
    def flops_per_position(self) -> int:
        """Operations, forward and backward, of all layers for one position, without attention pairs."""
        projections = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        feed_forward = (3 if self.gated else 2) * self.hidden * self.ffn
        first = self.input_dim * self.hidden
        return FORWARD_AND_BACKWARD * 2 * (self.layers * (projections + feed_forward) + first)

    @property
    def flops_per_row(self) -> int:
        """Operations, forward and backward, of the layers behind the last block for one row."""
        pairs = zip(self.output_widths, self.output_widths[1:], strict=False)
        return FORWARD_AND_BACKWARD * 2 * sum(wide * narrow for wide, narrow in pairs)


def vision_shape(
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    patch_values: int,
    merge: int,
    window_patches: int,
    full_attention_layers: int,
    llm_hidden: int,
) -> TransformerShape:
    """Return the shape of a Qwen2.5-style vision encoder with its merger.

    Args:
        patch_values: Numbers in one patch (channels x temporal patch x patch x patch).
        merge: Patches per side that the merger joins into one row.
        window_patches: Side of an attention window, patches; 0 is full.
    """
    merged = merge * merge * hidden
    return TransformerShape(
        hidden=hidden,
        layers=layers,
        ffn=ffn,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        input_dim=patch_values,
        output_widths=(merged, merged, llm_hidden),
        positions_per_row=merge * merge,
        window=window_patches,
        full_attention_layers=full_attention_layers,
    )


def audio_shape(
    *, layers: int, hidden: int, ffn: int, heads: int, num_mels: int, chunk_frames: int, llm_hidden: int
) -> TransformerShape:
    """Return the shape of a Whisper-style audio encoder with its projector.

    Its two convolutions (width 3, the second of stride 2) see two mel frames per position.

    Args:
        num_mels: Mel bands.
        chunk_frames: Mel frames that attend to each other, even.
    """
    return TransformerShape(
        hidden=hidden,
        layers=layers,
        ffn=ffn,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        gated=False,
        input_dim=2 * 3 * num_mels + 3 * hidden,
        output_widths=(hidden, llm_hidden),
        units_per_position=2,
        positions_per_row=2,
        window=chunk_frames // 2,
    )


@functools.lru_cache(maxsize=1 << 16)
def media_flops(shape: TransformerShape, grid: tuple[int, int, int]) -> int:
    """Return the operations, forward and backward, of one media segment.

    Args:
        shape: The encoder.
        grid: (temporal, rows, columns) of patches, or (mel frames, 1, 1); see ``Segment.grid``.
    """
    frames, rows, columns = position_grid(shape, grid)
    full = frames * (rows * columns) ** 2
    if shape.window:
        # A window is the product of a run of rows and a run of columns, so the sum of squares factors.
        windowed = frames * _sum_of_squares(rows, shape.window) * _sum_of_squares(columns, shape.window)
        full_layers = min(shape.full_attention_layers, shape.layers)
        pairs = full_layers * full + (shape.layers - full_layers) * windowed
    else:
        pairs = shape.layers * full
    positions = frames * rows * columns
    num_rows = positions // shape.positions_per_row
    return (
        shape.flops_per_pair * pairs + shape.flops_per_position * positions + shape.flops_per_row * num_rows
    )


def position_grid(shape: TransformerShape, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return (frames, rows, columns) of attention positions; attention never crosses a frame.

    An encoder with ``units_per_position`` above one reads one line of units (audio): it has one frame of
    that many fewer rows.
    """
    if shape.units_per_position > 1:
        return 1, -(-grid[0] // shape.units_per_position), 1
    return grid


@functools.lru_cache(maxsize=1 << 16)
def sequence_flops(shape: TransformerShape, num_tokens: int) -> int:
    """Return the operations, forward and backward, of one isolated sample in the LLM, its head included."""
    pairs = shape.layers * num_tokens * num_tokens
    linear = shape.flops_per_position + shape.flops_per_row
    return shape.flops_per_pair * pairs + linear * num_tokens


def _sum_of_squares(length: int, window: int) -> int:
    """Sum of the squared lengths of the windows that cut ``length``; the last one may be short."""
    return length // window * window * window + (length % window) ** 2


@dataclass(frozen=True)
class CostModel:
    """What one rank needs for packs, media and transfers, in seconds.

    Args:
        encoders: Shape of every encoder of the run, by name.
        llm: Shape of the LLM, its head over the vocabulary included.
        encoder_of: The encoder that reads each media modality.
        flops_per_s: Operations per second that a rank attains.
        bytes_per_s: Bytes per second that a rank sends or receives.
        latency_s: Time of one message, seconds.
        row_bytes: Bytes that one embedding row moves, its gradient included; 0 takes twice 2 bytes per
            value of the LLM's width.
        segment_s: Constant time per media segment or sample (kernel starts), seconds.

    Raises:
        ConfigError: A rate is not positive, or ``encoder_of`` names an encoder without a shape.
    """

    encoders: Mapping[str, TransformerShape]
    llm: TransformerShape
    encoder_of: Mapping[Modality, str]
    flops_per_s: float = 4e14
    bytes_per_s: float = 1e11
    latency_s: float = 2e-5
    row_bytes: int = 0
    segment_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("flops_per_s", self.flops_per_s), ("bytes_per_s", self.bytes_per_s)):
            if value <= 0:
                raise ConfigError(f"balance.{name} is {value}, must be above 0", fix="give a measured rate")
        for modality, name in self.encoder_of.items():
            if name not in self.encoders:
                raise ConfigError(
                    f"modality {str(modality)!r} is read by encoder {name!r}, which has no shape",
                    fix=f"describe it; known encoders: {', '.join(sorted(self.encoders)) or 'none'}",
                )

    def encoder_name(self, segment: Segment) -> str:
        """Return the encoder that reads a media segment.

        Raises:
            ConfigError: The run has no encoder for its modality.
        """
        name = self.encoder_of.get(segment.modality)
        if name is None:
            raise ConfigError(
                f"member {segment.member!r} is {segment.modality}, and the run has no encoder for it",
                fix="add an encoder for this modality, or leave it out of the source's layout",
            )
        return name

    def media_cost(self, segment: Segment) -> float:
        """Return the seconds that one rank needs to encode a media segment, forward and backward."""
        shape = self.encoders[self.encoder_name(segment)]
        return media_flops(shape, segment.grid) / self.flops_per_s + self.segment_s

    def pack_cost(self, pack: Pack) -> float:
        """Return the seconds that one rank would need for the pack in the LLM, forward and backward.

        Padding costs like any token: the LLM computes it.
        """
        lengths = [pack.padded_len or sample.num_tokens for sample in pack.samples]
        flops = sum(sequence_flops(self.llm, length) for length in lengths)
        return flops / self.flops_per_s + self.segment_s * len(pack.samples)

    def transfer_cost(self, *, num_rows: int, num_messages: int) -> float:
        """Return the seconds for a rank to send (or receive) rows in so many messages."""
        row_bytes = self.row_bytes or 2 * 2 * self.llm.hidden
        return num_rows * row_bytes / self.bytes_per_s + num_messages * self.latency_s
