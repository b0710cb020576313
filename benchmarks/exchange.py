"""When each kind of exchange is the quickest: by the cost model at scale, and measured on this machine.

    python -m benchmarks.exchange --json

Every rank makes some segments, each for one other rank of its group, drawn at random. ``model`` prices rows
of Qwen2.5-Omni-3B on H100-class nodes of eight ranks, there and back. ``measured`` runs four processes of
this machine that are called two nodes of two, forward and backward through gloo, kinds in turn within one
run: the best of some repeats of the slowest rank. No link here is slower than another, so only the ratios
tell, and two hops can only show what they cost. The last line of ``--json`` is one object: ``model`` and
``measured``, lists of rows.
"""

from __future__ import annotations

import json
import time
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist

from balancer.exchange import ExchangePricer
from balancer.nodes import GroupNodes, group_nodes
from balancer.partition import IntArray
from balancer.reshard import Routes, reshard_plan
from benchmarks.synthetic import cost_model
from omni_pipeline.core.plan import ExchangeKind
from omni_pipeline.core.seeding import generator
from omni_pipeline.core.topology import Topology
from tests.support.ranks import run_ranks
from trainer.parallel.mesh import make_exchange_groups
from trainer.reshard import reshard

KINDS: tuple[ExchangeKind, ...] = ("exact", "symmetric", "two_level")
RANKS_PER_NODE = 8
NODES = (1, 2, 8, 32)
# Segments that each rank makes for others, and the rows of each.
MODEL_LOADS = ((64, 1), (1, 16), (16, 16), (4, 256), (16, 256), (64, 256))
MEASURED = Topology(4, ranks_per_node=2)
MEASURED_LOADS = ((1, 4), (4, 16), (4, 256), (8, 1024))
MEASURED_HIDDEN = 256


@click.command()
@click.option("--repeats", default=20, show_default=True, help="Repeats of each measured exchange.")
@click.option("--seed", default=0, show_default=True, help="Seed of who makes rows for whom.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def main(*, repeats: int, seed: int, as_json: bool) -> None:
    """Price and measure the kinds of exchange.

    Example: python -m benchmarks.exchange --json
    """
    model = [model_row(nodes, *load, seed=seed) for nodes in NODES for load in MODEL_LOADS]
    print("modelled on H100-class nodes of 8 ranks; ms there and back, * is chosen")
    print("nodes  segments x rows    exact  symmetric  two_level")
    for row in model:
        cells = [_cell(row["ms"].get(kind), row["chosen"] == kind) for kind in KINDS]
        print(f"{row['nodes']:5d}  {row['segments']:8d} x {row['rows']:4d}", *cells)
    measured = measure(repeats=repeats, seed=seed)
    print("measured, 4 processes as 2 nodes of 2; times of the exact exchange")
    for row in measured:
        ratios = ", ".join(f"{kind} {row['ratio'][kind]:.2f}" for kind in KINDS)
        print(f"{row['segments']} segments x {row['rows']} rows: exact {row['exact_ms']:.2f} ms; {ratios}")
    if as_json:
        print(json.dumps({"model": model, "measured": measured}))


def _cell(milliseconds: float | None, chosen: bool) -> str:
    return f"{'-' if milliseconds is None else f'{milliseconds:.3f}' + '*' * chosen:>10}"


def model_row(nodes: int, segments: int, rows: int, *, seed: int) -> dict[str, Any]:
    """Price one load in a group of ``nodes`` whole nodes."""
    topology = Topology(nodes * RANKS_PER_NODE, ranks_per_node=RANKS_PER_NODE)
    routes = make_routes(group_nodes(topology, 0), segments=segments, rows=rows, seed=seed)
    pricer = ExchangePricer(cost_model(), routes.nodes)
    chosen, _ = pricer.choose(routes.maker, routes.owner, routes.rows)
    seconds = {kind: pricer.seconds(kind, routes.maker, routes.owner, routes.rows) for kind in pricer.kinds}
    return {
        "nodes": nodes,
        "segments": segments,
        "rows": rows,
        "ms": {kind: 1e3 * value for kind, value in seconds.items()},
        "chosen": chosen,
    }


def make_routes(nodes: GroupNodes, *, segments: int, rows: int, seed: int) -> Routes:
    """Return routes in which each member makes ``segments`` x ``rows`` rows, all for others."""
    num_members = len(nodes.node)
    random = generator(seed, "exchange benchmark", num_members, segments)
    maker = np.repeat(np.arange(num_members), segments)
    owner = (maker + random.integers(1, num_members, len(maker))) % num_members
    return Routes(
        maker=maker,
        owner=owner,
        rows=np.full(len(maker), rows, dtype=np.int64),
        source=np.tile(np.arange(segments) * rows, num_members),
        local=_places(owner, num_members) * rows,
        num_made=np.full(num_members, segments * rows, dtype=np.int64),
        nodes=nodes,
    )


def _places(owner: IntArray, num_members: int) -> IntArray:
    """Number the segments of each owner."""
    places = np.zeros(len(owner), dtype=np.int64)
    for member in range(num_members):
        mine = np.flatnonzero(owner == member)
        places[mine] = np.arange(len(mine))
    return places


def measure(*, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Run all kinds on processes of this machine."""
    by_rank = run_ranks(MEASURED.world_size, _measure_rank, args=(repeats, seed), timeout_s=600)
    found = []
    for index, (segments, rows) in enumerate(MEASURED_LOADS):
        # An exchange ends when its slowest rank ends.
        times = {
            kind: min(max(trial) for trial in zip(*(rank[index][kind] for rank in by_rank), strict=True))
            for kind in KINDS
        }
        ratio = {kind: times[kind] / times["exact"] for kind in KINDS}
        found.append({"segments": segments, "rows": rows, "exact_ms": 1e3 * times["exact"], "ratio": ratio})
    return found


def _measure_rank(rank: int, repeats: int, seed: int) -> list[dict[str, list[float]]]:
    groups = make_exchange_groups(MEASURED)
    nodes = group_nodes(MEASURED, 0)
    found = []
    for segments, rows in MEASURED_LOADS:
        routes = make_routes(nodes, segments=segments, rows=rows, seed=seed)
        plans = {kind: reshard_plan(routes, kind=kind, member=rank) for kind in KINDS}
        values = torch.ones(segments * rows, MEASURED_HIDDEN, requires_grad=True)
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(repeats):
            for kind, plan in plans.items():
                dist.barrier()
                start = time.perf_counter()
                taken, _ = reshard(values, plan, groups=groups)
                torch.autograd.backward(taken.sum())
                times[kind].append(time.perf_counter() - start)
        found.append(times)
    return found


if __name__ == "__main__":
    main()
