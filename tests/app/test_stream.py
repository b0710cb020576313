"""Stream: what decides the order is its identity, and what does not is left free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loaders.identity import check_identity
from loaders.order_config import OrderConfig
from loaders.source_config import SourceConfig
from omni_pipeline.app.wire import Stream
from omni_pipeline.core.errors import StateMismatchError
from tests.support.loading import make_data


def stream(folder: Path, *, lanes: int, epochs: int | None) -> Stream:
    data = make_data(folder, broken=False)
    order = OrderConfig(lanes=lanes, packs_per_step=lanes, seq_len=96)
    configs = tuple(
        SourceConfig(
            name=source.name,
            shards=str(folder / f"{source.name}-*.tar"),
            layout={"kind": "fields", "fields": ["jpg" if source.name == "captions" else "wav", "txt"]},
            epochs=epochs if source.name == "talks" else None,
        )
        for source in data.sources
    )
    return Stream(order=order, sources=data.sources, configs=configs, groups={}, seed=0)


def with_epochs(before: Stream, epochs: int | None) -> Stream:
    configs = [
        config.model_copy(update={"epochs": epochs}) if config.name == "talks" else config
        for config in before.configs
    ]
    return replace(before, configs=tuple(configs))


def check(saved: Stream, present: Stream) -> None:
    state = {"version": 1, "identity": saved.identity}
    check_identity(state, version=1, identity=present.identity, where="state", announce=False)


def test_the_epochs_of_a_source_may_change_between_runs_but_not_those_of_fewer_rows_than_lanes(
    tmp_path: Path,
) -> None:
    enough_rows = stream(tmp_path / "few-lanes", lanes=4, epochs=2)
    check(enough_rows, with_epochs(enough_rows, 4))
    check(enough_rows, with_epochs(enough_rows, None))
    few_rows = stream(tmp_path / "many-lanes", lanes=12, epochs=2)
    check(few_rows, with_epochs(few_rows, 2))
    for epochs in (4, None):
        with pytest.raises(StateMismatchError, match="source 'talks' changed") as caught:
            check(few_rows, with_epochs(few_rows, epochs))
        assert "the epochs of a source with fewer rows than lanes" in str(caught.value)


def test_a_source_that_a_weight_never_draws_is_known(tmp_path: Path) -> None:
    found = stream(tmp_path, lanes=4, epochs=None)
    configs = [
        config.model_copy(update={"weight": 0.0}) if config.name == "talks" else config
        for config in found.configs
    ]
    found = replace(found, configs=tuple(configs))
    assert [name for name in ("captions", "talks") if found.is_drawn(name)] == ["captions"]
