"""Synthetic samples with sizes like those of public datasets: images, speech and text, without their content.

The distributions are stated here and nowhere tuned. OpenImages (the copies with a longer side of 1024 pixels,
with captions of Localized Narratives), RefCOCOg (COCO pictures of 640 pixels, one short expression),
LibriSpeech (961 hours in 281 thousand utterances) and GigaSpeech (10000 hours in 8.3 million segments) are
known by their published means and limits; what lies between is our assumption, as are the large pictures, the
long recordings and the texts, which stand for sets that were never published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment
from omni_pipeline.core.seeding import generator
from omni_pipeline.core.sizes import VisionSizes, image_grids

VISION = VisionSizes(max_pixels=4096 * 28 * 28)
"""14-pixel patches, 2 x 2 merged into a row, at most 4096 rows in a picture."""
FRAMES_PER_ROW = 4
"""Mel frames (10 ms) that the speech encoder joins into one row."""
MARKERS = 2

IMAGE_SHARES = (0.4, 0.4, 0.2)
"""OpenImages, RefCOCOg, large ones."""
SPEECH_SHARES = (0.45, 0.45, 0.1)
"""LibriSpeech, GigaSpeech, long ones."""
TOKENS_PER_S = 3.6
"""Speech: 2.7 words per second (LibriSpeech), 1.33 tokens per word."""


def image_samples(count: int, *, seed: int, public_only: bool = False) -> list[Sample]:
    """Return pictures with captions: 40 % like OpenImages, 40 % like RefCOCOg, 20 % large ones.

    Sides: the longer one is 1024, 640, or log-normal around 2048 pixels; the ratio of sides is log-normal
    around 4:3, every third picture upright. Captions: 47, 11 and 60 tokens in the mean, Poisson.

    Args:
        count: Samples wanted.
        seed: Equal seeds give equal samples.
        public_only: None of the large ones; the others keep their ratio.
    """
    rng = generator(seed, "simulator.images", count)
    kind = rng.choice(3, size=count, p=_shares(IMAGE_SHARES, public_only=public_only))
    large = np.clip(rng.lognormal(np.log(2048), 0.35, count), 512, 8192)
    longer = np.choose(kind, (np.full(count, 1024.0), np.full(count, 640.0), large))
    shorter = longer / np.clip(rng.lognormal(np.log(4 / 3), 0.15, count), 1, 4)
    upright = rng.random(count) < 1 / 3
    height, width = np.where(upright, longer, shorter), np.where(upright, shorter, longer)
    raw = {"height": height.astype(np.int64), "width": width.astype(np.int64)}
    grids, _ = image_grids(raw, VISION)
    captions = 1 + rng.poisson(np.choose(kind, (46.0, 10.0, 59.0)))
    return [
        _sample("images", row, [_media(Modality.IMAGE, (time, rows, columns)), _text(caption)])
        for row, ((time, rows, columns), caption) in enumerate(
            zip(grids.tolist(), captions.tolist(), strict=True)
        )
    ]


def speech_samples(count: int, *, seed: int, public_only: bool = False) -> list[Sample]:
    """Return recordings with transcripts: 45 % like LibriSpeech, 45 % like GigaSpeech, 10 % long ones.

    Seconds: triangular from 1.5 over 15.5 to 20 (mean 12.3); log-normal around 3.4, at most 20 (mean 4.1);
    log-normal around 60, at most 300. Lengths are whole rows of 40 ms.

    Args:
        count: Samples wanted.
        seed: Equal seeds give equal samples.
        public_only: None of the long ones; the others keep their ratio.
    """
    rng = generator(seed, "simulator.speech", count)
    kind = rng.choice(3, size=count, p=_shares(SPEECH_SHARES, public_only=public_only))
    libri = rng.triangular(1.5, 15.5, 20.0, count)
    giga = np.clip(rng.lognormal(np.log(3.4), 0.6, count), 0.5, 20)
    long = np.clip(rng.lognormal(np.log(60), 0.8, count), 20, 300)
    seconds = np.choose(kind, (libri, giga, long))
    frames = FRAMES_PER_ROW * np.maximum(1, np.rint(seconds * 100 / FRAMES_PER_ROW)).astype(np.int64)
    words = 1 + rng.poisson(seconds * TOKENS_PER_S)
    return [
        _sample("speech", row, [_media(Modality.AUDIO, (length, 1, 1)), _text(transcript)])
        for row, (length, transcript) in enumerate(zip(frames.tolist(), words.tolist(), strict=True))
    ]


def text_samples(count: int, *, seed: int, public_only: bool = False) -> list[Sample]:
    """Return plain texts: tokens log-normal around 600 with sigma 1.2 (mean 1230), from 16 to 65536.

    Args:
        count: Samples wanted.
        seed: Equal seeds give equal samples.
        public_only: Changes nothing: all texts are our assumption.
    """
    rng = generator(seed, "simulator.text", count)
    tokens = np.clip(rng.lognormal(np.log(600), 1.2, count), 16, 65536).astype(np.int64)
    return [_sample("text", row, [_text(length)]) for row, length in enumerate(tokens.tolist())]


SAMPLES: dict[str, Callable[..., list[Sample]]] = {
    "images": image_samples,
    "speech": speech_samples,
    "text": text_samples,
}
"""What makes the samples of each synthetic source, ``(count, *, seed, public_only)``."""


def _shares(shares: tuple[float, ...], *, public_only: bool) -> list[float]:
    """The last share is not of a public set."""
    kept = [*shares[:-1], 0.0 if public_only else shares[-1]]
    return [share / sum(kept) for share in kept]


def _media(modality: Modality, grid: tuple[int, int, int]) -> Segment:
    if modality is Modality.AUDIO:
        num_rows = grid[0] // FRAMES_PER_ROW
    else:
        num_rows = grid[0] * (grid[1] // VISION.merge) * (grid[2] // VISION.merge)
    return Segment(modality, str(modality), 0, 0, grid, num_rows=num_rows, num_tokens=num_rows + MARKERS)


def _text(num_tokens: int) -> Segment:
    return Segment(
        Modality.TEXT, "text", 0, 0, (num_tokens, 1, 1), num_rows=0, num_tokens=num_tokens, loss=True
    )


def _sample(source: str, row: int, segments: Sequence[Segment]) -> Sample:
    """With an end-of-sample token; a text has one label less where it begins the sample."""
    num_tokens = sum(segment.num_tokens for segment in segments) + 1
    num_labels = segments[-1].num_tokens + (len(segments) > 1)
    return Sample(
        id=SampleId(source, 0, row),
        key=f"{row:06d}",
        shard=f"{source}-synthetic",
        segments=tuple(segments),
        num_tokens=num_tokens,
        num_labels=num_labels,
    )
