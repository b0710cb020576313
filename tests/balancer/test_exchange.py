"""Traffic of every kind against a count of the rows that plans send, and the choice between kinds."""

from __future__ import annotations

import collections
import itertools
import re

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from balancer.cost import CostModel
from balancer.exchange import ExchangePricer, Traffic
from balancer.layout import SequenceLayout
from balancer.nodes import group_nodes
from balancer.partition import IntArray
from balancer.reshard import build_routes, reshard_plan
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import ExchangeKind, StepPlan
from omni_pipeline.core.reshard import AllToAll
from omni_pipeline.core.topology import Topology
from tests.balancer.exchanges import scope_ranks
from tests.balancer.test_reshard import exchanges
from tests.balancer.worlds import ENCODERS, LSSP, Step, cost_model, image_pack, steps

KINDS: tuple[ExchangeKind, ...] = ("exact", "symmetric", "two_level")
NODES = group_nodes(Topology(8, ranks_per_node=4), 0)


def ints(*numbers: int) -> IntArray:
    return np.asarray(numbers, dtype=np.int64)


def counted_traffic(plan: StepPlan, layout: SequenceLayout, kind: ExchangeKind, microbatch: int) -> Traffic:
    """Count what the members' own plans send from rank to rank."""
    topology = layout.topology
    routes = build_routes(plan, microbatch=microbatch, layout=layout, encoders=ENCODERS)
    links: collections.Counter[tuple[int, int]] = collections.Counter()
    for member, rank in enumerate(plan.ranks):
        for number, hop in enumerate(reshard_plan(routes, kind=kind, member=member).hops):
            assert isinstance(hop, AllToAll)
            for other, rows in zip(
                scope_ranks(hop.scope, rank, topology, plan.group), hop.send_splits, strict=True
            ):
                if rows:
                    links[rank, other] += rows
                    assert kind == "exact" or (topology.node_of(rank) == topology.node_of(other)) == (
                        number == 0
                    )
    near = {
        link: rows for link, rows in links.items() if topology.node_of(link[0]) == topology.node_of(link[1])
    }
    far = {link: rows for link, rows in links.items() if link not in near}
    total = int(routes.rows[routes.maker != routes.owner].sum())
    return Traffic(*_busiest(near), *_busiest(far), total)


def _busiest(links: dict[tuple[int, int], int]) -> tuple[int, int]:
    rows: collections.Counter[tuple[int, int]] = collections.Counter()
    messages: collections.Counter[tuple[int, int]] = collections.Counter()
    for link, count in links.items():
        for end, rank in enumerate(link):
            rows[end, rank] += count
            messages[end, rank] += 1
    return max(rows.values(), default=0), max(messages.values(), default=0)


@settings(max_examples=100)
@given(exchanges())
def test_priced_traffic_is_what_the_plans_of_the_members_send(
    exchange: tuple[StepPlan, SequenceLayout, ExchangeKind],
) -> None:
    plan, layout, kind = exchange
    pricer = ExchangePricer(cost_model(), group_nodes(layout.topology, plan.group))
    for microbatch in range(plan.num_microbatches):
        routes = build_routes(plan, microbatch=microbatch, layout=layout, encoders=ENCODERS)
        found = pricer.traffic(kind, routes.maker, routes.owner, routes.rows)
        if kind != "symmetric":
            assert found == counted_traffic(plan, layout, kind, microbatch)
        moved = int(routes.rows[routes.maker != routes.owner].sum())
        assert found.total_rows == moved
        chosen, seconds = pricer.choose(routes.maker, routes.owner, routes.rows)
        by_kind = [pricer.seconds(one, routes.maker, routes.owner, routes.rows) for one in pricer.kinds]
        assert seconds == min(by_kind)
        assert chosen == (pricer.kinds[by_kind.index(seconds)] if moved else "exact")
        assert (seconds > 0) == bool(moved)


def test_the_order_of_the_runs_does_not_change_the_price() -> None:
    maker, owner, rows = ints(0, 1, 2, 7, 7), ints(4, 1, 3, 6, 0), ints(3, 9, 2, 5, 1)
    pricer = ExchangePricer(cost_model(), NODES)
    prices = set()
    for order in itertools.permutations(range(5)):
        index = ints(*order)
        prices.add(pricer.choose(maker[index], owner[index], rows[index]))
    assert len(prices) == 1


def _spread(rows_each: int) -> tuple[IntArray, IntArray, IntArray]:
    """Every member sends so many rows to every member."""
    maker, owner = np.divmod(np.arange(64), 8)
    return maker, owner, np.full(64, rows_each)


def busy_links(*, latency_s: float) -> CostModel:
    return cost_model(bytes_per_s=1e9, latency_s=latency_s)


def test_in_a_node_many_rows_go_exactly_and_few_rows_through_a_buffer() -> None:
    """Seven messages to the others, or three steps up and three down."""
    pricer = ExchangePricer(busy_links(latency_s=1e-5), group_nodes(Topology(8), 0))
    kinds = [pricer.choose(*_spread(rows))[0] for rows in (1, 10**6)]
    assert kinds == ["symmetric", "exact"]
    traffic = [pricer.traffic(kind, *_spread(1)) for kind in pricer.kinds]
    assert traffic == [Traffic(7, 7, 0, 0, 56), Traffic(0, 6, 0, 0, 56)]


def test_two_hops_send_one_message_to_each_node() -> None:
    pricer = ExchangePricer(busy_links(latency_s=1e-5), NODES)
    traffic = [pricer.traffic(kind, *_spread(1)) for kind in pricer.kinds]
    assert traffic == [Traffic(3, 3, 4, 4, 56), Traffic(0, 4, 14, 2, 56), Traffic(6, 3, 4, 1, 56)]


def test_a_buffer_goes_through_the_ports_of_the_members_of_a_node() -> None:
    """A group with one rank in each of eight nodes has one port where a whole node has eight."""
    nodes = group_nodes(Topology(64, pp=8, replicas_per_group=1, ranks_per_node=8), 0)
    pricer = ExchangePricer(busy_links(latency_s=1e-5), nodes)
    traffic = pricer.traffic("symmetric", *_spread(1))
    assert traffic == Traffic(0, 0, 56, 6, 56)
    bytes_per_row, network = pricer.cost_model.bytes_per_row, pricer.cost_model.hardware
    expected = 2 * 56 * bytes_per_row / network.network_bytes_per_s + 2 * 6 * network.network_latency_s
    assert pricer.seconds("symmetric", *_spread(1)) == pytest.approx(expected)


def test_two_hops_win_between_the_two() -> None:
    """Sixteen nodes: exact sends 60 messages over the network, two hops 15, and the buffer is large."""
    nodes = group_nodes(Topology(64, ranks_per_node=4), 0)
    pricer = ExchangePricer(busy_links(latency_s=1e-4), nodes)
    maker, owner = np.divmod(np.arange(64 * 64), 64)
    kinds = [pricer.choose(maker, owner, np.full(64 * 64, rows))[0] for rows in (1, 100, 10**5)]
    assert kinds == ["symmetric", "two_level", "exact"]


def test_without_messages_to_pay_the_exact_exchange_is_chosen() -> None:
    pricer = ExchangePricer(busy_links(latency_s=0.0), NODES)
    assert pricer.choose(*_spread(1))[0] == "exact"


@given(st.sampled_from(KINDS), st.integers(0, 10**6))
def test_a_setting_decides_the_kind(kind: ExchangeKind, rows: int) -> None:
    pricer = ExchangePricer(busy_links(latency_s=1e-5), NODES, setting=kind)
    chosen, seconds = pricer.choose(*_spread(rows))
    assert chosen == kind
    assert seconds == pricer.seconds(kind, *_spread(rows))
    assert pricer.choose(ints(3), ints(3), ints(rows)) == (kind, 0.0)


def test_two_hops_are_refused_where_a_group_has_no_rails() -> None:
    one_node, uneven = (
        group_nodes(Topology(4), 0),
        group_nodes(Topology(12, replicas_per_group=3, ranks_per_node=4), 1),
    )
    text = "balance.exchange is 'two_level', and a group has 4 ranks in its node"
    with pytest.raises(ConfigError, match=re.escape(text)):
        ExchangePricer(cost_model(), one_node, setting="two_level")
    with pytest.raises(ConfigError, match=re.escape("has 1, 2 ranks in its nodes")):
        ExchangePricer(cost_model(), uneven, setting="two_level")
    assert ExchangePricer(cost_model(), uneven).kinds == ("exact", "symmetric")


@settings(max_examples=60)
@given(steps(), st.booleans(), st.sampled_from([1e2, 1e6, 1e12]), st.sampled_from([0.0, 1e-6, 1e-2]))
def test_a_plan_stores_the_quickest_exchange_of_every_microbatch(
    step: Step, share: bool, bytes_per_s: float, latency_s: float
) -> None:
    model = cost_model(bytes_per_s=bytes_per_s, latency_s=latency_s)
    planner = step.planner(model=model, lssp=LSSP if share else None)
    for group in range(step.topology.num_groups):
        plan = planner.plan(step.packs_of(group), step=0, group=group)
        pricer = ExchangePricer(model, group_nodes(step.topology, group))
        for microbatch, kind in enumerate(plan.exchanges):
            routes = build_routes(plan, microbatch=microbatch, layout=planner.layout, encoders=ENCODERS)
            assert kind == pricer.choose(routes.maker, routes.owner, routes.rows)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_plans_keep_to_the_kind_that_is_set(kind: ExchangeKind) -> None:
    packs = (image_pack(0, num_images=8), image_pack(1, num_images=1))
    step = Step(Topology(4, ranks_per_node=2), 4, 2, packs)
    plan = step.planner(exchange=kind).plan(packs, step=0, group=0)
    assert _moved(plan)
    assert plan.exchanges == (kind, "exact")
    unbalanced = step.planner(exchange=kind).unbalanced(plan)
    assert unbalanced.exchanges == (kind, "exact")


def test_a_planner_refuses_an_exchange_that_its_groups_do_not_have() -> None:
    step = Step(Topology(8, replicas_per_group=4, ranks_per_node=4), 2, 1, ())
    with pytest.raises(
        ConfigError, match=r"balance\.exchange is 'two_level', and a group has 4 ranks in its node"
    ):
        step.planner(exchange="two_level")


def test_a_planner_refuses_an_exchange_that_one_of_its_groups_does_not_have() -> None:
    # Stages of 12 ranks on nodes of 4: the first group has three on each of its nodes, the second one or two.
    topology = Topology(24, pp=2, replicas_per_group=3, ranks_per_node=4)
    assert topology.rails_of_group(0)
    with pytest.raises(ConfigError, match="a group has 1, 2, 1, 2 ranks in its nodes"):
        Step(topology, 4, 3, ()).planner(exchange="two_level")


def test_a_move_pays_by_the_quickest_exchange() -> None:
    """Rank 0 would send seven of its eight images: seven messages at once, or a buffer of six steps."""
    packs = (image_pack(0, num_images=8),)
    step = Step(Topology(8), 8, 1, packs)
    gain = 7 * cost_model().media_cost(packs[0].samples[0].segments[0])
    model = cost_model(latency_s=gain / (2 * 6.5))
    assert not _moved(step.planner(model=model, exchange="exact").plan(packs, step=0, group=0))
    plan = step.planner(model=model).plan(packs, step=0, group=0)
    assert _moved(plan)
    assert plan.exchanges == ("symmetric",)


def _moved(plan: StepPlan) -> bool:
    return any(item.ranks != (0,) for item in plan.media)
