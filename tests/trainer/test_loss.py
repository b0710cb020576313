"""The chunked loss equals the plain one and never holds all logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.loss import chunked_cross_entropy, token_losses


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _inputs(
    positions: int, *, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(positions, 6, generator=random, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 6, generator=random, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 11, (positions,), generator=random)
    labels[torch.rand(positions, generator=random) < 0.3] = -100
    return hidden, weight, labels


@settings(max_examples=30, deadline=None)
@given(positions=st.integers(0, 20), chunk_size=st.integers(1, 25), seed=st.integers(0, 99))
def test_loss_and_gradients_equal_the_plain_ones_for_any_chunk(
    positions: int, chunk_size: int, seed: int
) -> None:
    hidden, weight, labels = _inputs(positions, seed=seed)
    loss, predictions = chunked_cross_entropy(hidden, weight, labels, chunk_size=chunk_size)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    logits = hidden @ weight.T
    plain = F.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gradients, torch.autograd.grad(plain, (hidden, weight)))
    assert torch.equal(predictions, logits.argmax(-1))


@settings(max_examples=30, deadline=None)
@given(positions=st.integers(0, 20), chunk_size=st.integers(1, 25), seed=st.integers(0, 99))
def test_the_losses_of_positions_equal_the_plain_ones_for_any_chunk(
    positions: int, chunk_size: int, seed: int
) -> None:
    hidden, weight, labels = _inputs(positions, seed=seed)
    losses, predictions = token_losses(hidden, weight, labels, chunk_size=chunk_size)
    logits = hidden @ weight.T
    torch.testing.assert_close(losses, F.cross_entropy(logits, labels, reduction="none").detach())
    assert torch.equal(predictions, logits.argmax(-1))
    assert not losses.requires_grad


def test_the_losses_of_half_precision_are_float32() -> None:
    hidden, weight, labels = _inputs(9, seed=1, dtype=torch.bfloat16)
    losses, _ = token_losses(hidden, weight, labels, chunk_size=4)
    plain = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="none")
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, plain.detach())


@pytest.mark.parametrize("positions", [0, 5])
def test_no_label_gives_zero_loss_and_zero_gradients(positions: int) -> None:
    hidden, weight, labels = _inputs(positions, seed=0)
    loss, _ = chunked_cross_entropy(hidden, weight, labels.fill_(-100), chunk_size=2)
    loss.backward()
    assert loss.item() == 0.0
    for tensor in (hidden, weight):
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_half_precision_sums_in_float32() -> None:
    hidden, weight, labels = _inputs(9, seed=1, dtype=torch.bfloat16)
    loss, _ = chunked_cross_entropy(hidden, weight, labels, chunk_size=4)
    plain = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain)


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_all_logits_never_exist_at_once() -> None:
    hidden = torch.randn(64, 4, requires_grad=True)
    weight = torch.randn(50, 4, requires_grad=True)
    with _LargestTensor() as largest:
        loss, _ = chunked_cross_entropy(hidden, weight, torch.zeros(64, dtype=torch.int64), chunk_size=8)
        loss.backward()
    assert largest.numel == 8 * 50


def test_all_logits_never_exist_at_once_for_the_losses_of_positions_either() -> None:
    hidden, weight = torch.randn(64, 4), torch.randn(50, 4)
    with _LargestTensor() as largest:
        token_losses(hidden, weight, torch.zeros(64, dtype=torch.int64), chunk_size=8)
    assert largest.numel == 8 * 50
