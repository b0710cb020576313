"""One rank of a run, from its environment to its end: the process boundary around ``trainer.loop.train``.

Reads torchrun's environment variables, joins the other ranks, compares settings with them before anything
else, builds all parts through ``app.wire``, resumes, trains, evaluates, and on rank 0 writes the report.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from loaders.loader import OmniLoader, merge_states
from omni_pipeline.app.finish import keep_gallery, report_of
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.run_dir import Event, RunDir
from omni_pipeline.app.sinks import ConsoleMetrics, JsonlMetrics, MultiMetrics, configure_logging
from omni_pipeline.app.wire import (
    Stream,
    build_loader,
    build_tokenizer,
    build_topology,
    held_out_stream,
    section_digests,
    training_stream,
)
from omni_pipeline.core.batch import Batch
from omni_pipeline.core.errors import OmniError, RankError
from omni_pipeline.core.metrics import Metrics
from omni_pipeline.core.plan import StepPlan
from omni_pipeline.core.topology import Topology
from trainer.agreement import compare_settings
from trainer.checkpoint import Checkpointer, Progress, latest
from trainer.colocation import colocate
from trainer.evaluation import evaluate
from trainer.loop import LoopSettings, train
from trainer.model.omni import build_model
from trainer.optimizer import build_optimizer, learning_rate
from trainer.parallel.mesh import backend_for, make_rank_groups, pick_device
from trainer.step import Learner

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Environment:
    """What torchrun (or ``app.launch``) tells a rank."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def read(cls) -> Environment:
        """Read the environment variables of torchrun."""
        world_size = int(os.environ["WORLD_SIZE"])
        return cls(
            rank=int(os.environ["RANK"]),
            world_size=world_size,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        )


def run_rank(config: RunConfig) -> None:
    """Be one rank of the run; returns when the run is done, else ends the process with an exit code."""
    place = Environment.read()
    configure_logging(place.rank)
    try:
        _run(config, place)
    except OmniError as error:
        _fail(error)
    except RuntimeError as error:
        if not _is_lost_peer(error):
            raise
        _fail(RankError("another rank left the run", where=str(error).splitlines()[0][:200]))


def _fail(error: OmniError) -> NoReturn:
    """Tell what happened and end at once: waiting for ranks that are gone would hang the exit."""
    logger.error("%s: %s", type(error).__name__, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code)


def _is_lost_peer(error: RuntimeError) -> bool:
    """gloo and NCCL tell by text only that a connection has gone."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(
        sign in text
        for sign in ("connection closed by peer", "connection reset", "gloo", "nccl", "broken pipe")
    )


def _run(config: RunConfig, place: Environment) -> None:
    topology = build_topology(config, world_size=place.world_size, ranks_per_node=place.local_world_size)
    tokenizer = build_tokenizer(config)
    stream = training_stream(config, tokenizer)
    device = pick_device(place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend_for(device), timeout=COLLECTIVE_TIMEOUT)
    compare_settings(section_digests(config))
    run = _Run(config, topology=topology, rank=place.rank, device=device, eos=tokenizer.special.eos)
    run.train(stream)
    dist.barrier()
    if place.rank == 0:
        logger.info("report: %s", report_of(run.folder.path))
    dist.destroy_process_group()


class _Run:
    """The parts of a run on one rank."""

    def __init__(
        self, config: RunConfig, *, topology: Topology, rank: int, device: torch.device, eos: int
    ) -> None:
        self.config = config
        self.topology = topology
        self.rank = rank
        self.eos = eos
        self.folder = RunDir(config.run.dir)
        self.digests = section_digests(config)
        groups = make_rank_groups(topology, device=device)
        parts = {"llm": config.llm, **{name: config.encoder(name) for name in ("vision", "audio")}}
        self.model = colocate(
            build_model(config.model, device="meta"),
            groups=groups,
            parallel={name: part.parallel for name, part in parts.items()},
            precision=config.run.precision,
            seed=config.run.seed,
        )
        self.learner = Learner(
            model=self.model,
            optimizer=build_optimizer(self.model.parts, config.optimizer),
            learning_rate_at=lambda step: learning_rate(
                step, config=config.optimizer, num_steps=config.run.steps
            ),
            grad_clip=config.optimizer.grad_clip,
            settings=self.digests,
        )
        self.checkpointer = Checkpointer(
            self.folder.checkpoints,
            module=self.model.module,
            optimizer=self.learner.optimizer,
            keep=config.checkpoint.keep,
            identity={"model": config.model.model_dump(mode="json")},
        )
        self.jsonl = None if rank else JsonlMetrics(self.folder.metrics_path)
        self.last_plan: StepPlan | None = None

    def train(self, stream: Stream) -> None:
        """Resume, train to the end, evaluate; a collective of all ranks."""
        config = self.config
        metrics = self._metrics()
        loader = self._loader(stream)
        with loader:
            progress = self._resume(loader)
            if self.rank == 0:
                self.folder.write_settings(config.model_dump(mode="json"))
            progress = train(
                self.learner,
                self._remembering(loader),
                settings=LoopSettings(
                    num_steps=config.run.steps,
                    seq_len=config.order.seq_len,
                    sources=tuple(source.name for source in stream.sources),
                    checkpoint=config.checkpoint,
                ),
                metrics=metrics,
                checkpointer=self.checkpointer,
                merge_states=merge_states,
                progress=progress,
                after_step=lambda num_steps: self._after_step(num_steps, metrics),
            )
        if progress.num_steps >= config.run.steps and self.last_plan is not None:
            self._evaluate(metrics, step=progress.num_steps - 1)
        metrics.close()
        if self.rank == 0 and self.last_plan is not None:
            keep_gallery(self.folder, self.last_plan, max_packs=config.run.gallery_packs)

    def _metrics(self) -> MultiMetrics:
        """Numbers are reduced over ranks before they are recorded, so only rank 0 keeps them."""
        if self.jsonl is None:
            return MultiMetrics([])
        return MultiMetrics([self.jsonl, ConsoleMetrics(self.config.run.steps)])

    def _loader(self, stream: Stream, *, quarantine: Path | None = None) -> OmniLoader:
        return build_loader(
            self.config,
            stream,
            topology=self.topology,
            rank=self.rank,
            quarantine=quarantine or self.folder.quarantine_path,
        )

    def _resume(self, loader: OmniLoader) -> Progress:
        path = latest(self.checkpointer.folder)
        if path is None:
            return Progress()
        restored = self.checkpointer.load(path)
        loader.load_state_dict(restored.loader_state)
        if self.rank == 0:
            step = restored.progress.num_steps
            self.folder.add_event(Event(step=step, text=f"resumed at step {step}"))
            logger.info("resumed from %s", path)
        return restored.progress

    def _remembering(self, loader: OmniLoader) -> Iterator[Batch]:
        """Pass batches on; keeps the last plan with samples for the gallery."""
        for batch in loader:
            if not batch.exhausted:
                self.last_plan = batch.plan
            yield batch

    def _after_step(self, num_steps: int, metrics: Metrics) -> None:
        if self.jsonl is not None:
            self.jsonl.flush()  # so that whoever watches the file sees this step
        every = self.config.evaluation.every_steps
        if every and num_steps % every == 0 and num_steps < self.config.run.steps:
            self._evaluate(metrics, step=num_steps - 1)

    def _evaluate(self, metrics: Metrics, *, step: int) -> None:
        """Run every held-out source once, forward only, and record its loss and accuracy."""
        for source in self.config.evaluation.sources:
            stream = held_out_stream(self.config, source, build_tokenizer(self.config))
            quarantine = self.folder.path / f"quarantine-{source.name}.jsonl"
            with self._loader(stream, quarantine=quarantine) as loader:
                sums = evaluate(
                    self.model,
                    loader,
                    sources=[source.name],
                    eos=self.eos,
                    settings=self.digests,
                )[source.name]
            if self.rank == 0:
                metrics.record(f"evaluation/{source.name}/loss", sums.loss, step)
                metrics.record(f"evaluation/{source.name}/accuracy", sums.accuracy, step)
                logger.info("held-out %s: loss %.4f, accuracy %.4f", source.name, sums.loss, sums.accuracy)
