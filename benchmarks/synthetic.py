"""Packs of made-up samples for the balance benchmarks: interleaved pages, plain text, videos and speech.

Sizes are log-normal: sides of pictures, lengths of texts, seconds of videos and recordings. Lanes draw by
chance, so that packs differ as those of a shuffled mixture do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from balancer.cost import CostModel
from balancer.hardware import load_hardware
from balancer.shapes import TransformerShape, audio_shape, vision_shape
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment
from omni_pipeline.core.seeding import generator
from omni_pipeline.core.sizes import ModelSizes, media_rows, smart_resize

SEQ_LEN = 8192
SIZES = ModelSizes()
LLM_HIDDEN = 2048
VIDEO_SIDE = 280
FRAMES_PER_S = 2.0
MEL_FRAMES_PER_S = 100

VISION = vision_shape(
    layers=32,
    hidden=1280,
    ffn=3420,
    heads=16,
    patch_values=1176,
    merge=2,
    window_patches=8,
    full_attention_layers=4,
    llm_hidden=LLM_HIDDEN,
)
AUDIO = audio_shape(
    layers=32, hidden=1280, ffn=5120, heads=20, num_mels=128, chunk_frames=200, llm_hidden=LLM_HIDDEN
)
LLM = TransformerShape(
    hidden=LLM_HIDDEN,
    layers=36,
    ffn=11008,
    heads=16,
    kv_heads=2,
    head_dim=128,
    causal=True,
    output_widths=(LLM_HIDDEN, 151_936),
)
ENCODERS = ("vision", "audio")

Mixture = Mapping[str, float]
"""Share of the tokens by kind of sample: ``page``, ``text``, ``video``, ``speech``."""


def cost_model() -> CostModel:
    """Return the prices of a model like Qwen2.5-Omni-3B on H100-class ranks."""
    return CostModel(
        encoders={"vision": VISION, "audio": AUDIO},
        llm=LLM,
        encoder_of={Modality.IMAGE: "vision", Modality.VIDEO: "vision", Modality.AUDIO: "audio"},
        hardware=load_hardware("h100"),
    )


def make_packs(mixture: Mixture, *, num_lanes: int, packs_per_lane: int, seed: int) -> list[Pack]:
    """Return the packs of a step, by lane; those of a lane do not depend on the other lanes."""
    packs = []
    for lane in range(num_lanes):
        rng = generator(seed, f"benchmark {sorted(mixture.items())}", lane)
        # Tokens that each kind is behind its share; a random start, as lanes are in mid-run.
        behind = {kind: float(rng.normal(0, SEQ_LEN / 4)) for kind in mixture}
        packs += [
            Pack(lane=lane, number=number, samples=pack_samples(rng, mixture, behind))
            for number in range(packs_per_lane)
        ]
    return packs


def pack_samples(rng: np.random.Generator, mixture: Mixture, behind: dict[str, float]) -> tuple[Sample, ...]:
    """Fill one sequence; each next sample is of the kind that is furthest behind its share of the tokens."""
    samples: list[Sample] = []
    num_tokens = 0
    while True:
        kind = max(behind, key=behind.__getitem__)
        sample = MAKERS[kind](rng)
        if num_tokens + sample.num_tokens > SEQ_LEN:
            return tuple(samples)
        samples.append(sample)
        num_tokens += sample.num_tokens
        for name, share in mixture.items():
            behind[name] += share * sample.num_tokens
        behind[kind] -= sample.num_tokens


def make_text(rng: np.random.Generator) -> Sample:
    """Return a document."""
    return as_sample([text(int(np.clip(rng.lognormal(6.0, 1.0), 16, 6000)))])


def make_page(rng: np.random.Generator) -> Sample:
    """Return one to six pictures, each followed by some text."""
    parts: list[Segment] = []
    for _ in range(int(rng.integers(1, 7))):
        side = float(np.clip(rng.lognormal(6.0, 0.6), 56, 2000))
        height, width = smart_resize(
            round(side),
            round(side * rng.uniform(0.6, 1.6)),
            factor=SIZES.vision.factor,
            min_pixels=SIZES.vision.min_pixels,
            max_pixels=SIZES.vision.max_pixels,
        )
        grid = (1, height // SIZES.vision.patch, width // SIZES.vision.patch)
        parts += [media(Modality.IMAGE, grid), text(int(rng.integers(8, 120)))]
    return as_sample(parts)


def make_video(rng: np.random.Generator) -> Sample:
    """Return a clip of 2 to 120 s, mostly short, some that fill most of a sequence, and a description."""
    seconds = float(np.clip(rng.lognormal(2.7, 1.0), 2, 120))
    patches = VIDEO_SIDE // SIZES.vision.patch
    grid = (round(seconds * FRAMES_PER_S / 2), patches, patches)
    return as_sample([media(Modality.VIDEO, grid), text(int(rng.integers(30, 200)))])


def make_speech(rng: np.random.Generator) -> Sample:
    """Return a recording of 1 to 200 s and its transcript."""
    seconds = float(np.clip(rng.lognormal(2.3, 0.8), 1, 200))
    frames = round(seconds * MEL_FRAMES_PER_S / 4) * 4
    return as_sample([media(Modality.AUDIO, (frames, 1, 1)), text(int(4 * seconds) + 1)])


MAKERS: dict[str, Callable[[np.random.Generator], Sample]] = {
    "page": make_page,
    "text": make_text,
    "video": make_video,
    "speech": make_speech,
}


def media(modality: Modality, grid: tuple[int, int, int]) -> Segment:
    """Return a media segment, its two markers counted."""
    rows = media_rows(modality, grid, SIZES)
    return Segment(modality, "media", 0, 0, grid, num_rows=rows, num_tokens=rows + 2)


def text(num_tokens: int) -> Segment:
    """Return a text segment that is trained on."""
    return Segment(Modality.TEXT, "txt", 0, 0, (num_tokens, 1, 1), 0, num_tokens, loss=True)


def as_sample(parts: list[Segment]) -> Sample:
    """Return the sample of ``parts`` and an end token."""
    num_tokens = sum(part.num_tokens for part in parts) + 1
    return Sample(SampleId("synthetic", 0, 0), "0", "synthetic", tuple(parts), num_tokens, num_labels=0)
