from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from omni_pipeline.core.config import load_config, merge_flags, validate
from omni_pipeline.core.errors import ConfigError


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    weight: float = Field(1.0, ge=0)
    name: str = "a"


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    steps: int = Field(10, ge=1)
    inner: Inner = Inner()
    items: list[Inner] = []


def test_flags_win_over_the_file_and_reach_into_lists(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('steps = 3\n[inner]\nname = "file"\n[[items]]\nname = "x"\n')
    config = load_config(Outer, path, ["--steps", "5", "--items.0.weight=2", "--inner.weight", "0.5"])
    assert config.steps == 5
    assert config.inner == Inner(name="file", weight=0.5)
    assert config.items == [Inner(name="x", weight=2)]


@given(st.dictionaries(st.sampled_from(["steps", "other"]), st.integers(1, 9)), st.integers(1, 99))
def test_merging_leaves_the_file_data_alone(data: dict[str, Any], value: int) -> None:
    before = dict(data)
    assert merge_flags(data, [f"--inner.weight={value}"])["inner"] == {"weight": value}
    assert data == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["steps"], "unexpected argument 'steps'"),
        (["--steps"], "flag --steps has no value"),
        (["--items.0.name", "x"], "'0' is no place in a list of 0"),
        (["--steps.deeper", "1"], "reaches into 'steps', which is a plain value"),
    ],
)
def test_a_malformed_flag_is_named(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        merge_flags({"steps": 1, "items": []}, flags)


def test_every_wrong_setting_is_listed_once_with_the_nearest_name() -> None:
    data = {"stepz": 1, "steps": 0, "inner": {"wieght": 1}, "items": [{"nam": "x"}]}
    with pytest.raises(ConfigError) as caught:
        validate(Outer, data, where="run.toml")
    text = str(caught.value)
    assert "setting 'steps': Input should be greater than or equal to 1, got 0" in text
    assert "unknown setting 'stepz'; did you mean 'steps'?" in text
    assert "unknown setting 'inner.wieght'; did you mean 'weight'?" in text
    assert "unknown setting 'items.0.nam'; did you mean 'name'?" in text
    assert "where: run.toml" in text


def test_a_missing_file_and_broken_toml_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        load_config(Outer, tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"not valid TOML.*line 1"):
        load_config(Outer, broken)
