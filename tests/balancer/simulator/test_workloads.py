"""The workloads are as large as their names say and as wide as their layouts need."""

from __future__ import annotations

import pytest

from balancer.shapes import TransformerShape
from balancer.simulator.samples import SAMPLES
from balancer.simulator.workloads import (
    MIXTURES,
    RANKS_PER_NODE,
    WORKLOADS,
    gpt_175b,
    llama_12b,
    llama_70b,
    usm_2b,
    vit_1b,
    vit_2b,
    vit_10b,
)
from omni_pipeline.core.sample import Modality


def parameters(shape: TransformerShape) -> float:
    """Weights of all layers."""
    return shape.matrix_values + shape.output_values


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        (vit_1b(5120), 1.0),
        (vit_2b(8192), 2.4),
        (vit_10b(8192), 10.0),
        (usm_2b(8192), 1.8),
        (llama_12b(), 11.6),
        (llama_70b(), 68.7),
        (gpt_175b(), 174.6),
    ],
)
def test_shapes_have_the_parameters_of_their_names(shape: TransformerShape, billions: float) -> None:
    assert parameters(shape) / 1e9 == pytest.approx(billions, rel=0.1)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_layouts_divide_ranks_layers_heads_and_packs(name: str) -> None:
    workload = WORKLOADS[name]
    topology = workload.topology
    assert topology.tp <= RANKS_PER_NODE
    assert workload.packs_per_step % topology.num_replicas == 0
    for shape in (workload.llm, *workload.encoders.values()):
        assert shape.heads % topology.tp == 0
        assert shape.hidden == shape.heads * shape.head_dim
    assert workload.llm.kv_heads % topology.tp == 0
    assert workload.llm.layers % topology.pp == 0
    for shape in workload.encoders.values():
        assert shape.output_widths[-1] == workload.llm.hidden


def test_published_sizes_are_those_of_the_table() -> None:
    found = {
        name: (item.packs_per_step, item.seq_len, item.topology.world_size, item.best_speedup)
        for name, item in WORKLOADS.items()
    }
    assert found == {
        "A": (32, 16384, 64, 1.54),
        "B": (64, 16384, 128, 3.30),
        "C": (128, 8192, 256, 7.57),
        "D": (256, 8192, 512, 1.98),
        "three": (64, 16384, 128, 2.01),
    }


@pytest.mark.parametrize("name", list(WORKLOADS))
@pytest.mark.parametrize("mixture", MIXTURES)
def test_weights_are_shares_of_known_sources(name: str, mixture: tuple[int, int]) -> None:
    weights = WORKLOADS[name].weights(mixture)
    assert set(weights) <= set(SAMPLES)
    assert sum(weights.values()) == pytest.approx(1)
    assert weights["text"] == pytest.approx(mixture[1] / 10)


def test_the_third_modality_is_read_by_its_own_encoder() -> None:
    assert WORKLOADS["three"].encoder_of == {Modality.IMAGE: "vision", Modality.AUDIO: "audio"}
    assert WORKLOADS["A"].encoder_of == {Modality.IMAGE: "vision"}
    assert WORKLOADS["three"].weights((8, 2)) == {"images": 0.4, "speech": 0.4, "text": 0.2}
