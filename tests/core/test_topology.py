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


@given(degrees, degrees, degrees, degrees, degrees)
def test_members_are_those_that_a_walk_over_all_ranks_finds(
    tp: int, cp: int, pp: int, size: int, groups: int
) -> None:
    layout = Topology(tp * cp * pp * size * groups, tp=tp, cp=cp, pp=pp, replicas_per_group=size)
    world = range(layout.world_size)
    for replica in range(layout.num_replicas):
        ranks = layout.ranks_of_replica(replica)
        assert ranks == tuple(rank for rank in world if layout.replica_of(rank) == replica)
        assert layout.row_owners(replica) == ranks[: tp * cp]
    for group in range(layout.num_groups):
        assert layout.ranks_of_group(group) == tuple(r for r in world if layout.group_of(r) == group)


def test_asking_for_members_does_not_walk_the_world() -> None:
    layout = Topology(2**60, tp=4, cp=2, pp=8, replicas_per_group=16)
    group = layout.num_groups - 1
    ranks = layout.ranks_of_group(group)
    assert len(ranks) == 4 * 2 * 8 * 16
    assert {layout.group_of(rank) for rank in ranks} == {group}
    assert ranks[-1] == 2**60 - 1
    assert layout.ranks_of_replica(layout.num_replicas - 1)[-1] == 2**60 - 1


def test_a_world_size_that_does_not_fit_says_how_to_mend_it() -> None:
    with pytest.raises(ConfigError, match="world size 6 is not a multiple of tp x cp x pp = 4"):
        Topology(6, tp=2, cp=2)
    with pytest.raises(ConfigError, match="6 replicas do not divide into groups of 4"):
        Topology(6, replicas_per_group=4)
    with pytest.raises(ConfigError, match="12 ranks do not divide into nodes of 8"):
        Topology(12, ranks_per_node=8)
    with pytest.raises(ConfigError, match="-1 ranks per node, must be at least 1, or 0 for a single node"):
        Topology(2, ranks_per_node=-1)


@given(degrees, degrees, degrees, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]))
def test_the_nodes_of_a_group_hold_each_of_its_ranks_once(
    tp: int, pp: int, size: int, groups: int, nodes: int
) -> None:
    ranks_per_node = tp * size * groups
    layout = Topology(
        tp * pp * size * groups * nodes,
        tp=tp,
        pp=pp,
        replicas_per_group=size * nodes,
        ranks_per_node=ranks_per_node,
    )
    assert layout.num_nodes == pp * nodes
    for group in range(layout.num_groups):
        by_node = layout.nodes_of_group(group)
        assert tuple(rank for ranks in by_node for rank in ranks) == layout.ranks_of_group(group)
        holders = [{rank // ranks_per_node for rank in ranks} for ranks in by_node]
        assert all(len(holder) == 1 for holder in holders)
        assert len(set.union(*holders)) == len(by_node)
        for ranks in by_node:
            assert {layout.node_of(rank) for rank in ranks} == {ranks[0] // ranks_per_node}
        rails = layout.rails_of_group(group)
        if len(by_node) == 1 or len({len(ranks) for ranks in by_node}) > 1:
            assert rails == ()
        else:
            assert rails == tuple(tuple(ranks[place] for ranks in by_node) for place in range(len(rails)))
            assert sorted(rank for rail in rails for rank in rail) == list(layout.ranks_of_group(group))


def test_a_group_with_more_ranks_in_one_node_than_in_another_has_no_rails() -> None:
    layout = Topology(12, replicas_per_group=3, ranks_per_node=4)
    assert layout.nodes_of_group(1) == ((3,), (4, 5))
    assert [layout.rails_of_group(group) for group in range(4)] == [(), (), (), ()]
    assert Topology(8, replicas_per_group=4, ranks_per_node=2).rails_of_group(1) == ((4, 6), (5, 7))


@pytest.mark.parametrize("ranks_per_node", [0, 4, 8])
def test_a_world_that_fits_in_a_node_has_one(ranks_per_node: int) -> None:
    layout = Topology(4, ranks_per_node=ranks_per_node)
    assert layout.num_nodes == 1
    assert layout.nodes_of_group(0) == ((0, 1, 2, 3),)
    assert [layout.node_of(rank) for rank in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize("number", [-1, 4])
def test_a_group_or_replica_that_is_not_there_is_a_misuse(number: int) -> None:
    layout = Topology(4, replicas_per_group=1)
    for members in (layout.replicas_of_group, layout.ranks_of_group):
        with pytest.raises(ValueError, match=f"there is no group {number}: the layout has 4"):
            members(number)
    for members in (layout.ranks_of_replica, layout.row_owners):
        with pytest.raises(ValueError, match=f"there is no replica {number}: the layout has 4"):
            members(number)
