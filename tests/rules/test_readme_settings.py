"""Every piece of a run file in the README is one that a run accepts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from omni_pipeline.app.run_config import RunConfig

README = Path(__file__).parents[2] / "README.md"
PIECES = re.findall(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
SOURCE: dict[str, Any] = {"shards": "x.tar", "layout": {"kind": "fields", "fields": ["mp4", "txt"]}}


def test_the_readme_shows_settings() -> None:
    assert len(PIECES) >= 2


@pytest.mark.parametrize("piece", PIECES)
def test_a_run_accepts_the_settings_that_the_readme_shows(piece: str) -> None:
    settings = tomllib.loads(piece)
    settings["sources"] = [SOURCE | source for source in settings.get("sources", [{"name": "a"}])]
    settings["order"] = {"packs_per_step": 64, "seq_len": 8192} | settings.get("order", {})
    config = RunConfig.model_validate({"run": {"dir": "runs/x", "steps": 1}} | settings)
    assert [source.name for source in config.sources] == [source["name"] for source in settings["sources"]]
