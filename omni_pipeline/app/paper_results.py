"""Results of the published workloads: speed-ups by workload, mixture and baseline, and the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from balancer.simulator.compare import ABLATIONS, BASELINES, OURS, PUBLISHED_BASELINES, Compared
from balancer.simulator.workloads import Workload

LAUNCH_MIXTURE = (5, 5)
FIXED_AT_LAUNCH = ("disaggregated", "bubble_filling")
"""Baselines whose layout or schedule is made for a mixture, and what it is made for where that moves."""


def mixture_name(mixture: tuple[int, int]) -> str:
    """Return ``media:text``."""
    return f"{mixture[0]}:{mixture[1]}"


@dataclass(frozen=True)
class Data:
    """What the samples are.

    Args:
        seed: Of samples and order.
        public_only: Sizes of the public sets only, without the large pictures and long recordings that we
            assume beside them.
    """

    seed: int = 0
    public_only: bool = False


@dataclass(frozen=True)
class Point:
    """One workload at one mixture.

    Args:
        workload: What is trained.
        mixture: (media, text).
        by_strategy: Results; what a baseline fixes at launch is made for the mean of this mixture.
        fixed: Results of ``FIXED_AT_LAUNCH`` made for ``LAUNCH_MIXTURE`` instead.
    """

    workload: Workload
    mixture: tuple[int, int]
    by_strategy: Mapping[str, Compared]
    fixed: Mapping[str, Compared]

    @property
    def ours(self) -> Compared:
        """The strategy that the others are compared with."""
        return self.by_strategy[OURS]

    def speedup(self, strategy: str) -> float | None:
        """Return throughput of ours / that of ``strategy``; None where one of them is out of memory."""
        return self._speedup(self.by_strategy[strategy])

    def speedup_fixed(self, strategy: str) -> float | None:
        """Return the same against ``strategy`` made for ``LAUNCH_MIXTURE``."""
        return self._speedup(self.fixed[strategy])

    def speedup_with_memory(self, strategy: str) -> float:
        """Return the same as ``speedup`` as if every rank had memory enough."""
        return self.by_strategy[strategy].step_s / self.ours.step_s

    def _speedup(self, other: Compared) -> float | None:
        if self.ours.out_of_memory or other.out_of_memory:
            return None
        return other.step_s / self.ours.step_s


@dataclass(frozen=True)
class Best:
    """The best speed-up of a workload, and against whom and where; None where nothing can be compared."""

    workload: Workload
    speedup: float | None
    baseline: str = ""
    mixture: str = ""


@dataclass(frozen=True)
class Paper:
    """All of it.

    Args:
        points: By workload, then mixture.
        hardware: Name of the machine.
        memory_bytes: Of one rank.
        num_steps: Steps at each point.
        data: What the samples are.
    """

    points: Sequence[Point]
    hardware: str
    memory_bytes: float
    num_steps: int
    data: Data

    @property
    def workloads(self) -> list[Workload]:
        """The workloads, in order."""
        return list({point.workload.name: point.workload for point in self.points}.values())

    def of(self, workload: Workload) -> list[Point]:
        """Return the points of one workload."""
        return [point for point in self.points if point.workload.name == workload.name]

    def best(self, workload: Workload) -> Best:
        """Return the best speed-up of a workload over mixtures and published baselines that fit in memory."""
        found = [
            (speedup, baseline, mixture_name(point.mixture))
            for point in self.of(workload)
            for baseline in PUBLISHED_BASELINES
            if (speedup := point.speedup(baseline)) is not None
        ]
        return Best(workload, *max(found)) if found else Best(workload, None)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data.

        ``speedup`` has a number for each workload, mixture and baseline, or null where one of the two does
        not fit in memory; ``speedup_with_memory`` is as if it did. ``ablation`` is throughput without / with,
        minus 1. ``speedup_fixed`` is against baselines made for one mixture and kept.
        """

        def by_point(strategies: Sequence[str], value: Any) -> dict[str, Any]:
            return {
                workload.name: {
                    mixture_name(point.mixture): {name: value(point, name) for name in strategies}
                    for point in self.of(workload)
                }
                for workload in self.workloads
            }

        return {
            "hardware": self.hardware,
            "steps": self.num_steps,
            "seed": self.data.seed,
            "public_only": self.data.public_only,
            "speedup": by_point(BASELINES, Point.speedup),
            "speedup_fixed": by_point(FIXED_AT_LAUNCH, Point.speedup_fixed),
            "speedup_with_memory": by_point(BASELINES, Point.speedup_with_memory),
            "best": {
                workload.name: {
                    "speedup": (best := self.best(workload)).speedup,
                    "baseline": best.baseline,
                    "mixture": best.mixture,
                    "published": workload.best_speedup,
                }
                for workload in self.workloads
            },
            "ablation": by_point(ABLATIONS, lambda point, name: 1 / point.speedup_with_memory(name) - 1),
            "results": by_point(
                (OURS, *BASELINES, *ABLATIONS), lambda point, name: asdict(point.by_strategy[name])
            ),
        }
