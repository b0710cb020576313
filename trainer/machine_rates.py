"""What this machine attains: matrix products by size, memory, starts of kernels, and collectives between
ranks.

Every figure is the best of some repeats on the device of this rank: what disturbs one of them is not the
machine. All ranks measure at the same time, as they compute at the same time in a step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

REPEATS = 11
KERNEL_STARTS = 1000


@dataclass(frozen=True, slots=True)
class LinkRate:
    """What one kind of collective over all ranks takes.

    Args:
        latency_s: Of the smallest one.
        bytes_per_s: That a rank sends and receives, by what a larger one takes more.
    """

    latency_s: float
    bytes_per_s: float


def product_rates(
    width: int, *, inner: int, tokens: list[int], device: torch.device, dtype: torch.dtype
) -> list[tuple[int, float]]:
    """Return (tokens, operations per second) of ``[tokens, width] @ [width, inner]``."""
    weight = torch.randn(width, inner, device=device, dtype=dtype)
    found = []
    for num in tokens:
        rows = torch.randn(num, width, device=device, dtype=dtype)
        found.append(
            (num, 2 * num * width * inner / _best_s(functools.partial(torch.matmul, rows, weight), device))
        )
    return found


def copy_bytes_per_s(device: torch.device) -> float:
    """Return the bytes per second that memory gives: read and written by one large copy."""
    num = 1 << (30 if device.type == "cuda" else 26)
    source = torch.zeros(num, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num / _best_s(lambda: target.copy_(source), device)


def kernel_start_s(device: torch.device) -> float:
    """Return the seconds between starts of small kernels."""
    number = torch.zeros(1, device=device)

    def start() -> None:
        for _ in range(KERNEL_STARTS):
            number.add_(1)

    return _best_s(start, device) / KERNEL_STARTS


def link_rates(device: torch.device) -> dict[str, LinkRate]:
    """Return what all-to-all, all-gather and reduce-scatter over all ranks take; all ranks must call this.

    The process group must be there. With one rank there is nothing to measure.
    """
    num_ranks = dist.get_world_size()
    if num_ranks == 1:
        return {}
    small = num_ranks
    large = (1 << (26 if device.type == "cuda" else 20)) // num_ranks * num_ranks
    found = {}
    for name, collective in _collectives(num_ranks).items():
        seconds = []
        for num in (small, large):
            whole = torch.zeros(num, device=device)
            part = torch.zeros(num // num_ranks, device=device)
            dist.barrier()
            seconds.append(_best_s(functools.partial(collective, whole, part), device))
        sent = 4 * (large - small) * (num_ranks - 1) / num_ranks
        found[name] = LinkRate(seconds[0], sent / max(seconds[1] - seconds[0], 1e-9))
    return found


def _collectives(num_ranks: int) -> dict[str, Callable[[Tensor, Tensor], object]]:
    """Each sends all of ``whole`` but the rank's own part."""
    return {
        "all_to_all": lambda whole, _: dist.all_to_all_single(torch.empty_like(whole), whole),
        "all_gather": lambda whole, part: dist.all_gather_single(whole, part),
        "reduce_scatter": lambda whole, part: dist.reduce_scatter_single(part, whole),
    }


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of ``run``, the device's work included; the first time does not count."""
    seconds = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return max(min(seconds[1:]), 1e-9)
