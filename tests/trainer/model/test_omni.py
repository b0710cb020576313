"""Building the whole model: meta device, first weights, sharded first weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd

from tests.support.ranks import run_ranks
from trainer.config import LlmConfig, ModelConfig
from trainer.counts import parameter_counts
from trainer.model.omni import OmniModel, build_model
from trainer.presets import PRESETS

SIZED_PARTS = {"size": "tiny", "vision": {"size": "1b"}, "llm": {"size": "12b"}}


@pytest.mark.parametrize("table", [*({"size": size} for size in sorted(PRESETS)), SIZED_PARTS], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_parameter_counts_are_those_of_the_built_model(table: dict[str, Any], tied: bool) -> None:
    config = ModelConfig.model_validate({**table, "llm": {**table.get("llm", {}), "tied_head": tied}})
    model = build_model(config, device="meta")
    vision, audio = model.encoders["vision"], model.encoders["audio"]
    projectors: dict[str, list[nn.Module]] = {
        "vision_projector": [vision.merger],
        "audio_projector": [audio.ln_post, audio.proj],
    }
    found = {name: sum(_num_parameters(part) for part in parts) for name, parts in projectors.items()}
    counts = {
        "vision": _num_parameters(vision) - found["vision_projector"],
        "vision_projector": found["vision_projector"],
        "audio": _num_parameters(audio) - found["audio_projector"],
        "audio_projector": found["audio_projector"],
        "llm": _num_parameters(model.llm),
    }
    assert list(counts.items()) == list(parameter_counts(config).items())


def test_tables_have_a_row_for_every_token_and_no_other() -> None:
    # A row that no token has would take part in the softmax, and in nobody else's.
    llm = build_model(ModelConfig(size="tiny", llm=LlmConfig(vocab_size=263)), device="meta").llm
    assert llm.embed_tokens.weight.shape[0] == 263
    assert llm.lm_head is not None
    assert llm.lm_head.weight.shape[0] == 263


def _num_parameters(part: nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())


def test_first_weights_depend_on_the_seed_alone() -> None:
    config = ModelConfig(size="tiny")
    torch.manual_seed(1)
    first = build_model(config, seed=3).state_dict()
    torch.manual_seed(2)
    again = build_model(config, seed=3).state_dict()
    other = build_model(config, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["llm.embed_tokens.weight"], other["llm.embed_tokens.weight"])
    assert not torch.equal(first["llm.layers.0.mlp.up_proj.weight"], first["llm.layers.1.mlp.up_proj.weight"])


def test_building_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    build_model(ModelConfig(size="tiny"))
    assert torch.equal(torch.get_rng_state(), before)


def test_every_parameter_gets_a_first_weight_and_there_are_no_buffers() -> None:
    model = build_model(ModelConfig(size="tiny"), device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights(0)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not list(model.buffers())


WORLD_SIZE = 3  # does not divide the widths, so some parts are uneven


def _tied(tied: bool) -> ModelConfig:
    return ModelConfig.model_validate({"size": "tiny", "llm": {"tied_head": tied}})


def _shard(model: OmniModel) -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.encoders.values(), model.llm):
        for block in part.block_list:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(part, mesh=mesh, mp_policy=policy)


def _wrong_parts(model: OmniModel, whole: OmniModel, *, rank: int) -> list[str]:
    """Names of the parameters of which this rank does not hold its part of the whole."""
    wrong = []
    whole_values = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        chunks = whole_values[name].detach().chunk(WORLD_SIZE)
        part = chunks[rank] if rank < len(chunks) else whole_values[name].detach()[:0]
        if not torch.equal(parameter.to_local(), part):
            wrong.append(name)
    return wrong


def _on_rank(rank: int) -> tuple[list[str], list[str], list[float]]:
    """Return wrong first weights, parameters without gradient, and losses; media on rank 0 only."""
    wrong, missing, losses = [], [], []
    for tied in (False, True):
        model = build_model(_tied(tied), device="meta")
        _shard(model)
        model.to_empty(device="cpu")
        model.init_weights(7)
        wrong += _wrong_parts(model, build_model(_tied(tied), seed=7), rank=rank)
        loss = _loss(model, has_media=rank == 0)
        loss.backward()
        missing += [name for name, parameter in model.named_parameters() if parameter.grad is None]
        losses.append(loss.item())
    return wrong, missing, losses


@pytest.fixture(scope="module")
def ranks() -> list[tuple[list[str], list[str], list[float]]]:
    return run_ranks(WORLD_SIZE, _on_rank)


def test_sharded_parameters_get_their_part_of_the_same_weights(
    ranks: list[tuple[list[str], list[str], list[float]]],
) -> None:
    assert [wrong for wrong, _, _ in ranks] == [[]] * WORLD_SIZE


def test_sharded_half_precision_runs_with_media_on_one_rank_only(
    ranks: list[tuple[list[str], list[str], list[float]]],
) -> None:
    assert [missing for _, missing, _ in ranks] == [[]] * WORLD_SIZE
    models = [build_model(_tied(tied), seed=7) for tied in (False, True)]
    for rank, (_, _, losses) in enumerate(ranks):
        expected = [_loss(model, has_media=rank == 0).item() for model in models]
        assert losses == pytest.approx(expected, rel=1e-2)


def _loss(model: OmniModel, *, has_media: bool = True) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    grids = np.array([(1, 4, 6), (30, 1, 1)])
    patches = torch.randint(0, 256, (24, 1176), dtype=torch.uint8, generator=random)
    mels = torch.randn(30, 16, generator=random)
    rows = torch.cat(
        [
            model.encoders["vision"](patches[: 24 * has_media], grids[:1][:has_media]),
            model.encoders["audio"](mels[: 30 * has_media], grids[1:][:has_media]),
        ]
    )
    tokens = torch.randint(0, 264, (40,), generator=random)
    positions = torch.arange(40).expand(3, 40)
    labels = tokens.roll(-1)
    media = torch.arange(len(rows))
    out = model.llm(tokens, positions, np.array([0, 40]), rows, media, labels)
    loss: torch.Tensor = out.loss_sum / 40
    return loss


def test_a_few_steps_bring_the_loss_down_and_reach_every_parameter() -> None:
    model = build_model(ModelConfig(size="tiny"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = _loss(model)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        unmoved = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert unmoved == []
        optimizer.step()
    assert losses[0] == pytest.approx(np.log(264), rel=0.1)
    assert losses[-1] < 0.7 * losses[0]


def test_gradients_are_the_same_bits_again_whatever_the_random_state() -> None:
    model = build_model(ModelConfig(size="tiny")).train()
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model.zero_grad()
        torch.autograd.backward(_loss(model))
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())
    dropouts = [name for name, part in model.named_modules() if isinstance(part, _DropoutNd)]
    assert dropouts == []
