"""The numbers of a step, reduced over ranks in one place and recorded on rank 0.

Waiting and step time are those of the slowest rank, counts are sums, a modelled imbalance is that of the
whole run (all ranks meet in every microbatch, so the makespan is that of the slowest group), and the measured
one is that of the ranks' own work. ``trainer/mean/...`` are means over ranks, which add up to a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from omni_pipeline.core.batch import Batch
from omni_pipeline.core.metrics import Metrics
from trainer.parallel.mesh import RankGroups
from trainer.stage_times import STAGES
from trainer.step import StepResult
from trainer.step_causes import (
    PARTS,
    Costs,
    FloatArray,
    StepCause,
    flops_of_rank,
    part_causes,
    rank_numbers,
    samples_of_rank,
)

LOADER_STAGES = ("plan_s", "fetch_s", "decode_s", "assemble_s")
STEP_STAGES = ("agree_s", "compute_s", "optimizer_s")
LEFT = "loader/left/"
MEAN = "trainer/mean/"


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one rank: waiting for its batch, and the whole step, waiting included."""

    wait_s: float
    step_s: float


@dataclass(frozen=True)
class StepWatcher:
    """Who wants to know why steps take so long.

    Args:
        costs: The run's cost model.
        see: Called on rank 0 with every step that was trained.
    """

    costs: Costs
    see: Callable[[StepCause], None]


class StepRecorder:
    """Records steps. ``record`` is a collective of all ranks.

    Args:
        metrics: Where numbers go; used on rank 0 only.
        sources: Names of all sources of the run, the same on all ranks.
        seq_len: Positions of a full pack.
        groups: The place of this rank.
        watcher: Told of the causes of slow steps; None on all ranks or on none.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        sources: Sequence[str],
        seq_len: int,
        groups: RankGroups,
        watcher: StepWatcher | None = None,
    ) -> None:
        self.metrics = metrics
        self.sources = tuple(sources)
        self.seq_len = seq_len
        self.groups = groups
        self.watcher = watcher

    def record(self, result: StepResult, batch: Batch | None, *, times: StepTimes) -> None:
        """Reduce the numbers of one step and keep them under its number."""
        largest = self._slowest(result, batch, times)
        sums = self._sums(batch)
        means = _means(result, times)
        own = [*largest.values(), *sums.values(), *means.values()]
        of_rank = torch.tensor([*own, *self._causes(result, batch)], dtype=torch.float64)
        gathered = [torch.empty_like(of_rank) for _ in range(self.groups.topology.world_size)]
        dist.all_gather(gathered, of_rank)
        if self.groups.rank != 0:
            return
        table = torch.stack(gathered).numpy()
        of_name = dict(zip([*largest, *sums, *means], table.T, strict=False))
        reduced = {name: float(of_name[name].max()) for name in largest}
        reduced |= {name: float(of_name[name].sum()) for name in sums}
        reduced |= {name: float(of_name[name].mean()) for name in means}
        found = self._derived(result, reduced)
        if not result.skipped:
            found |= self._tell_causes(found, table[:, len(own) :], step=result.step)
        endless = {f"{LEFT}{name}" for name in self.sources if batch is None or name not in batch.left}
        for name, value in found.items():
            if name not in endless:
                self.metrics.record(name, value, result.step)

    def _slowest(self, result: StepResult, batch: Batch | None, times: StepTimes) -> dict[str, float]:
        """Numbers of which the largest over ranks counts."""
        plan = None if batch is None else batch.plan
        loader = {} if batch is None else batch.timings
        return {
            "wait_s": times.wait_s,
            "step_s": times.step_s,
            **{f"loader/{name}": loader.get(name, 0.0) for name in LOADER_STAGES},
            **{f"trainer/{name}": result.timings.get(name, 0.0) for name in STEP_STAGES},
            "num_microbatches": 0 if plan is None else plan.num_microbatches,
            "encoder_before": 0.0 if plan is None else plan.encoder_balance.makespan_before,
            "encoder_after": 0.0 if plan is None else plan.encoder_balance.makespan_after,
            "llm_before": 0.0 if plan is None else plan.llm_balance.makespan_before,
            "llm_after": 0.0 if plan is None else plan.llm_balance.makespan_after,
        }

    def _sums(self, batch: Batch | None) -> dict[str, float]:
        """Numbers of which the sum over ranks counts."""
        tokens = dict.fromkeys(self.sources, 0)
        samples = dict.fromkeys(self.sources, 0)
        num_positions = 0
        for microbatch in () if batch is None else batch.microbatches:
            num_positions += len(microbatch.tokens) if microbatch.spans else 0
            for span in microbatch.spans:
                tokens[span.id.source] += span.end - span.start
                samples[span.id.source] += 1
        return {
            "encoder_mean": 0.0 if batch is None else batch.plan.encoder_balance.mean,
            "llm_mean": 0.0 if batch is None else batch.plan.llm_balance.mean,
            "num_positions": num_positions,
            **self._flops(batch),
            **{f"loader/tokens/{name}": count for name, count in tokens.items()},
            **{f"loader/samples/{name}": count for name, count in samples.items()},
            **self._sums_of_groups(batch),
        }

    def _flops(self, batch: Batch | None) -> dict[str, float]:
        """Operations that the models need for what this rank does; a replica's packs count on one rank."""
        if self.watcher is None:
            return {}
        flops = 0.0
        if batch is not None:
            replica = self.groups.topology.replica_of(self.groups.rank)
            first = self.groups.topology.ranks_of_replica(replica)[0] == self.groups.rank
            flops = flops_of_rank(
                batch.plan,
                rank=self.groups.rank,
                replica=replica if first else None,
                costs=self.watcher.costs,
            )
        return {"trainer/flops": flops}

    def _sums_of_groups(self, batch: Batch | None) -> dict[str, float]:
        """Numbers that all members of a group know alike: the first one speaks for it."""
        speaks = self.groups.rank == self.groups.members[0]
        heard = batch if speaks else None
        counts = {
            LEFT: {} if heard is None else heard.left,
            "loader/dropped/": {} if heard is None else heard.dropped,
            "loader/filtered/": {} if heard is None else heard.filtered,
        }
        return {
            "loader/empty_packs": 0 if heard is None else heard.num_empty_packs,
            **{
                f"{prefix}{name}": of_source.get(name, 0)
                for prefix, of_source in counts.items()
                for name in self.sources
            },
        }

    def _causes(self, result: StepResult, batch: Batch | None) -> list[float]:
        """What this rank adds to the search for the cause of a slow step."""
        samples = {}
        if self.watcher is not None and batch is not None:
            rank = self.groups.rank
            replica = self.groups.topology.replica_of(rank)
            samples = samples_of_rank(batch.plan, rank=rank, replica=replica, costs=self.watcher.costs)
        return rank_numbers(samples, result.stages, sources=self.sources)

    def _derived(self, result: StepResult, reduced: dict[str, float]) -> dict[str, float]:
        """Return the numbers by the name under which they are recorded."""
        world_size = self.groups.topology.world_size
        room = reduced["num_microbatches"] * world_size * self.seq_len
        num_positions = reduced["num_positions"]
        found = {
            "trainer/lr": result.lr,
            **{f"trainer/lr/{part}": lr for part, lr in result.part_lrs.items()},
            "trainer/tokens": result.num_tokens,
            "trainer/labels": result.num_labels,
            "trainer/num_ranks": world_size,
            "trainer/step_s": reduced["step_s"],
            "trainer/tokens_per_s": result.num_tokens / reduced["step_s"],
            "trainer/skipped": float(result.skipped),
            "loader/wait_s": reduced["wait_s"],
            "loader/bad_samples": result.num_failed,
            "loader/pack_fill": result.num_tokens / room if room else 0.0,
            "loader/padding": 1 - result.num_tokens / num_positions if num_positions else 0.0,
            "loader/empty_positions": reduced["loader/empty_packs"] * self.seq_len,
        }
        if not result.skipped:
            found |= {"trainer/loss": result.loss, "trainer/grad_norm": result.grad_norm}
        if result.z_loss is not None:
            found["trainer/z_loss"] = result.z_loss
        if result.experts is not None:
            found["trainer/balance_loss"] = result.experts.balance_loss
            found["trainer/expert_imbalance"] = result.experts.imbalance
        for part in PARTS:
            mean = reduced[f"{part}_mean"] / world_size
            found[f"balancer/{part}_mean_s"] = mean
            for when in ("before", "after"):
                makespan = reduced[f"{part}_{when}"]
                found[f"balancer/{part}_imbalance_{when}"] = makespan / mean if mean else 1.0
        return found | {name: value for name, value in reduced.items() if "/" in name}

    def _tell_causes(self, found: Mapping[str, float], table: FloatArray, *, step: int) -> dict[str, float]:
        """Tell the watcher what held the step up; return the measured imbalances."""
        names = {part: f"balancer/{part}_imbalance" for part in PARTS}
        both = {part: (found[f"{name}_before"], found[f"{name}_after"]) for part, name in names.items()}
        parts = part_causes(table, sources=self.sources, imbalances=both)
        if self.watcher is not None:
            lost = [(both[part][1] - 1) * found[f"balancer/{part}_mean_s"] for part in PARTS]
            cause = StepCause(step, found["trainer/step_s"], found["loader/wait_s"], sum(lost), parts)
            self.watcher.see(cause)
        return {
            f"balancer/{item.part}_imbalance_measured": item.imbalance_measured
            for item in parts
            if item.imbalance_measured is not None
        }


def _means(result: StepResult, times: StepTimes) -> dict[str, float]:
    """Numbers of which the mean over ranks counts: a rank's step is the sum of these."""
    stages = result.stages
    return {
        f"{MEAN}step_s": times.step_s,
        f"{MEAN}wait_s": times.wait_s,
        **{f"{MEAN}{name}": result.timings.get(name, 0.0) for name in STEP_STAGES},
        **{f"{MEAN}{stage}_s": stages.wall_s(stage) for stage in STAGES if stages.wall},
        **{f"{MEAN}{stage}_own_s": stages.own_s(stage) for stage in STAGES if stages.own},
    }
