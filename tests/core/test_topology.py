import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.topology import Topology

degrees = st.sampled_from([1, 2, 3, 4])


@given(degrees, degrees, degrees, degrees, degrees)
def test_groups_and_replicas_split_the_ranks_exactly(
    tp: int, cp: int, pp: int, size: int, groups: int
) -> None:
    layout = Topology(tp * cp * pp * size * groups, tp=tp, cp=cp, pp=pp, replicas_per_group=size)
    ranks = sorted(rank for group in range(layout.num_groups) for rank in layout.ranks_of_group(group))
    assert ranks == list(range(layout.world_size))
    for group in range(layout.num_groups):
        members = {
            rank for replica in layout.replicas_of_group(group) for rank in layout.ranks_of_replica(replica)
        }
        assert members == set(layout.ranks_of_group(group))
    owners = [rank for replica in range(layout.num_replicas) for rank in layout.row_owners(replica)]
    assert sorted(owners) == list(range(tp * cp * size * groups))


def test_a_world_size_that_does_not_fit_says_how_to_mend_it() -> None:
    with pytest.raises(ConfigError, match="world size 6 is not a multiple of tp x cp x pp = 4"):
        Topology(6, tp=2, cp=2)
    with pytest.raises(ConfigError, match="6 replicas do not divide into groups of 4"):
        Topology(6, replicas_per_group=4)
