"""What the trainer wants to know of the cost model: modelled seconds, and plain operations for the MFU."""

from __future__ import annotations

from balancer.cost import CostModel
from balancer.work import media_flops, sequence_flops
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
        shape = self._costs.encoders[self._costs.encoder_name(segment)]
        return media_flops(shape, segment.grid)

    def pack_flops(self, pack: Pack) -> float:
        """Return the operations of a pack in the LLM, likewise; padding is no work that the model needs."""
        return sum(sequence_flops(self._costs.llm, sample.num_tokens) for sample in pack.samples)
