"""Meshes, groups and sharding: gradients are sums over ranks, whatever the layout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.topology import Topology
from tests.support import parity
from tests.support.ranks import run_ranks
from trainer.colocation import EncoderAnchor, colocate, omni_anchors
from trainer.model.omni import build_model
from trainer.parallel.config import ParallelConfig, Precision
from trainer.parallel.mesh import make_module_mesh, make_rank_groups
from trainer.parallel.sharding import shard_module

CPU = torch.device("cpu")


class Stack(nn.Module):
    """Two blocks in a list, and a head outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        out: torch.Tensor = self.head(x)
        return out


def _gradients_against_sum(rank: int, precision: Precision) -> dict[int, float]:
    """Return the largest relative error by ``dp_shard``; rank 2 has no row at all."""
    rows = torch.arange(12.0).view(4, 3) / 7
    errors = {}
    for dp_shard in (-1, 4, 2, 1):
        torch.manual_seed(0)
        whole, sharded = Stack(), Stack()
        sharded.load_state_dict(whole.state_dict())
        mesh = make_module_mesh(device=CPU, dp_shard=dp_shard, setting="x")
        shard_module(sharded, mesh=mesh, precision=precision)
        own = rows[:0] if rank == 2 else rows[rank : rank + 1]
        torch.autograd.backward([sharded(own).float().square().sum()])
        torch.autograd.backward([whole(rows[[0, 1, 3]]).square().sum()])
        pairs = zip(sharded.parameters(), whole.parameters(), strict=True)
        errors[dp_shard] = max(
            float((part.grad.full_tensor() - one.grad).norm() / one.grad.norm())  # type: ignore[union-attr]
            for part, one in pairs
        )
    return errors


def test_gradients_are_summed_over_ranks_for_every_shard_degree() -> None:
    for errors in run_ranks(4, _gradients_against_sum, args=("fp32",)):
        assert max(errors.values()) < 1e-5, errors


def test_bfloat16_keeps_float32_parameters_and_gradients() -> None:
    for errors in run_ranks(4, _gradients_against_sum, args=("bf16",)):
        assert 1e-6 < max(errors.values()) < 2e-2, errors


def _group_sum(rank: int) -> tuple[tuple[int, ...], int]:
    groups = make_rank_groups(Topology(4, replicas_per_group=2), device=CPU)
    total = torch.tensor(rank)
    dist.all_reduce(total, group=groups.group)
    return groups.members, int(total)


def test_each_rank_is_in_the_process_group_of_its_balance_group() -> None:
    assert run_ranks(4, _group_sum) == [((0, 1), 1), ((0, 1), 1), ((2, 3), 5), ((2, 3), 5)]


def _refused(rank: int) -> list[str]:
    messages = []
    for topology in (Topology(4), Topology(2, tp=2)):
        with pytest.raises(ConfigError) as caught:
            make_rank_groups(topology, device=CPU)
        messages.append(caught.value.what)
    with pytest.raises(ConfigError) as caught:
        make_module_mesh(device=CPU, dp_shard=3, setting="llm.parallel.dp_shard")
    return [*messages, caught.value.what]


def test_layouts_that_do_not_fit_are_refused() -> None:
    assert run_ranks(2, _refused)[0] == [
        "the layout is for 4 ranks, 2 were started",
        "tp x cp x pp = 2, but a replica of this trainer is one rank",
        "setting 'llm.parallel.dp_shard': 3 does not divide the number of ranks, 2",
    ]


def _meta(rank: int) -> bool:
    groups = make_rank_groups(Topology(2), device=CPU)
    parallel = {"vision": ParallelConfig(dp_shard=1)}
    models = [build_model(parity.CONFIG, seed=3, device=device) for device in ("cpu", "meta")]
    for model in models:
        colocate(model, groups=groups, parallel=parallel, precision="fp32", seed=3)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return all(torch.equal(one.full_tensor(), other.full_tensor()) for one, other in pairs)  # type: ignore[attr-defined]


def test_a_model_on_the_meta_device_gets_the_same_first_weights() -> None:
    assert run_ranks(2, _meta) == [True, True]


def _unknown_part(rank: int) -> str:
    groups = make_rank_groups(Topology(1), device=CPU)
    with pytest.raises(ConfigError) as caught:
        colocate(
            build_model(parity.CONFIG), groups=groups, parallel={"ears": ParallelConfig()}, precision="fp32"
        )
    return str(caught.value)


def test_settings_of_a_part_that_does_not_exist_are_refused() -> None:
    assert run_ranks(1, _unknown_part) == [
        "the model has no part 'ears'\n  fix:   its parts are audio, llm, vision"
    ]


def _third_encoder(rank: int) -> tuple[list[str], int]:
    """Attach one more encoder: the LLM and the step stay as they are."""
    model = build_model(parity.CONFIG)
    hidden = parity.CONFIG.llm.hidden

    class Touch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, hidden)

        def forward(self, values: torch.Tensor, grids: object) -> torch.Tensor:
            rows: torch.Tensor = self.proj(values)
            return rows

    model.encoders["touch"] = Touch()
    touch = EncoderAnchor("touch", model.encoders["touch"], (), values_width=4, values_dtype="float32")
    anchors = (*omni_anchors(model), touch)
    groups = make_rank_groups(Topology(2), device=CPU)
    joined = colocate(model, groups=groups, parallel={}, precision="fp32", anchors=anchors)
    rows = touch.encode(touch.empty_input(), groups=groups)
    return list(joined.parts), len(rows)


def test_a_new_encoder_is_one_anchor() -> None:
    assert run_ranks(2, _third_encoder)[0] == (["vision", "audio", "touch", "llm"], 0)
