"""loaders.batches and lazily opened sources: only what is asked for is read, and little of it is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders import batches as batches_module
from loaders.batches import Recent
from loaders.decode.text import ByteTokenizer
from loaders.fitting import DENIED, FILTERED, UNUSABLE, USABLE
from loaders.index import index_shards
from loaders.index_file import BATCH_ROWS, index_path, open_index
from loaders.source import open_source
from loaders.source_config import SourceConfig
from omni_pipeline.core.errors import ConfigError, ShardError
from omni_pipeline.core.sizes import ModelSizes
from tests.support.shards import write_tar

SIZES = ModelSizes()
LONG = 2 * BATCH_ROWS + 300


def config_of(shards: Any, fields: Sequence[str] = ("txt",)) -> SourceConfig:
    """Return the configuration of a source named "s"."""
    layout = {"kind": "fields", "fields": fields}
    return SourceConfig.model_validate({"name": "s", "shards": shards, "layout": layout})


def write_texts(path: Path, num_samples: int, *, first: int = 0) -> str:
    """Write and index a shard of texts; the n-th of all has n % 97 tokens."""
    members = {f"{n:06d}.txt": b"x" * (n % 97) for n in range(first, first + num_samples)}
    write_tar(path, members)
    index_shards([str(path)])
    return str(path)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three shards of several batches each."""
    folder = tmp_path_factory.mktemp("shards")
    return [write_texts(folder / f"{n}.tar", LONG, first=n * LONG) for n in range(3)]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Names of the shards opened, and (shard, batch) read, in order."""
    seen: list[Any] = []

    def opening(shard: str) -> Any:
        seen.append(Path(shard).name)
        file = open_index(shard)
        real = file.batch
        file.batch = lambda number: seen.append((Path(shard).name, number)) or real(number)  # type: ignore
        return file

    monkeypatch.setattr(batches_module, "open_index", opening)
    monkeypatch.setattr("loaders.source.COUNTED_ROWS", 0)
    return seen


def test_only_the_shards_and_batches_of_wanted_rows_are_read(shards: list[str], reads: list[Any]) -> None:
    source = open_source(config_of(shards), SIZES, ByteTokenizer())
    assert len(source) == 3 * LONG
    assert source.has_labels
    assert reads == []
    source.sizes(np.array([LONG + 5, LONG + 3]))
    assert reads == ["1.tar", ("1.tar", 0)]
    source.sample(LONG + BATCH_ROWS - 1)
    source.identify(LONG + 7)
    source.problem(LONG)
    assert len(reads) == 2
    source.sizes(np.arange(2 * LONG - 1, 2 * LONG + 1))
    assert reads[2:] == [("1.tar", 2), "2.tar", ("2.tar", 0)]


def test_rows_of_all_batches_and_shards_come_as_asked(shards: list[str]) -> None:
    source = open_source(config_of(shards), SIZES, ByteTokenizer())
    wanted = np.random.default_rng(0).permutation(len(source))
    assert source.sizes(wanted).tokens.tolist() == (wanted % 97 + 1).tolist()
    for ordinal in (0, BATCH_ROWS - 1, BATCH_ROWS, LONG - 1, LONG, 2 * LONG + 2 * BATCH_ROWS, 3 * LONG - 1):
        sample = source.sample(ordinal)
        shard, row = divmod(ordinal, LONG)
        assert (sample.id.shard, sample.id.row, sample.key) == (shard, row, f"{ordinal:06d}")
        assert (sample.shard, sample.num_tokens) == (shards[shard], ordinal % 97 + 1)
    assert source.sizes(np.zeros(0, dtype=np.int64)).tokens.shape == (0,)


def test_the_values_used_last_are_kept_up_to_the_limit() -> None:
    made: list[int] = []
    recent: Recent[int, str] = Recent(2, lambda key: made.append(key) or str(key))  # type: ignore[func-returns-value]
    for key in (1, 2, 1, 3, 1, 2):
        assert recent.get(key) == str(key)
        assert len(recent) <= 2
    assert made == [1, 2, 3, 2]


def test_memory_is_bounded_by_batches_and_open_files(
    shards: list[str], reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_module, "KEPT_BATCHES", 2)
    monkeypatch.setattr(batches_module, "KEPT_LOCAL", 1)
    source = open_source(config_of(shards), SIZES, ByteTokenizer())
    for ordinal in range(0, len(source), 100):
        source.sizes(np.array([ordinal]))
        assert len(source._batches._batches) <= 2
        assert len(source._batches._files) == 1
    assert len(reads) == 3 + 9
    source.sizes(np.array([0]))
    assert reads[12:] == ["0.tar", ("0.tar", 0)]


def test_files_are_closed_when_they_are_let_go(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "KEPT_LOCAL", 1)
    source = open_source(config_of(shards), SIZES, ByteTokenizer())
    open_files = len(os.listdir("/proc/self/fd"))
    for ordinal in [0, LONG, 2 * LONG] * 5:
        source.sizes(np.array([ordinal]))
    assert len(os.listdir("/proc/self/fd")) <= open_files + 1


def test_forked_processes_and_threads_read_for_themselves(shards: list[str]) -> None:
    source = open_source(config_of(shards), SIZES, ByteTokenizer())
    source.sizes(np.array([0]))
    children = []
    for child in range(3):
        pid = os.fork()
        if pid == 0:
            wanted = np.random.default_rng(child).permutation(len(source))
            same = source.sizes(wanted).tokens.tolist() == (wanted % 97 + 1).tolist()
            os._exit(0 if same else 1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    wrong: list[int] = []

    def ask(seed: int) -> None:
        for ordinal in np.random.default_rng(seed).integers(0, len(source), 300).tolist():
            if source.sample(ordinal).num_tokens != ordinal % 97 + 1:
                wrong.append(ordinal)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_a_shard_that_changes_under_a_source_is_refused(tmp_path: Path) -> None:
    paths = [write_texts(tmp_path / f"{n}.tar", 3, first=3 * n) for n in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loaders.source.COUNTED_ROWS", 0)
        source = open_source(config_of(paths), SIZES, ByteTokenizer())
    write_texts(Path(paths[1]), 3, first=4)
    with pytest.raises(ShardError) as caught:
        source.sample(3)
    assert str(caught.value) == (
        "this shard was indexed again, with other samples, while it was in use\n"
        f"  where: source 's', {paths[1]}\n"
        "  fix:   put the shard back, or start a new run: the order of samples is another one"
    )
    write_texts(Path(paths[1]), 3, first=3)
    assert source.sample(3).key == "000003"
    os.unlink(index_path(paths[0]))
    with pytest.raises(ShardError, match="shard has no index"):
        source.sample(0)


def test_a_filter_leaves_out_rows_and_never_moves_any(tmp_path: Path) -> None:
    members = {f"{n}.txt": b"x" * n for n in range(5)} | {"5.json": b"{}"}
    path = write_tar(tmp_path / "0.tar", members)
    index_shards([str(path)])

    (tmp_path / "keys.txt").write_text("1")
    config = config_of(str(path)).model_copy(
        update={"where": "num_chars <= 3", "deny": (tmp_path / "keys.txt",)}
    )
    source = open_source(config, SIZES, ByteTokenizer())
    sizes = source.sizes(np.arange(6))
    assert sizes.status.tolist() == [USABLE, DENIED, USABLE, USABLE, FILTERED, UNUSABLE]
    assert sizes.tokens.tolist()[:5] == [1, 2, 3, 4, 5]
    assert [source.sample(n).num_tokens for n in range(5)] == [1, 2, 3, 4, 5]


def test_whether_text_may_be_trained_on_is_known_without_rows(tmp_path: Path, reads: list[Any]) -> None:
    path = write_tar(tmp_path / "0.tar", {"a.txt": b"x", "a.question.txt": b"?", "b.txt": b"y"})
    index_shards([str(path)])
    for fields, expected in (
        (["txt"], True),
        ([{"member": "txt", "loss": False}, {"member": "question.txt", "loss": False}], False),
        ([{"member": "txt", "loss": False}, "question.txt"], True),
    ):
        assert open_source(config_of(str(path), fields), SIZES, ByteTokenizer()).has_labels == expected
    assert reads == []
    with pytest.raises(ConfigError, match=r"the shards hold: txt \(2\), question.txt \(1\)"):
        open_source(config_of(str(path), ["jpg"]), SIZES, ByteTokenizer())


def test_memory_does_not_grow_with_the_rows() -> None:
    # A thousand shards of ten thousand rows against ten: a fresh process each, since memory is of a process.
    command = [sys.executable, "-m", "benchmarks.lazy_source", "--json", "--lanes", "4", "--steps", "3"]
    command += ["--rows", "100000", "--rows", "10000000"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    small, large = json.loads(done.stdout.splitlines()[-1]).values()
    assert large["rows"] == 100 * small["rows"]
    # Ten million rows held as columns would be 500 MB.
    assert large["end_rss_mb"] < small["end_rss_mb"] + 30
