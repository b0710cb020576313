"""How long a plan takes by size of the group, and what it buys by mixture of images and text.

    python -m benchmarks.balance --json

Packs are made of synthetic samples before the clock starts: interleaved pages with log-normal picture sizes,
and plain text, both with log-normal lengths, priced as Qwen2.5-VL-3B. ``plan_ms`` is the processor time of
one rank to plan a step of 8 microbatches (median of some repeats; one thread, so on an idle machine it is the
time that passes), ``reshard_ms`` that of routing all its microbatches. ``*_before`` and ``*_after`` are max /
mean of the modelled load of encoders and LLM over 64 ranks, in order and under the plan, by image:text share
of the tokens. The last line of ``--json`` is one object.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np

from balancer.cost import CostModel
from balancer.hardware import load_hardware
from balancer.planner import BalanceConfig, GroupPlanner
from balancer.report import moved_rows_fraction
from balancer.shapes import TransformerShape, vision_shape
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment
from omni_pipeline.core.seeding import generator
from omni_pipeline.core.sizes import ModelSizes, media_rows, smart_resize
from omni_pipeline.core.topology import Topology

SEQ_LEN = 8192
NUM_MICROBATCHES = 8
GROUP_RANKS = (8, 64, 256)
IMAGE_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
MIXTURE_RANKS = 64
SIZES = ModelSizes()
LLM_HIDDEN = 2048

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


@click.command()
@click.option("--repeats", default=5, show_default=True, help="Repeats of each timing.")
@click.option("--seed", default=0, show_default=True, help="Seed of the synthetic packs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(*, repeats: int, seed: int, as_json: bool) -> None:
    """Measure planning and what it buys.

    Example: python -m benchmarks.balance --json
    """
    result = {
        "plan": [measure_plan(num_ranks, repeats=repeats, seed=seed) for num_ranks in GROUP_RANKS],
        "mixture": [measure_mixture(share, seed=seed) for share in IMAGE_SHARES],
    }
    for row in result["plan"]:
        print(
            f"{row['ranks']:4d} ranks, {row['media']:5d} media: plan {row['plan_ms']:.1f} ms "
            f"(best {row['plan_best_ms']:.1f}), reshard {row['reshard_ms']:.1f} ms"
        )
    for row in result["mixture"]:
        print(
            f"image:text {row['image_share']:.0%}: encoders {row['encoder_before']:.2f} -> "
            f"{row['encoder_after']:.2f}, LLM {row['llm_before']:.2f} -> {row['llm_after']:.2f}, "
            f"{row['moved_rows_fraction']:.0%} of rows moved, modelled step {row['step_speedup']:.2f}x"
        )
    if as_json:
        print(json.dumps(result))


def measure_plan(num_ranks: int, *, repeats: int, seed: int) -> dict[str, Any]:
    """Time planning and routing of a group of ``num_ranks`` ranks at half images, half text."""
    planner, packs = world(num_ranks, image_share=0.5, seed=seed)
    plan = planner.plan(packs, step=0, group=0)

    def route() -> None:
        for microbatch in range(plan.num_microbatches):
            planner.reshard(plan, microbatch=microbatch, rank=0)

    planning = timings_ms(lambda: planner.plan(packs, step=0, group=0), repeats=repeats)
    return {
        "ranks": num_ranks,
        "microbatches": plan.num_microbatches,
        "packs": len(packs),
        "media": len(plan.media),
        "plan_ms": statistics.median(planning),
        "plan_best_ms": min(planning),
        "reshard_ms": statistics.median(timings_ms(route, repeats=repeats)),
    }


def measure_mixture(image_share: float, *, seed: int) -> dict[str, float]:
    """Return the imbalance before and after at ``image_share`` of the tokens in pages with images."""
    planner, packs = world(MIXTURE_RANKS, image_share=image_share, seed=seed)
    plan = planner.plan(packs, step=0, group=0)
    encoder, llm = plan.encoder_balance, plan.llm_balance
    return {
        "image_share": image_share,
        "media": len(plan.media),
        "encoder_before": encoder.imbalance_before,
        "encoder_after": encoder.imbalance_after,
        "llm_before": llm.imbalance_before,
        "llm_after": llm.imbalance_after,
        "moved_rows_fraction": moved_rows_fraction(plan, planner.topology),
        "step_speedup": (encoder.makespan_before + llm.makespan_before)
        / (encoder.makespan_after + llm.makespan_after),
    }


def world(num_ranks: int, *, image_share: float, seed: int) -> tuple[GroupPlanner, list[Pack]]:
    """Return a planner of one group of ``num_ranks`` replicas, and packs for all microbatches."""
    planner = GroupPlanner(
        Topology(world_size=num_ranks),
        cost_model=CostModel(
            encoders={"vision": VISION},
            llm=LLM,
            encoder_of={Modality.IMAGE: "vision", Modality.VIDEO: "vision"},
            hardware=load_hardware("h100"),
        ),
        config=BalanceConfig(group="all"),
        num_lanes=num_ranks,
        packs_per_step=num_ranks * NUM_MICROBATCHES,
        encoders=("vision",),
        seq_len=SEQ_LEN,
    )
    rng = generator(seed, "benchmark.balance", num_ranks, round(100 * image_share))
    packs = [
        Pack(lane=lane, number=number, samples=pack_samples(rng, image_share))
        for lane in range(num_ranks)
        for number in range(NUM_MICROBATCHES)
    ]
    return planner, packs


def pack_samples(rng: np.random.Generator, image_share: float) -> tuple[Sample, ...]:
    """Fill one sequence; each next sample is of the kind that is furthest behind its share of the tokens."""
    samples: list[Sample] = []
    used = {"page": 0.0, "text": 0.0}
    # A random start keeps the kinds from falling equally in all packs.
    phase = float(rng.normal(0, SEQ_LEN / 4))
    for _ in range(1000):
        behind = image_share * (used["page"] + used["text"]) - used["page"] + phase
        kind = "page" if behind > 0 else "text"
        sample = make_page(rng) if kind == "page" else make_text(rng)
        if sum(used.values()) + sample.num_tokens > SEQ_LEN:
            break
        samples.append(sample)
        used[kind] += sample.num_tokens
        phase *= 0.5
    return tuple(samples)


def make_text(rng: np.random.Generator) -> Sample:
    """Return a document of log-normal length."""
    return as_sample([text(int(np.clip(rng.lognormal(6.0, 1.0), 16, 6000)))])


def make_page(rng: np.random.Generator) -> Sample:
    """Return one to six pictures of log-normal size, each followed by some text."""
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
        rows = media_rows(Modality.IMAGE, grid, SIZES)
        parts.append(Segment(Modality.IMAGE, "jpg", 0, 0, grid, num_rows=rows, num_tokens=rows + 2))
        parts.append(text(int(rng.integers(8, 120))))
    return as_sample(parts)


def text(num_tokens: int) -> Segment:
    """Return a text segment that is trained on."""
    return Segment(Modality.TEXT, "txt", 0, 0, (num_tokens, 1, 1), 0, num_tokens, loss=True)


def as_sample(parts: list[Segment]) -> Sample:
    """Return the sample of ``parts`` and an end token."""
    num_tokens = sum(part.num_tokens for part in parts) + 1
    return Sample(SampleId("synthetic", 0, 0), "0", "synthetic", tuple(parts), num_tokens, num_labels=0)


def timings_ms(function: Callable[[], object], *, repeats: int) -> list[float]:
    """Return the processor time of each call in milliseconds."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        found.append(1000 * (time.process_time() - start))
    return found


if __name__ == "__main__":
    main()
