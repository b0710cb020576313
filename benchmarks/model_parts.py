"""The parts that ``benchmarks.model`` times: encoders and LLM at a size where matrix products dominate.

Every part is run on the same samples twice: *packed*, as the trainer runs it, and *padded*, as a batch is run
elsewhere: batch x longest, and what is behind the end of a sample is masked where it would change a result.
For the LLM that is nowhere: padding on the right is never seen by a causal kernel, and has no label. For an
encoder the padded batch is every picture (or recording) at the size of the largest, without the mask that it
would need, which favours padding. Operations are counted of the true tokens, patches and frames alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from balancer.work import media_flops, sequence_flops
from omni_pipeline.app.costs import encoder_shapes, llm_shape
from omni_pipeline.core.batch import IGNORE_LABEL
from trainer.config import ModelConfig
from trainer.model.omni import build_model

Grid = tuple[int, int, int]

MODEL = ModelConfig.model_validate(
    {
        "size": "7b",
        "vision": {"layers": 2, "full_attention_layers": [1]},
        "audio": {"layers": 2},
        "llm": {
            "layers": 2,
            "hidden": 1024,
            "intermediate": 4096,
            "heads": 8,
            "kv_heads": 2,
            "vocab_size": 8192,
        },
    }
)
"""Widths of the published encoders, an LLM of width 1024; few layers, so that a round is short."""


@dataclass(frozen=True)
class Samples:
    """What the parts run on.

    Args:
        pictures: Grids of patches.
        recordings: Grids of mel frames.
        texts: Tokens of each sample of the LLM.
    """

    pictures: tuple[Grid, ...] = ((1, 20, 20), (1, 12, 16), (1, 10, 8), (2, 8, 6), (1, 6, 10))
    recordings: tuple[Grid, ...] = ((150, 1, 1), (700, 1, 1), (400, 1, 1), (250, 1, 1))
    texts: tuple[int, ...] = (700, 180, 420, 96, 310, 342)

    def padded(self) -> Samples:
        """Return as many samples, all of the longest one's size."""
        picture = max(self.pictures, key=math.prod)
        return replace(
            self,
            pictures=(picture,) * len(self.pictures),
            recordings=(max(self.recordings),) * len(self.recordings),
            texts=(max(self.texts),) * len(self.texts),
        )


class Bench:
    """The model on made inputs; each part is a function that runs its forward and backward.

    Args:
        config: The model.
        samples: What is counted.
        dtype: Of weights and activations.
    """

    def __init__(self, config: ModelConfig, samples: Samples, *, dtype: torch.dtype) -> None:
        self.config, self.samples, self.dtype = config, samples, dtype
        self.model = build_model(config).to(dtype)
        self._random = torch.Generator().manual_seed(0)
        self._parts = self._make_parts()

    def parts(self) -> dict[str, Callable[[], float]]:
        """Return by name what to time: "vision", "audio" and "llm", packed, and each with ``_padded``.

        A part returns the loss of the LLM, or the sum of the squared rows of an encoder.
        """
        return self._parts

    def flops(self) -> dict[str, int]:
        """Return the operations of each part, forward and backward, of what is no padding."""
        shapes = encoder_shapes(self.config)
        grids = {"vision": self.samples.pictures, "audio": self.samples.recordings}
        found = {name: sum(media_flops(shapes[name], grid) for grid in of) for name, of in grids.items()}
        llm = llm_shape(self.config)
        return {**found, "llm": sum(sequence_flops(llm, length) for length in self.samples.texts)}

    def units(self, *, padded: bool = False) -> dict[str, int]:
        """Return the patches, mel frames and tokens; those that are no padding unless ``padded``."""
        samples = self.samples.padded() if padded else self.samples
        return {
            "vision": sum(map(math.prod, samples.pictures)),
            "audio": sum(map(math.prod, samples.recordings)),
            "llm": sum(samples.texts),
        }

    def product_shapes(self) -> list[tuple[int, int, int]]:
        """Return [rows, inputs, outputs] of matrix products like those of the parts."""
        found = []
        for rows, hidden, inner in (
            (self.units()["llm"], self.config.llm.hidden, self.config.llm.intermediate),
            (self.units()["vision"], self.config.vision.hidden, self.config.vision.intermediate),
            (self.units()["audio"] // 2, self.config.audio.hidden, self.config.audio.intermediate),
        ):
            found += [(rows, hidden, inner), (rows, inner, hidden), (rows, hidden, hidden)]
        return found

    def _make_parts(self) -> dict[str, Callable[[], float]]:
        tokens = [self._tokens(length) for length in self.samples.texts]
        runs: dict[str, Callable[[], float]] = {}
        for ending, samples in (("", self.samples), ("_padded", self.samples.padded())):
            runs[f"vision{ending}"] = self._encoder("vision", samples.pictures)
            runs[f"audio{ending}"] = self._encoder("audio", samples.recordings)
            runs[f"llm{ending}"] = self._llm(tokens, samples.texts)
        return runs

    def _encoder(self, name: str, grids: Sequence[Grid]) -> Callable[[], float]:
        module, num_units = self.model.encoders[name], sum(map(math.prod, grids))
        if name == "vision":
            shape = (num_units, self.config.patch_values)
            values = torch.randint(0, 256, shape, dtype=torch.uint8, generator=self._random)
        else:
            values = torch.randn(num_units, self.config.sizes.audio.num_mels, generator=self._random)
        grids_array = np.array(grids, dtype=np.int64)

        def run() -> float:
            rows: Tensor = module(values, grids_array)
            return _backward(module, rows.float().square().sum())

        return run

    def _llm(self, tokens: Sequence[Tensor], lengths: Sequence[int]) -> Callable[[], float]:
        """Put each text into as many positions as ``lengths`` say."""
        num_positions = sum(lengths)
        packed = torch.zeros(num_positions, dtype=torch.int64)
        labels = torch.full((num_positions,), IGNORE_LABEL)
        boundaries = np.cumsum([0, *lengths]).astype(np.int32)
        for text, start in zip(tokens, boundaries.tolist(), strict=False):
            packed[start : start + len(text)] = text
            labels[start : start + len(text) - 1] = text[1:]
        positions = torch.cat([torch.arange(length) for length in lengths]).expand(3, -1)
        no_rows = torch.zeros(0, self.config.llm.hidden), torch.zeros(0, dtype=torch.int64)

        def run() -> float:
            out = self.model.llm(packed, positions, boundaries, *no_rows, labels)
            return _backward(self.model.llm, out.loss_sum)

        return run

    def _tokens(self, length: int) -> Tensor:
        return torch.randint(0, self.config.llm.vocab_size, (length,), generator=self._random)


def _backward(module: nn.Module, loss: Tensor) -> float:
    module.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()
