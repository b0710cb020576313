"""The mixture flag: shares in, the same run with these sources out, or one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_pipeline.app.mixture_flag import with_mixture
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.core.config import load_config
from omni_pipeline.core.errors import ConfigError
from tests.support.runs import RUN_FILE


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE.format(root=tmp_path, steps=4), encoding="utf-8")
    flags = ("--sources.0.group", "media", "--groups", "{media=0.5}")
    return load_config(RunConfig, path, flags)


def test_named_sources_stay_at_their_shares_and_outside_of_groups(config: RunConfig) -> None:
    mixed = with_mixture(config, "clips=0.25, captions=3")
    assert [(source.name, source.weight, source.group) for source in mixed.sources] == [
        ("captions", 3.0, None),
        ("clips", 0.25, None),
    ]
    assert mixed.groups == {}
    assert mixed.order == config.order


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--mixture has ''"),
        ("captions", "--mixture has 'captions'"),
        ("captions=some", "--mixture has 'captions=some'"),
        ("captions=0", "--mixture has 'captions=0'"),
        ("captions=nan", "--mixture has 'captions=nan'"),
        ("captions=1,captions=2", "names source 'captions' twice"),
        ("caption=1", "did you mean 'captions'?"),
        ("zzz=1", "the sources are captions, talks, clips"),
    ],
)
def test_a_wrong_mixture_is_one_clear_error(config: RunConfig, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_mixture(config, text)
    assert message in str(caught.value)
