"""The cost model's shape of an LLM with experts has the parameters of that LLM."""

from __future__ import annotations

import pytest

from balancer.simulator.shards import num_values
from balancer.work import sequence_flops
from omni_pipeline.app.costs import llm_shape
from trainer.config import ModelConfig
from trainer.counts import parameter_counts


@pytest.mark.parametrize("experts", [{}, {"every": 3}, {"count": 16, "top_k": 2, "dense_layers": [0, 1]}])
def test_weights_and_operations_are_those_of_all_and_of_active_parameters(experts: dict[str, object]) -> None:
    config = ModelConfig.model_validate({"llm": {"size": "30b-a3b", "experts": experts}})
    llm, shape = config.llm, llm_shape(config)
    norms = llm.layers * (2 * llm.hidden + 2 * llm.head_dim) + llm.hidden
    assert num_values(shape, is_llm=True) == parameter_counts(config)["llm"] - norms
    table = llm.vocab_size * llm.hidden
    passed = parameter_counts(config, active=True)["llm"] - norms - table
    # Six operations for a weight and a token, and the attention of one token to itself.
    assert sequence_flops(shape, 1) == 6 * passed + 6 * llm.layers * llm.heads * llm.head_dim
