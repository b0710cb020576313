"""Ulysses: ranks that share a media segment swap rows for heads around its attention (Jacobs et al. 2023).

Every rank computes the linear layers on its own rows, all heads of them. Attention needs all rows, but only
of one head at a time: one all-to-all gives each of the d sharing ranks all rows of 1/d of the heads, another
one brings the results back. Several segments, shared by different members, travel in the same two.

All members of the balance group take part where any of them has a share, with zero rows if need be: the
splits come from the plan, which all of them hold. The exchange is our own ``autograd.Function`` because plain
collectives have dropped gradients without a word (pytorch#152127); every vector goes to exactly one place, so
its adjoint is the exchange run backwards.

Shapes: P patches of this rank's shares, N heads, H head width, L patches of whole segments of one degree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from omni_pipeline.core.batch import JoinedSegment
from trainer.model.attention import Segments, attend

Indices = npt.NDArray[np.int64]


class Sharing:
    """Which segments members of the group encode together in one microbatch, and the place of this rank.

    Not a dataclass, nor are those below: FSDP rebuilds those at every block.

    Args:
        joined: Of the whole group, at least one; the same on all members but for ``place``.
        member: This rank's place in the group.
        group: Process group of the members, in their order.
    """

    def __init__(self, joined: Sequence[JoinedSegment], *, member: int, group: dist.ProcessGroup) -> None:
        self.joined = tuple(joined)
        self.member = member
        self.group = group


@dataclass(frozen=True)
class Routes:
    """Where every (patch, head) vector goes: picked by destination, exchanged, put in the order of use.

    Args:
        pick: int64 [P * N]; the own vectors, patch by patch, in sending order.
        send_splits: Vectors to each member.
        recv_splits: Vectors from each member.
        place: int64 [received]; the received vectors in the order of use.
    """

    pick: Indices
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    place: Indices

    def reversed(self) -> Routes:
        """Return the way back, which is also the adjoint: both orders are permutations."""
        return Routes(np.argsort(self.place), self.recv_splits, self.send_splits, np.argsort(self.pick))


def head_routes(
    joined: Sequence[JoinedSegment],
    orders: Sequence[Indices],
    *,
    member: int,
    num_members: int,
    num_heads: int,
    patches_per_row: int,
) -> Routes:
    """Return what ``member`` sends and receives to attend over the segments that it shares.

    Args:
        joined: Of the whole group, in the same order on all members.
        orders: For each, int64 [patches of it]: the order in which attention wants its patches.
        member: Of the group.
        num_members: Members of the group.
        num_heads: N; every number of sharing members divides it.
        patches_per_row: Patches of an embedding row.

    Returns:
        Vectors in use lie by number of sharing members, then segment, then ``orders``, then head.
    """
    picks: list[list[Indices]] = [[] for _ in range(num_members)]
    recv_splits = [0] * num_members
    # Of each shared segment: its degree, and the first received vector of each patch, within its sender's.
    first_vectors: list[tuple[int, Indices, Indices]] = []
    num_own = 0
    for item, order in zip(joined, orders, strict=True):
        if member not in item.members:
            continue
        heads = num_heads // len(item.members)
        own = num_own + np.arange(item.shares[item.members.index(member)] * patches_per_row)
        num_own += len(own)
        senders, firsts = [], []
        for place, (other, rows) in enumerate(zip(item.members, item.shares, strict=True)):
            picks[other].append(_spread(own * num_heads + place * heads, heads))
            num_patches = rows * patches_per_row
            senders.append(np.full(num_patches, other, dtype=np.int64))
            firsts.append(recv_splits[other] + np.arange(num_patches) * heads)
            recv_splits[other] += num_patches * heads
        first_vectors.append((heads, np.concatenate(senders)[order], np.concatenate(firsts)[order]))
    before = np.cumsum([0, *recv_splits])
    # Stable, fewest members (most heads) first.
    first_vectors.sort(key=lambda item: -item[0])
    return Routes(
        pick=_concatenate([piece for of_member in picks for piece in of_member]),
        send_splits=tuple(sum(map(len, of_member)) for of_member in picks),
        recv_splits=tuple(recv_splits),
        place=_concatenate(
            [_spread(before[sender] + first, heads) for heads, sender, first in first_vectors]
        ),
    )


class HeadExchange:
    """The routes of one encoder in one microbatch, on its device; used by all of its layers.

    Args:
        sharing: The segments and the group.
        orders: See ``head_routes``.
        num_heads: Of the encoder.
        patches_per_row: Patches of an embedding row.
        device: Of the encoder.
    """

    def __init__(
        self,
        sharing: Sharing,
        orders: Sequence[Indices],
        *,
        num_heads: int,
        patches_per_row: int,
        device: torch.device,
    ) -> None:
        self.num_heads = num_heads
        self.group = sharing.group
        there = head_routes(
            sharing.joined,
            orders,
            member=sharing.member,
            num_members=dist.get_world_size(sharing.group),
            num_heads=num_heads,
            patches_per_row=patches_per_row,
        )
        self.there = _DeviceRoutes(there, device)
        self.back = _DeviceRoutes(there.reversed(), device)

    def attend(
        self, q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, *, segments: Mapping[int, Segments]
    ) -> Tensor:
        """Return what attention over the whole segments gives for this rank's patches: [P, N, H].

        A collective, forward and backward: all members must call it, also without a share.

        Args:
            q_PNH: Of this rank's shares, one after the other; so are k and v.
            segments: By number of sharing members, ascending: which patches attend to each other, in the
                order of use. Of a member without a share: one that is empty.
        """
        num_patches, num_heads, width = q_PNH.shape
        own = torch.stack([q_PNH, k_PNH, v_PNH], dim=2).reshape(num_patches * num_heads, 3 * width)
        gathered = _swap(own, self.there, self.back, self.group)
        heads = {degree: num_heads // degree for degree in segments}
        sizes = [item.num_rows * heads[degree] for degree, item in segments.items()]
        outs = []
        for (degree, item), vectors in zip(segments.items(), torch.split(gathered, sizes), strict=True):
            q_LNH, k_LNH, v_LNH = vectors.reshape(item.num_rows, heads[degree], 3, width).unbind(2)
            out_LNH = attend(q_LNH, k_LNH, v_LNH, segments=item, causal=False)
            outs.append(out_LNH.reshape(-1, width))
        return _swap(torch.cat(outs), self.back, self.there, self.group).reshape(q_PNH.shape)


class _DeviceRoutes:
    """``Routes`` with their orders on a device."""

    def __init__(self, routes: Routes, device: torch.device) -> None:
        self.pick, self.place = (
            torch.from_numpy(array).to(device, non_blocking=True) for array in (routes.pick, routes.place)
        )
        self.send_splits, self.recv_splits = list(routes.send_splits), list(routes.recv_splits)


def _swap(vectors: Tensor, routes: _DeviceRoutes, adjoint: _DeviceRoutes, group: dist.ProcessGroup) -> Tensor:
    swapped: Tensor = _Swap.apply(vectors, routes, adjoint, group)  # type: ignore[no-untyped-call]
    return swapped


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        vectors: Tensor,
        routes: _DeviceRoutes,
        adjoint: _DeviceRoutes,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.adjoint, ctx.group = adjoint, group
        return _travel(vectors, routes, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _travel(gradients[0], ctx.adjoint, ctx.group), None, None, None


def _travel(vectors: Tensor, routes: _DeviceRoutes, group: dist.ProcessGroup) -> Tensor:
    received = vectors.new_empty((sum(routes.recv_splits), vectors.shape[1]))
    picked = vectors.index_select(0, routes.pick)
    dist.all_to_all_single(received, picked, routes.recv_splits, routes.send_splits, group=group)
    return received.index_select(0, routes.place)


def _spread(first: Indices, count: int) -> Indices:
    """Return ``count`` consecutive numbers from each of ``first``."""
    return (first[:, None] + np.arange(count)).reshape(-1)


def _concatenate(arrays: Sequence[Indices]) -> Indices:
    return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])
