"""Measure this machine with the run's own model, and write what plans and simulations take from it.

Two files: a hardware profile (``balance.hardware``) and fitted costs (``balance.costs``). Start it on as
many ranks as the run has on this machine: they share its cores and links as in a step. What one machine
cannot tell (links between nodes; those inside it, with one rank) is taken from the profile that the run
file names.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from balancer.cost import LLM
from balancer.fit import Measured, fit_cost
from balancer.fitted import FittedCost, FittedCosts, save_fits
from balancer.hardware import HardwareProfile, efficiency_curve, load_hardware, save_hardware
from balancer.shapes import TransformerShape
from balancer.work import media_sizes, sample_sizes
from omni_pipeline.app.costs import encoder_shapes, llm_shape
from omni_pipeline.app.environment import Environment
from omni_pipeline.app.run_config import ENCODERS, RunConfig
from trainer.agreement import all_or_none
from trainer.machine_rates import LinkRate, copy_bytes_per_s, kernel_start_s, link_rates, product_rates
from trainer.parallel.mesh import backend_for, pick_device
from trainer.parallel.sharding import DTYPES
from trainer.part_times import Part, PartTime, Progress, part_grids

HARDWARE_FILE, COSTS_FILE = "hardware.toml", "costs.json"
TOKENS = tuple(1 << power for power in range(4, 15))
LARGE = {"cpu": 1024, "cuda": 8192}
"""Side of the square matrices whose product is taken for the peak."""


@dataclass(frozen=True)
class Calibration:
    """What was measured, and where it was written.

    Args:
        hardware_path: The hardware profile, for ``balance.hardware``.
        costs_path: The fitted costs, for ``balance.costs``.
        hardware: Its content.
        costs: Their content.
        links: By collective, over all ranks; empty with one rank.
        times: The microbatches measured, by part.
    """

    hardware_path: Path
    costs_path: Path
    hardware: HardwareProfile
    costs: FittedCosts
    links: Mapping[str, LinkRate]
    times: Mapping[str, tuple[PartTime, ...]]


def calibrate(
    config: RunConfig,
    out: Path,
    *,
    place: Environment | None = None,
    budget_s: float = 60.0,
    progress: Progress | None = None,
) -> Calibration | None:
    """Measure this machine for about ``budget_s`` seconds and write ``hardware.toml`` and ``costs.json``.

    With a ``place`` (of ``Environment.read``) all of its ranks must call this; they join a process group and
    leave it, unless they are in one. All measure at the same time, what rank 0 finds counts.

    Args:
        config: The run; its model, precision and ``order.seq_len`` are what is measured.
        out: Folder for the two files, made if it is not there.
        place: The place of this rank; None is a single process.
        budget_s: About the seconds of all measurements.
        progress: Told what is measured and which share of it is done.

    Returns:
        On rank 0, or in a single process, what was found; None on all other ranks.

    Raises:
        ConfigError: The profile that the run file names is not there.
        DataError: So little could be measured in the time that no fit can be made.
    """
    known = load_hardware(config.balance.hardware)
    device = pick_device(place.local_rank if place else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place is None:
        return _calibrate(config, out, device=device, known=known, budget_s=budget_s, progress=progress)
    joins = not dist.is_initialized()
    if joins:
        dist.init_process_group(backend_for(device))
    found = all_or_none(
        lambda: _calibrate(config, out, device=device, known=known, budget_s=budget_s, progress=progress),
        what="it cannot measure",
    )
    if joins:
        dist.destroy_process_group()
    return found


def fitted(times: tuple[PartTime, ...], *, name: str, shape: TransformerShape) -> FittedCost:
    """Return the cost of one part that fits its measured microbatches; see ``balancer.fit``."""
    measured = []
    for time in times:
        sizes = [sample_sizes(g[0]) if name == LLM else media_sizes(shape, g) for g in time.grids]
        what = f"{len(time.grids)} x {'x'.join(map(str, time.grids[0]))}"
        measured.append(Measured(what, tuple(sizes), forward_s=time.forward_s, backward_s=time.backward_s))
    return fit_cost(measured, shape=shape)


def _calibrate(
    config: RunConfig,
    out: Path,
    *,
    device: torch.device,
    known: HardwareProfile,
    budget_s: float,
    progress: Progress | None,
) -> Calibration | None:
    # Links first: they need all ranks at once, and ranks drift apart in what follows.
    links = link_rates(device) if dist.is_initialized() else {}
    hardware = _hardware(config, device=device, links=links, known=known)
    shapes = {**encoder_shapes(config.model), LLM: llm_shape(config.model)}
    times = {}
    for name in (*ENCODERS, LLM):
        part = Part(config.model, name, device=device, precision=config.run.precision)
        grids = part_grids(config.model, name, seq_len=config.order.seq_len)
        times[name] = tuple(part.times(grids, budget_s=budget_s / len(shapes), progress=progress))
        del part  # its memory is needed for the next one
    if dist.is_initialized() and dist.get_rank() > 0:
        return None
    costs = FittedCosts(
        machine=f"{hardware.name}, torch {torch.__version__}, {torch.get_num_threads()} threads a rank",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        precision=config.run.precision,
        fits={name: fitted(times[name], name=name, shape=shape) for name, shape in shapes.items()},
    )
    out.mkdir(parents=True, exist_ok=True)
    found = Calibration(out / HARDWARE_FILE, out / COSTS_FILE, hardware, costs, links, times)
    save_hardware(found.hardware_path, hardware, comment=f"Measured {costs.date}; {costs.machine}.")
    save_fits(found.costs_path, costs)
    return found


def _hardware(
    config: RunConfig, *, device: torch.device, links: Mapping[str, LinkRate], known: HardwareProfile
) -> HardwareProfile:
    """Return the profile of this machine; what cannot be measured here is that of ``known``."""
    llm, dtype = config.model.llm, DTYPES[config.run.precision]
    most = 4 * config.order.seq_len
    tokens = [num for num in TOKENS if num <= most] or [most]
    rates = product_rates(llm.hidden, inner=llm.intermediate, tokens=tokens, device=device, dtype=dtype)
    side = LARGE[device.type]
    [(_, square)] = product_rates(side, inner=side, tokens=[side], device=device, dtype=dtype)
    peak = max(square, *(rate for _, rate in rates))
    measured = {
        "name": _machine_name(device),
        "memory_bytes": _memory_bytes(device),
        "flops_per_s": peak,
        "hbm_bytes_per_s": copy_bytes_per_s(device),
        "kernel_s": kernel_start_s(device),
        "efficiency": efficiency_curve([(num, rate / peak) for num, rate in rates]),
    }
    if links:
        num_ranks = dist.get_world_size()
        link = links["all_to_all"]
        measured |= {
            "ranks_per_node": num_ranks,
            "node_bytes_per_s": link.bytes_per_s,
            # A message to each other rank makes the collective.
            "node_latency_s": link.latency_s / (num_ranks - 1),
        }
    return HardwareProfile.model_validate({**known.model_dump(), **measured})


def _machine_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} processor"


def _memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    return psutil.virtual_memory().total / num_ranks
