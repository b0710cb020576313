"""Bytes on each rank: parameters, optimizer state, gradients, and the activations that are in flight.

Activations are counted along the slots: they are there from a forward to its backward, so what 1F1B bounds
(stage s keeps P - s microbatches) and what encoding on demand or up front keeps follows from the schedule
itself. Left out: rows and messages on their way, logits, workspaces, and what an allocator loses.
"""

from __future__ import annotations

import numpy as np

from balancer.partition import FloatArray
from balancer.simulator.build import Seat, StepWork
from balancer.simulator.schedule import Stage


def peak_bytes(work: StepWork, kept_bytes: FloatArray) -> FloatArray:
    """Return the most bytes that each rank holds at once, float64 [ranks]; ranks without a seat hold none.

    Args:
        work: The step.
        kept_bytes: float64 [ranks, microbatches]; encoder activations from forward to backward.
    """
    num_ranks = max(rank for seat in work.seats for rank in seat.ranks) + 1
    peak = np.zeros(num_ranks)
    by_slots: dict[int, list[Seat]] = {}
    for seat in work.seats:
        by_slots.setdefault(id(seat.slots), []).append(seat)
    for seats in by_slots.values():
        ranks = np.concatenate([np.asarray(seat.ranks) for seat in seats])
        replicas = np.repeat([seat.replica for seat in seats], [len(seat.ranks) for seat in seats])
        llm = work.llm.kept_bytes[replicas] * (replicas >= 0)[:, None]
        encoders = kept_bytes[ranks]
        held = np.zeros(len(ranks))
        if work.encoder_shards:
            hosts = np.asarray([rank in work.encoder_shards.members_of for rank in ranks.tolist()])
            held += hosts * work.encoder_shards.held_bytes
        held += (replicas >= 0) * work.llm_shards.held_bytes
        peak[ranks] = held + activations_peak(seats[0].slots, llm=llm, encoders=encoders)
    return peak


def activations_peak(slots: Stage, *, llm: FloatArray, encoders: FloatArray) -> FloatArray:
    """Return the most activation bytes that ranks hold at once while they run ``slots``, float64 [ranks].

    Args:
        slots: What they do.
        llm: float64 [ranks, microbatches]; bytes from a forward to its backward.
        encoders: float64 [ranks, microbatches]; bytes of the encoders from forward to backward.
    """
    now = np.zeros(len(llm))
    most = now.copy()
    for slot in slots:
        if slot.task == "encode":
            now = now + slot.share * encoders[:, slot.microbatch]
        elif slot.task == "encode_backward":
            now = now - slot.share * encoders[:, slot.microbatch]
        elif slot.task == "forward":
            now = now + llm[:, slot.microbatch]
        elif slot.task == "backward":
            now = now - llm[:, slot.microbatch]
        most = np.maximum(most, now)
    return most
