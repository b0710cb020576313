"""Encoders from files: what is taken from one, and how a wrong one is told."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_pipeline.core.encoder_file import load_encoder, run_encoder_files
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.media import KINDS
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.sizes import ModelSizes, grid_rows, media_grids
from tests.support.depth import ENCODER_FILE, changed_file, kinds_restored

NAME, SUFFIX = 'name="depth"', 'suffixes=("depth.png",)'


@pytest.fixture(autouse=True)
def _own_kinds() -> Iterator[None]:
    with kinds_restored():
        yield


def test_modalities_are_one_object_per_name_wherever_they_come_from() -> None:
    assert Modality("image") is Modality.IMAGE
    for copied in (pickle.loads(pickle.dumps(Modality("depth"))), copy.deepcopy(Modality("depth"))):
        assert copied is Modality("depth")
    assert Modality("depth") == "depth"


def test_a_kind_from_a_file_stands_beside_the_built_in_ones() -> None:
    assert KINDS.modality_of("depth.png") is Modality.IMAGE
    encoder = load_encoder(ENCODER_FILE)
    assert encoder.name == "depth"
    assert KINDS.modalities[-1] is Modality("depth")
    assert KINDS.modality_of("left.DEPTH.png") is Modality("depth")
    assert KINDS.modality_of("png") is Modality.IMAGE
    assert KINDS.modality_of("depth") is None
    assert load_encoder(ENCODER_FILE) is encoder
    assert KINDS.modalities.count(Modality("depth")) == 1


def test_its_sizes_are_asked_for_like_those_of_any_kind() -> None:
    load_encoder(ENCODER_FILE)
    raw = {"height": np.array([16, 100, 15]), "width": np.array([32, 47, 64])}
    grids, problems = media_grids(Modality("depth"), raw, ModelSizes())
    assert grids.tolist() == [[1, 1, 2], [1, 6, 2], [0, 0, 0]]
    assert grid_rows(Modality("depth"), grids, ModelSizes()).tolist() == [2, 12, 0]
    assert {place: error.what for place, error in problems.items()} == {
        2: "depth of (1, 0, 4) units: not whole rows of 1"
    }


def test_another_process_knows_what_this_one_read_even_after_an_edit(tmp_path: Path) -> None:
    path = changed_file(tmp_path)
    load_encoder(path)
    files = pickle.loads(pickle.dumps(KINDS.files))
    path.write_text("no Python")
    del KINDS.modalities[-1], KINDS.of_suffix["depth.png"], KINDS.encoders["depth"]
    run_encoder_files(files)
    assert KINDS.files == files
    assert KINDS.modality_of("depth.png") is Modality("depth")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ([(NAME, 'name="image"')], "the name 'image' of an encoder is taken: it is built in"),
        ([(NAME, 'name="llm"')], "the name 'llm' of an encoder is taken: it is built in"),
        ([(SUFFIX, 'suffixes=("jpg",)')], "the suffix 'jpg' of 'depth' is taken: such members are image"),
        ([("ENCODER = ", "encoder = ")], "the file has no ENCODER, a MediaEncoder"),
        ([("PATCH = 16", "PATCH = 16 / 0")], "the encoder's file fails: ZeroDivisionError: division by zero"),
        ([("import io", "import io, sys; sys.modules['torch'] = sys")], "the encoder's file imports torch"),
        ([(SUFFIX, 'suffixes="depth"')], "the encoder's file fails: ValidationError"),
        ([("        unit_values", "        unit_dtype='ints', unit_values")], "'ints' is no numpy type"),
        ([("        unit_values", "        num_units=3, unit_values")], "num_units"),
    ],
)
def test_a_wrong_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[tuple[str, str]], what: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    monkeypatch.delitem(sys.modules, "torch")
    path = changed_file(tmp_path, *changes)
    with pytest.raises(ConfigError) as caught:
        load_encoder(path)
    assert what in caught.value.what
    assert caught.value.where is not None
    assert caught.value.where.startswith(str(path))
    assert caught.value.fix
    assert "depth" not in KINDS.encoders


def test_a_failing_file_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_encoder(changed_file(tmp_path, ("PATCH = 16", "PATCH = 16 / 0")))
    assert caught.value.where == f"{tmp_path / 'changed.py'}, line 18"


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the encoder's file .*gone\.py: No such file"):
        load_encoder(tmp_path / "gone.py")


def test_two_files_can_share_neither_a_name_nor_a_suffix(tmp_path: Path) -> None:
    load_encoder(ENCODER_FILE)
    with pytest.raises(ConfigError) as caught:
        load_encoder(changed_file(tmp_path, ("PATCH = 16", "PATCH = 8")))
    assert caught.value.what == (
        f"the name 'depth' of an encoder is taken: it is of {ENCODER_FILE}, another file"
    )
    with pytest.raises(ConfigError) as caught:
        load_encoder(changed_file(tmp_path, (NAME, 'name="range"')))
    assert caught.value.what == "the suffix 'depth.png' of 'range' is taken: such members are depth"


@pytest.mark.parametrize(
    "returned", [np.ones((3, 2), dtype=np.int64), np.ones((3, 3)), [[1, 1, 1]]], ids=["dims", "type", "count"]
)
def test_grids_that_are_no_grids_are_told(returned: Any) -> None:
    encoder = load_encoder(ENCODER_FILE)
    kind = encoder.kind.model_copy(update={"grids": lambda raw: returned})
    with pytest.raises(ConfigError, match=r"grids\(\) of encoder 'depth' returns .* for 3 members"):
        kind.checked_grids({"height": np.ones(3), "width": np.ones(3)})
