"""A loader over small real shards, and what training sees of its batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from balancer.lssp import LsspConfig
from balancer.planner import BalanceConfig, GroupPlanner
from balancer.reorder import lanes_of_group
from loaders.assemble import ModelInputs
from loaders.decode.text import ByteTokenizer
from loaders.identity import sources_identity
from loaders.index import index_shards
from loaders.loader import OmniLoader
from loaders.loader_config import LoaderConfig
from loaders.order import Order, OrderConfig
from loaders.source import Source, open_source
from loaders.source_config import SourceConfig
from loaders.step import Place
from omni_pipeline.core.batch import Batch
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.sizes import AudioSizes, ModelSizes, VisionSizes
from omni_pipeline.core.topology import Topology
from tests.balancer.worlds import cost_model
from tests.support.shards import caption_members, image_bytes, talk_members, write_tar

SIZES = ModelSizes(
    vision=VisionSizes(min_pixels=28 * 28, max_pixels=56 * 56, video_min_pixels=28 * 28),
    audio=AudioSizes(num_mels=16),
)
MODEL = ModelInputs(
    sizes=SIZES,
    special=ByteTokenizer.special,
    encoders={"vision": (Modality.IMAGE, Modality.VIDEO), "audio": (Modality.AUDIO,)},
)
WEIGHTS = {"captions": 0.6, "talks": 0.4}
BROKEN_KEY = "000004"


@dataclass(frozen=True)
class Data:
    """Two sources, and where the run keeps its records."""

    sources: tuple[Source, ...]
    folder: Path


def make_data(folder: Path, *, broken: bool, num_captions: int = 12) -> Data:
    """Captions in two shards, talks in one; ``broken`` cuts a JPEG in half, so that its header is right."""
    members = caption_members(num_captions)
    if broken:
        whole = image_bytes(
            84, 56, seed=4, pixels=np.random.default_rng(0).integers(0, 255, (56, 84, 3), "u1")
        )
        members[f"{BROKEN_KEY}.jpg"] = whole[: len(whole) // 2]
    names = list(members)
    folder.mkdir(exist_ok=True)
    for number, part in enumerate((names[:12], names[12:])):
        write_tar(folder / f"captions-{number}.tar", {name: members[name] for name in part})
    write_tar(folder / "talks-0.tar", talk_members(6))
    index_shards(sorted(str(path) for path in folder.glob("*.tar")))
    return open_data(folder, captions="jpg", talks="wav")


def make_captions(folder: Path, shard_sizes: Sequence[int]) -> Data:
    """One source of captions, cut into shards of these sizes."""
    folder.mkdir(exist_ok=True)
    first = 0
    for number, size in enumerate(shard_sizes):
        write_tar(folder / f"captions-{number}.tar", caption_members(size, first=first))
        first += size
    index_shards(sorted(str(path) for path in folder.glob("*.tar")))
    return open_data(folder, captions="jpg")


def open_data(folder: Path, **suffixes: str) -> Data:
    """Open sources by the suffix of their media; each sample has a text too."""
    sources = [
        SourceConfig(
            name=name,
            shards=str(folder / f"{name}-*.tar"),
            layout={"kind": "fields", "fields": [suffix, "txt"]},
        )
        for name, suffix in suffixes.items()
    ]
    return Data(tuple(open_source(item, SIZES, ByteTokenizer()) for item in sources), folder)


def identity_of(sources: Iterable[Source], *, seed: int = 7) -> dict[str, Any]:
    """As the run makes it."""
    return {"seed": seed, **sources_identity(sources)}


def make_loader(
    data: Data,
    *,
    quarantine: Path,
    topology: Topology | None = None,
    rank: int = 0,
    epochs: int | None = None,
    identity: Mapping[str, Any] | None = None,
    weights: Mapping[str, float] | None = None,
    order_settings: Mapping[str, Any] | None = None,
    **settings: Any,
) -> OmniLoader:
    layout = topology or Topology(world_size=1)
    defaults = {"lanes": 4, "packs_per_step": 4, "seq_len": 96, "look_ahead": 4, "epochs": epochs}
    order_config = OrderConfig(**{**defaults, **(order_settings or {})})
    place = Place(layout, rank)
    order = Order(
        order_config,
        sources=data.sources,
        weights=weights or {source.name: WEIGHTS[source.name] for source in data.sources},
        seed=7,
        lanes=lanes_of_group(place.group, order_config.lanes, layout),
    )
    planner = GroupPlanner(
        layout,
        cost_model=cost_model(),
        # What is loaded is compared segment by segment: none is cut into shares.
        config=BalanceConfig(lssp=LsspConfig(kind="off")),
        num_lanes=order_config.lanes,
        packs_per_step=order_config.packs_per_step,
        encoders=tuple(MODEL.encoders),
    )
    return OmniLoader(
        LoaderConfig(**{"num_workers": 0, "max_bad_fraction": 1.0, **settings}),
        order=order,
        planner=planner,
        place=place,
        model=MODEL,
        tokenizer_path=None,
        quarantine=quarantine,
        identity=identity or identity_of(data.sources),
    )


def content(batch: Batch) -> list[Any]:
    """All that training sees of a batch, and its state."""
    found: list[Any] = [batch.plan.digest, sorted(batch.failed), batch.num_bytes, batch.exhausted]
    for microbatch in batch.microbatches:
        arrays: list[np.ndarray[Any, Any]] = [microbatch.tokens, microbatch.labels, microbatch.positions]
        arrays.append(microbatch.cu_seqlens)
        for encoder, item in microbatch.inputs.items():
            found.append(encoder)
            arrays.extend([item.values, item.grids])
        arrays.extend([hop.send_rows for hop in microbatch.reshard.hops])
        arrays.extend([microbatch.reshard.take_rows, microbatch.reshard.positions])
        found.extend((array.dtype.str, array.shape, array.tobytes()) for array in arrays)
        found.append(microbatch.spans)
    return [*found, {**batch.state, "saved_with": None}]


def take(loader: OmniLoader, num_batches: int) -> list[list[Any]]:
    with loader:
        return [content(next(loader)) for _ in range(num_batches)]
