"""When and where a sample was or will be seen: its place in every epoch, found by following single lanes.

Which lane draws a sample in an epoch, and at which position, is arithmetic (``LaneOrder.positions_of``). At
which step that position is packed is not: it depends on what the lane packed before. So the lane is followed,
alone and with numbers only, which costs one L-th of following the whole order; from a checkpoint where the
sample was still ahead.

Epochs come one after the other in each lane, but lanes are not equally fast. At the first epoch (of a tiny
source: the first whole round of epochs) that is not reached before ``run.steps`` the other lanes are followed
too if they are few, or fewer than were followed anyway, and nothing is missed; else the search ends, and says
so.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from loaders.lanes import LaneOrder
from loaders.quarantine import PLAN_STAGE, read_quarantine
from omni_pipeline.app.data_end import has_ended
from omni_pipeline.app.find_rows import FoundRow, find_rows
from omni_pipeline.app.follow import KnownStates, Progress, no_progress
from omni_pipeline.app.lane_walk import LaneWalks
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.run_dir import RunDir
from omni_pipeline.app.sinks import num_steps_trained
from omni_pipeline.app.visit_place import SampleVisit, VisitPlace, places_of
from omni_pipeline.app.wire import (
    Stream,
    build_planner,
    build_tokenizer,
    build_topology,
    training_stream,
)

FEW_LANES = 8
# A sample that is not seen in the run is looked for in so many times its steps.
LOOK_BEYOND = 4


@dataclass(frozen=True)
class Visit:
    """One time that a sample is seen.

    Args:
        epoch: Of its source.
        lane: The lane that draws it.
        position: Its position there.
        step: The step that it is in.
        pack: Running number of its pack in the lane.
        state: "trained", "ahead", "not reached" since the data ended before, or "after the end" of the run.
        failure: Why it failed there, by the run's quarantine; "" if it is not known to have failed.
        place: Where it runs, if a number of ranks was given.
    """

    epoch: int
    lane: int
    position: int
    step: int
    pack: int
    state: str
    failure: str = ""
    place: VisitPlace | None = None


@dataclass(frozen=True)
class SampleHistory:
    """One row of the index, and when it is seen.

    Args:
        row: The row.
        visits: In the run, by step; if there is none, the first one after its end.
        num_epochs: Epochs looked at.
        note: Why there is no visit, or what was not looked at; a sentence, or "".
    """

    row: FoundRow
    visits: list[Visit]
    num_epochs: int
    note: str


@dataclass(frozen=True)
class FoundSample:
    """All samples with a key.

    Args:
        samples: The first ones in full.
        num_matches: All of them.
        num_steps: Steps of the run.
        num_trained: Steps that its folder says are trained.
        data_end: Step at which its folder says that the data ended, if it does.
        notes: What else there is to know, in sentences.
    """

    samples: list[SampleHistory]
    num_matches: int
    num_steps: int
    num_trained: int
    data_end: int | None
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return asdict(self)


def find_sample(
    config: RunConfig,
    key: str,
    *,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    progress: Progress = no_progress,
) -> FoundSample:
    """Return when and where the samples that ``key`` names are seen; reads indexes, nothing else.

    Args:
        config: The run.
        key: As ``find_rows.find_rows`` reads it.
        world_size: Ranks to tell the place of each visit on; None: places are not told, which is quicker.
        ranks_per_node: Ranks of one machine; None: all of them.
        progress: Told how far a lane was followed.

    Raises:
        ConfigError: Wrong settings or data, or no such sample.
    """
    stream = training_stream(config, build_tokenizer(config))
    found = find_rows(key, stream.sources, config.order, progress=progress)
    search = _Search(config, stream, found.rows, progress)
    samples = [search.history(row) for row in found.rows]
    if world_size is not None:
        topology = build_topology(config, world_size=world_size, ranks_per_node=ranks_per_node or world_size)
        planner = build_planner(config, topology)
        visits = [_key_of(item.row, visit) for item in samples for visit in item.visits]
        places = places_of(visits, stream, states=search.states, planner=planner, progress=progress)
        samples = [_with_places(item, places) for item in samples]
    notes = search.states.unusable(after=0, until=config.run.steps)
    if config.order.end == "drop" and search.data_end is None and search.may_end():
        notes.append(
            "order.end = 'drop' ends the run before the first step with an empty pack, which may be before"
            " the last visits; `omni plan --step` tells of each step"
        )
    return FoundSample(
        samples, found.num_matches, config.run.steps, search.num_trained, search.data_end, notes
    )


class _Search:
    """Finds the visits of some rows of one run."""

    def __init__(
        self, config: RunConfig, stream: Stream, rows: Sequence[FoundRow], progress: Progress
    ) -> None:
        self._config = config
        self._stream = stream
        self._order = stream.order_of_lanes([])
        self.states = KnownStates(config, stream)
        folder = RunDir(config.run.dir)
        self.num_trained = num_steps_trained(folder.metrics_path)
        ended = has_ended(folder.events(), self.num_trained) and _ends_alike(folder.settings(), config)
        self.data_end = self.num_trained if ended else None
        self._failures = {
            (record.step, record.sample_id): record.reason
            for record in read_quarantine(folder.quarantine_path)
            if record.stage != PLAN_STAGE and record.step < self.num_trained
        }
        wanted: dict[str, set[int]] = {}
        for row in rows:
            wanted.setdefault(row.id.source, set()).add(row.ordinal)
        self._walks = LaneWalks(
            self.states, {name: frozenset(ordinals) for name, ordinals in wanted.items()}, progress
        )

    def may_end(self) -> bool:
        """Whether a source has so many epochs and no more, so that lanes can run out of samples."""
        return any(
            self._order.lane_order(name).num_positions(0) is not None for name in self._order.source_names
        )

    def history(self, row: FoundRow) -> SampleHistory:
        """Return when ``row`` is seen."""
        if row.left_out:
            return SampleHistory(row, [], 0, f"never drawn: {row.left_out}")
        if not self._stream.is_drawn(row.id.source):
            return SampleHistory(row, [], 0, "never drawn: its source has weight 0 throughout")
        order = self._order.lane_order(row.id.source)
        visits, num_epochs, is_whole = self._visits(row, order)
        if visits:
            rest = f"epochs from {num_epochs} on were not looked at: lanes would have to be that far apart"
            note = "" if is_whole else rest
            return SampleHistory(row, sorted(visits, key=lambda visit: visit.step), num_epochs, note)
        return self._beyond(row, order, num_epochs)

    def _visits(self, row: FoundRow, order: LaneOrder) -> tuple[list[Visit], int, bool]:
        """Return the visits of the run, the epochs looked at, and whether there can be no more."""
        visits: list[Visit] = []
        misses = 0
        for epoch in itertools.count():
            if misses >= order.epochs_per_round:
                walked = self._walks.num_lanes
                if self._config.order.lanes - walked > max(FEW_LANES, walked):
                    return visits, epoch, False
                if self._none_reach(epoch, row.id.source, order):
                    return visits, epoch, True
            try:
                visit = self._visit(row, order, epoch, self._config.run.steps)
            except ValueError:  # the source has no more epochs
                return visits, epoch, True
            misses = 0 if visit else misses + 1
            if visit:
                visits.append(visit)
        raise AssertionError("epochs do not end by themselves")

    def _visit(self, row: FoundRow, order: LaneOrder, epoch: int, until: int) -> Visit | None:
        """Return the visit of ``epoch`` if it is before step ``until``.

        Raises:
            ValueError: The source has no such epoch.
        """
        source = row.id.source
        lane, position = order.positions_of(row.ordinal, epoch=epoch)
        walk = self._walks.to(lane, until, source=source, position=position)
        packed = walk.packed(source, position)
        if packed is None or packed.step >= until:
            return None
        state = "trained" if packed.step < self.num_trained else "ahead"
        if packed.step >= self._config.run.steps:
            state = "after the end"
        if self.data_end is not None and packed.step >= self.data_end:
            state = "not reached"
        failure = self._failures.get((packed.step, row.id), "")
        return Visit(epoch, lane, position, packed.step, packed.number, state, failure)

    def _none_reach(self, epoch: int, source: str, order: LaneOrder) -> bool:
        """Whether no lane comes to the round of ``epoch`` before the end of the run."""
        rounds = epoch // order.epochs_per_round
        steps = self._config.run.steps
        for lane in range(self._config.order.lanes):
            first = rounds * order.run_length(lane)
            walk = self._walks.to(lane, steps, source=source, position=first)
            if walk.num_drawn(source) > first:
                return False
        return True

    def _beyond(self, row: FoundRow, order: LaneOrder, num_epochs: int) -> SampleHistory:
        """Look for the first visit after the end of the run."""
        steps = self._config.run.steps
        never = f"not seen in the {steps} {'step' if steps == 1 else 'steps'} of the run"
        if self.data_end is not None and self.data_end <= steps:
            return SampleHistory(row, [], num_epochs, f"{never}: the data ended at step {self.data_end}")
        for until in range(2 * steps, (LOOK_BEYOND + 1) * steps, steps):
            visit = self._visit(row, order, 0, until)
            if visit is not None:
                return SampleHistory(row, [visit], num_epochs, f"{never}; it would be at step {visit.step}")
        return SampleHistory(row, [], num_epochs, f"{never}, nor before step {(LOOK_BEYOND + 1) * steps}")


def _ends_alike(settings: Mapping[str, Any] | None, config: RunConfig) -> bool:
    """Return whether data that ended with ``settings`` ends there with ``config`` too, and does not go on."""
    deciding = config.model_dump(mode="json", include={"order", "sources", "groups", "deny"})
    return settings is not None and all(settings.get(name) == value for name, value in deciding.items())


def _key_of(row: FoundRow, visit: Visit) -> SampleVisit:
    return SampleVisit(row.id.source, visit.lane, visit.position, visit.step, visit.pack)


def _with_places(history: SampleHistory, places: Mapping[SampleVisit, VisitPlace]) -> SampleHistory:
    visits = [replace(visit, place=places[_key_of(history.row, visit)]) for visit in history.visits]
    return replace(history, visits=visits)
