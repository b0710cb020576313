"""Mixture-of-experts layers equal those of transformers' Qwen3-MoE: routing, outputs, losses, gradients.

In float32: the reference takes the softmax of its router in float32 whatever the type of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.reference_library import transformers
from trainer.config import ModelConfig
from trainer.experts_config import ExpertsConfig
from trainer.model.llm import Llm, LlmOutput
from trainer.model.moe import Router, SparseMlp
from trainer.weights.names import LLM_IN_MEMORY, from_reference, to_reference

qwen3_moe = transformers.models.qwen3_moe.modeling_qwen3_moe

HIDDEN, VOCAB, EXPERTS, LAYERS = 32, 50, 6, 4
BALANCE = 0.3  # far above the published 0.001, so that its gradient shows
LENGTHS = [9, 1, 14, 6]

BASE = {"count": EXPERTS, "top_k": 2, "intermediate": 8, "balance_loss": BALANCE}
LAYOUTS: dict[str, dict[str, Any]] = {
    "all layers": {},
    "every second layer": {"every": 2},
    "named dense layers": {"dense_layers": (0, 2)},
    "weights as they are": {"normalize_top_k": False},
    "one expert": {"count": 1, "top_k": 1},
    "all experts": {"top_k": EXPERTS},
    "a width without a kernel": {"intermediate": 6},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference_config(experts: ExpertsConfig) -> Any:
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        num_experts=experts.count,
        num_experts_per_tok=experts.top_k,
        moe_intermediate_size=experts.intermediate,
        norm_topk_prob=experts.normalize_top_k,
        decoder_sparse_step=experts.every,
        mlp_only_layers=list(experts.dense_layers),
        router_aux_loss_coef=experts.balance_loss,
        output_router_logits=True,
        attn_implementation="eager",
    )
    config._experts_implementation = "eager"
    return config


def model_config(experts: ExpertsConfig) -> ModelConfig:
    llm = {
        "vocab_size": VOCAB,
        "hidden": HIDDEN,
        "intermediate": 48,
        "layers": LAYERS,
        "head_dim": 8,
        "rope_sections": (1, 1, 2),
        "attention_bias": False,
        "qk_norm": True,
        "experts": experts,
    }
    return ModelConfig.model_validate({"size": "tiny", "llm": llm})


def randomize(module: torch.nn.Module, *, seed: int = 0) -> None:
    """Fill every parameter, norms too, so that none can hide."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            start = 1.0 if "norm" in name else 0.0
            parameter.copy_(start + 0.3 * torch.randn(parameter.shape, generator=random))


class Both(NamedTuple):
    ours: Llm
    reference: Any
    config: ModelConfig


def both(layout: Mapping[str, Any]) -> Both:
    """Return both models with the same weights."""
    experts = ExpertsConfig(**{**BASE, **layout})
    config = model_config(experts)
    reference = transformers.Qwen3MoeForCausalLM(reference_config(experts)).train()
    randomize(reference)
    ours = Llm(config.llm)
    shapes = {f"llm.{name}": tuple(parameter.shape) for name, parameter in ours.named_parameters()}
    weights = from_reference(reference.state_dict(), shapes=shapes, layout=LLM_IN_MEMORY, config=config)
    ours.load_state_dict({name.removeprefix("llm."): value for name, value in weights.items()})
    return Both(ours, reference, config)


def tokens_of(lengths: list[int]) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (length,), generator=random) for length in lengths]


def run_ours(ours: Llm, samples: list[Tensor], *, padding: int = 0, **options: Any) -> LlmOutput:
    """Run samples in one sequence, each with ``padding`` rows behind it, and some more at the end."""
    tokens, labels, positions, bounds, spans = [], [], [], [0], []
    for sample in samples:
        length = len(sample) + padding
        spans.append((bounds[-1], bounds[-1] + len(sample)))
        bounds.append(bounds[-1] + length)
        tokens.append(torch.cat([sample, torch.full((padding,), 5)]))
        labels.append(torch.cat([sample[1:], torch.full((padding + 1,), -100)]))
        positions.append(torch.arange(length))
    tail = torch.full((padding,), 3)
    output: LlmOutput = ours(
        torch.cat([*tokens, tail]),
        torch.cat([*positions, tail]).expand(3, -1),
        np.array(bounds, dtype=np.int32),
        torch.zeros(0, HIDDEN, requires_grad=True),
        torch.zeros(0, dtype=torch.int64),
        torch.cat([*labels, tail - 103]),
        **({"spans": np.array(spans)} | options if padding else options),
    )
    return output


def assert_same_gradients(models: Both) -> None:
    found = {f"llm.{name}": parameter.grad for name, parameter in models.ours.named_parameters()}
    missing = [name for name, gradient in found.items() if gradient is None]
    assert not missing, missing
    ours = to_reference({name: g for name, g in found.items() if g is not None}, **in_memory(models))
    wanted = {name: parameter.grad for name, parameter in models.reference.named_parameters()}
    assert set(ours) == set(wanted)
    for name, gradient in wanted.items():
        expected = torch.zeros_like(ours[name]) if gradient is None else gradient
        # Relative to the largest gradient of the tensor: sums run in another order.
        error = (ours[name] - expected).abs().max()
        assert error <= 1e-5 * expected.abs().max() + 1e-8, f"{name} is off by {error}"


def in_memory(models: Both) -> dict[str, Any]:
    return {"layout": LLM_IN_MEMORY, "config": models.config}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_losses_and_all_gradients_are_those_of_the_reference(layout: str) -> None:
    models = both(LAYOUTS[layout])
    (sample,) = tokens_of([24])
    wanted = models.reference(input_ids=sample[None], labels=sample[None])
    wanted.loss.backward()
    out = run_ours(models.ours, [sample])
    assert out.balance_sum is not None
    logits = out.hidden @ models.ours.lm_head.weight.T  # type: ignore[union-attr]
    torch.testing.assert_close(logits, wanted.logits[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.balance_sum / len(sample), wanted.aux_loss)
    loss = out.loss_sum / (len(sample) - 1) + BALANCE * out.balance_sum / len(sample)
    torch.testing.assert_close(loss, wanted.loss)
    torch.autograd.backward([loss])
    assert_same_gradients(models)


def test_the_balancing_loss_alone_has_the_gradient_of_the_reference() -> None:
    models = both({"every": 2})
    (sample,) = tokens_of([24])
    models.reference(input_ids=sample[None]).aux_loss.backward()
    balance_sum = run_ours(models.ours, [sample]).balance_sum
    assert balance_sum is not None
    torch.autograd.backward([balance_sum / len(sample)])
    assert models.ours.layers[1].mlp.gate.weight.grad.abs().max() > 1e-4
    models.ours.lm_head.weight.grad = torch.zeros_like(models.ours.lm_head.weight)  # type: ignore[union-attr]
    for parameter in models.ours.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    assert_same_gradients(models)


@pytest.mark.parametrize("padding", [0, 3])
def test_packed_samples_are_the_references_sequences_one_by_one(padding: int) -> None:
    models = both({"dense_layers": (1,)})
    samples = tokens_of(LENGTHS)
    loss = balance = torch.zeros(())
    hidden = []
    for sample in samples:
        wanted = models.reference.model(input_ids=sample[None], output_router_logits=True)
        hidden.append(wanted.last_hidden_state[0])
        logits = models.reference.lm_head(hidden[-1])
        loss = loss + torch.nn.functional.cross_entropy(logits[:-1], sample[1:], reduction="sum")
        aux = qwen3_moe.load_balancing_loss_func(wanted.router_logits, EXPERTS, 2)
        balance = balance + len(sample) * aux
    torch.autograd.backward([loss / 7 + balance / 11])
    out = run_ours(models.ours, samples, padding=padding)
    assert out.balance_sum is not None
    parts = torch.split(out.hidden[: sum(LENGTHS) + padding * len(LENGTHS)], [n + padding for n in LENGTHS])
    for part, expected in zip(parts, hidden, strict=True):
        torch.testing.assert_close(part[: len(expected)], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.loss_sum, loss)
    torch.testing.assert_close(out.balance_sum, balance)
    torch.autograd.backward([out.loss_sum / 7 + out.balance_sum / 11])
    assert_same_gradients(models)


ROUTERS: dict[str, dict[str, Any]] = {
    "some": {},
    "weights as they are": {"normalize_top_k": False},
    "one expert": {"count": 1, "top_k": 1},
    "all experts": {"top_k": EXPERTS},
    "one of many": {"top_k": 1},
}


@pytest.mark.parametrize("layout", ROUTERS)
@pytest.mark.parametrize("ties", ["no", "two", "all"])
def test_a_layer_routes_weighs_and_answers_as_the_reference(layout: str, ties: str) -> None:
    experts = ExpertsConfig(**{**BASE, **ROUTERS[layout]})
    ours = SparseMlp(HIDDEN, experts)
    reference = qwen3_moe.Qwen3MoeSparseMoeBlock(reference_config(experts))
    randomize(reference)
    if ties != "no":
        with torch.no_grad():
            reference.gate.weight[: 2 if ties == "two" else experts.count] = reference.gate.weight[0].clone()
    ours.load_state_dict(reference.state_dict())
    x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2))
    _, weights, indices = reference.gate(x)
    routing = ours.gate(x)
    assert torch.equal(routing.experts, indices)
    torch.testing.assert_close(routing.weights, weights)
    out, _ = ours(x, None)
    torch.testing.assert_close(out, reference(x[None])[0])


def test_in_half_precision_the_router_chooses_as_the_reference() -> None:
    experts = ExpertsConfig(**BASE)
    ours = Router(HIDDEN, experts)
    reference = qwen3_moe.Qwen3MoeTopKRouter(reference_config(experts))
    randomize(reference)
    ours.load_state_dict(reference.state_dict())
    x = torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    _, weights, indices = reference.bfloat16()(x)
    routing = ours.bfloat16()(x)
    assert torch.equal(routing.experts, indices)
    assert torch.equal(routing.weights, weights)
