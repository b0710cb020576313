"""Parameters over ranks: who gathers them, who sums their gradients, how long that takes, what a rank keeps.

As the trainer does it: optimizer state and master weights are float32 and sharded, parameters are gathered in
bfloat16, gradients are summed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from balancer.hardware import HardwareProfile
from balancer.shapes import TransformerShape
from balancer.simulator.network import gather_s, reduce_all_s, spread_of
from balancer.simulator.setup import Setup
from balancer.work import weight_values

GATHERED_BYTES = 2
GRADIENT_BYTES = 4
STATE_BYTES = 4 + 8 + GRADIENT_BYTES  # master weight, two moments, the rank's part of the gradient
UPDATE_BYTES = 2 * (4 + 8) + GRADIENT_BYTES  # master and moments read and written, the gradient read
BLOCKS_AT_ONCE = 2  # the layer that computes, and the next one on its way


@dataclass(frozen=True)
class Shards:
    """One model's parameters on the ranks that hold them.

    Args:
        what: The model, for names of operations.
        per_step: Gathered and reduced once per step.
        gather_s: Seconds to gather what a rank computes with.
        reduce_s: Seconds to sum its gradients within a copy.
        across_s: Seconds to sum them over copies.
        members_of: By rank, the ranks whose collectives run together.
        holders_of: By rank, those of all copies.
        values: Parameters that each rank computes with.
        degree: Ranks that share them.
        num_layers: Layers on each rank, which are gathered one by one.
    """

    what: str
    per_step: bool
    gather_s: float
    reduce_s: float
    across_s: float
    members_of: Mapping[int, tuple[int, ...]]
    holders_of: Mapping[int, tuple[int, ...]]
    values: float
    degree: int
    num_layers: float

    def update_s(self, hardware: HardwareProfile) -> float:
        """Return the seconds of the optimizer on one rank: it reads and writes memory."""
        return self.values / self.degree * UPDATE_BYTES / hardware.hbm_bytes_per_s

    @property
    def held_bytes(self) -> float:
        """Bytes on each rank: its part of the state, and what is gathered at once."""
        whole = GATHERED_BYTES + GRADIENT_BYTES
        if self.degree == 1 or self.per_step:
            # A rank that shares with nobody still computes with a bfloat16 copy of its master weights.
            gathered = self.values * (whole if self.degree > 1 else GATHERED_BYTES)
        else:
            gathered = self.values * whole * min(1.0, BLOCKS_AT_ONCE / max(self.num_layers, 1.0))
        return self.values / self.degree * STATE_BYTES + gathered


def num_values(shape: TransformerShape, *, is_llm: bool) -> int:
    """Return the parameters of a model, those of all experts; an LLM has a table beside its head."""
    table = shape.output_widths[0] * shape.output_widths[-1] if is_llm and shape.output_widths else 0
    return weight_values(shape) + table


def encoder_values(setup: Setup) -> int:
    """Return the parameters of all encoders."""
    return sum(num_values(shape, is_llm=False) for shape in setup.cost_model.encoders.values())


def llm_shards(setup: Setup) -> Shards:
    """Return the LLM's parameters: of a stage and place in tp, over the replicas and their cp ranks.

    The tp ranks of a stage run the same collectives at the same time, each with its own part.
    """
    topology, llm = setup.topology, setup.cost_model.llm
    degree = setup.llm.ranks_per_copy(topology.cp * topology.num_replicas)
    replicas_per_copy = max(1, degree // topology.cp)
    width, per_stage = topology.tp * topology.cp, topology.world_size // topology.pp
    members_of, holders_of = {}, {}
    for start in range(0, topology.world_size, per_stage):
        stage = tuple(range(start, start + per_stage))
        size = replicas_per_copy * width
        for copy in range(0, per_stage, size):
            members = stage[copy : copy + size]
            members_of.update(dict.fromkeys(members, members))
        holders_of.update(dict.fromkeys(stage, stage))
    values = num_values(llm, is_llm=True) / (topology.tp * topology.pp)
    alike = [rank for rank in range(per_stage) if rank % topology.tp == 0]
    return _shards(
        "llm",
        setup=setup,
        per_step=setup.llm.reshard == "step",
        values=values,
        alike=alike,
        degree=degree,
        groups=(members_of, holders_of),
        num_layers=llm.layers / topology.pp,
    )


def encoder_shards(
    setup: Setup, hosts: Sequence[int], *, tp: int = 1, per_step: bool | None = None
) -> Shards | None:
    """Return the encoders' parameters, shared by runs of hosts; None without encoders.

    Args:
        setup: The run.
        hosts: Ranks that hold them, ascending.
        tp: Neighbouring hosts that hold one tensor-parallel copy and run its collectives together.
        per_step: Gathered and reduced once per step; None: as the setup says.
    """
    shapes = setup.cost_model.encoders
    if not shapes:
        return None
    everyone = tuple(hosts)
    degree = setup.encoder.ranks_per_copy(len(everyone) // tp)
    members_of = {}
    for start in range(0, len(everyone), degree * tp):
        members = everyone[start : start + degree * tp]
        members_of.update(dict.fromkeys(members, members))
    return _shards(
        "encoder",
        setup=setup,
        per_step=setup.encoder.reshard == "step" if per_step is None else per_step,
        values=encoder_values(setup) / tp,
        alike=everyone[::tp],
        degree=degree,
        groups=(members_of, dict.fromkeys(everyone, everyone)),
        num_layers=sum(shape.layers for shape in shapes.values()),
    )


def _shards(
    what: str,
    *,
    setup: Setup,
    per_step: bool,
    values: float,
    alike: Sequence[int],
    degree: int,
    groups: tuple[Mapping[int, tuple[int, ...]], Mapping[int, tuple[int, ...]]],
    num_layers: float,
) -> Shards:
    """``alike``: the ranks that hold equal values, all copies."""
    hardware = setup.hardware
    copy = spread_of(alike[:degree], hardware)
    across = spread_of(alike[::degree], hardware)
    # Each layer is one unit of FSDP, and what is outside of the layers one more.
    units = math.ceil(num_layers) + 1
    return Shards(
        what=what,
        per_step=per_step,
        gather_s=gather_s(values * GATHERED_BYTES, copy, hardware, num_collectives=units),
        reduce_s=gather_s(values * GRADIENT_BYTES, copy, hardware, num_collectives=units),
        across_s=reduce_all_s(values / degree * GRADIENT_BYTES, across, hardware, num_collectives=units),
        members_of=groups[0],
        holders_of=groups[1],
        values=values,
        degree=degree,
        num_layers=num_layers,
    )
