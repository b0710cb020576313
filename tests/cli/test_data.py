"""``omni data index``: indexes, a manifest of them, and what is said of both."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from loaders.index_file import index_path
from loaders.manifest import list_shards
from omni_pipeline.cli.main import main
from tests.support.shards import caption_members, write_tar


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["omni", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_index_writes_a_manifest_that_names_its_shards_and_can_be_named_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(write_tar(tmp_path / f"{n}.tar", caption_members(2, first=n))) for n in range(2)]
    manifest = str(tmp_path / "all.manifest.arrow")
    asked = ("data", "index", str(tmp_path / "*.tar"), "--manifest", manifest, "--workers", "0", "--json")
    assert run_main(monkeypatch, *asked) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 4
    assert list_shards(manifest) == paths
    written = Path(manifest).read_bytes()
    os.unlink(index_path(paths[1]))
    asked = ("data", "index", manifest, "--manifest", manifest, "--workers", "0", "--json")
    assert run_main(monkeypatch, *asked) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["shards"], summary["unchanged"]) == (2, 1)
    assert Path(manifest).read_bytes() == written


def test_no_manifest_is_written_of_shards_that_are_not_all_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_tar(tmp_path / "0.tar", caption_members(2))
    missing = "memory://nowhere/1.tar"
    manifest = tmp_path / "all.manifest.arrow"
    asked = ["data", "index", str(good), missing, "--workers", "0", "--manifest"]
    assert run_main(monkeypatch, *asked, str(manifest)) == 1
    assert not manifest.exists()
    assert "1 failed shards" in capsys.readouterr().out
    assert run_main(monkeypatch, *asked, str(tmp_path / "all.arrow")) == 2
    assert "name the manifest NAME.manifest.arrow" in capsys.readouterr().err
