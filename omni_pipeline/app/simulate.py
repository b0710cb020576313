"""Steps of a run simulated on any number of ranks: its own packs and plans, on hardware that is data."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from balancer.cost import CostModel
from balancer.hardware import HardwareProfile
from balancer.simulator.compare import OURS, Compared, compare, known_strategies
from balancer.simulator.setup import Setup, Sharding
from omni_pipeline.app.costs import cost_model
from omni_pipeline.app.follow import Progress, follow, no_progress
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.simulate_words import NAMES
from omni_pipeline.app.wire import build_planner, build_tokenizer, build_topology, training_stream
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.topology import Topology

ALL_UP_TO_RANKS = 2048
ONLY_OURS = f"above {ALL_UP_TO_RANKS} ranks only {OURS} is simulated by default: name others by --strategy"


@dataclass(frozen=True)
class Layout:
    """Ranks and how the LLM is spread over them.

    Args:
        num_ranks: World size.
        ranks_per_node: Ranks of one machine; None: those of the hardware.
        tp: Tensor-parallel degree.
        cp: Context-parallel degree.
        pp: Pipeline stages.
    """

    num_ranks: int
    ranks_per_node: int | None = None
    tp: int = 1
    cp: int = 1
    pp: int = 1


@dataclass(frozen=True)
class SimulatedRun:
    """Steps of a run under some strategies.

    Args:
        topology: The layout.
        hardware: The machine.
        shares: Share of the steps' tokens by source, largest first.
        num_steps: Steps simulated.
        num_packs: Packs of a step.
        num_tokens: Tokens of a step, mean.
        by_strategy: Results.
        notes: What else there is to know, in sentences.
    """

    topology: Topology
    hardware: HardwareProfile
    shares: dict[str, float]
    num_steps: int
    num_packs: int
    num_tokens: float
    by_strategy: dict[str, Compared]
    notes: list[str]

    def speedup(self, strategy: str) -> float | None:
        """Return throughput of multiplexing / that of another strategy; None if one was not simulated."""
        ours, other = self.by_strategy.get(OURS), self.by_strategy.get(strategy)
        return other.step_s / ours.step_s if ours and other and ours.step_s else None

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data; ``speedup`` is that of multiplexing over each other strategy."""
        topology = self.topology
        return {
            "ranks": topology.world_size,
            "ranks_per_node": topology.ranks_per_node,
            "tp": topology.tp,
            "cp": topology.cp,
            "pp": topology.pp,
            "num_replicas": topology.num_replicas,
            "num_groups": topology.num_groups,
            "hardware": self.hardware.name,
            "memory_bytes": self.hardware.memory_bytes,
            "mixture": self.shares,
            "steps": self.num_steps,
            "num_packs": self.num_packs,
            "num_tokens": self.num_tokens,
            "results": {name: asdict(found) for name, found in self.by_strategy.items()},
            "speedup": {name: self.speedup(name) for name in self.by_strategy if name != OURS},
            "notes": self.notes,
        }


def simulate_run(
    config: RunConfig,
    *,
    layout: Layout,
    num_steps: int,
    strategies: Sequence[str] = (),
    progress: Progress = no_progress,
) -> SimulatedRun:
    """Return the first steps of a run as its ranks would take them; no sample is read.

    Args:
        config: The run, on the machine of ``balance.hardware``.
        layout: Ranks, and how the LLM is spread over them.
        num_steps: Steps, from 0.
        strategies: Those wanted; none: all that the layout can be divided for, above ``ALL_UP_TO_RANKS``
            only ours.
        progress: Told how far it is.

    Raises:
        ConfigError: Wrong settings or data, a layout that does not divide, or no such strategy.
    """
    is_large = not strategies and layout.num_ranks > ALL_UP_TO_RANKS
    names = known_strategies((OURS,) if is_large else strategies)
    model = cost_model(config)
    per_node = layout.ranks_per_node or min(model.hardware.ranks_per_node, layout.num_ranks)
    hardware = model.hardware.model_copy(update={"ranks_per_node": per_node})
    model = replace(model, hardware=hardware)
    topology = build_topology(
        config,
        world_size=layout.num_ranks,
        ranks_per_node=per_node,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
    )
    of_all = num_steps + len(names)
    stream = training_stream(config, build_tokenizer(config))
    order = stream.order_of_lanes(range(config.order.lanes))
    steps = [
        [order.pack_of(pack) for pack in drawn]
        for _, drawn in follow(order, range(num_steps), progress=lambda done, _: progress(done, of_all))
    ]
    done = itertools.count(num_steps + 1)
    missing: list[str] = []
    by_strategy = compare(
        steps,
        planner_of=lambda balance: build_planner(
            config.model_copy(update={"balance": balance}), topology, model=model
        ),
        balance=config.balance,
        setup=_setup(config, topology, model),
        strategies=names,
        progress=lambda: progress(next(done), of_all),
        # A strategy that was asked for by name is an error instead.
        left_out=None
        if strategies
        else lambda name, error: missing.append(f"{NAMES[name]} left out: {error.what}"),
    )
    packs = [pack for step in steps for pack in step]
    return SimulatedRun(
        topology=topology,
        hardware=hardware,
        shares=_shares(packs),
        num_steps=num_steps,
        num_packs=len(steps[0]),
        num_tokens=sum(pack.num_tokens for pack in packs) / num_steps,
        by_strategy=by_strategy,
        notes=[
            *_off(config),
            *missing,
            *_notes(packs, topology, num_steps),
            *([ONLY_OURS] if is_large else []),
        ],
    )


def _shares(packs: Sequence[Pack]) -> dict[str, float]:
    tokens: Counter[str] = Counter()
    for sample in (sample for pack in packs for sample in pack.samples):
        tokens[sample.id.source] += sample.num_tokens
    total = max(1, tokens.total())
    return {name: count / total for name, count in tokens.most_common()}


def _off(config: RunConfig) -> list[str]:
    """What strategies cannot show, because the run has it switched off."""
    balance = config.balance
    if not balance.enabled:
        return ["balance.enabled = false: nothing is balanced or shared under any strategy"]
    if balance.lssp.kind == "off":
        return ["balance.lssp.kind = 'off': no segment is shared under any strategy"]
    return []


def _notes(packs: Sequence[Pack], topology: Topology, num_steps: int) -> list[str]:
    notes = []
    places = topology.num_replicas * -(-len(packs) // (num_steps * topology.num_replicas))
    idle = places - len(packs) // num_steps
    if idle:
        notes.append(
            f"{idle} of {places} (replica, microbatch) places run empty: "
            "order.packs_per_step is no multiple of the replicas"
        )
    num_empty = sum(not pack.samples for pack in packs)
    if num_empty:
        notes.append(f"{num_empty} of {len(packs)} packs are empty, since their lanes have no samples left")
    return notes


def _setup(config: RunConfig, topology: Topology, model: CostModel) -> Setup:
    """Parameters sharded as the run says, each encoder as the first of them."""
    llm = config.llm.parallel
    vision = config.encoder("vision").parallel
    return Setup(
        topology=topology,
        cost_model=model,
        llm=Sharding(llm.dp_shard, llm.reshard),
        encoder=Sharding(vision.dp_shard, vision.reshard),
    )
