"""Steps to plan: packs of every lane of a small world, and a cost model with two encoders."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st

from balancer.cost import CostModel
from balancer.exchange import ExchangeSetting
from balancer.lssp import LsspConfig
from balancer.planner import BalanceConfig, GroupPlanner
from balancer.shapes import TransformerShape, audio_shape, vision_shape
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.topology import Topology
from tests.support.hardware import flat_hardware
from tests.support.strategies import make_sample, media_segment, segment_lists, text_segment, worlds

ENCODERS = ("vision", "audio")
LSSP = LsspConfig(kind="auto")


def cost_model(*, bytes_per_s: float = 1e12, latency_s: float = 0.0) -> CostModel:
    """Return a small model on slow ranks, so that encoding outweighs moving rows unless asked otherwise."""
    return CostModel(
        encoders={
            "vision": vision_shape(
                layers=2,
                hidden=8,
                ffn=16,
                heads=2,
                patch_values=24,
                merge=2,
                window_patches=8,
                full_attention_layers=1,
                llm_hidden=16,
            ),
            "audio": audio_shape(
                layers=2, hidden=8, ffn=16, heads=2, num_mels=16, chunk_frames=200, llm_hidden=16
            ),
        },
        llm=TransformerShape(
            hidden=16, layers=2, ffn=32, heads=2, kv_heads=2, head_dim=8, causal=True, output_widths=(16, 264)
        ),
        encoder_of={Modality.IMAGE: "vision", Modality.VIDEO: "vision", Modality.AUDIO: "audio"},
        hardware=flat_hardware(flops_per_s=1e7, bytes_per_s=bytes_per_s, latency_s=latency_s),
    )


@dataclass(frozen=True)
class Step:
    """A world and the packs of all its lanes; lanes may have run out, so some packs are missing."""

    topology: Topology
    num_lanes: int
    packs_per_lane: int
    packs: tuple[Pack, ...]
    seq_len: int = 0

    def planner(
        self,
        *,
        enabled: bool = True,
        model: CostModel | None = None,
        lssp: LsspConfig | None = None,
        encoder_memory_bytes: int = 0,
        llm_memory_bytes: int = 0,
        exchange: ExchangeSetting = "auto",
    ) -> GroupPlanner:
        """Return a fresh planner of this world; it shares no segment unless asked."""
        return GroupPlanner(
            self.topology,
            cost_model=model or cost_model(),
            config=BalanceConfig(
                enabled=enabled,
                exchange=exchange,
                lssp=lssp or LsspConfig(kind="off"),
                encoder_memory_bytes=encoder_memory_bytes,
                llm_memory_bytes=llm_memory_bytes,
            ),
            num_lanes=self.num_lanes,
            packs_per_step=self.num_lanes * self.packs_per_lane,
            encoders=ENCODERS,
            seq_len=self.seq_len,
        )

    def packs_of(self, group: int) -> tuple[Pack, ...]:
        """Return the packs of the lanes of ``group``."""
        return tuple(pack for pack in self.packs if pack.lane % self.topology.num_groups == group)


def image_pack(lane: int, *, num_images: int, side: int = 8, number: int = 0) -> Pack:
    """A pack of one sample with equal images."""
    images = [media_segment(Modality.IMAGE, (1, side, side)) for _ in range(num_images)]
    return Pack(lane=lane, number=number, samples=(make_sample([*images, text_segment(4)], row=lane),))


def clip_pack(lane: int, *, frames: int, side: int = 8, number: int = 0) -> Pack:
    """A pack of one sample with a clip of so many temporal patches."""
    clip = media_segment(Modality.VIDEO, (frames, side, side))
    return Pack(lane=lane, number=number, samples=(make_sample([clip, text_segment(4)], row=lane),))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any small world with any packs, samples padded to a bucket or not, packs to one length or not."""
    topology = draw(worlds())
    num_lanes, packs_per_lane = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    parts = st.lists(segment_lists(max_text=60, max_size=4), max_size=3)
    packs = []
    for lane in range(num_lanes):
        for number in range(draw(st.integers(0, packs_per_lane))):
            samples = tuple(
                make_sample(part, row=100 * lane + 10 * number + row) for row, part in enumerate(draw(parts))
            )
            bucket = max((sample.num_tokens for sample in samples), default=1) + draw(st.integers(0, 9))
            padded_len = bucket if draw(st.booleans()) else 0
            packs.append(Pack(lane=lane, number=7 + number, samples=samples, padded_len=padded_len))
    longest = max((pack.num_positions for pack in packs), default=1)
    seq_len = longest + draw(st.integers(0, 20)) if draw(st.booleans()) else 0
    return Step(topology, num_lanes, packs_per_lane, tuple(packs), seq_len)
