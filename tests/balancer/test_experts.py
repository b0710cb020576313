"""Layers with experts: work of the active ones, weights and memory of all, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from balancer.shapes import TransformerShape
from balancer.simulator.shards import num_values
from balancer.work import activation_values, forward_parts, sample_sizes, sequence_flops, weight_values

D, N, K, H, F, V = 8, 4, 2, 2, 16, 50
E, ACTIVE, X = 6, 2, 5
DENSE = TransformerShape(
    hidden=D, layers=3, ffn=F, heads=N, kv_heads=K, head_dim=H, causal=True, output_widths=(D, V)
)
SPARSE = replace(DENSE, sparse_layers=2, num_experts=E, active_experts=ACTIVE, expert_ffn=X)
PROJECTIONS = 2 * D * N * H + 2 * D * K * H
TOKENS = 10


def test_operations_are_those_of_the_active_experts_and_the_router() -> None:
    linear, *others = forward_parts(SPARSE, sample_sizes(TOKENS))
    per_token = 3 * PROJECTIONS + 3 * D * F + 2 * (D * E + ACTIVE * 3 * D * X)
    assert linear.flops == 2 * TOKENS * per_token
    _, *dense_others = forward_parts(DENSE, sample_sizes(TOKENS))
    assert [part.flops for part in others] == [part.flops for part in dense_others]
    saved = 3 * 2 * TOKENS * 2 * (3 * D * F - D * E - ACTIVE * 3 * D * X)
    assert sequence_flops(DENSE, TOKENS) - sequence_flops(SPARSE, TOKENS) == saved


def test_weights_are_those_of_all_experts() -> None:
    layers = 3 * PROJECTIONS + 3 * D * F + 2 * (D * E + E * 3 * D * X)
    assert weight_values(SPARSE) == layers + D * V
    assert num_values(SPARSE, is_llm=True) == layers + 2 * D * V


def test_memory_traffic_is_that_of_the_rows_of_active_experts() -> None:
    linear, _, _, elementwise, _ = forward_parts(SPARSE, sample_sizes(TOKENS))
    dense_linear, _, _, dense_elementwise, _ = forward_parts(DENSE, sample_sizes(TOKENS))

    def products(ffn: int) -> int:
        return sum(a + b for a, b in [(D, ffn), (D, ffn), (ffn, D)])

    more = 2 * (D + E + ACTIVE * products(X) - products(F))
    assert linear.values - dense_linear.values == TOKENS * more
    # To the experts, back, and the sum; the activation of each; softmax and choice.
    moved = 2 * ACTIVE * D + 2 * ACTIVE * D + (ACTIVE * D + D)
    more = 2 * (moved + ACTIVE * 3 * X + 3 * E - 3 * F)
    assert elementwise.values - dense_elementwise.values == TOKENS * more


def test_activations_are_those_of_the_rows_of_active_experts() -> None:
    attention = 4 * D + (2 * N + 2 * K) * H + 2 * N
    sparse = attention + ACTIVE * (2 * D + 3 * X) + 2 * E
    dense = attention + 3 * F
    kept = activation_values(SPARSE, num_positions=TOKENS, num_rows=0, recompute=False)
    assert kept == TOKENS * (dense + 2 * sparse)
    again = activation_values(SPARSE, num_positions=TOKENS, num_rows=0, recompute=True)
    assert again == TOKENS * (3 * D + max(dense, sparse))
    for wide, layer in ((DENSE, dense), (replace(SPARSE, sparse_layers=3, ffn=1000), sparse)):
        again = activation_values(wide, num_positions=TOKENS, num_rows=0, recompute=True)
        assert again == TOKENS * (3 * D + layer)


@pytest.mark.parametrize("sparse_layers", [1, 3])
def test_one_expert_as_wide_as_the_layer_is_that_layer_but_for_router_and_moves(sparse_layers: int) -> None:
    one = replace(DENSE, sparse_layers=sparse_layers, num_experts=1, active_experts=1, expert_ffn=F)
    assert weight_values(one) - weight_values(DENSE) == sparse_layers * D
    assert one.matrix_values == one.all_matrix_values
