"""loaders.manifest: one file that sums up many shards, and opens a source as their indexes do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from loaders import manifest as manifest_module
from loaders import storage
from loaders.decode.text import ByteTokenizer
from loaders.index import build_index, index_shards
from loaders.index_file import index_path
from loaders.manifest import find_shards, list_shards, write_manifest
from loaders.source import Source, open_source
from loaders.source_config import SourceConfig
from omni_pipeline.core.errors import ConfigError, ShardError
from omni_pipeline.core.sizes import ModelSizes
from tests.support.shards import caption_members, write_tar

BYTES = ByteTokenizer()


class OtherTokenizer(ByteTokenizer):
    """Another fingerprint."""

    fingerprint = "other-1"


def opened(shards: Any, *, tokenizer: ByteTokenizer = BYTES) -> Source:
    """Return a source of captions named "s"."""
    layout = {"kind": "fields", "fields": ["jpg", "txt"]}
    config = SourceConfig.model_validate({"name": "s", "shards": shards, "layout": layout})
    return open_source(config, ModelSizes(), tokenizer)


def write_shards(folder: Path, num_shards: int, *, num_samples: int = 3) -> list[str]:
    """Write and index shards of captions."""
    folder.mkdir(exist_ok=True)
    paths = [
        str(write_tar(folder / f"{n}.tar", caption_members(num_samples, first=num_samples * n)))
        for n in range(num_shards)
    ]
    index_shards(paths)
    return paths


def samples_of(source: Source) -> list[Any]:
    """Return all that a source says of its rows."""
    everything = source.sizes(np.arange(len(source)))
    return [everything.tokens.tolist(), *(source.sample(ordinal) for ordinal in range(len(source)))]


def test_a_manifest_opens_the_same_source_as_its_shards(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "data", 3)
    beside = str(tmp_path / "data" / "all.manifest.arrow")
    elsewhere = str(tmp_path / "far.manifest.arrow")
    pattern = opened(str(tmp_path / "data" / "*.tar"))
    for manifest in (beside, elsewhere):
        write_manifest(manifest, paths)
        source = opened(manifest)
        assert source.shards == pattern.shards == tuple(paths)
        assert source.shard_sizes == pattern.shard_sizes == (3, 3, 3)
        assert source.fingerprint == pattern.fingerprint
        assert source.has_labels
        assert samples_of(source) == samples_of(pattern)


def test_a_source_opens_from_the_manifest_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_shards(tmp_path, 3)
    manifest = str(tmp_path / "all.manifest.arrow")
    write_manifest(manifest, paths)
    expected = opened(manifest).fingerprint
    monkeypatch.setattr("loaders.source.COUNTED_ROWS", 0)
    for path in paths[:2]:
        os.unlink(path)
        os.unlink(index_path(path))
    source = opened(manifest)
    assert source.fingerprint == expected
    assert source.sample(6).key == "000006"
    with pytest.raises(ShardError, match="there is no such file"):
        source.sample(0)


def test_manifest_and_shards_may_move_together_or_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_shards(tmp_path / "old", 2)
    monkeypatch.chdir(tmp_path)
    write_manifest("old/all.manifest.arrow", ["old/0.tar", paths[1]])
    assert list_shards("old/all.manifest.arrow") == ["old/0.tar", "old/1.tar"]
    (tmp_path / "old").rename(tmp_path / "new")
    assert [sample.key for sample in samples_of(opened("new/all.manifest.arrow"))[1:]] == [
        f"{n:06d}" for n in range(6)
    ]
    write_manifest("apart.manifest.arrow", ["new/0.tar"])
    shutil.copy("apart.manifest.arrow", tmp_path / "new" / "copy.manifest.arrow")
    assert list_shards("apart.manifest.arrow") == ["new/0.tar"]
    assert list_shards("new/copy.manifest.arrow") == ["new/new/0.tar"]


def test_shards_outside_its_folder_are_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_shards(tmp_path / "data", 1)
    (tmp_path / "lists").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    write_manifest("../lists/all.manifest.arrow", ["0.tar"])
    monkeypatch.chdir(tmp_path)
    assert list_shards("lists/all.manifest.arrow") == paths


def test_remote_manifests_name_their_shards_as_local_ones_do(tmp_path: Path) -> None:
    path = write_shards(tmp_path, 1)[0]
    for name in ("a.tar", "b/c.tar"):
        storage.write_file(f"memory://bucket/{name}", Path(path).read_bytes())
        build_index(f"memory://bucket/{name}", tokenizer=BYTES)
    shards = ["memory://bucket/a.tar", "memory://bucket/b/c.tar", path]
    for manifest in ("memory://bucket/all.manifest.arrow", str(tmp_path / "all.manifest.arrow")):
        write_manifest(manifest, shards)
        assert list_shards(manifest) == shards
        assert [sample.key for sample in samples_of(opened(manifest))[1:]] == 3 * [
            "000000",
            "000001",
            "000002",
        ]


def test_manifests_and_patterns_mix_and_a_shard_counts_once(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, 4)
    manifest = str(tmp_path / "some.manifest.arrow")
    write_manifest(manifest, [paths[2], paths[1]])
    shards = [paths[3], manifest, str(tmp_path / "*.tar")]
    table = find_shards(shards)
    assert table.shards == (paths[3], paths[2], paths[1], paths[0])
    assert table.manifests == ("", manifest, manifest, "")
    assert list_shards(shards) == list(table.shards)
    source = opened(shards)
    assert [source.identify(3 * n)[1:] for n in range(4)] == [
        (f"{3 * n:06d}", paths[n]) for n in (3, 2, 1, 0)
    ]


def test_a_shard_under_several_spellings_counts_once_as_first_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_shards(tmp_path / "data", 2)
    monkeypatch.chdir(tmp_path / "data")
    write_manifest("all.manifest.arrow", paths)
    (tmp_path / "data" / "link.tar").symlink_to("0.tar")
    shutil.copy(index_path("0.tar"), index_path("link.tar"))
    spellings = ["./0.tar", "0.tar", "../data/{0..1}.tar", f"file://{paths[0]}", *paths]
    manifests = ["all.manifest.arrow", "./all.manifest.arrow"]
    for patterns, expected in (
        (spellings, ["./0.tar", "../data/1.tar"]),
        ([*manifests, *spellings], ["0.tar", "1.tar"]),
        ([*paths, *manifests], paths),
        (["0.tar", "link.tar"], ["0.tar", "link.tar"]),
    ):
        assert list_shards(patterns) == list(find_shards(patterns).shards) == expected
        assert len(opened(patterns)) == 6
    table = find_shards([paths[1], *manifests])
    assert (table.shards, table.manifests) == ((paths[1], "0.tar"), ("", "all.manifest.arrow"))


def test_many_shards_are_summed_up_by_threads_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_shards(tmp_path, 6, num_samples=1)
    alone = find_shards(paths)
    monkeypatch.setattr(manifest_module, "FEW_SHARDS", 2)
    threaded = find_shards(paths)
    assert threaded.shards == alone.shards
    assert threaded.table.equals(alone.table)
    os.unlink(index_path(paths[3]))
    os.unlink(index_path(paths[5]))
    with pytest.raises(ShardError, match="shard has no index") as caught:
        find_shards(paths)
    assert caught.value.where == paths[3]


def test_a_stale_manifest_is_found_when_the_shard_is_opened(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, 2)
    manifest = str(tmp_path / "all.manifest.arrow")
    write_manifest(manifest, paths)
    source = opened(manifest)
    write_tar(Path(paths[1]), caption_members(4))
    index_shards(paths)
    source = opened_without_looking(manifest)
    assert source.sample(0).key == "000000"
    for ask in (source.sample, source.problem, lambda n: source.sizes(np.array([n]))):
        with pytest.raises(ShardError) as caught:
            ask(3)
        assert str(caught.value) == (
            f"manifest {manifest} is stale: this shard was indexed again, with other samples\n"
            f"  where: source 's', {paths[1]}\n"
            f"  fix:   run `omni data index {manifest} --manifest {manifest}`"
        )
    with pytest.raises(ConfigError, match="is stale"):
        opened(manifest)
    write_manifest(manifest, list_shards(manifest))
    assert opened(manifest).shard_sizes == (3, 4)


def opened_without_looking(manifest: str) -> Source:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loaders.source.COUNTED_ROWS", 0)
        return opened(manifest)


def test_a_shard_written_again_with_the_same_samples_is_not_stale(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, 1)
    manifest = str(tmp_path / "all.manifest.arrow")
    write_manifest(manifest, paths)
    members = caption_members(3)
    names = [f"{n:06d}.{suffix}" for n in range(3) for suffix in ("txt", "jpg")]
    assert list(members) != names
    write_tar(Path(paths[0]), {"000000.json": b"{}" * 900, **{name: members[name] for name in names}})
    index_shards(paths)
    source = opened(manifest)
    data = Path(paths[0]).read_bytes()
    segment = source.sample(2).segments[0]
    assert data[segment.offset : segment.offset + segment.length] == members["000002.jpg"]


def test_counts_of_the_tokenizer_are_asked_of_the_manifest(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, 2)
    manifest = str(tmp_path / "all.manifest.arrow")
    build_index(paths[0], tokenizer=OtherTokenizer())
    write_manifest(manifest, paths)
    with pytest.raises(ConfigError) as caught:
        opened(manifest, tokenizer=OtherTokenizer())
    assert str(caught.value) == (
        "index has no token counts of this run's tokenizer (other-1)\n"
        f"  where: source 's', {paths[1]}\n"
        f"  fix:   run `omni data index {manifest} --tokenizer FILE --manifest {manifest}`"
        " with the tokenizer of the run"
    )
    build_index(paths[1], tokenizer=OtherTokenizer())
    write_manifest(manifest, paths)
    assert opened(manifest, tokenizer=OtherTokenizer()).fingerprint != opened(manifest).fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("cut", "manifest is damaged"),
        ("version", "manifest has version 0, this program reads 1"),
        ("columns", "manifest is damaged: its columns are others"),
        ("index", "manifest has version None, this program reads 1"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, change: str, message: str) -> None:
    paths = write_shards(tmp_path, 1)
    manifest = tmp_path / "all.manifest.arrow"
    write_manifest(str(manifest), paths)
    table = pa.ipc.open_file(manifest.read_bytes()).read_all()
    if change == "cut":
        manifest.write_bytes(manifest.read_bytes()[:200])
    elif change == "index":
        table = pa.table({"key": ["a"]})
    elif change == "version":
        table = table.replace_schema_metadata({"version": "0"})
    else:
        table = table.drop_columns("damage")
    if change != "cut":
        with pa.ipc.new_file(str(manifest), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(ConfigError, match=message) as caught:
        opened(str(manifest))
    assert caught.value.where == f"source 's', {manifest}"
    assert caught.value.fix == f"run `omni data index SHARDS --manifest {manifest}` to write it again"


def test_missing_and_misnamed_manifests_are_setting_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        opened(str(tmp_path / "none.manifest.arrow"))
    with pytest.raises(ConfigError, match="there is no such manifest"):
        opened("memory://bucket/none.manifest.arrow")
    with pytest.raises(ConfigError, match=r"all.arrow does not end in .manifest.arrow"):
        write_manifest(str(tmp_path / "all.arrow"), write_shards(tmp_path, 1))


def test_suffixes_bad_members_and_damage_are_summed(tmp_path: Path) -> None:
    first = write_tar(tmp_path / "0.tar", {"a.JPG": b"no picture", "a.txt": b"x", "b.json": b"{}"})
    second = write_tar(tmp_path / "1.tar", caption_members(4))
    second.write_bytes(second.read_bytes()[:-12_000])
    index_shards([str(first), str(second)])
    manifest = str(tmp_path / "all.manifest.arrow")
    write_manifest(manifest, [str(first), str(second)])
    table = find_shards(manifest)
    left = int(table.num_samples[1])
    assert 0 < left < 4
    assert table.num_bad == 1
    assert table.suffixes["json"] == ("other", 1)
    assert table.suffixes["txt"][0] == "text"
    assert table.suffixes["jpg"][0] == "image"
    assert table.suffixes["jpg"][1] >= 1 + left - 1
    ((shard, damage),) = table.damaged
    assert (shard, "byte" in damage) == (str(second), True)
    assert opened(manifest).damaged == table.damaged
