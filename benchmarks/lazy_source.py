"""What a source costs that has a million, or a billion, samples: time to open, to plan, and memory.

    python -m benchmarks.lazy_source --json

A real index of 10,000 captioned pictures stands for every shard: the manifest names it under as many paths as
there are shards, all leading through links to the same two files, so each is opened, checked and read as its
own. Every size is measured in a fresh process that opens the source, makes an order of all lanes and takes
steps. Times are CPU times of that process, so other work on the machine does not count; ``*_rss_mb`` are
resident memory, of which ``start_rss_mb`` is Python with what it has imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import pyarrow as pa

from loaders.decode.text import ByteTokenizer
from loaders.index_file import read_summary, write_index
from loaders.index_rows import MEMBER_TYPES, TOKENS, WORD
from loaders.manifest import save_manifest, to_table
from loaders.order import Order, OrderConfig
from loaders.source import open_source
from loaders.source_config import SourceConfig
from loaders.storage import stat_shard
from omni_pipeline.core.seeding import generator
from omni_pipeline.core.sizes import ModelSizes

ROWS_PER_SHARD = 10_000
LINKS = 1000


@click.command()
@click.option("--rows", multiple=True, type=int, default=(1_000_000, 1_000_000_000), show_default=True)
@click.option("--steps", default=20, show_default=True, help="Steps taken after the first.")
@click.option("--lanes", default=64, show_default=True, help="Lanes, all in one process.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
@click.option("--measure", type=click.Path(path_type=Path), hidden=True)
def main(*, rows: tuple[int, ...], steps: int, lanes: int, as_json: bool, measure: Path | None) -> None:
    """Measure sources of the given numbers of ROWS.

    Example: python -m benchmarks.lazy_source --json
    """
    if measure is not None:
        click.echo(json.dumps(measured(measure, steps=steps, lanes=lanes)))
        return
    results: dict[str, dict[str, Any]] = {}
    for num_rows in rows:
        with tempfile.TemporaryDirectory() as folder:
            manifest = make_source(Path(folder), num_shards=max(1, num_rows // ROWS_PER_SHARD))
            command = [sys.executable, "-m", "benchmarks.lazy_source", "--measure", str(manifest)]
            command += ["--steps", str(steps), "--lanes", str(lanes)]
            found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results[str(num_rows)] = json.loads(found.splitlines()[-1])
            click.echo(f"{num_rows} rows: {results[str(num_rows)]}", err=as_json)
    if as_json:
        click.echo(json.dumps(results))


def measured(manifest: Path, *, steps: int, lanes: int) -> dict[str, float]:
    """Open the source of ``manifest`` in this process, order and pack it; return times and memory."""
    start_mb = _rss_mb()
    begin = time.process_time()
    layout = {"kind": "fields", "fields": ["jpg", "txt"]}
    config = SourceConfig.model_validate({"name": "pairs", "shards": str(manifest), "layout": layout})
    source = open_source(config, ModelSizes(), ByteTokenizer())
    opened = time.process_time()
    opened_mb = _rss_mb()
    order_config = OrderConfig(lanes=lanes, packs_per_step=4 * lanes, seq_len=8192, oversize="cut")
    order = Order(order_config, sources=[source], weights={"pairs": 1.0}, seed=0, lanes=range(lanes))
    ordered = time.process_time()
    order.next_step(0)
    planned = time.process_time()
    num_samples = sum(len(pack.samples) for step in range(1, steps + 1) for pack in order.next_step(step))
    end = time.process_time()
    return {
        "rows": len(source),
        "open_ms": round((opened - begin) * 1e3, 1),
        "order_ms": round((ordered - opened) * 1e3, 1),
        "first_step_ms": round((planned - ordered) * 1e3, 1),
        "samples_per_s": round(num_samples / (end - planned)),
        "start_rss_mb": start_mb,
        "opened_rss_mb": opened_mb,
        "end_rss_mb": _rss_mb(),
    }


def make_source(folder: Path, *, num_shards: int) -> Path:
    """Write one shard, its index, and a manifest that names it ``num_shards`` times; return the manifest."""
    shard = folder / "part.tar"
    shard.write_bytes(bytes(10_240))
    write_pairs_index(str(shard), num_rows=ROWS_PER_SHARD)
    for number in range(LINKS):
        (folder / f"{number:03d}").symlink_to(".", target_is_directory=True)
    names = [f"{n // LINKS:03d}/{n % LINKS:03d}/part.tar" for n in range(num_shards)]
    manifest = folder / "all.manifest.arrow"
    save_manifest(str(manifest), to_table(names, [read_summary(str(shard))] * num_shards))
    return manifest


def write_pairs_index(shard: str, *, num_rows: int) -> None:
    """Write an index of ``num_rows`` captioned pictures, of sizes as the web has them, for any file."""
    random = generator(0, "benchmarks/lazy_source")
    count = 2 * num_rows
    is_text = np.arange(count) % 2
    height, width = np.clip(random.lognormal(6.4, 0.4, (2, count)), 64, 8000).astype(np.int32)
    tokens = np.clip(random.lognormal(3.5, 0.6, count), 1, 500).astype(np.int32)
    length = np.where(is_text, 4 * tokens, height.astype(np.int64) * width // 8)
    columns: dict[str, Any] = {
        "suffix": np.where(is_text, "txt", "jpg"),
        "modality": np.where(is_text, "text", "image"),
        "error": np.full(count, ""),
        "offset": np.cumsum(length + 1024),
        "length": length,
        "height": np.where(is_text, 0, height),
        "width": np.where(is_text, 0, width),
        "num_chars": np.where(is_text, 4 * tokens, 0),
        "num_bytes": np.where(is_text, 4 * tokens, 0),
    }
    members = [
        pa.array(columns[name]).dictionary_encode()
        if kind == WORD
        else pa.array(columns.get(name, np.zeros(count)), kind, safe=False)
        for name, kind in MEMBER_TYPES.items()
    ]
    starts = pa.array(np.arange(0, count + 1, 2), pa.int32())
    rows = pa.RecordBatch.from_pydict(
        {
            "key": pa.array([f"{number:09d}" for number in range(num_rows)]),
            "members": pa.ListArray.from_arrays(
                starts, pa.StructArray.from_arrays(members, names=list(MEMBER_TYPES))
            ),
            TOKENS + ByteTokenizer.fingerprint: pa.ListArray.from_arrays(
                starts, pa.array(np.where(is_text, tokens, -1), pa.int32())
            ),
        }
    )
    write_index(shard, rows, stat=stat_shard(shard), damage="")


def _rss_mb() -> float:
    return round(psutil.Process().memory_info().rss / 1e6, 1)


if __name__ == "__main__":
    main()
