"""Hypothesis strategies for samples, sources and worlds, and the plain builders that they share.

Sizes obey what the index promises: a media segment takes its rows and two markers, a sample takes its
segments and one end-of-sample token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

from loaders.fitting import PackSizes, sizes_of
from omni_pipeline.core.media import BUILT_IN
from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment
from omni_pipeline.core.sizes import ModelSizes, media_rows
from omni_pipeline.core.topology import Topology

SIZES = ModelSizes()


def text_segment(num_tokens: int, *, loss: bool = True, member: str = "txt") -> Segment:
    """Return a text segment of ``num_tokens``."""
    grid = (num_tokens, 1, 1)
    return Segment(Modality.TEXT, member, 0, num_tokens, grid, num_rows=0, num_tokens=num_tokens, loss=loss)


def media_segment(
    modality: Modality,
    grid: tuple[int, int, int],
    *,
    member: str = "",
    patch_s: float = SIZES.vision.patch_s,
) -> Segment:
    """Return a media segment with this encoder grid; of a clip, with this time between temporal patches."""
    rows = media_rows(modality, grid, SIZES)
    return Segment(
        modality,
        member or str(modality),
        0,
        grid[0] * grid[1] * grid[2],
        grid,
        num_rows=rows,
        num_tokens=rows + 2,
        patch_s=patch_s if modality is Modality.VIDEO else 0.0,
    )


def clip_with_sound(
    grid: tuple[int, int, int], mel_frames: int, *, patch_s: float = SIZES.vision.patch_s
) -> list[Segment]:
    """Return a clip and its sound track."""
    sound = media_segment(Modality.AUDIO, (mel_frames, 1, 1), member=str(Modality.VIDEO))
    return [media_segment(Modality.VIDEO, grid, patch_s=patch_s), replace(sound, is_track=True)]


def make_sample(
    segments: Sequence[Segment], *, source: str = "source", shard: int = 0, row: int = 0
) -> Sample:
    """Return the sample made of ``segments``, with tokens and labels counted as the index does."""
    loss_tokens = sum(segment.num_tokens for segment in segments if segment.loss)
    labels = loss_tokens + (1 if any(segment.loss for segment in segments) else 0)
    if segments and segments[0].loss:
        labels -= 1
    return Sample(
        id=SampleId(source, shard, row),
        key=f"{shard:04d}-{row:06d}",
        shard=f"{source}-{shard:05d}.tar",
        segments=tuple(segments),
        num_tokens=sum(segment.num_tokens for segment in segments) + 1,
        num_labels=labels,
    )


@dataclass(frozen=True)
class MemorySource:
    """A ``SampleSource`` over a list of segment lists, cut into shards.

    Args:
        name: Name of the source.
        shard_sizes: Samples of each shard.
        segments: Of each sample by ordinal; reused in turn if there are fewer than samples.
    """

    name: str
    shard_sizes: Sequence[int]
    segments: Sequence[Sequence[Segment]] = field(repr=False)

    def sizes(self, ordinals: npt.NDArray[np.int64]) -> PackSizes:
        """Return the sizes of these rows."""
        return sizes_of([self.sample(ordinal) for ordinal in ordinals.tolist()])

    def identify(self, ordinal: int) -> tuple[SampleId, str, str]:
        """Return (id, key, shard) of a row."""
        sample = self.sample(ordinal)
        return sample.id, sample.key, sample.shard

    def problem(self, ordinal: int) -> str:
        """Not asked: all rows are usable."""
        raise AssertionError(f"row {ordinal} is usable")

    def sample(self, ordinal: int) -> Sample:
        """Return the sample at ``ordinal``."""
        row = ordinal
        for shard, size in enumerate(self.shard_sizes):
            if row < size:
                segments = self.segments[ordinal % len(self.segments)]
                return make_sample(segments, source=self.name, shard=shard, row=row)
            row -= size
        raise IndexError(f"source {self.name!r} has no sample {ordinal}")


def text_source(name: str, shard_sizes: Sequence[int], tokens: Sequence[int]) -> MemorySource:
    """Return a source of plain text whose samples have ``tokens`` tokens in turn, the last one included."""
    return MemorySource(name, shard_sizes, [[text_segment(count - 1)] for count in tokens])


def grids(modality: Modality, *, max_side: int = 12) -> st.SearchStrategy[tuple[int, int, int]]:
    """Encoder grids of one modality; picture sides are multiples of the merge factor."""
    if modality is Modality.AUDIO:
        return st.tuples(st.integers(4, 600), st.just(1), st.just(1))
    side = st.integers(1, max_side // 2).map(lambda half: 2 * half)
    frames = st.just(1) if modality is Modality.IMAGE else st.integers(1, 6)
    return st.tuples(frames, side, side)


@st.composite
def segments(draw: st.DrawFn, *, max_text: int = 200) -> Segment:
    """One segment of any modality."""
    modality = draw(st.sampled_from(list(BUILT_IN)))
    if modality is Modality.TEXT:
        return text_segment(draw(st.integers(1, max_text)), loss=draw(st.booleans()))
    return media_segment(modality, draw(grids(modality)))


@st.composite
def clips_with_sound(draw: st.DrawFn) -> list[Segment]:
    """A clip of up to 10 s, mostly of odd rates, and its sound; either may last longer."""
    grid, mel_frames = draw(grids(Modality.VIDEO, max_side=6)), draw(st.integers(4, 900))
    return clip_with_sound(grid, mel_frames, patch_s=draw(st.sampled_from([1.0, 2 / 3, 2 / 0.7, 0.08])))


def segment_lists(
    *, max_text: int = 200, min_size: int = 0, max_size: int
) -> st.SearchStrategy[list[Segment]]:
    """Segments of any modality, some of them clips with their sound; such a pair counts as one."""
    one = segments(max_text=max_text).map(lambda segment: [segment])
    parts = st.lists(st.one_of(one, one, one, clips_with_sound()), min_size=min_size, max_size=max_size)
    return parts.map(lambda found: [segment for part in found for segment in part])


@st.composite
def samples(
    draw: st.DrawFn, *, source: str = "source", row: int | None = None, max_segments: int = 5
) -> Sample:
    """One sample of one to ``max_segments`` segments, a clip with its sound counted as one."""
    parts = draw(segment_lists(min_size=1, max_size=max_segments))
    return make_sample(parts, source=source, row=draw(st.integers(0, 1000)) if row is None else row)


@st.composite
def sample_lists(draw: st.DrawFn, *, min_size: int = 0, max_size: int = 40) -> list[Sample]:
    """Samples with distinct ids."""
    parts = draw(st.lists(segment_lists(min_size=1, max_size=4), min_size=min_size, max_size=max_size))
    return [make_sample(part, row=row) for row, part in enumerate(parts)]


def shard_sizes(*, max_shards: int = 6, max_size: int = 20) -> st.SearchStrategy[list[int]]:
    """Sizes of shards, some of them empty, at least one sample in all."""
    sizes = st.lists(st.integers(0, max_size), min_size=1, max_size=max_shards)
    return sizes.filter(lambda found: sum(found) > 0)


@st.composite
def sources(draw: st.DrawFn, *, name: str = "source") -> MemorySource:
    """An in-memory source of mixed samples."""
    parts = st.lists(st.lists(segments(), min_size=1, max_size=3), min_size=1, max_size=8)
    return MemorySource(name, draw(shard_sizes()), draw(parts))


@st.composite
def source_sets(draw: st.DrawFn, *, max_sources: int = 4) -> list[MemorySource]:
    """One to ``max_sources`` sources with distinct names."""
    return [draw(sources(name=f"source-{index}")) for index in range(draw(st.integers(1, max_sources)))]


@st.composite
def worlds(draw: st.DrawFn, *, max_replicas: int = 4, max_degree: int = 2) -> Topology:
    """Small layouts: any tp, cp, pp up to ``max_degree``, replicas, groups and nodes that divide them."""
    tp, cp, pp = (draw(st.integers(1, max_degree)) for _ in range(3))
    replicas = draw(st.integers(1, max_replicas))
    per_group = draw(st.sampled_from([count for count in range(1, replicas + 1) if replicas % count == 0]))
    world_size = tp * cp * pp * replicas
    per_node = draw(st.sampled_from([0, *(size for size in range(1, world_size) if world_size % size == 0)]))
    return Topology(world_size, tp=tp, cp=cp, pp=pp, replicas_per_group=per_group, ranks_per_node=per_node)
