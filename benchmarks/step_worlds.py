"""Packs of three mixtures for ``benchmarks.step``, and the batches that a loader would make of their plans.

A step is two microbatches of two replicas. Packs are made so that, left where they fall, *skewed* gives all
pictures and clips to replica 0 and text to replica 1; *even* gives both the same shares of pictures and text
in samples of random size; *long* has one clip or one picture that is most of the encoders' work, so that only
sharing it can help. Content is made up in memory and depends on the place of a
segment alone, so that all variants train on the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from balancer.cost import CostModel
from balancer.lssp import LsspConfig
from balancer.planner import BalanceConfig, GroupPlanner
from loaders.assemble import Array, ModelInputs, Piece, assemble_microbatch, pieces_of, segment_of
from loaders.decode.text import ByteTokenizer
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.core.batch import Batch
from omni_pipeline.core.plan import Pack, StepPlan
from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment
from omni_pipeline.core.seeding import generator
from omni_pipeline.core.sizes import media_rows
from omni_pipeline.core.topology import Topology
from trainer.config import ModelConfig

NUM_RANKS = 2
NUM_PACKS = 2 * NUM_RANKS
SEQ_LEN = 512
ENCODERS = {"vision": (Modality.IMAGE, Modality.VIDEO), "audio": (Modality.AUDIO,)}
# Small enough for many steps on a CPU, and pictures and clips up to the length of a pack.
MODEL = ModelConfig.model_validate(
    {
        "size": "demo",
        "sizes": {"vision": {"max_pixels": 441 * 28 * 28, "video_max_frames": 64}},
        "vision": {
            "layers": 5,
            "hidden": 192,
            "intermediate": 576,
            "heads": 4,
            "window": 112,
            "full_attention_layers": (1, 4),
        },
        "llm": {"layers": 3, "hidden": 192, "intermediate": 512, "heads": 6, "kv_heads": 2},
    }
)
RUN = RunConfig.model_validate(
    {
        "run": {"dir": "unused", "steps": 1},
        "sources": [{"name": "unused", "shards": "unused", "layout": {"fields": ["txt"]}}],
        "order": {"seq_len": SEQ_LEN, "lanes": NUM_PACKS, "packs_per_step": NUM_PACKS},
        "model": MODEL,
        "balance": {"hardware": "cpu"},
    }
)
INPUTS = ModelInputs(MODEL.sizes, ByteTokenizer.special, ENCODERS)
# Balanced at all, and long segments shared.
VARIANTS = {"in_order": (False, False), "balanced": (True, False), "lssp": (True, True)}
# By mixture: the variants that are compared on it.
MIXTURES = {"skewed": ("in_order", "balanced"), "even": ("in_order", "lssp"), "long": ("balanced", "lssp")}


@dataclass(frozen=True)
class World:
    """What both ranks know: how to plan, by variant."""

    planners: dict[str, GroupPlanner]

    @classmethod
    def of(cls, cost_model: CostModel) -> World:
        """Return the planners of all variants."""
        return cls({name: _planner(cost_model, *switches) for name, switches in VARIANTS.items()})

    def batch(self, variant: str, packs: tuple[Pack, ...], *, rank: int) -> Batch:
        """Return what a loader would give ``rank``."""
        planner, microbatches = self.planners[variant], []
        plan = planner.plan(packs, step=0, group=0)
        for index in range(plan.num_microbatches):
            pieces = pieces_of(plan, microbatch=index, rank=rank, replica=rank, with_text=True, model=INPUTS)
            built = assemble_microbatch(
                plan,
                planner.reshard(plan, microbatch=index, rank=rank),
                microbatch=index,
                rank=rank,
                replica=rank,
                arrays={
                    piece: content(plan, piece)[units.start : units.stop] for piece, units in pieces.items()
                },
                failed=frozenset(),
                model=INPUTS,
            )
            microbatches.append(built)
        return Batch(plan, tuple(microbatches), failed=frozenset(), state={}, num_bytes=0, timings={})


def make_packs(mixture: str, *, seed: int) -> tuple[Pack, ...]:
    """Return the packs of one step, in the order in which replicas would take them."""
    rng = generator(seed, f"benchmark.step.{mixture}")
    fill = {"skewed": _skewed, "even": _even, "long": _long}[mixture]
    return tuple(Pack(lane, 0, _renamed(fill(lane, rng), lane)) for lane in range(NUM_PACKS))


def content(plan: StepPlan, piece: Piece) -> Array:
    """Return the decoded array of a piece: noise of its place."""
    _, segment = segment_of(plan, piece)
    rng = generator(1, "benchmark.step.content", plan.packs[piece.pack].lane, piece.sample, piece.segment)
    if segment.modality is Modality.TEXT:
        return rng.integers(0, 256, segment.num_units, dtype=np.int32)
    shape = segment.num_units, INPUTS.width(segment.modality)
    if segment.modality is Modality.AUDIO:
        return rng.standard_normal(shape, dtype=np.float32)
    return rng.integers(0, 256, shape, dtype=np.uint8)


def _planner(cost_model: CostModel, enabled: bool, lssp: bool) -> GroupPlanner:
    config = BalanceConfig(
        enabled=enabled, group="all", lssp=LsspConfig(kind="auto" if lssp else "off", max_degree=2)
    )
    return GroupPlanner(
        Topology(NUM_RANKS),
        cost_model=cost_model,
        config=config,
        num_lanes=NUM_PACKS,
        packs_per_step=NUM_PACKS,
        encoders=tuple(ENCODERS),
    )


def _skewed(lane: int, rng: np.random.Generator) -> list[Sample]:
    return _filled(_media if lane % NUM_RANKS == 0 else _text, rng)


def _even(lane: int, rng: np.random.Generator) -> list[Sample]:
    # Text and media of each pack take half of it.
    return _filled(_media, rng, SEQ_LEN // 2) + _filled(_text, rng, SEQ_LEN // 2)


def _long(lane: int, rng: np.random.Generator) -> list[Sample]:
    if lane:
        return _filled(_text, rng)
    # Of a clip the frames can be shared without an exchange, of a picture they cannot.
    side = int(rng.integers(18, 21))
    grids = [(Modality.VIDEO, (int(rng.integers(22, 26)), 8, 8)), (Modality.IMAGE, (1, 2 * side, 2 * side))]
    modality, grid = grids[int(rng.integers(2))]
    long = _sample([_segment(modality, grid), _words(16)])
    return [long, *_filled(_text, rng, SEQ_LEN - long.num_tokens)]


def _filled(
    make: Callable[[np.random.Generator], Sample], rng: np.random.Generator, num_tokens: int = SEQ_LEN
) -> list[Sample]:
    """Return samples up to ``num_tokens``; the last one is text of what is left."""
    samples: list[Sample] = []
    left = num_tokens
    while (sample := make(rng)).num_tokens <= left - 2:
        samples.append(sample)
        left -= sample.num_tokens
    return [*samples, _sample([_words(left - 1)])]


def _media(rng: np.random.Generator) -> Sample:
    """A picture of log-normal size, or every fourth time a clip, with a caption."""
    sides = [int(np.clip(2 * round(rng.lognormal(1.7, 0.3)), 6, 20)) for _ in range(2)]
    if rng.random() < 0.25:
        return _sample([_segment(Modality.VIDEO, (int(rng.integers(2, 7)), 8, 8)), _words(12)])
    return _sample([_segment(Modality.IMAGE, (1, *sides)), _words(12)])


def _text(rng: np.random.Generator) -> Sample:
    return _sample([_words(int(np.clip(rng.lognormal(4.0, 0.7), 8, 300)))])


def _words(num_tokens: int) -> Segment:
    return Segment(Modality.TEXT, "txt", 0, 0, (num_tokens, 1, 1), 0, num_tokens, loss=True)


def _segment(modality: Modality, grid: tuple[int, int, int]) -> Segment:
    rows = media_rows(modality, grid, MODEL.sizes)
    return Segment(modality, str(modality), 0, 0, grid, num_rows=rows, num_tokens=rows + 2)


def _sample(segments: list[Segment]) -> Sample:
    num_tokens = sum(segment.num_tokens for segment in segments) + 1
    num_labels = sum(segment.num_tokens for segment in segments if segment.loss) + 1
    num_labels -= segments[0].loss
    return Sample(SampleId("made up", 0, 0), "0", "made up", tuple(segments), num_tokens, num_labels)


def _renamed(samples: list[Sample], lane: int) -> tuple[Sample, ...]:
    return tuple(
        replace(sample, id=SampleId("made up", lane, row), key=f"{lane}-{row}")
        for row, sample in enumerate(samples)
    )
