"""The step plan: what a step does, decided before any of it is done.

Every member of a group computes the same plan from the same inputs. Loader, trainer, ``omni plan`` and the
report read it; nobody changes it. ``digest`` is what members compare.
"""

from __future__ import annotations

import array
import functools
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from omni_pipeline.core.interleave import Runs
from omni_pipeline.core.reshard import ReshardPlan
from omni_pipeline.core.sample import Sample

ExchangeKind = Literal["exact", "symmetric", "two_level"]
"""How rows travel: one all-to-all with exact splits; a buffer of all rows, summed over the group; or two
all-to-alls, first inside the node, then between ranks of equal place in their nodes."""
EXACT: ExchangeKind = "exact"


@dataclass(frozen=True, slots=True)
class Pack:
    """Whole samples that share one sequence.

    Args:
        lane: The lane it comes from.
        number: Running number of the pack in its lane, from the start of the run.
        samples: In sequence order; may be empty (a pack of zero weight).
        padded_len: Positions that every sample takes, its padding at its end; 0 lays samples end to end.
    """

    lane: int
    number: int
    samples: tuple[Sample, ...]
    padded_len: int = 0

    @property
    def num_tokens(self) -> int:
        """Sequence positions that hold a token of a sample."""
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def num_positions(self) -> int:
        """Sequence positions taken, padding included."""
        return self.padded_len * len(self.samples) if self.padded_len else self.num_tokens

    @property
    def starts(self) -> tuple[int, ...]:
        """First position of each sample."""
        lengths = [self.padded_len or sample.num_tokens for sample in self.samples]
        return tuple(itertools.accumulate(lengths, initial=0))[:-1]

    @property
    def num_labels(self) -> int:
        """Positions with a label."""
        return sum(sample.num_labels for sample in self.samples)


@dataclass(frozen=True, slots=True)
class PackSlot:
    """Where one pack runs: replica (of the whole run) and microbatch. ``pack`` indexes ``StepPlan.packs``."""

    pack: int
    replica: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class MediaPlacement:
    """Where one media segment is fetched, decoded and encoded.

    A *short* segment is encoded by one rank, a *long* one by a sequence-parallel subgroup (LSSP): each of its
    ranks makes a share of the rows.

    Args:
        pack: Index in ``StepPlan.packs``.
        sample: Index in the pack's samples.
        segment: Index in the sample's segments.
        microbatch: The microbatch of its pack.
        encoder: Name of the encoder.
        ranks: Ranks (of the whole run) that encode it, in the order of their shares; one if it is short.
        shares: Embedding rows that each of ``ranks`` makes, at least 1: consecutive runs of its rows.
        joined: Whether attention crosses the shares, so that their ranks exchange heads (Ulysses); shares
            that end where attention ends anyway (frames of a clip, chunks of a recording) need no exchange.
        position: First sequence position of its embedding rows in the pack.
        num_rows: Embedding rows, the sum of ``shares``.
        runs: Where clip and sound are interleaved: positions in the pack and numbers of its rows, by runs of
            consecutive positions. Empty where all rows follow each other from ``position`` on.
    """

    pack: int
    sample: int
    segment: int
    microbatch: int
    encoder: str
    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    joined: bool
    position: int
    num_rows: int
    runs: Runs = ()

    @property
    def is_long(self) -> bool:
        """Whether several ranks encode it."""
        return len(self.ranks) > 1

    def rows_of(self, rank: int) -> range:
        """Return which of the segment's rows ``rank`` makes; none if it has no share."""
        if rank not in self.ranks:
            return range(0)
        place = self.ranks.index(rank)
        start = sum(self.shares[:place])
        return range(start, start + self.shares[place])


@dataclass(frozen=True, slots=True)
class Balance:
    """Modelled load of one resource (an encoder side or the LLM) over the step, in cost units.

    Ranks meet at every microbatch, so the makespan is the sum over microbatches of the largest load.
    ``imbalance`` is makespan / mean: 1 is perfect.
    """

    mean: float
    makespan_before: float
    makespan_after: float

    @property
    def imbalance_before(self) -> float:
        """Max / mean with packs and media where they fall without a plan."""
        return self.makespan_before / self.mean if self.mean else 1.0

    @property
    def imbalance_after(self) -> float:
        """Max / mean under this plan."""
        return self.makespan_after / self.mean if self.mean else 1.0


@dataclass(frozen=True)
class StepPlan:
    """All decisions of one step for one group.

    Args:
        step: Step of the run, from 0.
        group: The group it is for.
        ranks: All ranks of the group, ascending.
        replicas: All replicas of the group, ascending.
        num_microbatches: Microbatches of every replica of the run in this step.
        packs: The group's packs, by lane then number.
        slots: One per pack, in the order of ``packs``. A (replica, microbatch) without a slot runs empty.
        media: One per media segment, by pack, sample, segment.
        exchanges: How rows travel, by microbatch.
        encoder_balance: Load of the encoders over the group's ranks.
        llm_balance: Load of the LLM over the group's replicas.
    """

    step: int
    group: int
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    num_microbatches: int
    packs: tuple[Pack, ...]
    slots: tuple[PackSlot, ...]
    media: tuple[MediaPlacement, ...]
    exchanges: tuple[ExchangeKind, ...]
    encoder_balance: Balance
    llm_balance: Balance

    @functools.cached_property
    def digest(self) -> int:
        """63-bit digest of all that members must agree on."""
        numbers, names = self._content()
        content = hashlib.blake2b(json.dumps([len(numbers), *names]).encode(), digest_size=8)
        content.update(numbers)
        return int.from_bytes(content.digest(), "little") >> 1

    def _content(self) -> tuple[array.array[int], list[str]]:
        """Return what the digest covers as numbers, and names, which stand as their places in that list.

        Every list is preceded by its length, so different contents are different numbers.
        """
        names: dict[str, int] = {}

        def place(name: str) -> int:
            return names.setdefault(name, len(names))

        # Tuples added to one list: a tenth of the time of JSON, for thousands of samples and media.
        found = [self.step, self.group, len(self.ranks), *self.ranks, len(self.replicas), *self.replicas]
        found += (self.num_microbatches, len(self.packs), len(self.slots), len(self.media))
        for pack in self.packs:
            found += (pack.lane, pack.number, pack.padded_len, len(pack.samples))
            for sample in pack.samples:
                where, segments = sample.id, sample.segments
                found += (place(where.source), where.shard, where.row, sample.num_tokens, len(segments))
                for segment in segments:
                    found += segment.grid
        for slot in self.slots:
            found += (slot.pack, slot.replica, slot.microbatch)
        for item in self.media:
            found += (item.pack, item.sample, item.segment, item.position, place(item.encoder), item.joined)
            found += (len(item.ranks), *item.ranks, len(item.shares), *item.shares, len(item.runs))
            for run in item.runs:
                found += run
        found += map(place, self.exchanges)
        return array.array("q", found), list(names)

    def pack_at(self, replica: int, microbatch: int) -> int | None:
        """Return the index of the pack that runs there, or None for an empty one."""
        return self._pack_at.get((replica, microbatch))

    @functools.cached_property
    def _pack_at(self) -> dict[tuple[int, int], int]:
        return {(slot.replica, slot.microbatch): slot.pack for slot in self.slots}

    def media_of(self, *, rank: int, microbatch: int) -> tuple[MediaPlacement, ...]:
        """Return what ``rank`` encodes in ``microbatch``, whole or a share of it, in plan order."""
        return self._media_of.get((rank, microbatch), ())

    @functools.cached_property
    def _media_of(self) -> dict[tuple[int, int], tuple[MediaPlacement, ...]]:
        found: dict[tuple[int, int], list[MediaPlacement]] = {}
        for placement in self.media:
            for rank in placement.ranks:
                found.setdefault((rank, placement.microbatch), []).append(placement)
        return {place: tuple(items) for place, items in found.items()}

    def joined_of(self, microbatch: int) -> tuple[MediaPlacement, ...]:
        """Return the segments of ``microbatch`` whose attention crosses their shares, in plan order."""
        return self._joined_of.get(microbatch, ())

    @functools.cached_property
    def _joined_of(self) -> dict[int, tuple[MediaPlacement, ...]]:
        found: dict[int, list[MediaPlacement]] = {}
        for placement in self.media:
            if placement.joined:
                found.setdefault(placement.microbatch, []).append(placement)
        return {microbatch: tuple(items) for microbatch, items in found.items()}

    def media_in(self, microbatch: int) -> tuple[MediaPlacement, ...]:
        """Return all media of ``microbatch``, in plan order."""
        return self._media_in.get(microbatch, ())

    @functools.cached_property
    def _media_in(self) -> dict[int, tuple[MediaPlacement, ...]]:
        found: dict[int, list[MediaPlacement]] = {}
        for placement in self.media:
            found.setdefault(placement.microbatch, []).append(placement)
        return {microbatch: tuple(items) for microbatch, items in found.items()}

    @property
    def num_long(self) -> int:
        """Media segments that several ranks share."""
        return sum(item.is_long for item in self.media)

    @property
    def num_tokens(self) -> int:
        """Sequence positions of all packs that hold a token of a sample."""
        return sum(pack.num_tokens for pack in self.packs)

    @property
    def padding(self) -> float:
        """Share of the sequence positions that are padding, 0 to 1."""
        num_positions = sum(pack.num_positions for pack in self.packs)
        return 1 - self.num_tokens / num_positions if num_positions else 0.0


class Planner(Protocol):
    """Turns packs into plans. Pure: equal arguments give equal plans on every member."""

    def plan(self, packs: Sequence[Pack], *, step: int, group: int) -> StepPlan:
        """Return the plan of ``group`` for ``step``."""
        ...

    def reshard(self, plan: StepPlan, *, microbatch: int, rank: int) -> ReshardPlan:
        """Return what ``rank`` sends and receives in ``microbatch``."""
        ...


def plan_to_dict(plan: StepPlan) -> dict[str, Any]:
    """Return the plan as JSON-plain data, for ``omni plan --json`` and the report."""
    return {
        "step": plan.step,
        "group": plan.group,
        "digest": f"{plan.digest:016x}",
        "ranks": list(plan.ranks),
        "num_microbatches": plan.num_microbatches,
        "exchanges": list(plan.exchanges),
        "num_long": plan.num_long,
        "padding": plan.padding,
        "imbalance": {
            "encoder": {
                "before": plan.encoder_balance.imbalance_before,
                "after": plan.encoder_balance.imbalance_after,
            },
            "llm": {"before": plan.llm_balance.imbalance_before, "after": plan.llm_balance.imbalance_after},
        },
        "packs": [
            {
                "lane": pack.lane,
                "number": pack.number,
                "replica": slot.replica,
                "microbatch": slot.microbatch,
                "num_tokens": pack.num_tokens,
                "num_positions": pack.num_positions,
                "padded_len": pack.padded_len,
                "num_labels": pack.num_labels,
                "samples": [
                    {
                        "source": sample.id.source,
                        "key": sample.key,
                        "shard": sample.shard,
                        "row": sample.id.row,
                        "num_tokens": sample.num_tokens,
                        "segments": [
                            {
                                "modality": str(segment.modality),
                                "member": segment.member,
                                "grid": list(segment.grid),
                                "num_rows": segment.num_rows,
                                "is_track": segment.is_track,
                            }
                            for segment in sample.segments
                        ],
                    }
                    for sample in pack.samples
                ],
            }
            for pack, slot in zip(plan.packs, plan.slots, strict=True)
        ],
        "media": [
            {
                "pack": item.pack,
                "sample": item.sample,
                "segment": item.segment,
                "microbatch": item.microbatch,
                "encoder": item.encoder,
                "ranks": list(item.ranks),
                "shares": list(item.shares),
                "joined": item.joined,
                "position": item.position,
                "num_rows": item.num_rows,
            }
            for item in plan.media
        ],
    }
