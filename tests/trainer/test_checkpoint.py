"""Checkpoints are complete or invisible, exact, and fit any number of ranks."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from omni_pipeline.core.errors import RankError, StateMismatchError
from tests.support.ranks import RanksFailedError, run_ranks
from trainer import checkpoint, checkpoint_files
from trainer.checkpoint import Checkpointer, Progress
from trainer.checkpoint_files import LOADER_NAME, SEAL_NAME, STATE_NAME, latest
from trainer.optimizer import build_optimizer
from trainer.optimizer_config import OptimizerConfig
from trainer.parallel.mesh import make_module_mesh
from trainer.parallel.sharding import shard_module
from trainer.parts import freeze

_PUBLISH = "_publish"
Values = dict[str, torch.Tensor]


class Pair(nn.Module):
    """Two parts on meshes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 3)
        self.llm = nn.Linear(3, 7)


def _checkpointer(
    folder: Path, *, dp_shard: int = -1, keep: int = 2, seed: int = 0, frozen: str = ""
) -> Checkpointer:
    torch.manual_seed(seed)
    module = Pair()
    freeze({name: part.parameters() for name, part in module.named_children()}, {frozen})
    for part, degree in ((module.encoder, dp_shard), (module.llm, -1)):
        mesh = make_module_mesh(device=torch.device("cpu"), dp_shard=degree, setting="x")
        shard_module(part, mesh=mesh, precision="fp32")
    parts = {name: list(part.parameters()) for name, part in module.named_children()}
    optimizer = build_optimizer(parts, OptimizerConfig(lr=0.1))
    return Checkpointer(folder, module=module, optimizer=optimizer, keep=keep, identity={"layers": 2})


def _train(checkpointer: Checkpointer, *, num_steps: int) -> None:
    module = checkpointer.module
    assert isinstance(module, Pair)
    for _ in range(num_steps):
        torch.autograd.backward([module.llm(module.encoder(torch.ones(2, 5)).tanh()).square().sum()])
        checkpointer.optimizer.step()
        checkpointer.optimizer.zero_grad()


def _values(checkpointer: Checkpointer) -> Values:
    return {
        name: parameter.full_tensor().clone()  # type: ignore[attr-defined]
        for name, parameter in checkpointer.module.named_parameters()
    }


def _save(rank: int, folder: Path, dp_shard: int) -> tuple[Values, Values, torch.Tensor]:
    """Save after two steps; return the weights then and two steps later, and the next random number."""
    checkpointer = _checkpointer(folder, dp_shard=dp_shard)
    _train(checkpointer, num_steps=2)
    checkpointer.save(Progress(num_steps=2, num_tokens=9), {"lanes": {"0": [1, 2]}})
    saved, number = _values(checkpointer), torch.rand(1)
    _train(checkpointer, num_steps=2)
    return saved, _values(checkpointer), number


def _load(rank: int, folder: Path, dp_shard: int) -> tuple[Values, Values, torch.Tensor, Any]:
    checkpointer = _checkpointer(folder, dp_shard=dp_shard, seed=5)
    path = latest(folder)
    assert path is not None
    restored = checkpointer.load(path)
    loaded, number = _values(checkpointer), torch.rand(1)
    _train(checkpointer, num_steps=2)
    return loaded, _values(checkpointer), number, restored


def test_a_checkpoint_continues_exactly_at_the_same_world_size(tmp_path: Path) -> None:
    saved, later, number = run_ranks(2, _save, args=(tmp_path, -1))[0]
    loaded, continued, same_number, restored = run_ranks(2, _load, args=(tmp_path, -1))[0]
    torch.testing.assert_close((loaded, continued), (saved, later), rtol=0, atol=0)
    assert torch.equal(number, same_number)
    assert restored.progress == Progress(num_steps=2, num_tokens=9)
    assert restored.loader_state == {"lanes": {"0": [1, 2]}}


@pytest.mark.parametrize(("world_size", "dp_shard"), [(1, 1), (4, 2)])
def test_a_checkpoint_loads_at_another_world_size(tmp_path: Path, world_size: int, dp_shard: int) -> None:
    saved, *_ = run_ranks(2, _save, args=(tmp_path, -1))[0]
    for loaded, *_ in run_ranks(world_size, _load, args=(tmp_path, dp_shard)):
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


def _save_many(rank: int, folder: Path, keep: int) -> None:
    checkpointer = _checkpointer(folder, keep=keep)
    for step in (5, 20, 100):
        checkpointer.save(Progress(num_steps=step), {})


def test_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    run_ranks(2, _save_many, args=(tmp_path, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000100"]


def _killed_in(rank: int, folder: Path, place: str) -> None:
    checkpointer = _checkpointer(folder)
    checkpointer.save(Progress(num_steps=1), {"at": 1})
    module = checkpoint_files if place == "_flush" else checkpoint
    original = getattr(module, place)

    def die(*arguments: Any) -> None:
        if rank == 0:
            original(*arguments)
            os._exit(9)

    setattr(module, place, die)
    checkpointer.save(Progress(num_steps=2), {"at": 2})


@pytest.mark.parametrize("place", ["_start_draft", "_flush"])
def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path, place: str) -> None:
    with pytest.raises(RanksFailedError, match="rank 0 of 2"):
        run_ranks(2, _killed_in, args=(tmp_path, place))
    assert latest(tmp_path) == tmp_path / "step-00000001"
    assert len(list(tmp_path.iterdir())) == 2
    restored = run_ranks(1, _load, args=(tmp_path, -1))[0][3]
    assert restored.loader_state == {"at": 1}
    run_ranks(2, _save, args=(tmp_path, -1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("damage", ["cut", "removed", "no seal", "seal cut"])
def test_a_damaged_checkpoint_is_not_the_latest(tmp_path: Path, damage: str) -> None:
    run_ranks(1, _save_many, args=(tmp_path, 3))
    newest = tmp_path / "step-00000100"
    shard = next(path for path in newest.rglob("*.distcp") if path.stat().st_size)
    seal = newest / SEAL_NAME
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "removed":
        shard.unlink()
    elif damage == "no seal":
        seal.unlink()
    else:
        seal.write_text(seal.read_text()[:-3])
    assert latest(tmp_path) == tmp_path / "step-00000020"


def test_a_folder_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "missing") is None


def _freeze_others(rank: int, folder: Path) -> tuple[list[Values], dict[str, int], list[str]]:
    """Train the LLM alone, save, and go on with the encoder alone, then with both.

    Returns the weights when saved, when loaded and after one more step of the encoder; the steps that the
    optimizer knows of each parameter when both are trained; and what was logged.
    """
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer.checkpoint").addHandler(handler)
    logging.getLogger("trainer.checkpoint").setLevel(logging.INFO)
    first = _checkpointer(folder, frozen="encoder")
    _train(first, num_steps=2)
    path = first.save(Progress(num_steps=2), {})
    values = [_values(first)]
    second = _checkpointer(folder, seed=5, frozen="llm")
    second.load(path)
    values.append(_values(second))
    _train(second, num_steps=1)
    values.append(_values(second))
    both = _checkpointer(folder, seed=6)
    both.load(path)
    _train(both, num_steps=1)
    steps = {
        name: int(both.optimizer.state[parameter]["step"])
        for name, parameter in both.module.named_parameters()
    }
    return values, steps, lines


def test_other_parts_may_be_frozen_when_a_run_goes_on(tmp_path: Path) -> None:
    (first, second) = run_ranks(2, _freeze_others, args=(tmp_path,))
    (saved, loaded, later), steps, lines = first
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    moved = {name for name, value in later.items() if not torch.equal(value, saved[name])}
    assert moved == {"encoder.weight", "encoder.bias"}
    # The encoder's first step is as the first of any run; the LLM goes on with what it has gathered.
    assert steps == {"encoder.weight": 1, "encoder.bias": 1, "llm.weight": 3, "llm.bias": 3}
    told = (
        f"2 parameters were not trained when {tmp_path / 'step-00000002'} was saved, "
        "their optimizer state starts fresh: encoder.bias, ..."
    )
    assert lines == [told, told]
    assert second[2] == []


def _other_settings(rank: int, folder: Path) -> list[float]:
    checkpointer = _checkpointer(folder)
    _train(checkpointer, num_steps=1)
    path = checkpointer.save(Progress(num_steps=1), {})
    for group in checkpointer.optimizer.param_groups:
        group["weight_decay"] = 0.7
    checkpointer.load(path)
    return [group["weight_decay"] for group in checkpointer.optimizer.param_groups]


def test_hyperparameters_are_those_of_the_run_and_not_of_its_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(1, _other_settings, args=(tmp_path,)) == [[0.7] * 4]


def _misfit(rank: int, folder: Path) -> list[str]:
    checkpointer = _checkpointer(folder)
    path = checkpointer.save(Progress(num_steps=3), {})
    checkpointer.identity = {"layers": 4}
    messages = []
    for wrong in (path, folder / "step-00000009"):
        with pytest.raises(StateMismatchError) as caught:
            checkpointer.load(wrong)
        messages.append(caught.value.what)
    return messages


def test_a_checkpoint_of_another_model_or_a_missing_one_is_refused(tmp_path: Path) -> None:
    assert run_ranks(1, _misfit, args=(tmp_path,))[0] == [
        "'layers' was 2 when saved, is 4 here",
        f"{tmp_path / 'step-00000009'} is not a complete checkpoint",
    ]


def _full_disk(rank: int, folder: Path) -> str:
    checkpointer = _checkpointer(folder)

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    setattr(checkpoint, _PUBLISH, fail)
    with pytest.raises(RankError) as caught:
        checkpointer.save(Progress(num_steps=3), {})
    return str(caught.value)


def test_a_full_disk_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    draft = tmp_path / ".tmp-step-00000003"
    assert (
        run_ranks(2, _full_disk, args=(tmp_path,))
        == [
            f"cannot finish {draft}: [Errno 28] No space left on device\n"
            "  where: rank 0\n"
            f"  fix:   {checkpoint.START_AGAIN}"
        ]
        * 2
    )


def test_the_files_beside_the_tensors_are_json(tmp_path: Path) -> None:
    run_ranks(1, _save, args=(tmp_path, -1))
    path = tmp_path / "step-00000002"
    state = json.loads((path / STATE_NAME).read_text())
    assert state["saved_with"]["world_size"] == 1
    assert json.loads((path / LOADER_NAME).read_text()) == {"lanes": {"0": [1, 2]}}
