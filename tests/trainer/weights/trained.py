"""A run in small that starts from weights; apart from the tests, so that ranks need not load the library."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from omni_pipeline.core.errors import StateMismatchError
from omni_pipeline.core.topology import Topology
from trainer.checkpoint import Checkpointer, Progress
from trainer.colocation import ColocatedModel, colocate
from trainer.config import ModelConfig
from trainer.model.llm import LlmOutput
from trainer.model.omni import build_model
from trainer.parallel.mesh import make_rank_groups
from trainer.start_checks import check_parameters
from trainer.weights.folder import open_weights
from trainer.weights.reference_files import keep_reference
from trainer.weights.start import load_weights


def start(imported: Path, *, seed: int = 1) -> tuple[ModelConfig, ColocatedModel]:
    """Return a sharded model with the weights in ``imported``; a collective of all ranks."""
    config = ModelConfig.model_validate({"weights": str(imported)})
    model = colocate(
        build_model(config, device="meta"),
        groups=make_rank_groups(Topology(dist.get_world_size()), device=torch.device("cpu")),
        parallel={},
        precision="fp32",
        seed=seed,
    )
    load_weights(open_weights(imported), model.module)
    check_parameters(model.module, source="the import", fix="x")
    return config, model


def train_a_step(rank: int, imported: Path, run: Path, tokens: Tensor) -> Tensor:
    """Start from weights, train a step on ``tokens`` [S], save a checkpoint; return logits [S, V]."""
    config, model = start(imported)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.5)
    torch.autograd.backward([_forward(model, tokens).loss_sum / len(tokens)])
    optimizer.step()
    with torch.no_grad():
        hidden = _forward(model, tokens).hidden
    model.release()
    llm = model.module.llm
    head = llm.embed_tokens if llm.lm_head is None else llm.lm_head
    logits: Tensor = hidden @ head.weight.full_tensor().T
    checkpointer = Checkpointer(
        run / "checkpoints",
        module=model.module,
        optimizer=torch.optim.AdamW(model.module.parameters()),
        keep=1,
        identity={"model": config.identity},
    )
    if rank == 0:
        keep_reference(run, weights=open_weights(imported), tokenizer=None)
    checkpointer.save(Progress(num_steps=1), {})
    return logits


def refused_start(rank: int, imported: Path) -> str:
    """Return why a model cannot start from ``imported``."""
    try:
        start(imported)
    except StateMismatchError as error:
        return str(error)
    return ""


def _forward(model: ColocatedModel, tokens: Tensor) -> LlmOutput:
    """Run all parts, as a step of text without media does."""
    length = len(tokens)
    rows = torch.cat([anchor.encode(anchor.empty_input(), groups=model.groups) for anchor in model.anchors])
    output: LlmOutput = model.llm(
        tokens,
        torch.arange(length).expand(3, length),
        torch.tensor([0, length], dtype=torch.int32).numpy(),
        rows,
        torch.empty(0, dtype=torch.int64),
        tokens.roll(-1),
    )
    return output
