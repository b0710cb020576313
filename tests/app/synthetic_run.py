"""A run folder as a real run would leave it, made of numbers only, and a plan over real small media.

``python -m tests.app.synthetic_run FOLDER`` writes one with its report, to look at.
"""

from __future__ import annotations

import io
import json
import math
import sys
import wave
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw

from omni_pipeline.app.report import write_report
from omni_pipeline.app.report_gallery import gallery_from_plan
from omni_pipeline.app.run_dir import Event
from omni_pipeline.app.sinks import JsonlMetrics
from omni_pipeline.core.plan import Balance, MediaPlacement, Pack, PackSlot, StepPlan
from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment

SOURCES = {"captions": 0.34, "motion": 0.24, "talks": 0.2, "prose": 0.12, "pages": 0.1}
EVENTS = (Event(step=258, text="rank 1 killed (SIGKILL)"), Event(step=240, text="resumed at step 240"))
CHANCE = {"shapes": 0.125, "motion": 0.25, "tones": 0.125}
SUMMARY = {
    "title": "Synthetic run",
    "model": "demo, 11.2 M parameters",
    "world_size": 4,
    "seed": 0,
    "chance": CHANCE,
}


def write_run(run_dir: Path, *, steps: int = 400, kill: int = 258, resume: int = 240) -> None:
    """Write metrics of two attempts and a quarantine."""
    for first, last in ((0, kill + 1), (resume, steps)):
        metrics = JsonlMetrics(run_dir / "metrics.jsonl", clock=lambda: 1.0e9)
        for step in range(first, last):
            _record_step(metrics, step, steps)
        metrics.close()
    reasons = (
        ("decode", "JPEG is cut: 40 bytes are missing at the end"),
        ("fetch", "shard ended at byte 1048576, 20480 bytes before the index says"),
        ("decode", "image header says 20000 x 20000 pixels, limit 178956970\n  fix: raise the limit"),
        ("worker", "decode took longer than 30 s; the worker was replaced"),
    )
    with (run_dir / "quarantine.jsonl").open("w", encoding="utf-8") as file:
        for index in range(6):
            stage, reason = reasons[index % 4]
            file.write(json.dumps(quarantine_record(index, stage=stage, reason=reason)) + "\n")


def quarantine_record(
    index: int, *, stage: str = "decode", reason: str = "cut", key: str = ""
) -> dict[str, object]:
    """Return one line of quarantine.jsonl."""
    return {
        "step": 17 + 61 * index,
        "source": "captions" if index % 3 else "motion",
        "shard": f"shards/captions-{index:05d}.tar",
        "shard_index": index,
        "row": 3 * index,
        "key": key or f"00{index}417",
        "member": f"00{index}417.jpg",
        "offset": 512,
        "length": 9000,
        "stage": stage,
        "reason": reason,
        "rank": index % 4,
        "time": 1.0e9 + index,
    }


def _record_step(metrics: JsonlMetrics, step: int, steps: int) -> None:
    rng = np.random.default_rng(step)
    share = step / steps
    loss = 0.55 + 5.0 * math.exp(-step / 45) + 0.9 * math.exp(-step / 260) + 0.06 * rng.normal()
    step_s = 0.46 + 0.03 * rng.gamma(2.0) + (1.1 if step % 97 == 60 else 0.0)
    tokens = 15900.0 + int(rng.integers(-220, 220))
    after = {"encoder": 1.05 + 0.02 * rng.gamma(1.5), "llm": 1.03 + 0.012 * rng.gamma(1.5)}
    values: dict[str, float] = {
        "trainer/loss": loss,
        "trainer/grad_norm": 0.8 + 3 * math.exp(-step / 60) + 0.15 * rng.gamma(2.0),
        "trainer/lr": 2e-3 * min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * share)),
        "trainer/tokens": tokens,
        "trainer/labels": tokens * 0.31,
        "trainer/tokens_per_s": tokens / step_s,
        "trainer/step_s": step_s,
        "loader/wait_s": 0.004 + 0.003 * rng.gamma(1.0) + (0.3 if step % 97 == 60 else 0.0),
        "loader/bad_samples": float(step % 61 == 17),
        "loader/pack_fill": tokens / 16384,
    }
    for name, most in (("encoder", 1.9), ("llm", 1.34)):
        values[f"balancer/{name}_imbalance_before"] = most + 0.12 * rng.normal()
        values[f"balancer/{name}_imbalance_after"] = after[name]
    for name, weight in SOURCES.items():
        moved = weight * (1 + (1.2 * share if name == "talks" else -0.35 * share)) + 0.015 * rng.normal()
        values[f"loader/tokens/{name}"] = tokens * max(moved, 0.0)
        values[f"loader/samples/{name}"] = float(rng.integers(4, 30))
    if step % 80 == 79:
        for name, best in (("shapes", 0.97), ("motion", 0.93), ("tones", 0.95)):
            seen = best * (1 - math.exp(-step / 90))
            values[f"evaluation/held-out-{name}/accuracy"] = seen
            values[f"evaluation/held-out-{name}/loss"] = 2.0 * (1 - seen) + 0.05
            values[f"evaluation/swapped-{name}/accuracy"] = CHANCE[name] + 0.01 * rng.normal()
    for name, value in values.items():
        metrics.record(name, float(value), step)


def picture(index: int) -> Image.Image:
    """Return a picture with one coloured shape."""
    hue = (index * 67) % 360
    image = Image.new("RGB", (220, 160), f"hsl({(hue + 180) % 360}, 25%, 88%)")
    ImageDraw.Draw(image).ellipse((40 + 9 * index % 60, 30, 140, 130), fill=f"hsl({hue}, 65%, 52%)")
    return image


def jpeg(index: int) -> bytes:
    """Return ``picture`` as JPEG."""
    out = io.BytesIO()
    picture(index).save(out, "JPEG")
    return out.getvalue()


def clip(index: int) -> bytes:
    """Return a one-second mp4 of a moving square."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=12)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for number in range(12):
            image = Image.new("RGB", (128, 96), "#20304a")
            ImageDraw.Draw(image).rectangle(
                (8 * number, 30 + index, 8 * number + 26, 60 + index), fill="#ffb454"
            )
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    return out.getvalue()


def tone(index: int) -> bytes:
    """Return a short wav: a tone that swells and fades."""
    times = np.arange(12000) / 16000
    swell = np.sin(np.pi * times / times[-1]) * (0.55 + 0.45 * np.sin(2 * np.pi * 5 * times))
    data = (swell * np.sin(2 * np.pi * (220 + 40 * index) * times) * 20000).astype("<i2")
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(data.tobytes())
    return out.getvalue()


@dataclass
class Store:
    """One shard in memory that samples are added to."""

    url: str = "shards/made-00000.tar"
    content: bytearray = field(default_factory=bytearray)

    def read(self, url: str, offset: int, length: int) -> bytes:
        """Return a range, as ``read_range`` does."""
        assert url == self.url
        return bytes(self.content[offset : offset + length])

    def add(self, payload: bytes) -> tuple[int, int]:
        """Keep ``payload``; return (offset, length)."""
        offset = len(self.content)
        self.content += payload
        return offset, len(payload)

    def sample(self, source: str, key: str, *members: tuple[Modality, str, bytes, int]) -> Sample:
        """Return a sample of (modality, suffix, payload, tokens) members."""
        segments = []
        for modality, suffix, payload, tokens in members:
            offset, length = self.add(payload)
            rows = 0 if modality is Modality.TEXT else tokens - 2
            segments.append(
                Segment(
                    modality=modality,
                    member=f"{key}.{suffix}",
                    offset=offset,
                    length=length,
                    grid=(tokens, 1, 1),
                    num_rows=rows,
                    num_tokens=tokens,
                    loss=modality is Modality.TEXT,
                )
            )
        total = sum(segment.num_tokens for segment in segments) + 1
        row = len(self.content)
        return Sample(SampleId(source, 0, row), key, self.url, tuple(segments), total, 5)


def mixed_plan(store: Store, *, num_packs: int = 4, texts: Callable[[int], str] | None = None) -> StepPlan:
    """Return a plan of packs with images, videos, recordings and text over four ranks."""
    say = texts or (lambda index: f"A round shape number {index}, softly lit, on a plain ground.")
    packs, media, slots = [], [], []
    for number in range(num_packs):
        samples = []
        for place in range(7 + number):
            index = 10 * number + place
            text = say(index)
            words = (Modality.TEXT, "txt", text.encode(), max(4, len(text) // 4))
            kinds = {
                0: (Modality.IMAGE, "jpg", jpeg(index), 42 + 7 * place),
                1: (Modality.AUDIO, "wav", tone(index), 21),
                2: (Modality.VIDEO, "mp4", clip(place), 96),
            }
            members = (kinds[place % 4], words) if place % 4 in kinds else (words,)
            samples.append(store.sample(list(SOURCES)[place % 4], f"{index:06d}", *members))
        packs.append(Pack(lane=number, number=400 + number, samples=tuple(samples)))
        slots.append(PackSlot(pack=number, replica=number % 2, microbatch=number // 2))
        media += _placements(number, samples)
    balance = Balance(mean=1.0, makespan_before=1.8, makespan_after=1.05)
    return StepPlan(
        step=399,
        group=0,
        ranks=(0, 1, 2, 3),
        replicas=(0, 1),
        num_microbatches=2,
        packs=tuple(packs),
        slots=tuple(slots),
        media=tuple(media),
        exchanges=("exact",) * 2,
        encoder_balance=balance,
        llm_balance=balance,
    )


def _placements(number: int, samples: list[Sample]) -> list[MediaPlacement]:
    placements, position = [], 0
    for place, sample in enumerate(samples):
        for which, segment in enumerate(sample.segments):
            if segment.is_media:
                encoder = "audio" if segment.modality is Modality.AUDIO else "vision"
                rank = (number + place) % 4
                placements.append(
                    MediaPlacement(
                        pack=number,
                        sample=place,
                        segment=which,
                        microbatch=number // 2,
                        encoder=encoder,
                        ranks=(rank,),
                        shares=(segment.num_rows,),
                        joined=False,
                        position=position,
                        num_rows=segment.num_rows,
                    )
                )
            position += segment.num_tokens
        position += 1
    return placements


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    write_run(folder, steps=int(sys.argv[2]) if len(sys.argv) > 2 else 400)
    shard = Store()
    packs_shown = gallery_from_plan(mixed_plan(shard), shard.read, max_packs=3)
    write_report(folder, folder / "report.html", gallery=packs_shown, events=EVENTS, summary=SUMMARY)
