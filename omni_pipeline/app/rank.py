"""One rank of a run, from its environment to its end: the process boundary around ``trainer.loop.train``.

Reads torchrun's environment variables, joins the other ranks, compares settings with them before anything
else, builds all parts through ``app.wire``, resumes, trains, evaluates, and on rank 0 writes the report.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from loaders.loader import OmniLoader, merge_states
from loaders.quarantine import Quarantine
from omni_pipeline.app.costs import cost_model
from omni_pipeline.app.data_end import DATA_ENDED, data_end
from omni_pipeline.app.environment import Environment
from omni_pipeline.app.finish import keep_gallery, report_of
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.run_dir import Event, RunDir
from omni_pipeline.app.sinks import (
    EVALUATION,
    ConsoleMetrics,
    JsonlMetrics,
    MultiMetrics,
    configure_logging,
    has_evaluation,
    num_steps_trained,
    read_metrics,
)
from omni_pipeline.app.step_costs import StepCosts
from omni_pipeline.app.wire import (
    Stream,
    build_loader,
    build_tokenizer,
    build_topology,
    encoder_digests,
    held_out_stream,
    section_digests,
    training_stream,
)
from omni_pipeline.app.worst_steps import WorstSteps, namer
from omni_pipeline.core.batch import Batch
from omni_pipeline.core.errors import DataError, OmniError, RankError, StateMismatchError
from omni_pipeline.core.metrics import Metrics
from omni_pipeline.core.plan import StepPlan
from trainer.agreement import all_or_none, compare_settings
from trainer.checkpoint import Checkpointer, Progress
from trainer.checkpoint_files import is_complete, latest
from trainer.colocation import colocate, omni_anchors, parameters_by_part
from trainer.evaluation import evaluate
from trainer.loop import LoopSettings, TrainEnd, train
from trainer.model.attention import KERNEL_WORDS, attention_kernel
from trainer.model.blocks import check_compiler, prepare_blocks
from trainer.model.omni import build_model
from trainer.objective import Objective
from trainer.optimizer import build_optimizer, learning_rate
from trainer.parallel.mesh import backend_for, make_rank_groups, pick_device
from trainer.parallel.sharding import DTYPES
from trainer.parts import freeze
from trainer.start_checks import check_parameters
from trainer.step import Learner
from trainer.step_numbers import StepWatcher
from trainer.weights.folder import open_weights
from trainer.weights.reference_files import keep_reference
from trainer.weights.start import load_weights

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


def run_rank(config: RunConfig, place: Environment) -> None:
    """Be one rank of the run; returns when the run is done, else ends the process with an exit code."""
    configure_logging(place.rank)
    try:
        _run(config, place)
    except OmniError as error:
        _fail(error, place)
    except Exception as error:  # the process boundary: tell it and end before the others notice
        if not _is_lost_peer(error):
            logger.exception("this rank failed")
            _fail(RankError(f"{type(error).__name__}: {error}", where=f"rank {place.rank}"), place)
        logger.debug("lost a peer", exc_info=True)
        _fail(RankError("another rank left the run", where=str(error).splitlines()[0][:200]), place)


def _fail(error: OmniError, place: Environment) -> NoReturn:
    """Tell what happened and end at once: waiting for ranks that are gone would hang the exit.

    What all ranks know alike is told once per machine.
    """
    if place.local_rank == 0 or not error.is_shared:
        logger.error("%s: %s", type(error).__name__, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code)


def _is_lost_peer(error: Exception) -> bool:
    """gloo tells by text only that a connection has gone."""
    text = str(error).lower()
    signs = "connection closed by peer", "connection reset", "broken pipe", "timed out"
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in signs)
    )


def _run(config: RunConfig, place: Environment) -> None:
    device = pick_device(place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Before anything that can fail on one rank alone: from here on each can tell the others.
    dist.init_process_group(backend_for(device), timeout=COLLECTIVE_TIMEOUT)
    compare_settings(all_or_none(lambda: section_digests(config), what="it cannot start"))
    run = all_or_none(lambda: RankRun(config, place=place, device=device), what="it cannot start")
    run.prepare_model()
    run.train()
    dist.barrier()
    if place.rank == 0:
        # Loaders run ahead: what failed in steps beyond the end was never part of this run.
        Quarantine.forget_from(run.folder.quarantine_path, num_steps_trained(run.folder.metrics_path))
        logger.info("report: %s", report_of(run.folder.path))
    dist.destroy_process_group()


class RankRun:
    """The parts of a run on one rank. Made without collectives, so that it may fail on one rank alone."""

    def __init__(self, config: RunConfig, *, place: Environment, device: torch.device) -> None:
        self.config = config
        self.rank = place.rank
        self.device = device
        self.topology = build_topology(
            config, world_size=place.world_size, ranks_per_node=place.local_world_size
        )
        if compiled := [name for name, part in config.parts.items() if part.compile]:
            check_compiler(device, parts=compiled)
        self.tokenizer = build_tokenizer(config)
        self.stream = training_stream(config, self.tokenizer)
        self.held_out = {
            source.name: held_out_stream(config, source, self.tokenizer)
            for source in config.evaluation.sources
        }
        self.folder = RunDir(config.run.dir).make()
        self.lock = self.folder.lock() if self.rank == 0 else None
        self.digests = section_digests(config)
        self.jsonl = JsonlMetrics(self.folder.metrics_path) if self.rank == 0 else None
        if self.rank == 0:
            self.folder.write_settings(config.model_dump(mode="json"))
        self.used_up: Mapping[str, Mapping[str, float]] = {}
        self.last_plans: deque[StepPlan] = deque(maxlen=2)

    def prepare_model(self) -> None:
        """Build and shard the model and its optimizer; a collective of all ranks."""
        config = self.config
        model = build_model(config.model, added=config.added_encoders, device="meta")
        freeze(parameters_by_part(omni_anchors(model), model.llm), config.optimizer.freeze)
        for name, part in config.parts.items():
            module = model.llm if name == "llm" else model.encoders[name]
            prepare_blocks(module, recompute=part.recompute, compiled=part.compile)
        self.model = colocate(
            model,
            groups=make_rank_groups(self.topology, device=self.device),
            parallel={name: part.parallel for name, part in config.parts.items()},
            precision=config.run.precision,
            seed=config.run.seed,
        )
        if self.rank == 0:
            kernel = attention_kernel(self.device, DTYPES[config.run.precision])
            logger.info(
                "attention on %s in %s: %s", self.device.type, config.run.precision, KERNEL_WORDS[kernel]
            )
        self.learner = Learner(
            model=self.model,
            optimizer=build_optimizer(self.model.parameters_by_part, config.optimizer),
            learning_rate_at=lambda step: learning_rate(
                step, config=config.optimizer, num_steps=config.run.steps
            ),
            grad_clip=config.optimizer.grad_clip,
            settings=self.digests,
            objective=Objective.of(config.model, config.optimizer),
        )
        self.checkpointer = Checkpointer(
            self.folder.checkpoints,
            module=self.model.module,
            optimizer=self.learner.optimizer,
            keep=config.checkpoint.keep,
            identity=_identity(config),
        )

    def train(self) -> None:
        """Resume, train to the end, evaluate; a collective of all ranks."""
        config = self.config
        metrics = self._metrics()
        with self._loader(self.stream) as loader:
            progress = self._resume(loader)
            if self._evaluates_after(progress.num_steps) and not self._is_evaluated(progress.num_steps - 1):
                # A kill came between the checkpoint of this step and the end of its evaluation.
                self._evaluate(metrics, step=progress.num_steps - 1)
            end = train(
                self.learner,
                self._remembering(loader),
                settings=LoopSettings(
                    num_steps=config.run.steps,
                    seq_len=config.order.seq_len,
                    sources=tuple(source.name for source in self.stream.sources),
                    checkpoint=config.checkpoint,
                    end=config.order.end,
                ),
                metrics=metrics,
                checkpointer=self.checkpointer,
                merge_states=merge_states,
                progress=progress,
                after_step=lambda num_steps: self._after_step(num_steps, metrics),
                watcher=self._watcher(progress),
            )
        if self.rank == 0 and progress.num_steps >= config.run.steps:
            logger.info("%s of %s steps were done already", progress.num_steps, config.run.steps)
        if not end.progress.num_steps:
            fix = "add data, or raise order.epochs"
            if config.order.end == "drop":
                fix += (
                    "; or, as 'drop' wants a sample for every pack: lower order.lanes, or order.end = 'pad'"
                )
            raise DataError("the data ended before the first step", fix=fix)
        if self.jsonl is not None:
            self.jsonl.flush()
            self._tell_end(end)
        if end.reason != "signal" and not self._is_evaluated(end.progress.num_steps - 1):
            self._evaluate(metrics, step=end.progress.num_steps - 1)
        metrics.close()
        # The very last plan may be of a step that was dropped.
        plans = [plan for plan in self.last_plans if plan.step < end.progress.num_steps]
        if self.rank == 0 and plans:
            keep_gallery(self.folder, plans[-1], max_packs=config.run.gallery_packs)

    def _tell_end(self, end: TrainEnd) -> None:
        """Say what was seen and what is left of data that ends; if it has ended, also in the report."""
        if end.reason == "data":
            step = end.progress.num_steps
            event = Event(step=step, text=f"{DATA_ENDED} at step {step}")
            logger.info("%s (order.end is %r)", event.text, self.config.order.end)
            if event not in self.folder.events():
                self.folder.add_event(event)
        used = data_end(read_metrics(self.folder.metrics_path))
        if used is not None:
            logger.info("%s", used)

    def _metrics(self) -> MultiMetrics:
        """Numbers are reduced over ranks before they are recorded, so only rank 0 keeps them."""
        if self.jsonl is None:
            return MultiMetrics([])
        return MultiMetrics([self.jsonl, ConsoleMetrics(self.config.run.steps)])

    def _watcher(self, progress: Progress) -> StepWatcher:
        """Every rank prices its samples; rank 0 keeps the worst steps."""
        costs = StepCosts(cost_model(self.config))
        if self.rank != 0:
            return StepWatcher(costs, see=lambda _: None)
        worst = WorstSteps(
            self.folder.worst_steps_path, first_step=progress.num_steps, name_of=namer(self.stream.sources)
        )
        return StepWatcher(costs, worst.see)

    def _loader(self, stream: Stream, *, quarantine: Path | None = None) -> OmniLoader:
        return build_loader(
            self.config,
            stream,
            tokenizer=self.tokenizer,
            topology=self.topology,
            rank=self.rank,
            quarantine=quarantine or self.folder.quarantine_path,
        )

    def _resume(self, loader: OmniLoader) -> Progress:
        path = self._agreed_checkpoint()
        if path is None:
            all_or_none(self._start_fresh, what="it cannot start")
            self._write_first_weights()
            return Progress()
        restored = all_or_none(lambda: self.checkpointer.load(path), what=f"it cannot load {path}")
        check_parameters(
            self.model.module,
            source=str(path),
            fix="remove that folder: the run continues from the checkpoint before it",
        )
        num_trained = self._num_trained_before()
        all_or_none(
            lambda: loader.load_state_dict(restored.loader_state, honour_until=num_trained),
            what=f"it cannot use {path}",
        )
        if self.rank == 0:
            step = restored.progress.num_steps
            self.folder.add_event(Event(step=step, text=f"resumed at step {step}"))
            logger.info("resumed from %s", path)
        return restored.progress

    def _write_first_weights(self) -> None:
        """Put the weights of ``model.weights`` in place, if that is set, and look at those of every part."""
        path = self.config.model.weights
        source = f"first weights, seed {self.config.run.seed}"
        fix = "let the part's `init_weights` write every parameter, and no matrix with zeros only"
        if path is not None:
            weights = open_weights(path)
            all_or_none(lambda: load_weights(weights, self.model.module), what=f"it cannot use {path}")
            source, fix = str(weights.path), "take other weights, or import them again from a sound folder"
        check_parameters(self.model.module, source=source, fix=fix)

    def _agreed_checkpoint(self) -> Path | None:
        """Return the latest complete checkpoint that rank 0 sees, once every rank sees it too."""
        choice = [latest(self.checkpointer.folder) if self.rank == 0 else None]
        dist.broadcast_object_list(choice, src=0)
        path = choice[0]
        if path is None:
            return None

        def check() -> None:
            if not is_complete(path):
                raise StateMismatchError(
                    f"rank {self.rank} does not see the checkpoint {path} that rank 0 resumes from",
                    fix="put run.dir on storage that all ranks share",
                )

        all_or_none(check, what="it cannot resume")
        return path

    def _start_fresh(self) -> None:
        """Keep apart an earlier start's quarantine: what failed may be mended. Keep what exports need."""
        if self.rank == 0:
            Quarantine.start_fresh(self.folder.quarantine_path)
            weights = self.config.model.weights
            keep_reference(
                self.folder.path,
                weights=None if weights is None else open_weights(weights),
                tokenizer=self.config.tokenizer.path,
            )

    def _num_trained_before(self) -> int:
        """Return the steps that earlier starts trained, also past the checkpoint; equal on all ranks.

        Failures of later steps, which were only prefetched, are put aside.
        """
        answer = [0]
        if self.rank == 0:
            answer = [num_steps_trained(self.folder.metrics_path)]
            Quarantine.forget_from(self.folder.quarantine_path, answer[0])
        dist.broadcast_object_list(answer, src=0)
        return answer[0]

    def _is_evaluated(self, step: int) -> bool:
        """Return whether an earlier start of this run has evaluated after ``step``; equal on all ranks."""
        answer = [False]
        if self.rank == 0:
            answer = [has_evaluation(self.folder.metrics_path, step, sets=list(self.held_out))]
        dist.broadcast_object_list(answer, src=0)
        return answer[0]

    def _remembering(self, loader: OmniLoader) -> Iterator[Batch]:
        """Pass batches on; keeps the last plans with samples for the gallery."""
        for batch in loader:
            if not batch.exhausted:
                self.last_plans.append(batch.plan)
            self.used_up = batch.used_up
            yield batch

    def _after_step(self, num_steps: int, metrics: Metrics) -> None:
        if self.jsonl is not None:
            self.jsonl.flush()  # so that whoever watches the file sees this step
            self._tell_used_up(num_steps - 1)
        if self._evaluates_after(num_steps):
            self._evaluate(metrics, step=num_steps - 1)

    def _tell_used_up(self, step: int) -> None:
        """Say once of each source that a lane of the first group has drawn its last sample, in ``step``."""
        told = {event.text for event in self.folder.events()} if self.used_up else set()
        for source, shares in self.used_up.items():
            event = Event(step=step, text=f"a lane is out of {source}")
            if event.text not in told:
                self.folder.add_event(event)
                rest = ", ".join(f"{name} {share:.3f}" for name, share in shares.items() if share > 0)
                logger.info("step %s: %s; its shares are now: %s", step, event.text, rest or "none")

    def _evaluates_after(self, num_steps: int) -> bool:
        """Return whether an evaluation during the run is due after so many steps."""
        every = self.config.evaluation.every_steps
        return every > 0 and 0 < num_steps < self.config.run.steps and num_steps % every == 0

    def _evaluate(self, metrics: Metrics, *, step: int) -> None:
        """Run every held-out source once, forward only, and record its loss and accuracy."""
        for name, stream in self.held_out.items():
            with self._loader(stream, quarantine=self.folder.quarantine_of(name)) as loader:
                sums = evaluate(
                    self.model,
                    loader,
                    sources=[name],
                    eos=self.tokenizer.special.eos,
                    settings=self.digests,
                )[name]
            if self.rank == 0:
                if not sums.num_labels:
                    where = self.folder.quarantine_of(name)
                    logger.warning("held-out %s: no sample could be judged; see %s", name, where)
                counts = {
                    "seen": sums.num_seen,
                    "failed": sums.num_failed,
                    "dropped": sums.num_dropped,
                    "filtered": sums.num_filtered,
                }
                numbers = {"loss": sums.loss, "accuracy": sums.accuracy, **counts}
                for key, value in numbers.items():
                    metrics.record(f"{EVALUATION}{name}/{key}", value, step)
                told = ", ".join(f"{count:,} {word}" for word, count in counts.items())
                logger.info(
                    "held-out %s: loss %.4f, accuracy %.4f; samples: %s", name, sums.loss, sums.accuracy, told
                )


def _identity(config: RunConfig) -> dict[str, Any]:
    """Return what must be equal for a checkpoint to fit; of encoders only those that are attached, if any."""
    digests = encoder_digests(config)
    return {"model": config.model.identity} | ({"encoders": digests} if digests else {})
