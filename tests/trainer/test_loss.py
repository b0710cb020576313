"""The chunked loss equals the plain one and never holds all logits."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.loss import LOGITS_AT_ONCE, chunk_size_for, chunked_cross_entropy, token_losses


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
    loss, predictions, _ = chunked_cross_entropy(hidden, weight, labels, chunk_size=chunk_size)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    logits = hidden @ weight.T
    plain = F.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gradients, torch.autograd.grad(plain, (hidden, weight)))
    assert torch.equal(predictions, logits.argmax(-1))


@settings(max_examples=30, deadline=None)
@given(positions=st.integers(0, 20), chunk_size=st.integers(1, 25), seed=st.integers(0, 99))
def test_the_z_loss_and_its_gradients_equal_the_plain_ones(
    positions: int, chunk_size: int, seed: int
) -> None:
    hidden, weight, labels = _inputs(positions, seed=seed)
    loss, _, z_sum = chunked_cross_entropy(hidden, weight, labels, chunk_size=chunk_size, z_loss=0.3)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    logits = hidden @ weight.T
    plain_z = logits.logsumexp(-1)[labels != -100].square().sum()
    plain = F.cross_entropy(logits, labels, reduction="sum") + 0.3 * plain_z
    torch.testing.assert_close(z_sum, plain_z.detach())
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gradients, torch.autograd.grad(plain, (hidden, weight)))
    assert not z_sum.requires_grad


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
    loss, *_ = chunked_cross_entropy(hidden, weight, labels.fill_(-100), chunk_size=2)
    loss.backward()
    assert loss.item() == 0.0
    for tensor in (hidden, weight):
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_half_precision_sums_in_float32() -> None:
    hidden, weight, labels = _inputs(9, seed=1, dtype=torch.bfloat16)
    loss, *_ = chunked_cross_entropy(hidden, weight, labels, chunk_size=4)
    plain = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain)


def test_many_chunks_of_half_precision_are_as_right_as_one() -> None:
    hidden, weight, labels = _inputs(1200, seed=1, dtype=torch.bfloat16)
    hidden = hidden.detach() + 1  # rows alike, so that the sum grows and small parts of it could get lost
    exact = _weight_gradient(hidden.double(), weight.double(), labels, chunk_size=1200)
    errors = [
        float((_weight_gradient(hidden, weight, labels, chunk_size=size).double() - exact).norm())
        for size in (1200, 8)
    ]
    assert errors[1] < 2 * errors[0]


def _weight_gradient(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, chunk_size: int
) -> torch.Tensor:
    weight = weight.detach().requires_grad_()
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_size=chunk_size).loss_sum
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.dtype == weight.dtype
    return gradient


def test_the_gradient_of_half_precision_is_scaled_in_float32() -> None:
    hidden, weight, labels = _inputs(9, seed=1, dtype=torch.bfloat16)
    loss, *_ = chunked_cross_entropy(hidden, weight, labels, chunk_size=9)  # a single product
    whole = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    thirds = torch.autograd.grad(loss / 3, (hidden, weight))
    for one, third in zip(whole, thirds, strict=True):
        assert torch.equal(third, (one.float() / 3).to(torch.bfloat16))


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_costs_none(frozen: int) -> None:
    inputs = _inputs(9, seed=2)
    inputs[frozen].requires_grad_(False)
    with _Live() as live:
        loss, *_ = chunked_cross_entropy(*inputs, chunk_size=4)
        loss.backward()
    assert inputs[frozen].grad is None
    assert inputs[1 - frozen].grad is not None
    assert live.calls["mm"] + live.calls["addmm_"] == 3 + 3, "for each chunk the logits and one gradient"
    with torch.no_grad(), _Live() as live:
        loss, *_ = chunked_cross_entropy(*_inputs(9, seed=2), chunk_size=4)
    assert not loss.requires_grad
    assert live.calls["mm"] == 3
    assert live.calls["exp_"] == 0


class _Live(TorchDispatchMode):
    """Counts calls by name, and the numbers in tensors made meanwhile that are alive at one time."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.calls: Counter[str] = Counter()
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[func._schema.name.removeprefix("aten::")] += 1
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage(), tensor.element_size())
        return out

    def _see(self, storage: torch.UntypedStorage, width: int) -> None:
        key, numel = storage.data_ptr(), storage.nbytes() // width
        if numel and key not in self._storages:
            self._storages.add(key)
            self.now += numel
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, numel)

    def _forget(self, key: int, numel: int) -> None:
        self._storages.discard(key)
        self.now -= numel


@pytest.mark.parametrize("chunk_size", [4, 16])
def test_memory_of_forward_and_backward_is_that_of_one_chunk(chunk_size: int) -> None:
    positions, width, vocabulary = 128, 4, 2000
    hidden = torch.randn(positions, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.zeros(positions, dtype=torch.int64)
    with _Live(hidden, weight, labels) as live:
        loss, *_ = chunked_cross_entropy(hidden, weight, labels, chunk_size=chunk_size)
        kept = live.now
        (loss / 7).backward()
    gradients = hidden.numel() + weight.numel()
    small = 4 * positions
    assert kept <= gradients + small
    # Logits and their log-softmax, which becomes the gradient; or the gradients, and those scaled.
    assert live.peak <= max(2 * chunk_size * vocabulary + gradients, 2 * gradients) + small
    assert live.peak < positions * vocabulary / 2


def test_all_logits_never_exist_at_once_for_the_losses_of_positions_either() -> None:
    hidden, weight = torch.randn(64, 4), torch.randn(50, 4)
    with _Live(hidden, weight) as live:
        token_losses(hidden, weight, torch.zeros(64, dtype=torch.int64), chunk_size=8)
    assert live.peak < 64 * 50 / 2


def test_a_chunk_has_as_many_positions_as_its_logits_may_be() -> None:
    assert chunk_size_for(152_064) == 441
    assert chunk_size_for(LOGITS_AT_ONCE + 1) == 1
