"""The sizes of encoders and of the LLM that decide how much work they are.

What an attention segment is follows the Qwen2.5 family: in vision one frame (temporal patch), or one square
window of it in the windowed layers; in audio one chunk of positions after the convolutions; in the LLM one
sample, because packs isolate their samples.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """The sizes of one transformer that decide how many operations it takes.

    A *position* is what attention sees: a patch, an audio frame after the strided convolution, or a token.

    Args:
        hidden: Width of the residual stream.
        layers: Transformer layers.
        ffn: Width of the feed-forward layer, where it is not experts.
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
        sparse_layers: Layers with experts in place of the feed-forward layer.
        num_experts: Of a sparse layer.
        active_experts: Of these, those that one position passes.
        expert_ffn: Width of an expert, which is a feed-forward layer.
        joins: Whether attention can cross the ranks that share a segment; else it is cut between frames only.
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
    sparse_layers: int = 0
    num_experts: int = 0
    active_experts: int = 0
    expert_ffn: int = 0
    # It changes no cost, so not the digest either.
    joins: bool = field(default=True, repr=False)

    @property
    def matrix_values(self) -> int:
        """Numbers in the matrices that every position passes: all layers and the first one."""
        return self._matrix_values(self.active_experts)

    @property
    def all_matrix_values(self) -> int:
        """As ``matrix_values``, with the experts that a position does not pass."""
        return self._matrix_values(self.num_experts)

    @property
    def dense_layers(self) -> int:
        """Layers without experts."""
        return self.layers - self.sparse_layers

    def _matrix_values(self, experts: int) -> int:
        projections = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        per_width = (3 if self.gated else 2) * self.hidden
        router = self.hidden * self.num_experts
        feed_forward = self.dense_layers * per_width * self.ffn
        feed_forward += self.sparse_layers * (router + experts * per_width * self.expert_ffn)
        return self.layers * projections + feed_forward + self.input_dim * self.hidden

    @property
    def output_values(self) -> int:
        """Numbers in the matrices behind the last block, which every row passes."""
        return sum(wide * narrow for wide, narrow in itertools.pairwise(self.output_widths))

    @property
    def windowed_layers(self) -> int:
        """Layers whose attention stays inside a window."""
        return self.layers - min(self.full_attention_layers, self.layers) if self.window else 0

    @property
    def digest(self) -> str:
        """Short digest of all sizes: equal for equal shapes, on any machine."""
        return hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()


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


def position_grid(shape: TransformerShape, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return (frames, rows, columns) of attention positions; attention never crosses a frame.

    An encoder with ``units_per_position`` above one reads one line of units (audio): it has one frame of
    that many fewer rows.
    """
    if shape.units_per_position > 1:
        return 1, -(-grid[0] // shape.units_per_position), 1
    return grid
