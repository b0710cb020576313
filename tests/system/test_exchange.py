"""A run on several nodes: the way that rows travel is a setting, and changes no loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_pipeline.app.explain import explain_step
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.wire import build_planner, build_topology
from omni_pipeline.core.config import load_config
from omni_pipeline.core.errors import ConfigError
from tests.support.ranks import run_ranks
from tests.support.runs import be_rank, losses, make_run

pytestmark = pytest.mark.slow


def test_two_nodes_train_the_same_by_every_kind_of_exchange(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, steps=3)
    found = {}
    for kind in ("exact", "symmetric", "two_level"):
        flags = ["--run.dir", str(tmp_path / kind), "--balance.exchange", kind]
        planned = explain_step(
            load_config(RunConfig, run_file, flags), step=0, world_size=4, ranks_per_node=2
        )
        rows = planned.groups[0].exchanges
        assert any(row.kind == kind and row.node_bytes and row.network_bytes for row in rows)
        run_ranks(4, be_rank, args=(run_file, 4, flags, 2))
        found[kind] = losses(tmp_path / kind)
    assert list(found["exact"]) == [0, 1, 2]
    for kind in ("symmetric", "two_level"):
        assert found[kind] == pytest.approx(found["exact"], rel=1e-6)


def test_two_hops_on_one_node_are_refused_before_ranks_start(tmp_path: Path) -> None:
    config = load_config(RunConfig, make_run(tmp_path), ["--balance.exchange", "two_level"])
    with pytest.raises(ConfigError, match="a group has 2 ranks in its node") as caught:
        build_planner(config, build_topology(config, world_size=2, ranks_per_node=2))
    assert caught.value.fix == "use balance.exchange = 'auto', or a balance.group of several whole nodes"
