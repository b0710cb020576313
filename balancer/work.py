"""Operations and memory traffic of packs and media, as whole numbers: the analytic side of the costs.

A forward is five parts, each of kernels alike: matrix products, attention over whole segments, attention in
windows, elementwise work (norms, activations, residuals), and the layers behind the last block. Every part
has operations and values that memory moves; whichever takes longer is its time (roofline, Williams 2009). A
backward is twice a forward in both: each matrix product has two. Attention keeps its scores on chip
(FlashAttention, Dao 2022), so memory moves its queries, keys, values and outputs only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from balancer.shapes import TransformerShape, position_grid

FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a media segment or sample decides its work.

    Args:
        positions: Attention positions.
        rows: Rows that pass the layers behind the last block.
        full_pairs: (query, key) pairs of one layer that sees whole frames (or the whole sample).
        window_pairs: Those of one windowed layer.
    """

    positions: int
    rows: int
    full_pairs: int
    window_pairs: int = 0

    def pairs(self, shape: TransformerShape) -> int:
        """Return the pairs of all layers."""
        windowed = shape.windowed_layers
        return (shape.layers - windowed) * self.full_pairs + windowed * self.window_pairs


@dataclass(frozen=True, slots=True)
class Part:
    """Forward work of kernels alike.

    Args:
        flops: Floating-point operations.
        values: Numbers read and written, without weights.
    """

    flops: int
    values: int


@functools.lru_cache(maxsize=1 << 16)
def media_sizes(shape: TransformerShape, grid: tuple[int, int, int]) -> Sizes:
    """Return the sizes of a media segment.

    Args:
        shape: The encoder.
        grid: (temporal, rows, columns) of patches, or (mel frames, 1, 1); see ``Segment.grid``.
    """
    frames, rows, columns = position_grid(shape, grid)
    positions = frames * rows * columns
    window_pairs = 0
    if shape.window:
        # A window is the product of a run of rows and a run of columns, so the sum of squares factors.
        window_pairs = frames * _sum_of_squares(rows, shape.window) * _sum_of_squares(columns, shape.window)
    return Sizes(
        positions=positions,
        rows=positions // shape.positions_per_row,
        full_pairs=frames * (rows * columns) ** 2,
        window_pairs=window_pairs,
    )


def sample_sizes(num_tokens: int) -> Sizes:
    """Return the sizes of one isolated sample in the LLM, whose head sees every position."""
    return Sizes(positions=num_tokens, rows=num_tokens, full_pairs=num_tokens * num_tokens)


def packed_sizes(lengths: Sequence[int]) -> Sizes:
    """Return the sizes of samples of these lengths together, isolated from each other in one sequence."""
    positions = sum(lengths)
    return Sizes(positions=positions, rows=positions, full_pairs=sum([length * length for length in lengths]))


def sum_of_sizes(items: Sequence[Sizes]) -> Sizes:
    """Return the sizes of segments together."""
    return Sizes(
        positions=sum(item.positions for item in items),
        rows=sum(item.rows for item in items),
        full_pairs=sum(item.full_pairs for item in items),
        window_pairs=sum(item.window_pairs for item in items),
    )


def forward_parts(shape: TransformerShape, sizes: Sizes) -> tuple[Part, ...]:
    """Return the parts of a forward."""
    windowed = shape.windowed_layers
    values = _values_per_position(shape)
    output_values = sum(shape.output_widths[:-1]) + sum(shape.output_widths[1:])
    return (
        Part(2 * shape.matrix_values * sizes.positions, values.linear * sizes.positions),
        _attention(shape, shape.layers - windowed, sizes.full_pairs, sizes.positions),
        _attention(shape, windowed, sizes.window_pairs, sizes.positions),
        Part(0, values.elementwise * sizes.positions),
        Part(2 * shape.output_values * sizes.rows, output_values * sizes.rows),
    )


def media_flops(shape: TransformerShape, grid: tuple[int, int, int]) -> int:
    """Return the operations, forward and backward, of one media segment, without recomputation."""
    parts = forward_parts(shape, media_sizes(shape, grid))
    return FORWARD_AND_BACKWARD * sum(part.flops for part in parts)


def sequence_flops(shape: TransformerShape, num_tokens: int) -> int:
    """Return the operations, forward and backward, of one isolated sample in the LLM, its head included."""
    return FORWARD_AND_BACKWARD * sum(part.flops for part in forward_parts(shape, sample_sizes(num_tokens)))


def weight_values(shape: TransformerShape) -> int:
    """Return the numbers of all matrices, which a forward reads once: some position passes each expert."""
    return shape.all_matrix_values + shape.output_values


def activation_values(shape: TransformerShape, *, num_positions: int, num_rows: int, recompute: bool) -> int:
    """Return the numbers that a forward keeps for its backward.

    With recomputation only the input of every layer is kept, and what one layer keeps while it is done again.
    The logits of an LLM are not kept (its loss runs in chunks).
    """
    heads = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)  # queries, keys, values, and the output
    # Twice the stream and its norm; log-sum-exp of each head, float32; gate, up and their product.
    attention = 4 * shape.hidden + heads + 2 * shape.heads
    inner = 3 if shape.gated else 2
    dense = attention + inner * shape.ffn
    # Every active expert keeps its input and output too; the probabilities of the router are float32.
    expert = 2 * shape.hidden + inner * shape.expert_ffn
    sparse = attention + shape.active_experts * expert + 2 * shape.num_experts
    if recompute:
        largest = max(dense if shape.dense_layers else 0, sparse if shape.sparse_layers else 0)
        layers = shape.layers * shape.hidden + largest
    else:
        layers = shape.dense_layers * dense + shape.sparse_layers * sparse
    output = sum(shape.output_widths[:-1])
    return (layers + shape.input_dim) * num_positions + output * num_rows


@dataclass(frozen=True, slots=True)
class _Values:
    linear: int
    elementwise: int


@functools.lru_cache(maxsize=64)
def _values_per_position(shape: TransformerShape) -> _Values:
    """Numbers read and written per position by matrix products, and by all that lies between them."""
    hidden = shape.hidden
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 3 * hidden + (query + 2 * key) + (query + hidden)
    first = shape.input_dim + hidden
    dense, expert = _feed_forward(shape, shape.ffn), _feed_forward(shape, shape.expert_ffn)
    active = shape.active_experts
    router = _Values(hidden + shape.num_experts, 3 * shape.num_experts)
    # Rows go to their experts and come back (in, out), and are added up.
    moved = (2 + 2 + 1) * active * hidden + hidden
    # Two norms (in, out), two residual sums (two in, one out), rotary of queries and keys.
    elementwise = 4 * hidden + 6 * hidden + 2 * (query + key)
    return _Values(
        shape.layers * attention
        + shape.dense_layers * dense.linear
        + shape.sparse_layers * (router.linear + active * expert.linear)
        + first,
        shape.layers * elementwise
        + shape.dense_layers * dense.elementwise
        + shape.sparse_layers * (router.elementwise + active * expert.elementwise + moved),
    )


def _feed_forward(shape: TransformerShape, ffn: int) -> _Values:
    """Numbers read and written by the products of a feed-forward layer, and by its activation."""
    products = (2 if shape.gated else 1) * (shape.hidden + ffn) + (ffn + shape.hidden)
    return _Values(products, (3 if shape.gated else 2) * ffn)


def _attention(shape: TransformerShape, layers: int, pairs: int, positions: int) -> Part:
    """Two products of two operations per pair and head; a causal kernel skips half of the pairs."""
    flops = layers * pairs * 4 * shape.heads * shape.head_dim
    values = layers * positions * 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    return Part(flops // 2 if shape.causal else flops, values)


def _sum_of_squares(length: int, window: int) -> int:
    """Sum of the squared lengths of the windows that cut ``length``; the last one may be short."""
    return length // window * window * window + (length % window) ** 2
