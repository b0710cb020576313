"""Experts: grouped products, empty runs, no rows, packing; and the samples that their balance counts."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.trainer.model.reference import build, gradients
from trainer.config import ModelConfig
from trainer.counts import parameter_counts
from trainer.experts_config import ExpertsConfig
from trainer.model.expert_balance import RoutedSamples
from trainer.model.llm import Llm, LlmOutput
from trainer.model.moe import SparseMlp, grouped_linear
from trainer.model.omni import build_model

EXPERTS = {"count": 5, "top_k": 2, "intermediate": 8}
LENGTHS = [7, 1, 12, 5]


def _config(**experts: Any) -> ModelConfig:
    llm = {"layers": 3, "qk_norm": True, "experts": {**EXPERTS, "dense_layers": (1,), **experts}}
    return ModelConfig.model_validate({"size": "tiny", "llm": llm})


def _run(llm: Llm, lengths: list[int], *, seed: int = 0, **options: Any) -> LlmOutput:
    """Run samples of these lengths in one sequence, or the one numbered ``only``."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 264, (sum(lengths),), generator=random)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(3, -1)
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    labels = tokens.roll(-1)
    labels[bounds[1:] - 1] = -100
    if (only := options.pop("only", None)) is not None:
        here = slice(bounds[only], bounds[only + 1])
        tokens, positions, labels = tokens[here], positions[:, here], labels[here]
        bounds = bounds[only : only + 2] - bounds[only]
    rows = torch.zeros(0, 64, dtype=torch.float64, requires_grad=True)
    output: LlmOutput = llm(
        tokens, positions, bounds, rows, torch.zeros(0, dtype=torch.int64), labels, **options
    )
    return output


def _sums(output: LlmOutput) -> Tensor:
    assert output.balance_sum is not None
    return output.loss_sum + output.balance_sum


def test_packed_equals_separate_with_the_balance_of_every_sample_by_itself() -> None:
    llm = build(_config()).llm
    packed = _run(llm, LENGTHS)
    torch.autograd.backward([_sums(packed)])
    found = gradients(llm)
    llm.zero_grad()
    alone = [_run(llm, LENGTHS, only=index) for index in range(len(LENGTHS))]
    torch.autograd.backward([torch.stack([_sums(output) for output in alone]).sum()])
    torch.testing.assert_close(packed.hidden, torch.cat([output.hidden for output in alone]))
    torch.testing.assert_close(_sums(packed), torch.stack([_sums(output) for output in alone]).sum())
    torch.testing.assert_close(packed.expert_counts, sum(output.expert_counts for output in alone))
    torch.testing.assert_close(found, gradients(llm))


def test_blocks_that_run_again_in_the_backward_count_their_tokens_once() -> None:
    llm = build(_config()).llm
    plain = _run(llm, LENGTHS)
    torch.autograd.backward([_sums(plain)])
    found = gradients(llm)
    llm.zero_grad()
    for block in llm.block_list:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    again = _run(llm, LENGTHS)
    torch.autograd.backward([_sums(again)])
    assert torch.equal(_sums(again), _sums(plain))
    torch.testing.assert_close(gradients(llm), found, rtol=0, atol=0)
    torch.testing.assert_close(again.expert_counts, plain.expert_counts, rtol=0, atol=0)


def test_every_token_of_a_sample_passes_top_k_experts_of_every_sparse_layer() -> None:
    counts = _run(build(_config()).llm, LENGTHS).expert_counts
    assert counts is not None
    assert counts.shape == (2, 5)
    assert counts.sum(dim=1).tolist() == [2 * sum(LENGTHS)] * 2


def test_only_the_samples_that_are_named_count() -> None:
    llm = build(_config()).llm
    named = _run(llm, LENGTHS, spans=np.array([(0, 7), (8, 20)]))
    alone = [_run(llm, LENGTHS, only=index) for index in (0, 2)]
    torch.testing.assert_close(named.balance_sum, sum(output.balance_sum for output in alone))
    torch.testing.assert_close(named.expert_counts, sum(output.expert_counts for output in alone))
    none = _run(llm, LENGTHS, spans=np.empty((0, 2), dtype=np.int64))
    assert none.balance_sum == 0.0


def test_perfect_balance_costs_top_k_and_one_expert_for_all_costs_the_most() -> None:
    """By hand: 5 experts, 2 of each token."""
    like = torch.zeros(1, dtype=torch.float64)
    samples = RoutedSamples([(0, 5)], num_rows=5, like=like)
    even = samples.sums(torch.full((5, 5), 0.2).double(), torch.tensor([[i, (i + 1) % 5] for i in range(5)]))
    torch.testing.assert_close(samples.loss_sum([even, even]), 5 * torch.tensor(2.0).double())
    sure = torch.tensor([[1.0, 0, 0, 0, 0]] * 5).double()
    worst = samples.sums(sure, torch.tensor([[0, 1]] * 5))
    torch.testing.assert_close(samples.loss_sum([worst]), 5 * torch.tensor(5.0).double())


@pytest.mark.parametrize("span", [(3, 3), (4, 2), (-1, 2), (0, 6)])
def test_samples_beyond_the_rows_are_refused(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"span 1 is rows {span[0]} to {span[1]} of 5"):
        RoutedSamples([(0, 1), span], num_rows=5, like=torch.zeros(1))


def test_no_rows_stay_on_the_graph_of_every_parameter() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        layer = _layer().to(dtype)
        x = torch.zeros(0, 16, dtype=dtype, requires_grad=True)
        out, sums = layer(x, RoutedSamples([], num_rows=0, like=x))
        torch.autograd.backward([out.float().sum() + sums.probs.sum()])
        assert all(not gradient.any() for gradient in gradients(layer).values())
        assert x.grad is not None


def test_without_gradient_and_losses_by_position_no_balance_is_made() -> None:
    llm = build(_config()).llm
    of_positions = _run(llm, LENGTHS, with_losses=True)
    assert (of_positions.balance_sum, of_positions.expert_counts) == (None, None)
    torch.testing.assert_close(of_positions.loss_sum, _run(llm, LENGTHS).loss_sum.detach())


def _layer(**experts: Any) -> SparseMlp:
    layer = SparseMlp(16, ExpertsConfig(**{**EXPERTS, **experts}))
    random = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(generator=random, std=0.3)
    return layer


RUNS = {"some empty": [3, 0, 4, 0, 0], "first": [9, 0, 0, 0, 0], "last": [0, 0, 0, 0, 2], "none": [0] * 5}


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 6])
def test_grouped_products_are_those_of_the_runs_one_by_one(
    runs: list[int], dtype: torch.dtype, width: int
) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(sum(runs), 8, generator=random).to(dtype).requires_grad_()
    weight = torch.randn(5, width, 8, generator=random).to(dtype).requires_grad_()
    ends = torch.tensor(runs).cumsum(0).to(torch.int32)
    grouped = grouped_linear(x, weight, ends)
    one_by_one = torch.cat([part @ weight[i].T for i, part in enumerate(torch.split(x, runs))])
    torch.testing.assert_close(grouped, one_by_one)
    gradient = torch.randn(grouped.shape, generator=random).to(dtype)
    torch.testing.assert_close(
        torch.autograd.grad([grouped], [x, weight], [gradient]),
        torch.autograd.grad([one_by_one], [x, weight], [gradient]),
    )


def test_no_token_depends_on_the_others_and_the_same_input_gives_the_same_bits() -> None:
    layer = _layer()
    x = torch.randn(300, 16, generator=torch.Generator().manual_seed(1))
    whole = layer(x, None)[0]
    assert torch.equal(whole, layer(x, None)[0])
    torch.testing.assert_close(torch.cat([layer(row, None)[0] for row in x.split(1)]), whole)
    crowd = x[:1].expand(300, -1)
    torch.testing.assert_close(layer(crowd, None)[0], whole[:1].expand(300, -1))


def test_first_weights_of_experts_are_as_lively_as_any_other() -> None:
    config = _config(count=8, intermediate=24)
    block = build_model(config, seed=5).llm.layers[0].mlp
    assert block.gate.weight.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert block.experts.gate_up_proj.std().item() == pytest.approx(1 / 8, rel=0.05)
    inner = 1 / math.sqrt(24) / math.sqrt(2 * config.llm.layers)
    assert block.experts.down_proj.std().item() == pytest.approx(inner, rel=0.05)
    assert not torch.equal(block.experts.gate_up_proj[0], block.experts.gate_up_proj[1])


@pytest.mark.parametrize("llm", [{}, {"every": 2}, {"top_k": 5}])
@pytest.mark.parametrize("bias", [True, False])
def test_counts_of_parameters_are_those_of_the_model(llm: dict[str, Any], bias: bool) -> None:
    config = _config(dense_layers=(), **llm)
    config = config.model_copy(update={"llm": config.llm.model_copy(update={"attention_bias": bias})})
    model = Llm(config.llm)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert parameter_counts(config)["llm"] == total
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert config.llm.experts is not None
    idle = experts * (config.llm.experts.count - config.llm.experts.top_k) // config.llm.experts.count
    assert parameter_counts(config, active=True)["llm"] == total - idle
