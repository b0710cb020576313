"""OmniLoader: plan -> fetch -> decode -> assemble, as a ``torchdata.nodes`` pipeline ahead of the trainer.

``PlanNode`` plans a step, waits for its bytes in the budget and hands the pieces of this rank to the decode
workers; a ``Prefetcher`` lets it run ahead; a ``Mapper`` waits for the pieces and lays them out as
microbatches; a second ``Prefetcher`` does that beside the trainer. Steps stay in order throughout, so no
worker count, depth or race can show in the batches. (Not ``ParallelMapper``: its threads call
``torch.set_num_threads(1)``, and decoding is parallel in the worker processes already. Not ``Loader``: what
it adds is state, and ours is cut at the consumer.)

Each batch carries the state after it, and ``state_dict`` is that of the last batch handed out. The nodes' own
snapshots are off.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torchdata.nodes import BaseNode, Mapper, Prefetcher

from loaders.assemble import ModelInputs
from loaders.budget import ByteBudget
from loaders.identity import STATE_VERSION, check_identity, full_identity, step_and_lanes
from loaders.loader_config import LoaderConfig
from loaders.order import merge_states as merge_lanes
from loaders.pack_order import PackOrder
from loaders.quarantine import Quarantine
from loaders.step import Place, PlannedStep, StepAssembler, StepPlanner, decode_settings
from loaders.workers import Decoder, InlineDecoder, WorkerPool
from omni_pipeline.core.batch import Batch
from omni_pipeline.core.errors import StateMismatchError
from omni_pipeline.core.plan import Planner
from omni_pipeline.core.state import check_head

logger = logging.getLogger(__name__)

_ASSEMBLED_AHEAD = 1


class OmniLoader:
    """Yields one ``Batch`` per step for one rank, without end: who consumes it decides when to stop.

    When the group has no samples left, batches have ``exhausted`` set and hold no sample; a run may stop when
    the batches of all groups say so (one number in the step's first collective), and not before, because
    a group knows its own lanes only.

    A batch counts in the byte budget until the next one is asked for. While a microbatch is put together,
    its decoded pieces exist twice; the budget does not count that.

    Args:
        config: How to fetch and decode.
        order: Packs of this group's lanes; owned by the loader from here on.
        planner: Makes the plans.
        place: Layout and rank.
        model: What the model reads.
        tokenizer_path: For the decode workers; None for plain bytes.
        quarantine: The run's record file; all ranks append to it.
        identity: Settings that change the order of samples; a state must have the same. Under "sources": the
            fingerprint of every source by name, compared for those that state and run have in common.
    """

    def __init__(
        self,
        config: LoaderConfig,
        *,
        order: PackOrder,
        planner: Planner,
        place: Place,
        model: ModelInputs,
        tokenizer_path: Path | None,
        quarantine: Path,
        identity: Mapping[str, Any],
    ) -> None:
        self._config = config
        self._order = order
        self._planner = planner
        self._place = place
        self._model = model
        self._tokenizer_path = tokenizer_path
        self._quarantine = Quarantine(quarantine, rank=place.rank)
        self._identity = full_identity(identity, config)
        self._budget = ByteBudget(config.prefetch_bytes)
        self._state = self._full_state(0, order.state_dict())
        self._honour_until: int | None = None
        self._decoder: Decoder | None = None
        self._root: BaseNode[Batch | _Failed] | None = None
        self._held_bytes = 0
        self._closed = False

    @property
    def peak_bytes(self) -> int:
        """Most bytes of batches held at one time so far."""
        return self._budget.peak_bytes

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next step's batch; waits for it.

        Raises:
            DataError: A source is past its error budget, or gives nothing that fits.
            WorkerError: Decode workers cannot be kept alive.
            RuntimeError: The loader is closed.
        """
        if self._closed:
            raise RuntimeError("the loader is closed")
        root = self._start() if self._root is None else self._root
        self._budget.release(self._held_bytes)
        self._held_bytes = 0
        begin = time.monotonic()
        item: Batch | _Failed = next(root)
        if isinstance(item, _Failed):
            del root
            self.close()
            raise item.error
        self._held_bytes = item.num_bytes
        self._state = item.state
        timings = {**item.timings, "wait_s": time.monotonic() - begin}
        return replace(item, timings=timings)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch handed out: head, next step, and this group's lanes."""
        return copy.deepcopy(self._state)

    def load_state_dict(self, state: Mapping[str, Any], *, honour_until: int | None = None) -> None:
        """Continue after the batch that ``state`` is of.

        ``state`` may be that of one group or the merged one of all; it fits any number of ranks and groups,
        if it has the lanes of this group. Sources may have been added (read from their beginning), removed
        and reweighted since; the others go on where they were.

        Args:
            state: From ``state_dict``, ``Batch.state`` or ``merge_states``.
            honour_until: End (exclusive) of the steps that were trained after ``state`` was saved: what
                failed in them fails again, so that they are trained on the same labels. None: none were.

        Raises:
            StateMismatchError: Another run, another version, damaged, without lanes that are needed here, or
                of a source whose data changed.
            RuntimeError: Iteration has started.
        """
        if self._root is not None or self._closed:
            raise RuntimeError("load_state_dict after the first batch: load into a fresh loader")
        check_identity(
            state,
            version=STATE_VERSION,
            identity=self._identity,
            where="loader state",
            announce=self._place.rank == 0,
        )
        step, lanes = step_and_lanes(state)
        self._order.load_state_dict(lanes)
        self._state = self._full_state(step, self._order.state_dict())
        self._honour_until = honour_until

    def close(self) -> None:
        """Stop workers and threads and wait for them; may be called again."""
        if self._closed:
            return
        self._closed = True
        self._budget.close()
        if self._decoder is not None:
            self._decoder.close()
        # Dropping the nodes joins their threads; the budget and the decoder have let go of them above.
        self._root = None
        self._quarantine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> BaseNode[Batch | _Failed]:
        step = self._state["step"]
        known = self._quarantine.honour(step, until=self._honour_until)
        if known and self._place.leads_group:
            failures = "failure" if known == 1 else "failures"
            logger.info("%s %s of steps from %s on will be repeated", known, failures, step)
        self._decoder = self._make_decoder()
        steps = StepPlanner(
            self._order,
            planner=self._planner,
            place=self._place,
            model=self._model,
            decoder=self._decoder,
            budget=self._budget,
            quarantine=self._quarantine,
            step=step,
            state_of=self._full_state,
        )
        assembler = StepAssembler(
            self._planner,
            place=self._place,
            model=self._model,
            quarantine=self._quarantine,
            max_bad_fraction=self._config.max_bad_fraction,
        )
        ahead = Prefetcher(PlanNode(steps), prefetch_factor=self._config.prefetch_steps, snapshot_frequency=0)
        batches = Mapper(ahead, _guarded(assembler))
        self._root = Prefetcher(batches, prefetch_factor=_ASSEMBLED_AHEAD, snapshot_frequency=0)
        return self._root

    def _make_decoder(self) -> Decoder:
        config = self._config
        settings = decode_settings(config, model=self._model, tokenizer_path=self._tokenizer_path)
        if config.num_workers == 0:
            return InlineDecoder(settings)
        return WorkerPool(config.num_workers, settings=settings, deadline_s=config.deadline_s)

    def _full_state(self, step: int, lanes: dict[str, Any]) -> dict[str, Any]:
        saved_with = {
            "world_size": self._place.topology.world_size,
            "num_groups": self._place.topology.num_groups,
            "num_workers": self._config.num_workers,
        }
        return {
            "version": STATE_VERSION,
            "identity": copy.deepcopy(self._identity),
            "saved_with": saved_with,
            "step": step,
            "lanes": lanes,
        }


class PlanNode(BaseNode[Any]):  # type: ignore[misc]  # torchdata is seen as untyped
    """Source of the pipeline: planned steps, their pieces already on the way to the workers.

    Ends when the byte budget is closed, and after the first error, which it hands on as an item.
    """

    def __init__(self, steps: StepPlanner) -> None:
        super().__init__()
        self._steps = steps
        self._ended = False

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin; the state was loaded into the order before."""
        super().reset(initial_state)

    def next(self) -> PlannedStep | _Failed:
        """Return the next planned step."""
        if self._ended:
            raise StopIteration
        try:
            step = self._steps.next_step()
        except Exception as error:  # noqa: BLE001 - a thread boundary: the consumer raises it
            self._ended = True
            return _Failed(error)
        if step is None:
            raise StopIteration
        return step

    def get_state(self) -> dict[str, Any]:
        """Return nothing: state is cut at the consumer, see the module."""
        return {}


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one global state of the states of all groups (any ranks of them) after the same step.

    Raises:
        StateMismatchError: No state, or they differ in version, identity, step, or about a lane.
    """
    every = list(states)
    if not every:
        raise StateMismatchError("there is no loader state to merge", fix="gather the states of all ranks")
    first = every[0]
    for other in every[1:]:
        check_head(other, version=first["version"], identity=first["identity"], where="loader state")
        if other["step"] != first["step"]:
            raise StateMismatchError(
                f"loader states are of steps {first['step']} and {other['step']}",
                fix="merge the states of one step only",
            )
    return {**copy.deepcopy(dict(first)), "lanes": copy.deepcopy(merge_lanes([s["lanes"] for s in every]))}


@dataclass(frozen=True, slots=True)
class _Failed:
    """An error on its way to the consumer. (The nodes would raise another exception, made of its text.)"""

    error: Exception


def _guarded(assembler: StepAssembler) -> Any:
    def build(item: PlannedStep | _Failed) -> Batch | _Failed:
        if isinstance(item, _Failed):
            return item
        try:
            return assembler.build(item)
        except Exception as error:  # noqa: BLE001 - a thread boundary: the consumer raises it
            return _Failed(error)

    return build
