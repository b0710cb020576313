"""The published workloads: models, batches and mixtures that ``omni simulate --paper`` runs.

Of the paper (MegaScale-Omni, EuroSys 2026) the sizes are known by name and count only: "ViT-10B", 256 GPUs,
and so on. What a name stands for is stated at each shape: numbers of a published model of that size where
there is one, else our assumption between two that are. Parallel degrees and groups are not published and are
our choice: tensor parallel over the 8 ranks of a node (4 for the 12B model), as many stages as the LLM needs
to fit, no context parallelism, four replicas to a group.

The sizes of the same names in ``[model.vision]`` and ``[model.llm]`` of a run file are other shapes: layers
of this project's family, which can be trained. Here a name is what others have published under it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from balancer.shapes import TransformerShape, vision_shape
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.topology import Topology

RANKS_PER_NODE = 8
MIXTURES = ((1, 9), (3, 7), (5, 5), (7, 3), (9, 1))
"""(media, text): shares of the LLM's tokens that come from samples with media, and from plain text."""


def usm_2b(llm_hidden: int) -> TransformerShape:
    """Return the 2B speech encoder of USM (Zhang et al. 2023): 32 Conformer layers of width 1536.

    Four mel frames of 128 bands join into a position; attention stays in chunks of 8 s. A Conformer layer has
    two feed-forward layers of 4 x its width and a convolution whose pointwise parts take 3 x width^2; all
    three are counted as one feed-forward layer of (4 + 4 + 1.5) x the width.
    """
    hidden = 1536
    return TransformerShape(
        hidden=hidden,
        layers=32,
        ffn=19 * hidden // 2,
        heads=16,
        kv_heads=16,
        head_dim=hidden // 16,
        gated=False,
        input_dim=4 * 128,
        output_widths=(hidden, llm_hidden),
        units_per_position=4,
        window=200,
    )


def llama_12b() -> TransformerShape:
    """Return LLaMA-13B (Touvron et al. 2023) with 36 of its 40 layers: 11.7B. Our assumption."""
    return _llm(hidden=5120, layers=36, ffn=13824, heads=40, kv_heads=40, vocabulary=32000)


def llama_70b() -> TransformerShape:
    """Return LLaMA-2-70B (Touvron et al. 2023)."""
    return _llm(hidden=8192, layers=80, ffn=28672, heads=64, kv_heads=8, vocabulary=32000)


def gpt_175b() -> TransformerShape:
    """Return GPT-3 (Brown et al. 2020), its vocabulary padded to a multiple of 128."""
    return _llm(hidden=12288, layers=96, ffn=49152, heads=96, kv_heads=96, vocabulary=50304, gated=False)


def vit_1b(llm_hidden: int) -> TransformerShape:
    """Return ViT-g (Zhai et al. 2022): 1.0B."""
    return _vit(hidden=1408, layers=40, ffn=6144, heads=16, llm_hidden=llm_hidden)


def vit_2b(llm_hidden: int) -> TransformerShape:
    """Return a ViT of 2.4B. Our assumption: depth and width of ViT-e with the inner width of ViT-G."""
    return _vit(hidden=1792, layers=56, ffn=8192, heads=16, llm_hidden=llm_hidden)


def vit_10b(llm_hidden: int) -> TransformerShape:
    """Return a ViT of 9.7B. Our assumption: between InternViT-6B (3200 x 45) and ViT-22B (6144 x 48)."""
    return _vit(hidden=4096, layers=48, ffn=16384, heads=32, llm_hidden=llm_hidden)


@dataclass(frozen=True)
class Workload:
    """One line of the published table.

    Args:
        name: "A" to "D", or "three" for that of three modalities.
        title: The models, in words.
        encoders: Shape of each: "vision", and perhaps "audio".
        llm: Shape of the LLM.
        packs_per_step: Sequences of a step (the published batch).
        seq_len: Tokens of a sequence.
        topology: The published number of GPUs; degrees and groups are our choice.
        best_speedup: The published best over mixtures and baselines, second-hand.
    """

    name: str
    title: str
    encoders: Mapping[str, TransformerShape]
    llm: TransformerShape
    packs_per_step: int
    seq_len: int
    topology: Topology
    best_speedup: float

    @property
    def encoder_of(self) -> dict[Modality, str]:
        """Who reads which modality."""
        return {modality: name for name, modality in READS.items() if name in self.encoders}

    @property
    def media_sources(self) -> tuple[str, ...]:
        """Synthetic sources with media, by which the media's share of the tokens is divided evenly."""
        return tuple(SOURCE_OF[name] for name in self.encoders)

    def weights(self, mixture: tuple[int, int]) -> dict[str, float]:
        """Return the share of tokens of each synthetic source, see ``balancer.simulator.samples``.

        Args:
            mixture: (media, text), as in ``MIXTURES``.
        """
        media, text = mixture
        amounts = {name: media / len(self.media_sources) for name in self.media_sources}
        return {name: amount / (media + text) for name, amount in {**amounts, "text": text}.items()}


READS = {"vision": Modality.IMAGE, "audio": Modality.AUDIO}
SOURCE_OF = {"vision": "images", "audio": "speech"}


def _vit(*, hidden: int, layers: int, ffn: int, heads: int, llm_hidden: int) -> TransformerShape:
    """Return a plain vision transformer: 14-pixel patches, attention over the whole picture, no gate.

    Its rows are made of 2 x 2 patches by a merger of two layers, as in the model family of this project.
    """
    shape = vision_shape(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        patch_values=3 * 14 * 14,
        merge=2,
        window_patches=0,
        full_attention_layers=0,
        llm_hidden=llm_hidden,
    )
    return replace(shape, gated=False)


def _llm(
    *, hidden: int, layers: int, ffn: int, heads: int, kv_heads: int, vocabulary: int, gated: bool = True
) -> TransformerShape:
    return TransformerShape(
        hidden=hidden,
        layers=layers,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        gated=gated,
        causal=True,
        output_widths=(hidden, vocabulary),
    )


def _layout(num_ranks: int, *, tp: int, pp: int) -> Topology:
    return Topology(num_ranks, tp=tp, pp=pp, replicas_per_group=4, ranks_per_node=RANKS_PER_NODE)


def _workloads() -> tuple[Workload, ...]:
    """The published batches, lengths, GPUs and best speed-ups; see the module for the rest."""
    small, large, gpt = llama_12b(), llama_70b(), gpt_175b()
    one, two, ten = {"vision": vit_1b(5120)}, {"vision": vit_2b(8192)}, {"vision": vit_10b(8192)}
    ten_wide = {"vision": vit_10b(12288)}
    # Of three modalities only the encoder is published; the rest is that of B, our assumption.
    three = {**two, "audio": usm_2b(8192)}
    title = "ViT-2.4B + USM-2B + LLaMA-70B"
    return (
        Workload("A", "ViT-1B + LLaMA-12B", one, small, 32, 16384, _layout(64, tp=4, pp=2), 1.54),
        Workload("B", "ViT-2.4B + LLaMA-70B", two, large, 64, 16384, _layout(128, tp=8, pp=4), 3.30),
        Workload("C", "ViT-10B + LLaMA-70B", ten, large, 128, 8192, _layout(256, tp=8, pp=4), 7.57),
        Workload("D", "ViT-10B + GPT-175B", ten_wide, gpt, 256, 8192, _layout(512, tp=8, pp=8), 1.98),
        Workload("three", title, three, large, 64, 16384, _layout(128, tp=8, pp=4), 2.01),
    )


WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _workloads()}
"""By name, in the order of the published table."""
