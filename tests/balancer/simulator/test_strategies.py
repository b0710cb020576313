"""Strategies on small worlds: whatever the layout, a step holds together."""

import dataclasses
from collections.abc import Sequence

import pytest

from balancer.cost import CostModel
from balancer.hardware import HardwareProfile
from balancer.planner import BalanceConfig, GroupPlanner
from balancer.simulator.build import build_programs
from balancer.simulator.disaggregated import best_split
from balancer.simulator.engine import run
from balancer.simulator.setup import Setup, Sharding, profile_of
from balancer.simulator.simulate import simulate_step
from balancer.simulator.strategies import STRATEGIES, plans_for
from omni_pipeline.core.errors import ConfigError, PlanError
from omni_pipeline.core.plan import Pack, StepPlan
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.topology import Topology
from tests.balancer.worlds import ENCODERS, cost_model
from tests.support.strategies import make_sample, media_segment, text_segment

HARDWARE = HardwareProfile(
    name="small",
    ranks_per_node=4,
    memory_bytes=1e9,
    flops_per_s=1e9,
    hbm_bytes_per_s=1e9,
    node_bytes_per_s=1e9,
    node_latency_s=1e-6,
    network_bytes_per_s=1e8,
    network_latency_s=1e-5,
)
LAYOUTS = [
    Topology(1),
    Topology(2, replicas_per_group=1),
    Topology(4, pp=2),
    Topology(4, tp=2),
    Topology(4, cp=2),
    Topology(8, tp=2, pp=2, replicas_per_group=1, ranks_per_node=4),
    Topology(16, tp=2, pp=4, ranks_per_node=4),
    Topology(16, tp=2, cp=2, pp=2, replicas_per_group=1, ranks_per_node=4),
]


def model(**changes: object) -> CostModel:
    return dataclasses.replace(cost_model(), hardware=HARDWARE.model_copy(update=changes))


def some_packs(topology: Topology, *, per_lane: int = 4, media: int = 3) -> list[Pack]:
    """One lane per replica; the packs differ in the size and number of their images, some have none."""
    packs = []
    for lane in range(topology.num_replicas):
        for number in range(per_lane):
            images = [
                media_segment(Modality.IMAGE, (1, 8 + 4 * (lane % 3), 8 + 8 * image))
                for image in range((lane + number) % (media + 1))
            ]
            speech = [media_segment(Modality.AUDIO, (400, 1, 1))] if number % 2 and media else []
            sample = make_sample([*images, *speech, text_segment(20 + 10 * number)], row=10 * lane + number)
            packs.append(Pack(lane=lane, number=number, samples=(sample,)))
    return packs


def make_plans(packs: Sequence[Pack], setup: Setup, strategy: str) -> list[StepPlan]:
    topology = setup.topology
    config = BalanceConfig.model_validate({"lssp": {"kind": "auto"}, **plans_for(strategy)})
    planner = GroupPlanner(
        topology,
        cost_model=setup.cost_model,
        config=config,
        num_lanes=topology.num_replicas,
        packs_per_step=len(packs),
        encoders=ENCODERS,
    )
    groups = range(topology.num_groups)
    return [
        planner.plan(
            [pack for pack in packs if pack.lane % topology.num_groups == group], step=0, group=group
        )
        for group in groups
    ]


@pytest.mark.parametrize("topology", LAYOUTS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_runs_every_layout(strategy: str, topology: Topology) -> None:
    setup = Setup(topology, model(), llm=Sharding(-1, "step"), encoder=Sharding(2, "microbatch"))
    packs = some_packs(topology)
    plans = make_plans(packs, setup, strategy)
    if strategy == "disaggregated" and topology.world_size <= topology.tp * topology.cp:
        with pytest.raises(ConfigError, match="cannot be split into encoders and replicas"):
            simulate_step(plans, setup=setup, strategy=strategy)
        return
    step = simulate_step(plans, setup=setup, strategy=strategy)
    assert step.num_tokens == sum(pack.num_tokens for pack in packs)
    assert 0 < step.mfu < 1
    assert 0 <= step.bubble_fraction < 1
    assert step.encoder_imbalance >= 1
    assert step.llm_imbalance >= 1
    assert step.peak_bytes > 0
    assert not step.out_of_memory
    assert sum(step.busy_s[kind] for kind in ("encoder", "llm", "optimizer")) <= step.step_s * (1 + 1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_text_alone_runs_under_every_strategy(strategy: str) -> None:
    topology = Topology(8, tp=2, pp=2, ranks_per_node=4)
    setup = Setup(topology, model())
    plans = make_plans(some_packs(topology, media=0), setup, strategy)
    assert simulate_step(plans, setup=setup, strategy=strategy).exchange_s == 0


def test_plans_of_other_groups_are_refused() -> None:
    setup = Setup(Topology(2, replicas_per_group=1), model())
    plans = make_plans(some_packs(setup.topology), setup, "multiplexed")
    with pytest.raises(PlanError, match=r"plans of groups \[1, 0\] for a run of 2 groups"):
        simulate_step(plans[::-1], setup=setup)


def test_an_unknown_strategy_names_the_known_ones() -> None:
    setup = Setup(Topology(2), model())
    with pytest.raises(ConfigError, match="there is no strategy 'magic'") as error:
        simulate_step(make_plans(some_packs(setup.topology), setup, "static"), setup=setup, strategy="magic")
    assert error.value.fix == f"known strategies: {', '.join(STRATEGIES)}"


def test_a_layout_with_other_nodes_than_the_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="the layout has 0 ranks per node"):
        Setup(Topology(8), model())


@pytest.mark.parametrize("strategy", ["disaggregated", "bubble_filling", "static"])
def test_a_profile_of_other_data_changes_what_is_fixed_before_the_data_is_seen(strategy: str) -> None:
    topology = Topology(16, tp=2, pp=2, ranks_per_node=4)
    setup = Setup(topology, model())
    packs = some_packs(topology)
    text = profile_of(some_packs(topology, media=0), setup.cost_model)
    speech = dataclasses.replace(text, encoder_s=9 * text.llm_s, segment_s={"vision": 1.0, "audio": 100.0})
    plans = make_plans(packs, setup, strategy)
    times = {
        simulate_step(plans, setup=dataclasses.replace(setup, profile=profile), strategy=strategy).step_s
        for profile in (text, speech)
    }
    assert len(times) == 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_faster_network_never_slows_a_step(strategy: str) -> None:
    topology = Topology(16, tp=2, pp=4, ranks_per_node=4)
    slow = Setup(topology, model(network_bytes_per_s=1e5), encoder=Sharding(4, "microbatch"))
    fast = dataclasses.replace(slow, cost_model=model(network_bytes_per_s=1e8, network_latency_s=0.0))
    plans = make_plans(some_packs(topology), slow, strategy)
    steps = [simulate_step(plans, setup=setup, strategy=strategy).step_s for setup in (slow, fast)]
    assert steps[1] < steps[0]


def test_our_step_does_the_plan_s_work_and_is_never_shorter_than_its_parts() -> None:
    topology = Topology(16, tp=2, pp=2, replicas_per_group=2, ranks_per_node=4)
    setup = Setup(topology, model())
    plans = make_plans(some_packs(topology), setup, "multiplexed")
    prepared = STRATEGIES["multiplexed"].prepare(plans, setup)
    timeline = run(build_programs(prepared.work, setup))
    llm, encoding = prepared.work.llm, prepared.encoding
    assert timeline.busy_s["encoder"] == pytest.approx(encoding.load_s.sum(axis=1))
    slots_s = (llm.forward_s + llm.backward_s).sum(axis=1)
    replicas = [topology.replica_of(rank) for rank in range(topology.world_size)]
    assert timeline.busy_s["llm"] == pytest.approx(slots_s[replicas])
    assert timeline.step_s >= timeline.compute_s.max()
    # A microbatch passes every stage forward and backward, after it has been encoded.
    alone_s = encoding.load_s.max(axis=0) + topology.pp * (llm.forward_s + llm.backward_s).max(axis=0)
    assert timeline.step_s >= alone_s.max() * (1 - 1e-12)


def test_encoding_up_front_keeps_more_and_on_demand_hides_nothing_of_the_work() -> None:
    topology = Topology(8, tp=1, pp=4, ranks_per_node=4)
    setup = Setup(topology, model())
    plans = make_plans(some_packs(topology, per_lane=12), setup, "multiplexed")
    demand, first = (simulate_step(plans, setup=setup, strategy=name) for name in ("multiplexed", "upfront"))
    assert demand.peak_bytes < first.peak_bytes
    assert demand.busy_s["encoder"] == pytest.approx(first.busy_s["encoder"])


def test_the_split_of_a_pool_follows_the_profile_and_fits_the_machine() -> None:
    topology = Topology(32, tp=2, pp=2, ranks_per_node=4)
    packs = some_packs(topology)
    setup = Setup(topology, model())
    text = profile_of(some_packs(topology, media=0), setup.cost_model)
    hosts = []
    for factor in (0.1, 1, 10):
        profile = dataclasses.replace(text, encoder_s=factor * text.llm_s)
        split = best_split(packs, dataclasses.replace(setup, profile=profile))
        hosts.append(sum(map(len, split.teams)))
        assert split.llm.world_size + hosts[-1] == 32
    assert hosts[0] < hosts[1] < hosts[2]
    assert all(count % 4 == 0 for count in hosts)


def test_too_little_memory_is_told() -> None:
    topology = Topology(2)
    setup = Setup(topology, model(memory_bytes=1000.0))
    plans = make_plans(some_packs(topology), setup, "multiplexed")
    assert simulate_step(plans, setup=setup).out_of_memory


def test_without_balancing_media_are_dealt_over_the_ranks_of_their_replica() -> None:
    topology = Topology(8, tp=2, pp=2, ranks_per_node=4)
    setup = Setup(topology, model())
    plans = make_plans(some_packs(topology), setup, "no_balancing")
    prepared = STRATEGIES["no_balancing"].prepare(plans, setup)
    for plan in plans:
        for slot in plan.slots:
            ranks = topology.ranks_of_replica(slot.replica)
            count = sum(segment.is_media for s in plan.packs[slot.pack].samples for segment in s.segments)
            busy = prepared.encoding.kept_bytes[list(ranks), slot.microbatch] > 0
            assert busy.tolist() == [place < count for place in range(len(ranks))]
