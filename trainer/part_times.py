"""How long microbatches of each part of the model take on this rank: encoders and LLM by themselves.

Parts run as in a step, forward and backward, on made-up content of many sizes, without sharding or
exchange. All sizes take turns, round after round, so that a machine that slows down slows them all; the
median of the rounds counts. The time is bounded: what has not had its turn by then is left out, largest
first. A rank of one thread is timed by what the thread computes: standing aside for another process is no
work of the model.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from omni_pipeline.core.sizes import audio_rows
from trainer.config import ModelConfig
from trainer.model.audio import AudioEncoder
from trainer.model.llm import Llm
from trainer.model.vision import VisionEncoder
from trainer.parallel.config import Precision
from trainer.parallel.sharding import DTYPES

Grid = tuple[int, int, int]
Progress = Callable[[str, float], None]
"""Told what is measured, and which share of it is done (0 to 1)."""

MAX_ROUNDS = 9
MAX_MICROBATCHES = 24
COUNTS = (1, 2, 4, 8, 16, 32)
NUM_SIZES = 6


@dataclass(frozen=True, slots=True)
class PartTime:
    """One microbatch of one part, as measured.

    Args:
        grids: Its segments as ``Segment.grid``; of the LLM (tokens, 1, 1) of each sample.
        forward_s: Median seconds of the forward.
        backward_s: Median seconds of the backward.
        num_rounds: How often it was measured.
    """

    grids: tuple[Grid, ...]
    forward_s: float
    backward_s: float
    num_rounds: int


class Part:
    """One part of a model on a device, ready to run any microbatch.

    Args:
        config: The model.
        name: "vision", "audio" or "llm".
        device: Where it runs.
        precision: As ``run.precision``; a sharded module computes in it too.
    """

    def __init__(self, config: ModelConfig, name: str, *, device: torch.device, precision: Precision) -> None:
        self.config, self.name, self.device = config, name, device
        with device:
            self.module: nn.Module = _build(config, name).to(DTYPES[precision])
        is_alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if is_alone else time.perf_counter

    def times(
        self, microbatches: Sequence[tuple[Grid, ...]], *, budget_s: float, progress: Progress | None = None
    ) -> list[PartTime]:
        """Measure ``microbatches`` in turns, within about ``budget_s``; those without a turn are left out.

        Args:
            microbatches: Segments of each, smallest microbatch first.
            budget_s: Seconds; nothing is begun that would go beyond them, were it as long as the last one.
            progress: Told after every turn.
        """
        end = time.perf_counter() + budget_s
        found: list[list[tuple[float, float]]] = [[] for _ in microbatches]
        self.run(microbatches[0])
        for number, index in enumerate(list(range(len(microbatches))) * MAX_ROUNDS):
            started = time.perf_counter()
            found[index].append(self.run(microbatches[index]))
            if progress is not None:
                left = max(0.0, end - time.perf_counter()) / max(budget_s, 1e-9)
                progress(self.name, max(1 - left, (number + 1) / (len(microbatches) * MAX_ROUNDS)))
            if 2 * time.perf_counter() - started > end:
                break
        measured = zip(microbatches, found, strict=True)
        return [_median(grids, times) for grids, times in measured if times]

    def run(self, grids: Sequence[Grid]) -> tuple[float, float]:
        """Run one microbatch and return its seconds (forward, backward)."""
        inputs = self._inputs(grids)
        self._wait()
        started = self._clock()
        out = self._forward(*inputs)
        self._wait()
        between = self._clock()
        torch.autograd.backward(out, torch.ones_like(out))
        self._wait()
        return between - started, self._clock() - between

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _forward(self, *inputs: Tensor) -> Tensor:
        if self.name == "llm":
            tokens, positions, boundaries, rows, places, labels = inputs
            loss: Tensor = self.module(tokens, positions, boundaries.numpy(), rows, places, labels).loss_sum
            return loss
        values, grids = inputs
        rows_RE: Tensor = self.module(values, grids)
        return rows_RE

    def _inputs(self, grids: Sequence[Grid]) -> tuple[Tensor, ...]:
        num_units = sum(math.prod(grid) for grid in grids)
        if self.name == "llm":
            return self._llm_inputs([grid[0] for grid in grids], num_units)
        if self.name == "vision":
            shape = (num_units, self.config.patch_values)
            values = torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device)
        else:
            values = torch.randn(num_units, self.config.sizes.audio.num_mels, device=self.device)
        return values, torch.tensor(grids, dtype=torch.int64)

    def _llm_inputs(self, lengths: Sequence[int], num_tokens: int) -> tuple[Tensor, ...]:
        """Samples of text; media rows would be written over some positions and cost nothing more."""
        llm, device = self.config.llm, self.device
        tokens = torch.randint(0, llm.vocab_size, (num_tokens,), device=device)
        positions = torch.cat([torch.arange(length) for length in lengths]).expand(3, -1).to(device)
        boundaries = torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))
        rows = torch.zeros((0, llm.hidden), device=device)
        return tokens, positions, boundaries, rows, torch.zeros(0, dtype=torch.int64, device=device), tokens


def part_grids(config: ModelConfig, name: str, *, seq_len: int) -> list[tuple[Grid, ...]]:
    """Return microbatches to measure, smallest first: sizes and numbers of segments change apart.

    Args:
        config: The model; its sizes bound those of media.
        name: "vision", "audio" or "llm".
        seq_len: Positions of a pack: no microbatch has more embedding rows or tokens.
    """
    found = []
    for grid in _segment_grids(config, name, seq_len):
        for count in COUNTS:
            if count * _num_rows(config, name, grid) <= seq_len:
                found.append((grid,) * count)
    found.sort(key=lambda grids: (sum(math.prod(grid) for grid in grids), len(grids)))
    if len(found) <= MAX_MICROBATCHES:
        return found
    step = (len(found) - 1) / (MAX_MICROBATCHES - 1)
    return [found[round(index * step)] for index in range(MAX_MICROBATCHES)]


def _build(config: ModelConfig, name: str) -> nn.Module:
    if name == "vision":
        return VisionEncoder(config)
    return AudioEncoder(config) if name == "audio" else Llm(config.llm)


def _segment_grids(config: ModelConfig, name: str, seq_len: int) -> list[Grid]:
    if name == "vision":
        sizes = config.sizes.vision
        sides = _spread(
            math.isqrt(sizes.min_pixels) / sizes.factor, math.isqrt(sizes.max_pixels) / sizes.factor
        )
        grids = [(1, sizes.merge * side, sizes.merge * side) for side in sides]
        side = sizes.merge * max(1, math.isqrt(sizes.video_max_pixels) // sizes.factor)
        most = max(1, sizes.video_max_frames // sizes.temporal_patch)
        return grids + [(frames, side, side) for frames in _spread(2, min(most, 64)) if frames > 1]
    longest = 4 * seq_len
    if name == "audio":
        longest = min(longest, round(100 * config.sizes.audio.max_duration_s))
        return [(frames, 1, 1) for frames in _spread(min(25, longest), longest)]
    return [(tokens, 1, 1) for tokens in _spread(max(1, seq_len // 32), seq_len)]


def _num_rows(config: ModelConfig, name: str, grid: Grid) -> int:
    if name == "vision":
        return math.prod(grid) // config.sizes.vision.merge**2
    return audio_rows(grid[0]) if name == "audio" else grid[0]


def _spread(low: float, high: float) -> list[int]:
    """Whole numbers from ``low`` to ``high`` in about equal ratios."""
    ratio = max(high, low) / low
    return sorted({max(1, round(low * ratio ** (step / (NUM_SIZES - 1)))) for step in range(NUM_SIZES)})


def _median(grids: tuple[Grid, ...], times: Sequence[tuple[float, float]]) -> PartTime:
    # The first of a size finds its memory and kernels cold.
    warm = times[1:] if len(times) > 2 else times
    forward, backward = zip(*warm, strict=True)
    return PartTime(grids, statistics.median(forward), statistics.median(backward), len(warm))
