"""The rank runner itself: results by rank, the first failure shown, nothing outlives the limit."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RanksFailedError, run_ranks


def _sum_of_ranks(rank: int, factor: int) -> tuple[int, float, int]:
    total = torch.tensor(float(rank * factor))
    dist.all_reduce(total)
    return rank, total.item(), torch.get_num_threads()


def _fails_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def _dies(rank: int) -> None:
    if rank == 0:
        os._exit(9)
    dist.barrier()


def _sleeps(rank: int) -> None:
    time.sleep(60)


def test_results_come_back_by_rank() -> None:
    assert run_ranks(2, _sum_of_ranks, args=(10,)) == [(0, 10.0, 1), (1, 10.0, 1)]


def test_the_first_failure_is_shown_with_its_rank_and_traceback() -> None:
    with pytest.raises(RanksFailedError, match=r"(?s)rank 1 of 2 failed first.*rank one has had enough"):
        run_ranks(2, _fails_on_one)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RanksFailedError, match="rank 0 of 2 failed first:\nthe process ended"):
        run_ranks(2, _dies)


def test_ranks_that_do_not_end_are_killed_at_the_limit() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"ranks \[0, 1\] of 2 did not end within 2.0 s"):
        run_ranks(2, _sleeps, timeout_s=2.0)
    assert time.monotonic() - start < 30
