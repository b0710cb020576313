"""Data that the loader's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.loading import Data, make_data


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("good"), broken=False)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("damaged"), broken=True)


@pytest.fixture
def quarantine(tmp_path: Path) -> Path:
    return tmp_path / "run" / "quarantine.jsonl"
