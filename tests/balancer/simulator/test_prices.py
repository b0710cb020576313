"""What things take and hold, by hand: collectives, parameters, rows, activations."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from balancer.cost import LLM, RECOMPUTED
from balancer.layout import SequenceLayout
from balancer.reshard import build_routes
from balancer.simulator.build import Seat, StepWork
from balancer.simulator.exchanges import exchange_s, moved_rows, planned_exchanges
from balancer.simulator.memory import peak_bytes
from balancer.simulator.network import Spread, gather_s, message_s, reduce_all_s, spread_of
from balancer.simulator.schedule import one_f_one_b
from balancer.simulator.setup import Setup, Sharding, profile_of
from balancer.simulator.shards import encoder_shards, llm_shards, num_values
from balancer.simulator.work import LlmWork, encode, encoder_seconds, llm_work, planned_segments
from omni_pipeline.core.topology import Topology
from tests.balancer.simulator.test_strategies import HARDWARE, make_plans, model, some_packs
from tests.balancer.worlds import ENCODERS, Step, steps

MACHINE = HARDWARE.model_copy(update={"node_latency_s": 0.5, "network_latency_s": 3.0})


def test_a_gather_inside_a_node_receives_what_others_hold() -> None:
    assert spread_of(range(4), MACHINE) == Spread(4, 1)
    # 3 / 4 of 4e9 bytes at 1e9 bytes/s, and two rounds.
    assert gather_s(4e9, Spread(4, 1), MACHINE) == 3 + 2 * 0.5


def test_a_gather_between_nodes_uses_the_ports_of_all_members_of_a_node() -> None:
    assert spread_of(range(8), MACHINE) == Spread(8, 2)
    # Half of 4e9 bytes over four ports of 1e8 bytes/s, and two rounds inside, one between.
    assert gather_s(4e9, Spread(8, 2), MACHINE) == 5 + 2 * 0.5 + 3
    # One member in each node: one port, no links inside.
    assert spread_of((0, 4), MACHINE) == Spread(2, 2)
    assert gather_s(4e9, Spread(2, 2), MACHINE) == 20 + 3
    # Its links inside are not used, however slow.
    quick = MACHINE.model_copy(update={"network_bytes_per_s": 1e10})
    assert gather_s(4e9, Spread(2, 2), quick) == pytest.approx(0.2 + 3)
    assert reduce_all_s(4e9, Spread(2, 2), MACHINE) == 2 * 23
    # The same bytes in three collectives: two latencies more.
    assert gather_s(4e9, Spread(2, 2), MACHINE, num_collectives=3) == 20 + 3 * 3
    assert reduce_all_s(4e9, Spread(2, 2), MACHINE, num_collectives=3) == 2 * (20 + 3 * 3)


def test_nobody_gathers_alone() -> None:
    assert gather_s(4e9, Spread(1, 1), MACHINE) == 0
    assert gather_s(0, Spread(8, 2), MACHINE) == 0


def test_a_message_takes_its_link() -> None:
    assert message_s(1e9, same_node=True, hardware=MACHINE) == 1.5
    assert message_s(1e9, same_node=False, hardware=MACHINE) == 13


def test_parameters_of_the_llm_are_divided_over_stages_and_tp_and_shared_by_replicas() -> None:
    cost_model = model()
    setup = Setup(Topology(16, tp=2, pp=2, ranks_per_node=4), cost_model, llm=Sharding(2, "step"))
    shards = llm_shards(setup)
    # 16 x (4 x 16 + 3 x 32) x 2 layers, and head and table of 264 words.
    whole = 2 * 16 * (4 * 16 + 3 * 32) + 2 * 16 * 264
    assert num_values(cost_model.llm, is_llm=True) == whole
    assert shards.values == whole / 4
    assert shards.degree == 2
    assert shards.members_of[0] == (0, 1, 2, 3)
    assert shards.holders_of[9] == tuple(range(8, 16))
    # Two replicas on one node share; four copies' sums go over two nodes.
    # A layer of this stage, and what is outside of the layers.
    assert shards.gather_s == gather_s(shards.values * 2, Spread(2, 1), HARDWARE, num_collectives=2)
    across_s = reduce_all_s(shards.values / 2 * 4, Spread(2, 2), HARDWARE, num_collectives=2)
    assert shards.across_s == across_s
    # State of half the values, a whole bfloat16 copy, whole gradients.
    assert shards.held_bytes == shards.values / 2 * 16 + shards.values * (2 + 4)


def test_encoder_parameters_that_are_gathered_layer_by_layer_need_two_layers_of_room() -> None:
    setup = Setup(Topology(4), model(), encoder=Sharding(-1, "microbatch"))
    shards = encoder_shards(setup, range(4))
    assert shards is not None
    assert shards.num_layers == 4
    assert shards.held_bytes == shards.values / 4 * 16 + shards.values * (2 + 4) * 2 / 4
    alone = encoder_shards(setup, range(1))
    assert alone is not None
    assert alone.held_bytes == alone.values * (16 + 2)


def test_sharding_takes_the_greatest_common_divisor_with_those_who_hold_the_parameters() -> None:
    assert [Sharding(8).ranks_per_copy(count) for count in (24, 12, 3, 8)] == [8, 4, 1, 8]
    assert Sharding(-1).ranks_per_copy(12) == 12


def test_peak_memory_is_parameters_and_what_is_in_flight() -> None:
    stages = one_f_one_b(2, 3)
    setup = Setup(Topology(2, pp=2), model(), llm=Sharding(-1, "step"))
    shards = llm_shards(setup)
    kept = np.asarray([[5.0, 7.0, 11.0]])
    llm = LlmWork(kept, kept, kept, kept, kept)
    seats = tuple(Seat((stage,), slots, 0, stage, (stage,)) for stage, slots in enumerate(stages))
    work = StepWork(seats, 2, llm, {}, {}, None, shards, {0: 0.0, 1: 0.0})
    peak = peak_bytes(work, np.zeros((2, 3))) - shards.held_bytes
    # Stage 0 holds two microbatches at once, at most 7 + 11; stage 1 one.
    assert peak.tolist() == pytest.approx([18, 11])


def test_the_llm_s_slots_divide_a_pack_and_pay_for_their_collectives() -> None:
    cost_model = dataclasses.replace(model(), passes={LLM: RECOMPUTED})
    pack = some_packs(Topology(1))[0]
    single = Setup(Topology(1), cost_model)
    alone = llm_work({(0, 0): pack}, single, num_microbatches=1)
    seconds = cost_model.pack_cost(pack)
    assert alone.forward_s[0, 0] == pytest.approx(seconds / 4)
    assert alone.backward_s[0, 0] == pytest.approx(seconds * 3 / 4)
    parallel = Setup(Topology(8, tp=2, pp=4, ranks_per_node=4), cost_model)
    divided = llm_work({(0, 0): pack}, parallel, num_microbatches=1)
    # Half a layer a stage; four gathers a layer of the sequence in bfloat16.
    gathers = 0.5 * 4 * gather_s(2 * 16 * pack.num_positions, Spread(2, 1), HARDWARE)
    assert divided.forward_s[0, 0] == pytest.approx(seconds / 4 / 8 + gathers)
    assert divided.backward_s[0, 0] == pytest.approx(seconds * 3 / 4 / 8 + 2 * gathers)
    assert divided.message_s[0, 0] == message_s(
        2 * 16 * pack.num_positions / 2, same_node=True, hardware=HARDWARE
    )


def test_encoding_is_priced_by_rank_and_microbatch() -> None:
    setup = Setup(Topology(2), model(kernel_s=1e-4))
    plans = make_plans(some_packs(setup.topology), setup, "no_balancing")
    segments = planned_segments(plans, setup)
    assert len({(item.ranks, item.microbatch) for item in segments}) < 2 * plans[0].num_microbatches
    encoding = encode(segments, setup, hosts=range(2), num_microbatches=plans[0].num_microbatches)
    for rank in range(2):
        for microbatch in range(plans[0].num_microbatches):
            own = [item for item in segments if (item.ranks, item.microbatch) == ((rank,), microbatch)]
            grids = {
                name: [
                    item.segment.grid for item in own if setup.cost_model.encoder_name(item.segment) == name
                ]
                for name in ENCODERS
            }
            expected = sum(encoder_seconds(setup.cost_model, grids))
            assert encoding.load_s[rank, microbatch] == expected > 0
            assert encoding.kept_bytes[rank, microbatch] == sum(
                setup.cost_model.media_bytes(item.segment) for item in own
            )


def test_a_joined_segment_is_one_operation_of_its_ranks() -> None:
    setup = Setup(Topology(2), model())
    packs = some_packs(setup.topology)
    item = next(
        item
        for item in planned_segments(make_plans(packs, setup, "no_lssp"), setup)
        if item.segment.grid == (1, 8, 16)
    )
    split = setup.cost_model.split(item.segment, 2)
    assert split is not None
    assert split.joined
    shared = dataclasses.replace(item, ranks=(0, 1), shares=split.shares, joined=True, microbatch=0)
    encoding = encode([shared], setup, hosts=range(2), num_microbatches=1)
    first, second = encoding.parts[0, 0], encoding.parts[1, 0]
    assert first[0] is second[0]
    assert first[0].members == (0, 1)
    assert first[0].forward_s + first[0].backward_s == pytest.approx(max(split.costs))


def test_joined_shares_run_at_the_rate_of_the_kernels_that_they_are_in() -> None:
    machine = HARDWARE.model_copy(update={"efficiency": ((64.0, 0.25), (1024.0, 1.0))})
    setup = Setup(Topology(2), dataclasses.replace(model(), hardware=machine))
    packs = some_packs(setup.topology)
    items = planned_segments(make_plans(packs, setup, "no_lssp"), setup)
    item = next(item for item in items if item.segment.grid == (1, 8, 16))
    split = setup.cost_model.split(item.segment, 2, num_positions=64)
    assert split is not None
    shared = dataclasses.replace(item, ranks=(0, 1), shares=split.shares, joined=True, microbatch=0)
    alone, among = (
        encode([shared, *others], setup, hosts=range(2), num_microbatches=1).parts[0, 0][0]
        for others in ([], [dataclasses.replace(shared, ranks=(1, 0))] * 20)
    )
    assert alone.forward_s + alone.backward_s == pytest.approx(max(split.costs))
    best = setup.cost_model.split(item.segment, 2)
    assert best is not None
    assert max(best.costs) < max(split.costs)
    # A kernel of 21 shares is large enough for the best rate.
    assert among.forward_s + among.backward_s == pytest.approx(max(best.costs))


@settings(max_examples=40)
@given(steps())
def test_rows_travel_as_the_plan_s_routes_say(step: Step) -> None:
    planner = step.planner()
    setup = Setup(step.topology, model(ranks_per_node=64), step.seq_len)
    plans = [planner.plan(step.packs_of(g), step=0, group=g) for g in range(step.topology.num_groups)]
    layout = SequenceLayout(step.topology, step.seq_len)
    for plan in plans:
        segments = planned_segments([plan], setup)
        moved = moved_rows(segments, setup, num_microbatches=plan.num_microbatches)
        ranks = np.asarray(plan.ranks)
        for microbatch, moves in enumerate(moved):
            routes = build_routes(plan, microbatch=microbatch, layout=layout, encoders=ENCODERS)
            found = sorted(zip(moves.maker.tolist(), moves.owner.tolist(), moves.rows.tolist(), strict=True))
            expected = zip(
                ranks[routes.maker].tolist(), ranks[routes.owner].tolist(), routes.rows.tolist(), strict=True
            )
            assert found == sorted(expected)
    exchanges = planned_exchanges(plans, planned_segments(plans, setup), setup)
    assert len(exchanges) == len(plans) * plans[0].num_microbatches


def test_rows_are_told_apart_by_microbatch_in_whatever_order_the_media_are() -> None:
    setup = Setup(Topology(4), model())
    plans = make_plans(some_packs(setup.topology), setup, "no_lssp")
    segments = planned_segments(plans, setup)
    microbatches = [item.microbatch for item in segments]
    assert microbatches != sorted(microbatches)
    moved = moved_rows(segments, setup, num_microbatches=plans[0].num_microbatches)
    for microbatch, moves in enumerate(moved):
        own = [item for item in segments if item.microbatch == microbatch]
        assert moves.rows.sum() == sum(item.segment.num_rows for item in own)


def test_an_exchange_costs_its_busiest_rank() -> None:
    setup = Setup(Topology(8, ranks_per_node=4), model(node_latency_s=0.0, network_latency_s=0.0))
    plans = make_plans(some_packs(setup.topology), setup, "no_lssp")
    moves = moved_rows(planned_segments(plans, setup), setup, num_microbatches=plans[0].num_microbatches)[0]
    near = dataclasses.replace(
        moves, maker=np.asarray([0, 0, 1]), owner=np.asarray([1, 2, 1]), rows=np.asarray([10, 20, 99])
    )
    far = dataclasses.replace(near, owner=np.asarray([1, 7, 1]))
    row_bytes = 2 * 2 * 16
    assert exchange_s(near, setup) == pytest.approx(30 * row_bytes / 1e9)
    assert exchange_s(far, setup) == pytest.approx(20 * row_bytes / 1e8)


def test_a_profile_holds_means() -> None:
    cost_model = model()
    packs = some_packs(Topology(3))
    profile = profile_of(packs, cost_model)
    media = [segment for pack in packs for sample in pack.samples for segment in sample.segments]
    costs = [cost_model.media_cost(segment) for segment in media if segment.is_media]
    assert profile.encoder_s == pytest.approx(sum(costs) / len(packs))
    assert profile.llm_s == pytest.approx(sum(map(cost_model.pack_cost, packs)) / len(packs))
    assert max(costs) >= profile.largest_s > sum(costs) / len(costs)
    assert set(profile.segment_s) == {"vision", "audio"}
    assert profile_of([], cost_model).encoder_s == 0
