"""Checkpoints of a whole run: complete or invisible, and loadable at any number of ranks.

Model, optimizer and RNG go through torch's distributed checkpoint (DCP), which reshards on load; the
progress of the run and the state of the loader are JSON. A folder is sealed when it is written in full, so
a process killed at any moment leaves the previous checkpoint the latest one.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from omni_pipeline.core.errors import RankError, StateMismatchError
from omni_pipeline.core.state import check_head
from trainer.checkpoint_files import (
    LOADER_NAME,
    STATE_NAME,
    TEMPORARY_PREFIX,
    TENSORS_NAME,
    is_complete,
    latest,
    numbered,
    path_of,
    publish,
    read_loader_state,
    remove,
    seal,
)

logger = logging.getLogger(__name__)

VERSION = 1
START_AGAIN = "free space or mend the storage, then start again: it continues from the checkpoint before"


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Args:
        num_steps: Steps done, skipped ones included; the next step has this number.
        num_tokens: Sequence positions trained on.
        num_labels: Positions with a label trained on.
        num_skipped: Steps without any label.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_labels: int = 0
    num_skipped: int = 0


@dataclass(frozen=True)
class Restored:
    """What ``load`` gives back beside the weights it has put in place."""

    progress: Progress
    loader_state: dict[str, Any]


class Checkpointer:
    """Writes and reads the checkpoints of one run. Every method is a collective of all ranks.

    Args:
        folder: ``<run>/checkpoints``, on storage that all ranks share.
        module: The sharded model.
        optimizer: Its optimizer.
        keep: Newest complete checkpoints that stay.
        identity: JSON-plain values that must be equal when loading (e.g. the model's sizes).
    """

    def __init__(
        self,
        folder: Path,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        keep: int,
        identity: dict[str, Any],
    ) -> None:
        self.folder = folder
        self.module = module
        self.optimizer = optimizer
        self.keep = keep
        self.identity = identity

    def save(self, progress: Progress, loader_state: dict[str, Any]) -> Path:
        """Write a checkpoint, remove the oldest beyond ``keep``, and return its path.

        Raises:
            RankError: Writing failed; the earlier checkpoints are as they were. Raised on all ranks.
        """
        path = path_of(self.folder, progress.num_steps)
        draft = self.folder / f"{TEMPORARY_PREFIX}{path.name}"
        _on_first_rank(lambda: _start_draft(self.folder, draft), what=f"cannot start {draft}")
        model, optimizer = self._model_and_optimizer()
        # No hyperparameters: a run takes them from its run file.
        tensors = {
            "model": model,
            "optimizer": {"state": optimizer["state"]},
            "rng": _rng_of_rank(dist.get_rank()),
        }
        try:
            save_tensors(tensors, storage_writer=FileSystemWriter(draft / TENSORS_NAME))
        except CheckpointException as error:
            raise RankError(
                f"cannot write {draft}: {_causes(error)}",
                fix=START_AGAIN,
            ) from error
        head = {
            "version": VERSION,
            "identity": self.identity,
            "saved_with": {"world_size": dist.get_world_size(), "torch": str(torch.__version__)},
        }
        files = {STATE_NAME: {**head, "progress": vars(progress)}, LOADER_NAME: loader_state}
        _on_first_rank(lambda: _publish(draft, path, files), what=f"cannot finish {draft}")
        _on_first_rank(lambda: _remove_oldest(self.folder, self.keep), what=f"cannot tidy {self.folder}")
        return path

    def load(self, path: Path) -> Restored:
        """Put weights, optimizer and RNG of the checkpoint ``path`` in place.

        A rank that did not exist when it was saved keeps its RNG state. Parameters that were frozen when it
        was saved, and are trained here, begin with no optimizer state, which is logged; hyperparameters are
        those of this run.

        Raises:
            StateMismatchError: ``path`` is not a complete checkpoint, or one of another model.
        """
        if not is_complete(path):
            raise StateMismatchError(
                f"{path} is not a complete checkpoint",
                fix=f"choose another; the latest complete one is {latest(path.parent)}",
            )
        state = json.loads((path / STATE_NAME).read_text(encoding="utf-8"))
        check_head(state, version=VERSION, identity=self.identity, where=str(path))
        reader = FileSystemReader(path / TENSORS_NAME)
        rng = _rng_of_rank(dist.get_rank())
        saved = reader.read_metadata().state_dict_metadata
        model, optimizer = self._model_and_optimizer()
        trained = {
            name: state
            for name, state in optimizer["state"].items()
            if all(f"optimizer.state.{name}.{key}" in saved for key in state)
        }
        wanted = {
            "model": model,
            "optimizer": {"state": trained},
            "rng": {key: value for key, value in rng.items() if f"rng.{key}" in saved},
        }
        try:
            load_tensors(wanted, storage_reader=reader)
        except CheckpointException as error:
            raise StateMismatchError(
                f"{path} is damaged: {_causes(error)}",
                fix="remove that folder: the run continues from the checkpoint before it",
            ) from error
        set_model_state_dict(self.module, wanted["model"])
        set_optimizer_state_dict(
            self.module,
            self.optimizer,
            {**optimizer, "state": trained},
            options=StateDictOptions(strict=False),  # without it each of them must have a state
        )
        _tell_fresh(sorted(optimizer["state"].keys() - trained.keys()), path)
        _restore_rng(wanted["rng"], dist.get_rank())
        return Restored(progress=Progress(**state["progress"]), loader_state=read_loader_state(path))

    def _model_and_optimizer(self) -> tuple[dict[str, Any], dict[str, Any]]:
        optimizer: dict[str, Any] = get_optimizer_state_dict(self.module, self.optimizer)
        return get_model_state_dict(self.module), optimizer


def _tell_fresh(names: list[str], path: Path) -> None:
    if names and dist.get_rank() == 0:
        logger.info(
            "%s parameters were not trained when %s was saved, their optimizer state starts fresh: %s, ...",
            len(names),
            path,
            names[0],
        )


def _start_draft(folder: Path, draft: Path) -> None:
    """Remove what killed processes left, then make the folder of the draft."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name.startswith(TEMPORARY_PREFIX):
            shutil.rmtree(path)
    for _, path in numbered(folder):
        if not is_complete(path):
            logger.warning("%s is incomplete: it is removed", path)
            remove(path)
    (draft / TENSORS_NAME).mkdir(parents=True)


def _publish(draft: Path, path: Path, files: dict[str, dict[str, Any]]) -> None:
    seal(draft, files)
    publish(draft, path)


def _remove_oldest(folder: Path, keep: int) -> None:
    for _, path in numbered(folder)[:-keep]:
        remove(path)


def _on_first_rank(action: Callable[[], None], *, what: str) -> None:
    """Do ``action`` on rank 0 while the others wait; its failure is raised on all ranks."""
    outcome = [""]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            outcome = [str(error)]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0]:
        raise RankError(
            f"{what}: {outcome[0]}",
            where="rank 0",
            fix=START_AGAIN,
        )


def _causes(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))


def _rng_of_rank(rank: int) -> dict[str, torch.Tensor]:
    states = {f"cpu-{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"cuda-{rank}"] = torch.cuda.get_rng_state()
    return states


def _restore_rng(states: dict[str, torch.Tensor], rank: int) -> None:
    if (state := states.get(f"cpu-{rank}")) is not None:
        torch.set_rng_state(state)
    if (state := states.get(f"cuda-{rank}")) is not None:
        torch.cuda.set_rng_state(state)
