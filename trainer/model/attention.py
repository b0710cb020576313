"""Attention over packed sequences of any lengths, each row only with the rows of its own segment.

Segments are explicit Python integers, so no device is ever asked for them. Device and type decide the kernel,
see ``attention_kernel``: on CUDA in half precision one for segments of any lengths; else rows are sorted by
the length of their segment and every length is one batched call: a thousand equal windows cost one call, not
a thousand.

Shapes: L rows, N query heads, K key and value heads (K divides N), H head width, B segments of one length.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from trainer.model.blocks import outside_graphs

AttentionKernel = Literal["varlen", "grouped"]

KERNEL_WORDS: dict[AttentionKernel, str] = {
    "varlen": "one kernel for segments of any lengths",
    "grouped": "one SDPA call per length of segment",
}


def attention_kernel(device: torch.device, dtype: torch.dtype) -> AttentionKernel:
    """Return what runs attention of ``dtype`` on ``device``; the kernel for any lengths takes halves only."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return "varlen" if device.type == "cuda" and is_half else "grouped"


class Integers(Protocol):
    """A numpy array or a CPU tensor. FSDP moves tensors to its device and leaves arrays alone: use arrays."""

    def tolist(self) -> Any:
        """Return nested lists of int."""
        ...


class Segments:
    """How rows divide into consecutive segments. Not a dataclass: FSDP rebuilds those at every block.

    Args:
        lengths: Rows of each segment; zeros are left out.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(int(length) for length in lengths if length)
        self.num_rows = sum(self.lengths)
        self._tensors: dict[tuple[str, torch.device], Tensor] = {}
        counts = Counter(self.lengths)
        self.groups = tuple(sorted(counts.items())) or ((0, 1),)
        self.is_sorted = all(a <= b for a, b in itertools.pairwise(self.lengths))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Integers, *, num_rows: int) -> Segments:
        """Return the segments between ``cu_seqlens``; rows behind the last boundary form one of their own.

        Raises:
            ValueError: The boundaries fall, or go beyond ``num_rows``.
        """
        bounds = [*cast("list[int]", cu_seqlens.tolist()), num_rows]
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        if bounds[0] != 0 or any(length < 0 for length in lengths):
            raise ValueError(f"cu_seqlens {bounds[:-1]} do not rise from 0 to at most {num_rows}")
        return cls(lengths)

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """Return the boundaries, int32 [segments + 1]; made once per device."""
        return self._tensor("cu_seqlens", device)

    def sort_rows(self, device: torch.device) -> Tensor:
        """Return int64 [L]: row indices, shortest segments first."""
        return self._tensor("sort", device)

    def unsort_rows(self, device: torch.device) -> Tensor:
        """Return int64 [L]: the inverse of ``sort_rows``."""
        return self._tensor("unsort", device)

    def _tensor(self, name: str, device: torch.device) -> Tensor:
        key = (name, device)
        if key not in self._tensors:
            self._tensors[key] = torch.from_numpy(self._array(name)).to(device, non_blocking=True)
        return self._tensors[key]

    def _array(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        lengths = np.array(self.lengths, dtype=np.int64)
        ends = np.cumsum(lengths)
        if name == "cu_seqlens":
            return np.concatenate([[0], ends]).astype(np.int32)
        order = np.argsort(lengths, kind="stable")
        sorted_ends = np.cumsum(lengths[order])
        shift = (ends - lengths)[order] - (sorted_ends - lengths[order])
        rows = np.repeat(shift, lengths[order]) + np.arange(self.num_rows)
        return rows if name == "sort" else np.argsort(rows)


# Lengths of segments change with every microbatch: in a graph each would be compiled.
@outside_graphs
def attend(q_LNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, *, segments: Segments, causal: bool) -> Tensor:
    """Return softmax(q k / sqrt(H)) v inside every segment: [L, N, H]; L = 0 stays on the graph.

    Raises:
        ValueError: The segments do not cover the rows.
    """
    if segments.num_rows != q_LNH.shape[0]:
        raise ValueError(f"segments cover {segments.num_rows} rows, there are {q_LNH.shape[0]}")
    if segments.num_rows and attention_kernel(q_LNH.device, q_LNH.dtype) == "varlen":
        return _attend_varlen(q_LNH, k_LKH, v_LKH, segments=segments, causal=causal)
    return _attend_grouped(q_LNH, k_LKH, v_LKH, segments=segments, causal=causal)


def _attend_varlen(
    q_LNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, *, segments: Segments, causal: bool
) -> Tensor:
    cu_seqlens = segments.cu_seqlens(q_LNH.device)
    longest = max(segments.lengths)
    out_LNH = varlen_attn(
        q_LNH,
        k_LKH,
        v_LKH,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=q_LNH.shape[1] != k_LKH.shape[1],
    )
    return cast(Tensor, out_LNH)


def _attend_grouped(
    q_LNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, *, segments: Segments, causal: bool
) -> Tensor:
    tensors = (q_LNH, k_LKH, v_LKH)
    if not segments.is_sorted:
        order = segments.sort_rows(q_LNH.device)
        tensors = (q_LNH[order], k_LKH[order], v_LKH[order])
    sizes = [length * count for length, count in segments.groups]
    groups = zip(segments.groups, *(torch.split(tensor, sizes) for tensor in tensors), strict=True)
    outs = [_attend_equal(q, k, v, length=length, causal=causal) for (length, _), q, k, v in groups]
    out_LNH = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out_LNH if segments.is_sorted else out_LNH[segments.unsort_rows(q_LNH.device)]


def _attend_equal(q_LNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, *, length: int, causal: bool) -> Tensor:
    """Attend inside runs of ``length`` rows, all in one call."""
    num_segments = q_LNH.shape[0] // length if length else 1
    q_BNLH, k_BKLH, v_BKLH = (
        rows.reshape(num_segments, length, *rows.shape[1:]).transpose(1, 2) for rows in (q_LNH, k_LKH, v_LKH)
    )
    out_BNLH = F.scaled_dot_product_attention(
        q_BNLH, k_BKLH, v_BKLH, is_causal=causal, enable_gqa=q_LNH.shape[1] != k_LKH.shape[1]
    )
    return out_BNLH.transpose(1, 2).reshape(q_LNH.shape)
