"""Recomputation: the same bits from less memory, sharded and with joined shares too; and runs that repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed.checkpoint.filesystem import FileSystemReader

from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.topology import Topology
from tests.support import parity
from tests.support.ranks import run_ranks
from tests.support.steps import Recorder
from tests.trainer import test_long_media as long_media
from trainer.checkpoint import TENSORS_NAME, Checkpointer, Progress
from trainer.colocation import colocate
from trainer.config import ModelConfig
from trainer.model.blocks import check_compiler, prepare_blocks
from trainer.model.omni import OmniModel, build_model
from trainer.optimizer import build_optimizer
from trainer.optimizer_config import OptimizerConfig
from trainer.parallel.config import ParallelConfig
from trainer.parallel.mesh import make_rank_groups, pick_device
from trainer.step import Learner, train_step

PARTS = "vision", "audio", "llm"


def _module(model: OmniModel, part: str) -> torch.nn.Module:
    return model.llm if part == "llm" else model.encoders[part]


def _run_part(model: OmniModel, part: str, lengths: Sequence[int] = (4, 6)) -> torch.Tensor:
    """Return a scalar of one part that every weight of it changes, over segments by length."""
    random = torch.Generator().manual_seed(0)
    if part == "vision":
        grids = np.array([(1, 2 * length, 4) for length in lengths])
        patches = torch.randint(0, 256, (8 * sum(lengths), 1176), dtype=torch.uint8, generator=random)
        return model.encoders["vision"](patches, grids).square().sum()
    if part == "audio":
        grids = np.array([(9 * length, 1, 1) for length in lengths])
        mels = torch.randn(9 * sum(lengths), 16, generator=random)
        return model.encoders["audio"](mels, grids).square().sum()
    bounds = np.cumsum([0, *(9 * length for length in lengths)])
    tokens = torch.randint(0, 264, (9 * sum(lengths),), generator=random)
    positions = torch.arange(len(tokens)).expand(3, -1)
    rows = torch.zeros(0, model.config.llm.hidden)
    places = torch.zeros(0, dtype=torch.int64)
    return model.llm(tokens, positions, bounds, rows, places, tokens.roll(-1)).loss_sum


def _gradients_and_bytes(part: str, *, layers: int, recompute: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients of a part, and the bytes that its forward keeps for the backward."""
    vision: dict[str, Any] = {"layers": layers, "full_attention_layers": [0]}
    config = {"size": "tiny", "vision": vision, "audio": {"layers": layers}, "llm": {"layers": layers}}
    model = build_model(ModelConfig.model_validate(config), seed=3)
    if recompute:
        prepare_blocks(_module(model, part), recompute=True, compiled=False)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = _run_part(model, part)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, sum(kept.values())


# Positions and width of what _run_part feeds to the blocks.
BLOCK_INPUTS = {"vision": (80, 32), "audio": (45, 32), "llm": (90, 64)}


@pytest.mark.parametrize("part", PARTS)
def test_recomputation_gives_the_same_bits_and_keeps_only_the_input_of_each_block(part: str) -> None:
    plain, kept_plain = _gradients_and_bytes(part, layers=4, recompute=False)
    again, kept = _gradients_and_bytes(part, layers=4, recompute=True)
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        assert torch.equal(gradient, again[name]), name
    assert kept < 0.5 * kept_plain
    _, kept_deep = _gradients_and_bytes(part, layers=8, recompute=True)
    assert kept_deep - kept == 4 * 4 * math.prod(BLOCK_INPUTS[part])


def _recomputed(model: OmniModel, *, compiled: Sequence[str] = ()) -> OmniModel:
    for part in PARTS:
        # Graphs are run as they are, which takes less time than compiling them.
        prepare_blocks(_module(model, part), recompute=True, compiled=part in compiled, backend="eager")
    return model


def test_first_weights_and_names_are_those_without_recomputation() -> None:
    plain = dict(build_model(parity.CONFIG, seed=3).named_parameters())
    model = _recomputed(build_model(parity.CONFIG, device="meta")).to_empty(device="cpu")
    model.init_weights(3)
    found = dict(model.named_parameters())
    assert list(found) == list(plain)
    assert all(torch.equal(found[name], value) for name, value in plain.items())


def _shared_step(
    rank: int, world_size: int, scenario: str, layout: ParallelConfig, compiled: Sequence[str] = ()
) -> tuple[Any, dict[str, torch.Tensor], int]:
    """Return a step with recomputation, its gradients, and how many all-to-alls it made."""
    topology = Topology(world_size)
    model = colocate(
        _recomputed(build_model(parity.CONFIG, seed=3).double(), compiled=compiled),
        groups=make_rank_groups(topology, device=pick_device()),
        parallel=dict.fromkeys(PARTS, layout),
        precision="fp32",
    )
    batch = long_media._batch(*long_media.SCENARIOS[world_size][scenario], topology)
    recorder = Recorder(model.module)
    counted = []
    plain = dist.all_to_all_single

    def counting(*arguments: Any, **named: Any) -> Any:
        counted.append(arguments)
        return plain(*arguments, **named)

    dist.all_to_all_single = counting  # in this process of one rank only
    learner = Learner(model, recorder, learning_rate_at=lambda step: 0.5, grad_clip=math.inf, settings={})
    result = train_step(learner, batch, step=0)
    return result, recorder.gradients, len(counted)


@pytest.mark.parametrize(
    ("world_size", "scenario", "layout"),
    [
        (2, "all kinds, ranks in any order", ParallelConfig()),
        pytest.param(
            4,
            "two ranks without anything",
            ParallelConfig(dp_shard=2, reshard="step"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_recomputed_step_with_joined_shares_equals_one_plain_process(
    world_size: int, scenario: str, layout: ParallelConfig
) -> None:
    by_rank = run_ranks(world_size, _shared_step, args=(world_size, scenario, layout))
    result, gradients, _ = by_rank[0]
    long_media._compare(result, gradients, long_media._reference(world_size, scenario), scenario)
    # Rows there and back, and in every layer two exchanges, done three times: forward, again, and backward.
    num_joined = 1 if world_size == 4 else 2
    num_microbatches = num_joined
    expected = 2 * num_microbatches + 3 * 2 * parity.CONFIG.vision.layers * num_joined
    assert [number for _, _, number in by_rank] == [expected] * world_size


def _train(rank: int, folder: Path) -> list[tuple[list[float], dict[str, torch.Tensor], set[str]]]:
    """Train three steps, twice plainly and once with recomputation, whatever torch's own random state is."""
    return [
        _trained(folder / str(number), recompute=recompute, seed=number)
        for number, recompute in enumerate((False, False, True))
    ]


def _trained(
    folder: Path, *, recompute: bool, seed: int
) -> tuple[list[float], dict[str, torch.Tensor], set[str]]:
    """Return losses, final weights, and the names in a checkpoint of them."""
    torch.manual_seed(seed)
    built = build_model(parity.CONFIG, seed=3)
    model = colocate(
        _recomputed(built) if recompute else built,
        groups=make_rank_groups(Topology(1), device=pick_device()),
        parallel={},
        precision="fp32",
    )
    optimizer = build_optimizer(model.parameters_by_part, OptimizerConfig())
    learner = Learner(model, optimizer, learning_rate_at=lambda step: 1e-3, grad_clip=1.0, settings={})
    packs = (Pack(0, 0, (parity.mixed_sample(1), parity.text_sample(9))),)
    planner = parity.make_planner(Topology(1), num_packs=1, balance=True)
    losses = []
    for step in range(3):
        batch = parity.build_batch(planner.plan(packs, step=step, group=0), planner, rank=0)
        losses.append(train_step(learner, batch, step=step).loss)
    checkpointer = Checkpointer(folder, module=model.module, optimizer=optimizer, keep=1, identity={})
    path = checkpointer.save(Progress(num_steps=3), {})
    names = set(FileSystemReader(path / TENSORS_NAME).read_metadata().state_dict_metadata)
    weights = {name: p.full_tensor().detach() for name, p in model.module.named_parameters()}  # type: ignore[attr-defined]
    return losses, weights, names


def test_two_runs_have_the_same_bits_and_the_same_names_in_checkpoints(tmp_path: Path) -> None:
    ((first, *others),) = run_ranks(1, _train, args=(tmp_path,))
    losses, weights, names = first
    assert losses[-1] < losses[0]
    assert "model.llm.layers.0.mlp.up_proj.weight" in names
    for other_losses, other_weights, other_names in others:
        assert other_losses == losses
        assert other_names == names
        assert other_weights.keys() == weights.keys()
        assert all(torch.equal(other_weights[name], weight) for name, weight in weights.items())


def _compiled(part: str, *, backend: str, **llm: Any) -> OmniModel:
    model = build_model(ModelConfig.model_validate({"size": "tiny", "llm": llm}), seed=3)
    prepare_blocks(_module(model, part), recompute=False, compiled=True, backend=backend)
    return model


EXPERTS = {"count": 4, "top_k": 2, "intermediate": 32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "llm"), [("vision", {}), ("audio", {}), ("llm", {}), ("llm", {"experts": EXPERTS})]
)
def test_other_lengths_compile_nothing_again(part: str, llm: dict[str, Any]) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = _compiled(part, backend="eager", **llm)
    graphs = []
    for lengths in ([4, 3], [5, 5, 2], [1], [2, 9], [7, 1, 1, 4], [6], [3, 3, 3, 8]):
        _run_part(model, part, lengths).backward()
        graphs.append(counters["stats"]["unique_graphs"])
    # A size of one is compiled apart.
    assert 0 < graphs[0] <= graphs[1]
    assert graphs[2:] == [graphs[2]] * 5


@pytest.mark.slow
def test_a_compiled_and_recomputed_step_with_joined_shares_equals_one_plain_process() -> None:
    scenario = "all kinds, ranks in any order"
    arguments = 2, scenario, ParallelConfig(), ["vision"]
    result, gradients, _ = run_ranks(2, _shared_step, args=arguments, timeout_s=100.0)[0]
    long_media._compare(result, gradients, long_media._reference(2, scenario), scenario)


@pytest.mark.slow
def test_compiled_code_gives_the_same_numbers() -> None:
    torch._dynamo.reset()
    check_compiler(torch.device("cpu"), parts=["llm"])
    plain, model = build_model(ModelConfig(size="tiny"), seed=3), _compiled("llm", backend="inductor")
    for lengths in ([4, 3], [2, 5, 9]):
        losses = [_run_part(one, "llm", lengths) for one in (plain, model)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        for (name, expected), found in zip(plain.llm.named_parameters(), model.llm.parameters(), strict=True):
            assert expected.grad is not None
            error = (found.grad - expected.grad).norm()
            assert error <= 1e-5 * expected.grad.norm(), name


@pytest.mark.slow
def test_a_machine_without_a_compiler_says_so() -> None:
    torch._dynamo.reset()
    without: Any = torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")})
    with without, fresh_cache(), pytest.raises(ConfigError) as caught:
        check_compiler(torch.device("cpu"), parts=["vision", "llm"])
    assert str(caught.value) == (
        "compile is set for vision, llm, and this machine cannot: InvalidCxxCompiler: No working C++ "
        "compiler found in torch._inductor.config.cpp.cxx: (None, 'no-such-compiler')\n"
        "  fix:   install a C++ compiler (g++; for CUDA also triton), or leave compile out"
    )
