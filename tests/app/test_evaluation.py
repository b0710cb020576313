"""An evaluation sees every held-out sample exactly once, on any number of ranks and groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

from loaders.index import index_shards
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.wire import build_loader, build_tokenizer, build_topology, held_out_stream
from omni_pipeline.core.batch import Batch
from omni_pipeline.core.config import load_config
from tests.support.ranks import run_ranks
from tests.support.shards import caption_members, image_bytes, talk_members, write_tar
from trainer.colocation import ColocatedModel, colocate
from trainer.evaluation import EvalSums, evaluate
from trainer.model.omni import build_model
from trainer.parallel.mesh import make_rank_groups

RUN_FILE = """
[run]
dir = "{root}/run"
steps = 1

[[sources]]
name = "captions"
shards = "{root}/captions-*.tar"
layout = {{ kind = "fields", fields = ["jpg", "txt"] }}

[order]
lanes = 4
packs_per_step = 8
seq_len = 64
look_ahead = 4

[model]
size = "tiny"

[loader]
num_workers = 0
max_bad_fraction = 1.0

[[evaluation.sources]]
name = "captions"
shards = "{root}/captions-*.tar"
layout = {{ kind = "fields", fields = ["jpg", "txt"] }}

[[evaluation.sources]]
name = "few"
shards = "{root}/few-0.tar"
layout = {{ kind = "fields", fields = ["wav", "txt"] }}

[[evaluation.sources]]
name = "oversize"
shards = "{root}/oversize-0.tar"
layout = {{ kind = "fields", fields = ["jpg", "txt"] }}
"""
BROKEN, LONG = 4, 20
LONG_TEXT = b"long " * 20
# By world size, the replicas per group.
LAYOUTS = {1: 1, 2: 2, 3: 1, 4: 2}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards with a broken picture and a long text; fewer samples than lanes; one sample that can run,
    three with long texts and one without a picture.
    """
    root = tmp_path_factory.mktemp("data")
    members = caption_members(27)
    noise = torch.randint(0, 255, (56, 84, 3), generator=torch.Generator().manual_seed(0)).byte().numpy()
    whole = image_bytes(84, 56, pixels=noise)
    members[f"{BROKEN:06d}.jpg"] = whole[: len(whole) // 2]
    members[f"{LONG:06d}.txt"] = LONG_TEXT
    names = list(members)
    for shard, (start, end) in enumerate(((0, 18), (18, 22), (22, 54))):
        write_tar(root / f"captions-{shard}.tar", {name: members[name] for name in names[start:end]})
    write_tar(root / "few-0.tar", talk_members(2))
    oversize = {name: LONG_TEXT if "txt" in name else data for name, data in caption_members(5).items()}
    write_tar(root / "oversize-0.tar", {**oversize, "000002.txt": b"short", "000003.jpg": b"no picture"})
    assert not any(report.error for report in index_shards([str(path) for path in root.glob("*.tar")]))
    path = root / "run.toml"
    path.write_text(RUN_FILE.format(root=root))
    return path


class Seen:
    """Passes batches on and counts the samples that run, by source and key."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.keys: Counter[tuple[str, str]] = Counter()

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            for microbatch in batch.microbatches:
                self.keys.update((span.id.source, span.key) for span in microbatch.spans)
            yield batch


def _evaluate(
    rank: int, run_file: Path, world_size: int, folder: Path
) -> tuple[dict[str, EvalSums], Counter[Any]]:
    flags = ["--balance.group", str(LAYOUTS[world_size])]
    config = load_config(RunConfig, run_file, flags)
    topology = build_topology(config, world_size=world_size, ranks_per_node=world_size)
    model = _model(config, topology)
    tokenizer = build_tokenizer(config)
    found: dict[str, EvalSums] = {}
    keys: Counter[Any] = Counter()
    for source in config.evaluation.sources:
        loader = build_loader(
            config,
            held_out_stream(config, source, tokenizer),
            tokenizer=tokenizer,
            topology=topology,
            rank=rank,
            quarantine=folder / f"{source.name}.jsonl",
        )
        with loader:
            seen = Seen(loader)
            found |= evaluate(model, seen, sources=[source.name], eos=tokenizer.special.eos, settings={})
            keys += seen.keys
    return found, keys


def _model(config: RunConfig, topology: Any) -> ColocatedModel:
    return colocate(
        build_model(config.model, seed=3),
        groups=make_rank_groups(topology, device=torch.device("cpu")),
        parallel={},
        precision="fp32",
    )


@pytest.fixture(scope="module")
def alone(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, EvalSums]:
    """The sums of one process."""
    ((sums, keys),) = run_ranks(1, _evaluate, args=(run_file, 1, tmp_path_factory.mktemp("alone")))
    _check_keys([keys])
    return sums


def _check_keys(of_ranks: list[Counter[Any]]) -> None:
    """Every sample that fits runs on exactly one rank, exactly once."""
    total: Counter[Any] = Counter()
    for keys in of_ranks:
        total += keys
    expected = {("captions", f"{number:06d}") for number in range(27) if number != LONG}
    expected |= {("few", "000000"), ("few", "000001"), ("oversize", "000002")}
    assert set(total) == expected
    assert set(total.values()) == {1}


def test_seen_failed_and_dropped_samples_are_all_that_a_source_has(alone: dict[str, EvalSums]) -> None:
    counts = {name: (sums.num_seen, sums.num_failed, sums.num_dropped) for name, sums in alone.items()}
    assert counts == {"captions": (25, 1, 1), "few": (2, 0, 0), "oversize": (1, 0, 4)}


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_many_ranks_see_what_one_sees(
    run_file: Path, tmp_path: Path, alone: dict[str, EvalSums], world_size: int
) -> None:
    results = run_ranks(world_size, _evaluate, args=(run_file, world_size, tmp_path))
    _check_keys([keys for _, keys in results])
    for sums, _ in results:
        assert sums == results[0][0]
        for name, expected in alone.items():
            loss_sum, *counts = astuple(sums[name])
            assert counts == list(astuple(expected)[1:]), name
            assert loss_sum == pytest.approx(expected.loss_sum, rel=1e-6), name
