"""The language model against the reference: logits, losses and gradients, for positions as far as 30000.

Bound: the defaults of ``assert_close``, in float32 on tensors divided by their largest entry. Not in
float64: there the reference still normalises in float32.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from omni_pipeline.core.batch import IGNORE_LABEL
from tests.support.reference_thinker import (
    CONFIG,
    Pair,
    assert_equal,
    assert_gradients_equal,
    head_weight,
    make_pair,
    zero_gradients,
)

NUM_TOKENS = 24
MEDIA = torch.tensor([0, 5, 6, 7, 20])


@functools.cache
def _pair(*, tied: bool) -> Pair:
    return make_pair(
        CONFIG.model_validate({**CONFIG.model_dump(), "llm": {**CONFIG.llm.model_dump(), "tied_head": tied}})
    )


def _inputs(pair: Pair, *, farthest: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, positions, media rows, and labels."""
    random = torch.Generator().manual_seed(2)
    llm = pair.config.llm
    tokens = torch.randint(0, llm.vocab_size, (NUM_TOKENS,), generator=random)
    positions = torch.randint(0, farthest, (3, NUM_TOKENS), generator=random)
    rows = torch.randn(len(MEDIA), llm.hidden, generator=random)
    labels = torch.where(torch.arange(NUM_TOKENS) % 3 == 0, IGNORE_LABEL, tokens.roll(-1))
    labels[-1] = IGNORE_LABEL
    return tokens, positions, rows, labels


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("farthest", [40, 30_000])
def test_logits_loss_and_gradients_are_those_of_the_reference(tied: bool, farthest: int) -> None:
    pair = _pair(tied=tied)
    tokens, positions, rows, labels = _inputs(pair, farthest=farthest)
    zero_gradients(pair)
    own, other = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    ours = pair.ours.llm(tokens, positions, np.array([0, NUM_TOKENS]), own, MEDIA, labels)
    language = pair.theirs.model.language_model
    embedded = language.embed_tokens(tokens).index_copy(0, MEDIA, other)[None]
    hidden = language(inputs_embeds=embedded, position_ids=positions[:, None]).last_hidden_state
    theirs = pair.theirs.lm_head(hidden)
    loss = pair.theirs.loss_function(
        logits=theirs, labels=labels.roll(1)[None], vocab_size=pair.config.llm.vocab_size
    )
    num_labels = (labels != IGNORE_LABEL).sum()
    assert_equal(F.linear(ours.hidden, head_weight(pair.ours)), theirs[0])
    torch.testing.assert_close(ours.loss_sum / num_labels, loss)
    torch.autograd.backward(ours.loss_sum / num_labels)
    torch.autograd.backward(loss)
    assert_gradients_equal(pair, parts=["llm."])
    assert own.grad is not None
    assert other.grad is not None
    assert_equal(own.grad, other.grad)


def test_the_loss_of_each_position_is_that_of_the_logits() -> None:
    pair = _pair(tied=False)
    tokens, positions, rows, labels = _inputs(pair, farthest=40)
    bounds = np.array([0, NUM_TOKENS])
    ours = pair.ours.llm(tokens, positions, bounds, rows, MEDIA, labels, with_losses=True)
    language = pair.theirs.model.language_model
    embedded = language.embed_tokens(tokens).index_copy(0, MEDIA, rows)[None]
    theirs = pair.theirs.lm_head(language(inputs_embeds=embedded, position_ids=positions[:, None])[0])[0]
    torch.testing.assert_close(
        ours.losses, F.cross_entropy(theirs, labels, reduction="none"), check_device=False
    )
    assert torch.equal(ours.predictions, theirs.argmax(-1))
