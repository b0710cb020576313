"""What the trainer wants to know of the cost model: modelled seconds, and plain operations for the MFU."""

from __future__ import annotations

from balancer.cost import LLM, CostModel
from balancer.work import FORWARD_AND_BACKWARD, media_flops, sequence_flops
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Segment


class StepCosts:
    """The cost model of a run, as ``trainer.step_causes.Costs`` asks for it."""

    def __init__(self, cost_model: CostModel) -> None:
        self._costs = cost_model

    def media_cost(self, segment: Segment) -> float:
        """Return the seconds to encode a media segment on one rank, forward and backward."""
        return self._costs.media_cost(segment)

    def pack_cost(self, pack: Pack) -> float:
        """Return the seconds of a pack in the LLM, forward and backward."""
        return self._costs.pack_cost(pack)

    def media_flops(self, segment: Segment) -> float:
        """Return the operations to encode a media segment, forward and backward, nothing computed twice."""
        name = self._costs.encoder_name(segment)
        return media_flops(self._costs.encoders[name], segment.grid) * self._needed(name)

    def pack_flops(self, pack: Pack) -> float:
        """Return the operations of a pack in the LLM, likewise; padding is no work that the model needs."""
        flops = sum(sequence_flops(self._costs.llm, sample.num_tokens) for sample in pack.samples)
        return flops * self._needed(LLM)

    def _needed(self, part: str) -> float:
        """Return how much of a forward and backward is needed: less for what is frozen."""
        return (1 + self._costs.passes_of(part).backward) / FORWARD_AND_BACKWARD
