"""Which ranks work together: process groups of the balance groups, one device mesh per module.

Ranks of a group exchange embedding rows and agree on a plan; the ranks of a module's mesh share its
parameters. Both are made by all ranks in one order, so every rank must call the functions of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.reshard import Scope
from omni_pipeline.core.topology import Topology
from trainer.parallel.config import ranks_per_copy

REPLICATE_AXIS = "dp_replicate"
SHARD_AXIS = "dp_shard"


@dataclass(frozen=True)
class RankGroups:
    """The place of this rank in the run.

    Args:
        topology: The layout of the run.
        rank: This rank.
        device: Where its tensors live.
        members: Ranks of its balance group, ascending.
        exchange: The process groups in which rows travel, by scope; ``"node"`` and ``"rail"`` only if the
            balance group has rails.
    """

    topology: Topology
    rank: int
    device: torch.device
    members: tuple[int, ...]
    exchange: Mapping[Scope, dist.ProcessGroup]

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of ``members``."""
        return self.exchange["group"]

    @property
    def sizes(self) -> dict[Scope, int]:
        """Ranks in each process group of ``exchange``."""
        return {scope: dist.get_world_size(group) for scope, group in self.exchange.items()}


def pick_device(local_rank: int = 0) -> torch.device:
    """Return the CUDA device of ``local_rank`` if the machine has one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def backend_for(device: torch.device) -> str:
    """Return the backend for ``init_process_group``.

    With CUDA both are needed: the agreements of a step are small CPU tensors, so that no message between
    ranks has to wait for the device.
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def make_rank_groups(topology: Topology, *, device: torch.device) -> RankGroups:
    """Return the groups of this rank; all ranks must call this together.

    Raises:
        ConfigError: The process group has another size, or a replica has more than one rank.
    """
    world_size = dist.get_world_size()
    if topology.world_size != world_size:
        raise ConfigError(
            f"the layout is for {topology.world_size} ranks, {world_size} were started",
            fix="start that many ranks, or change the layout",
        )
    if topology.ranks_per_replica != 1:
        raise ConfigError(
            f"tp x cp x pp = {topology.ranks_per_replica}, but a replica of this trainer is one rank",
            fix="make a layout with tp, cp and pp of 1",
        )
    rank = dist.get_rank()
    return RankGroups(
        topology=topology,
        rank=rank,
        device=device,
        members=topology.ranks_of_group(topology.group_of(rank)),
        exchange=make_exchange_groups(topology),
    )


def make_exchange_groups(topology: Topology) -> dict[Scope, dist.ProcessGroup]:
    """Return the process groups in which rows of this rank travel; all ranks must call this together."""
    rank = dist.get_rank()
    found: dict[Scope, dist.ProcessGroup] = {}
    for index in range(topology.num_groups):
        rails = topology.rails_of_group(index)
        parts: list[tuple[Scope, tuple[int, ...]]] = [("group", topology.ranks_of_group(index))]
        if rails:
            parts += [("node", members) for members in topology.nodes_of_group(index)]
            parts += [("rail", members) for members in rails]
        for scope, members in parts:
            group = dist.new_group(list(members))
            if rank in members:
                found[scope] = group
    return found


def make_module_mesh(*, device: torch.device, dp_shard: int, setting: str) -> DeviceMesh:
    """Return the mesh of one module; all ranks must call this together.

    One axis when all ranks share one copy of the parameters, else copies x shards (hybrid sharding), with
    the ranks of a copy next to each other.

    Args:
        device: Where the module lives.
        dp_shard: Ranks per copy; -1: all.
        setting: Name of the setting, for the message.

    Raises:
        ConfigError: ``dp_shard`` does not divide the number of ranks.
    """
    world_size = dist.get_world_size()
    shard = ranks_per_copy(dp_shard, world_size=world_size, setting=setting)
    if shard == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=(SHARD_AXIS,))
    shape = (world_size // shard, shard)
    return init_device_mesh(device.type, shape, mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS))
