"""Packed attention against a dense mask in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.model.reference import dense_attention
from trainer.model.attention import AttentionKernel, Segments, attend, attention_kernel


def _qkv(num_rows: int, *, heads: int = 4, kv_heads: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = [(num_rows, heads, 8), (num_rows, kv_heads, 8), (num_rows, kv_heads, 8)]
    q, k, v = (torch.randn(s, generator=random, dtype=torch.float64, requires_grad=True) for s in shapes)
    return q, k, v


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=8),
    causal=st.booleans(),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
)
def test_any_segments_equal_the_dense_mask_forward_and_backward(
    lengths: list[int], causal: bool, heads: tuple[int, int]
) -> None:
    qkv = _qkv(sum(lengths), heads=heads[0], kv_heads=heads[1])
    out = attend(*qkv, segments=Segments(lengths), causal=causal)
    expected = dense_attention(*qkv, lengths=lengths, causal=causal)
    upstream = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out, qkv, upstream), torch.autograd.grad(expected, qkv, upstream)
    )


def test_equal_lengths_share_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = F.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, v: Tensor, **options: bool) -> Tensor:
        calls.append(q.shape[0])
        return real(q, k, v, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    lengths = [4, 2] * 50 + [3]
    attend(*_qkv(sum(lengths)), segments=Segments(lengths), causal=False)
    assert calls == [50, 1, 50]


@pytest.mark.parametrize(
    ("device", "dtype", "kernel"),
    [
        ("cpu", torch.float32, "grouped"),
        ("cpu", torch.bfloat16, "grouped"),
        ("cuda", torch.float32, "grouped"),
        ("cuda", torch.bfloat16, "varlen"),
        ("cuda", torch.float16, "varlen"),
    ],
)
def test_device_and_type_decide_the_kernel(device: str, dtype: torch.dtype, kernel: AttentionKernel) -> None:
    assert attention_kernel(torch.device(device), dtype) == kernel


def test_no_rows_stay_on_the_graph() -> None:
    qkv = _qkv(0)
    out = attend(*qkv, segments=Segments([]), causal=True)
    out.sum().backward()
    assert out.shape == (0, 4, 8)
    assert all(tensor.grad is not None for tensor in qkv)


def test_sorted_rows_and_their_inverse_undo_each_other() -> None:
    segments = Segments([3, 1, 0, 2])
    cpu = torch.device("cpu")
    assert segments.sort_rows(cpu).tolist() == [3, 4, 5, 0, 1, 2]
    assert segments.sort_rows(cpu)[segments.unsort_rows(cpu)].tolist() == list(range(6))
    assert segments.cu_seqlens(cpu).tolist() == [0, 3, 4, 6]
    assert segments.cu_seqlens(cpu).dtype == torch.int32


def test_rows_behind_the_last_boundary_are_a_segment_of_their_own() -> None:
    assert Segments.from_cu_seqlens(np.array([0, 3, 5]), num_rows=9).lengths == (3, 2, 4)
    assert Segments.from_cu_seqlens(np.array([0]), num_rows=0).lengths == ()


@pytest.mark.parametrize(("bounds", "num_rows"), [([0, 3, 2], 4), ([0, 5], 4), ([1, 4], 4)])
def test_boundaries_that_do_not_fit_are_refused(bounds: list[int], num_rows: int) -> None:
    with pytest.raises(ValueError, match=f"do not rise from 0 to at most {num_rows}"):
        Segments.from_cu_seqlens(np.array(bounds), num_rows=num_rows)


def test_segments_must_cover_the_rows() -> None:
    with pytest.raises(ValueError, match="segments cover 4 rows, there are 5"):
        attend(*_qkv(5), segments=Segments([4]), causal=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("causal", "kv_heads"), list(itertools.product([False, True], [4, 2])))
def test_the_kernel_for_varied_lengths_equals_the_grouped_calls(causal: bool, kv_heads: int) -> None:
    lengths = [5, 64, 1, 64, 17]
    qkv = [
        tensor.detach().cuda().bfloat16().requires_grad_() for tensor in _qkv(sum(lengths), kv_heads=kv_heads)
    ]
    wide = [tensor.detach().double().requires_grad_() for tensor in qkv]
    out = attend(*qkv, segments=Segments(lengths), causal=causal)
    expected = attend(*wide, segments=Segments(lengths), causal=causal)
    # bfloat16 has 8 bits: rounding of inputs of order 1 in each of two products.
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    gradients = torch.autograd.grad(out.sum(), qkv)
    for gradient, exact in zip(gradients, torch.autograd.grad(expected.sum(), wide), strict=True):
        torch.testing.assert_close(gradient.double(), exact, rtol=5e-2, atol=5e-2)
