"""Parameters that were never written, are not finite, or are zeros, are found before the first step."""

from __future__ import annotations

import math

import pytest
import torch

from omni_pipeline.core.errors import DataError
from omni_pipeline.core.topology import Topology
from tests.support.ranks import run_ranks
from trainer.colocation import ColocatedModel, colocate
from trainer.config import ModelConfig
from trainer.model import init
from trainer.model.omni import build_model
from trainer.parallel.mesh import make_rank_groups
from trainer.start_checks import check_parameters


def _model(world_size: int) -> ColocatedModel:
    return colocate(
        build_model(ModelConfig(size="tiny"), device="meta"),
        groups=make_rank_groups(Topology(world_size), device=torch.device("cpu")),
        parallel={},
        precision="fp32",
        seed=0,
    )


def _message(model: ColocatedModel) -> tuple[str, bool]:
    """Return the message of the check, and whether one rank is enough to tell it."""
    try:
        check_parameters(model.module, source="first weights", fix="write them")
    except DataError as error:
        return str(error), error.is_shared
    return "", False


def _skip_in_init(rank: int, skipped: tuple[str, ...], world_size: int) -> tuple[str, bool]:
    fill = init._fill

    first_value = init._first_value
    names: list[str] = []

    def remember(name: str, shape: torch.Size, *, seed: int, num_layers: int) -> torch.Tensor:
        names.append(name)
        return first_value(name, shape, seed=seed, num_layers=num_layers)

    def fill_named(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        if names[-1] not in skipped:
            fill(parameter, value)

    init._first_value, init._fill = remember, fill_named
    return _message(_model(world_size))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_that_first_weights_skip_is_named_on_all_ranks(world_size: int) -> None:
    skipped = ("llm.norm.weight", "encoders.vision.blocks.1.attn.q.weight")
    for message, is_shared in run_ranks(world_size, _skip_in_init, args=(skipped, world_size)):
        assert message == (
            "parameters cannot be trained on; not finite: encoders.vision.blocks.1.attn.q.weight, "
            "llm.norm.weight\n  where: first weights\n  fix:   write them"
        )
        assert is_shared


def _spoil(rank: int) -> list[str]:
    """Spoil parameters on the last rank only, one after the other; return what the check says."""
    model = _model(2)
    said = [_message(model)[0]]
    parameters = dict(model.module.named_parameters())
    with torch.no_grad():
        for name in ("llm.layers.0.self_attn.k_proj.bias", "llm.embed_tokens.weight"):
            local = parameters[name].to_local()  # type: ignore[attr-defined]
            before = local.clone()
            if rank == 1:
                local[-1] = math.inf
            said.append(_message(model)[0])
            local.copy_(before)
        table = parameters["llm.embed_tokens.weight"].to_local()  # type: ignore[attr-defined]
        if rank == 0:
            table.zero_()  # half of a matrix may be
        said.append(_message(model)[0])
        for index in range(5):
            parameters[[*parameters][-1 - index]].zero_()
        parameters["encoders.audio.conv1.bias"].zero_()
        said.append(_message(model)[0])
    return said


def test_what_one_rank_holds_is_told_by_all_and_zeros_count_only_for_whole_matrices() -> None:
    first, second = run_ranks(2, _spoil)
    assert first == second
    sound, bias, table, half, zeros = first
    assert sound == half == ""
    assert "not finite: llm.layers.0.self_attn.k_proj.bias\n" in bias
    assert "not finite: llm.embed_tokens.weight\n" in table
    assert zeros.splitlines()[0] == (
        "parameters cannot be trained on; all zero: llm.layers.1.mlp.gate_proj.weight, "
        "llm.layers.1.mlp.up_proj.weight, llm.layers.1.mlp.down_proj.weight, llm.lm_head.weight"
    )
