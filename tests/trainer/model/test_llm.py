"""Packed samples do not see each other; packed equals separate; media rows are differentiable."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainer.model.reference import build, gradients
from trainer.config import ModelConfig
from trainer.model.llm import Llm, LlmOutput

LENGTHS = [7, 1, 12, 5]
MEDIA = [2, 3, 10, 11, 12]  # in samples 0 and 2


class _Pack(NamedTuple):
    tokens: Tensor
    positions: Tensor
    labels: Tensor
    rows: Tensor


def _llm(*, tied: bool = False) -> Llm:
    return build(ModelConfig.model_validate({"size": "tiny", "llm": {"tied_head": tied}})).llm


def _pack(seed: int = 0) -> _Pack:
    random = torch.Generator().manual_seed(seed)
    size = sum(LENGTHS)
    # Positions restart in every sample and differ between the axes, as beside pictures.
    base = torch.cat([torch.arange(length) for length in LENGTHS])
    positions = torch.stack([base, base + base % 3, base + base % 2])
    labels = torch.randint(0, 264, (size,), generator=random)
    labels[::5] = -100
    rows = torch.randn(len(MEDIA), 64, generator=random, dtype=torch.float64, requires_grad=True)
    return _Pack(torch.randint(0, 264, (size,), generator=random), positions, labels, rows)


def _run(llm: Llm, pack: _Pack) -> LlmOutput:
    cu_seqlens = np.cumsum([0, *LENGTHS]).astype(np.int32)
    out = llm(pack.tokens, pack.positions, cu_seqlens, pack.rows, torch.tensor(MEDIA), pack.labels)
    assert isinstance(out, LlmOutput)
    return out


def _run_separately(llm: Llm, pack: _Pack) -> tuple[Tensor, Tensor]:
    losses, hidden = [], []
    media = torch.tensor(MEDIA)
    start = 0
    for length in LENGTHS:
        here = slice(start, start + length)
        inside = (media >= start) & (media < start + length)
        out = llm(
            pack.tokens[here],
            pack.positions[:, here],
            torch.tensor([0, length], dtype=torch.int32),
            pack.rows[inside],
            media[inside] - start,
            pack.labels[here],
        )
        losses.append(out.loss_sum)
        hidden.append(out.hidden)
        start += length
    return torch.stack(losses).sum(), torch.cat(hidden)


@pytest.mark.parametrize("tied", [False, True])
def test_packed_equals_separate_forward_and_backward(tied: bool) -> None:
    llm, pack = _llm(tied=tied), _pack()
    out = _run(llm, pack)
    out.loss_sum.backward()
    packed_gradients, packed_rows = gradients(llm), pack.rows.grad
    llm.zero_grad()
    pack = _pack()
    loss, hidden = _run_separately(llm, pack)
    loss.backward()
    torch.testing.assert_close(out.hidden, hidden)
    torch.testing.assert_close(out.loss_sum, loss)
    torch.testing.assert_close(packed_gradients, gradients(llm))
    torch.testing.assert_close(packed_rows, pack.rows.grad)


def test_the_losses_of_positions_are_those_of_the_sum() -> None:
    llm, pack = _llm(), _pack()
    cu_seqlens = np.cumsum([0, *LENGTHS]).astype(np.int32)
    arguments = pack.tokens, pack.positions, cu_seqlens, pack.rows, torch.tensor(MEDIA), pack.labels
    summed, of_positions = llm(*arguments), llm(*arguments, with_losses=True)
    torch.testing.assert_close(of_positions.losses.sum(), summed.loss_sum.detach())
    torch.testing.assert_close(of_positions.loss_sum, summed.loss_sum.detach())
    assert torch.equal(of_positions.predictions, summed.predictions)
    assert not of_positions.losses.requires_grad


@pytest.mark.parametrize("sample", range(len(LENGTHS)))
def test_changing_the_text_of_a_sample_changes_no_other_sample(sample: int) -> None:
    llm, pack = _llm(), _pack()
    start = sum(LENGTHS[:sample])
    inside = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    inside[start : start + LENGTHS[sample]] = True
    changed = pack._replace(tokens=torch.where(inside, (pack.tokens + 1) % 264, pack.tokens))
    before, after = _run(llm, pack).hidden, _run(llm, changed).hidden
    assert torch.equal(before[~inside], after[~inside])
    assert not torch.equal(before[inside], after[inside])


def test_changing_the_media_of_a_sample_changes_no_other_sample() -> None:
    llm, pack = _llm(), _pack()
    before = _run(llm, pack).hidden
    after = _run(llm, pack._replace(rows=pack.rows + torch.tensor([0.0, 0, 0, 1, 0])[:, None])).hidden
    differs = (before != after).any(dim=1).nonzero().flatten().tolist()
    # Attention is causal: the row at 11 changes itself and what follows it in its sample, positions 8 .. 19.
    assert differs == list(range(11, 20))


def test_text_under_media_does_not_matter() -> None:
    llm, pack = _llm(), _pack()
    tokens = pack.tokens.clone()
    tokens[MEDIA] = 5
    assert torch.equal(_run(llm, pack).loss_sum, _run(llm, pack._replace(tokens=tokens)).loss_sum)


def test_no_media_rows_stay_on_the_graph() -> None:
    llm, pack = _llm(), _pack()
    rows = torch.zeros(0, 64, dtype=torch.float64, requires_grad=True)
    out = llm(
        pack.tokens, pack.positions, np.array([0, 25]), rows, torch.zeros(0, dtype=torch.int64), pack.labels
    )
    out.loss_sum.backward()
    assert rows.grad is not None
    assert out.losses is None


def test_an_empty_pack_gives_zero_loss_and_zero_gradients_everywhere() -> None:
    llm = _llm()
    none = torch.zeros(0, dtype=torch.int64)
    rows = torch.zeros(0, 64, dtype=torch.float64, requires_grad=True)
    out = llm(none, none.expand(3, 0), np.array([0], dtype=np.int32), rows, none, none)
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0.0
    assert rows.grad is not None
    assert all(not gradient.any() for gradient in gradients(llm).values())


def test_rows_and_positions_of_media_must_agree() -> None:
    llm, pack = _llm(), _pack()
    with pytest.raises(ValueError, match="4 media rows for 5 media positions"):
        _run(llm, pack._replace(rows=pack.rows[:4]))
