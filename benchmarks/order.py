"""How fast samples are ordered and packed, how full the packs are, and what a start and a resume cost.

    python -m benchmarks.order --json

The mixture is plain text (log-normal lengths), image and caption, and long videos. Samples are made before
the clock starts, so these numbers are those of lanes, mixture and packing alone; ``billion_samples`` is the
same of one source of a billion rows that is opened shard by shard, in a process of its own (see
``benchmarks.lazy_source``). All is one thread on one core for all lanes, so times are CPU times of the
process: other work on the machine hardly counts. The last line of ``--json`` is one object:

``samples_per_s`` (packed; median) and ``samples_per_s_spread``; ``first_plan_ms`` (a new Order and its first
step); ``resume_ms`` (a new Order, a state loaded from JSON and the next step, at steps 10 and 10 million)
and ``state_kb`` (that JSON); ``pack_fill`` (used / offered positions); ``rss_mb`` (resident memory of the
process with the billion rows); ``buckets``: the same samples in buckets, with ``padding`` (share of the
positions taken), and ``one_bucket_padding``, were every sample padded to the whole sequence.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import numpy as np

from loaders.bucketing_config import BucketingConfig
from loaders.fitting import IntArray, PackSizes, sizes_of
from loaders.order import Order, OrderConfig
from loaders.weight import Weight
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment
from omni_pipeline.core.seeding import generator
from omni_pipeline.core.sizes import ModelSizes, media_rows, smart_resize

WEIGHTS: dict[str, Weight] = {"text": 0.4, "captions": [[0, 0.4], [1000, 0.2]], "videos": 0.2}
FAR_STEP = 10_000_000
BILLION = 1_000_000_000
SIZES = ModelSizes()


class PooledSource:
    """A large source whose samples repeat a pool of ready-made ones."""

    def __init__(self, name: str, shard_sizes: Sequence[int], pool: Sequence[Sample]) -> None:
        self.name = name
        self.shard_sizes = shard_sizes
        self._pool = pool
        self._sizes = sizes_of(pool)

    def sizes(self, ordinals: IntArray) -> PackSizes:
        """Return the sizes of these rows."""
        rows = ordinals % len(self._pool)
        sizes = self._sizes
        return PackSizes(
            *(getattr(sizes, name)[rows] for name in ("tokens", "cut_tokens", "patches", "mel_frames")),
            status=sizes.status[rows],
        )

    def sample(self, ordinal: int) -> Sample:
        """Return the sample at ``ordinal``."""
        return self._pool[ordinal % len(self._pool)]

    def identify(self, ordinal: int) -> tuple[SampleId, str, str]:
        """Return (id, key, shard) of a row."""
        sample = self.sample(ordinal)
        return sample.id, sample.key, sample.shard

    def problem(self, ordinal: int) -> str:
        """Not asked: all rows are usable."""
        raise IndexError(ordinal)


@click.command()
@click.option("--steps", default=12, show_default=True, help="Steps timed.")
@click.option("--lanes", default=64, show_default=True, help="Lanes, all on this core.")
@click.option("--packs-per-step", default=256, show_default=True, help="Packs of a step.")
@click.option("--seq-len", default=8192, show_default=True, help="Positions of a pack.")
@click.option("--repeats", default=5, show_default=True, help="Repeats; the median is shown.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(*, steps: int, lanes: int, packs_per_step: int, seq_len: int, repeats: int, as_json: bool) -> None:
    """Measure ordering, packing and resuming.

    Example: python -m benchmarks.order --json
    """
    config = OrderConfig(
        lanes=lanes, packs_per_step=packs_per_step, seq_len=seq_len, max_patches=4 * seq_len, oversize="cut"
    )
    sources = make_sources()
    # The collector would walk the ready-made samples again and again, which no run has.
    gc.collect()
    gc.freeze()

    def build() -> Order:
        return Order(config, sources=sources, weights=WEIGHTS, seed=0, lanes=range(lanes))

    order = build()
    for step in range(10):
        order.next_step(step)
    near = json.dumps(order.state_dict())
    far = far_state(near)
    rates, packs = measure_rate(order, first_step=10, steps=steps, repeats=repeats)
    billion = measure_billion(lanes=lanes)
    result = {
        "samples_per_s": round(statistics.median(rates)),
        "samples_per_s_spread": [round(min(rates)), round(max(rates))],
        "first_plan_ms": median_ms(lambda: build().next_step(0), repeats=repeats),
        "resume_ms": {
            "step_10": median_ms(lambda: resume(build(), near, step=10), repeats=repeats),
            f"step_{FAR_STEP}": median_ms(lambda: resume(build(), far, step=FAR_STEP), repeats=repeats),
        },
        "state_kb": round(len(near) / 1e3, 1),
        "pack_fill": round(sum(pack.num_tokens for pack in packs) / (seq_len * len(packs)), 4),
        "samples_per_pack": round(sum(len(pack.samples) for pack in packs) / len(packs), 2),
        "rss_mb": billion["end_rss_mb"],
        "billion_samples": billion,
        "buckets": measure_buckets(config, sources, steps=steps, repeats=repeats),
    }
    for name, value in result.items():
        click.echo(f"{name}: {value}", err=as_json)
    if as_json:
        click.echo(json.dumps(result))


def measure_rate(
    order: Order, *, first_step: int, steps: int, repeats: int
) -> tuple[list[float], list[Pack]]:
    """Return samples per CPU second of each repeat of ``steps`` steps, and all packs made."""
    rates, packs = [], []
    for repeat in range(repeats):
        first = first_step + repeat * steps
        started = time.process_time()
        made = [pack for step in range(first, first + steps) for pack in order.next_entries(step)]
        rates.append(sum(len(pack.entries) for pack in made) / (time.process_time() - started))
        packs += [order.pack_of(pack) for pack in made]
    return rates, packs


def measure_billion(*, lanes: int) -> dict[str, float]:
    """Return what ``benchmarks.lazy_source`` says of a source of a billion rows."""
    command = [sys.executable, "-m", "benchmarks.lazy_source", "--rows", str(BILLION), "--json"]
    done = subprocess.run([*command, "--lanes", str(lanes)], check=True, capture_output=True, text=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found[str(BILLION)]


def measure_buckets(
    config: OrderConfig, sources: Sequence[PooledSource], *, steps: int, repeats: int
) -> dict[str, float]:
    """Return speed, fill and padding of the same samples in buckets of like shares of the tokens."""
    bucketing = BucketingConfig(quantiles=16)
    config = config.model_copy(update={"bucketing": bucketing, "look_ahead": 4 * config.look_ahead})
    order = Order(config, sources=sources, weights=WEIGHTS, seed=0, lanes=range(config.lanes))
    for step in range(10):
        order.next_step(step)
    rates, packs = measure_rate(order, first_step=10, steps=steps, repeats=repeats)
    num_tokens = sum(pack.num_tokens for pack in packs)
    return {
        "samples_per_s": round(statistics.median(rates)),
        "pack_fill": round(num_tokens / (config.seq_len * len(packs)), 4),
        "padding": round(1 - num_tokens / sum(pack.num_positions for pack in packs), 4),
        "one_bucket_padding": round(
            1 - num_tokens / (config.seq_len * sum(len(pack.samples) for pack in packs)), 4
        ),
    }


def resume(order: Order, text: str, *, step: int) -> None:
    """Load a state from its JSON text and take the next step."""
    order.load_state_dict(json.loads(text))
    order.next_step(step)


def far_state(text: str) -> str:
    """Return the state as it would look at ``FAR_STEP``: all lanes moved on alike in each source."""
    state: dict[str, Any] = json.loads(text)
    first = state["0"]["sources"]
    ahead = {name: saved["position"] * (FAR_STEP // 10 - 1) for name, saved in first.items()}
    for lane in state.values():
        for name, saved in lane["sources"].items():
            saved["position"] += ahead[name]
        lane["number"] *= FAR_STEP // 10
        lane["buffer"] = [[name, position + ahead[name]] for name, position in lane["buffer"]]
    return json.dumps(state)


def median_ms(function: Callable[[], object], *, repeats: int) -> float:
    """Return the median CPU time of ``function``, milliseconds."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        function()
        times.append((time.process_time() - started) * 1e3)
    return round(statistics.median(times), 2)


def make_sources(*, pool: int = 20_000) -> list[PooledSource]:
    """Return the three sources: 20 M texts, 5 M captioned images, 200 k videos."""
    random = generator(0, "benchmarks/order")
    lengths = np.clip(random.lognormal(6.0, 1.1, pool), 8, 60_000).astype(int)
    texts = [[_text(int(length))] for length in lengths]
    images = [
        [_picture(int(height), int(width)), _text(int(caption))]
        for height, width, caption in zip(
            random.lognormal(6.4, 0.4, pool), random.lognormal(6.4, 0.4, pool), random.lognormal(3.5, 0.6,
            pool), strict=True,
        )
    ]  # fmt: skip
    videos = [
        [_clip(int(frames), 252, 448), _text(int(words))]
        for frames, words in zip(
            np.clip(random.lognormal(3.2, 0.7, pool // 20), 4, 100), random.lognormal(5, 0.8, pool // 20),
            strict=True,
        )
    ]  # fmt: skip
    return [
        PooledSource("text", [10_000] * 2000, _samples("text", texts)),
        PooledSource("captions", [5_000] * 1000, _samples("captions", images)),
        PooledSource("videos", [500] * 400, _samples("videos", videos)),
    ]


def _samples(source: str, segments: Sequence[list[Segment]]) -> list[Sample]:
    return [
        Sample(
            id=SampleId(source, 0, row),
            key=f"{row:08d}",
            shard=f"{source}-00000.tar",
            segments=tuple(parts),
            num_tokens=sum(part.num_tokens for part in parts) + 1,
            num_labels=sum(part.num_tokens for part in parts if part.loss) + 1,
        )
        for row, parts in enumerate(segments)
    ]


def _text(num_tokens: int) -> Segment:
    count = max(1, num_tokens)
    return Segment(Modality.TEXT, "txt", 0, 4 * count, (count, 1, 1), 0, count, loss=True)


def _picture(height: int, width: int) -> Segment:
    vision = SIZES.vision
    height, width = smart_resize(
        height, width, factor=vision.factor, min_pixels=vision.min_pixels, max_pixels=vision.max_pixels
    )
    return _media(Modality.IMAGE, (1, height // vision.patch, width // vision.patch))


def _clip(num_frames: int, height: int, width: int) -> Segment:
    vision = SIZES.vision
    temporal = max(1, num_frames // vision.temporal_patch)
    return _media(Modality.VIDEO, (temporal, height // vision.patch, width // vision.patch))


def _media(modality: Modality, grid: tuple[int, int, int]) -> Segment:
    rows = media_rows(modality, grid, SIZES)
    return Segment(modality, str(modality), 0, 1, grid, rows, rows + 2)


if __name__ == "__main__":
    main()
