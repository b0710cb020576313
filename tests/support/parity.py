"""The naive reference of a step, and batches of synthetic samples to compare it with.

The reference is one process, one pack and one media segment at a time, without sharding, exchange or
balance. Content is a function of the sample's id and nothing else, so any rank and the reference make the
same arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from balancer.cost import CostModel
from balancer.planner import BalanceConfig, GroupPlanner
from loaders.assemble import ModelInputs, encoder_inputs, pieces_of, segment_of
from loaders.decode.text import ByteTokenizer
from omni_pipeline.app.costs import ENCODER_OF, encoder_shapes, llm_shape
from omni_pipeline.core.batch import IGNORE_LABEL, Batch, EncoderInput, MicroBatch, SampleSpan
from omni_pipeline.core.plan import Pack, StepPlan
from omni_pipeline.core.sample import Modality, Sample, SampleId
from omni_pipeline.core.seeding import generator
from omni_pipeline.core.topology import Topology
from tests.support.hardware import flat_hardware
from tests.support.interleaved import row_positions, token_walk
from tests.support.strategies import clip_with_sound, make_sample, media_segment, text_segment
from trainer.config import ModelConfig
from trainer.model.omni import OmniModel

# As many heads as ranks may share a picture.
CONFIG = ModelConfig(size="tiny", vision={"heads": 4})
ENCODERS = ("vision", "audio")
INPUTS = ModelInputs(
    CONFIG.sizes,
    ByteTokenizer.special,
    {"vision": (Modality.IMAGE, Modality.VIDEO), "audio": (Modality.AUDIO,)},
)
_TOKEN_OF = {"start": 1, "end": 2, "row": 3}
NO_FAILURES: frozenset[SampleId] = frozenset()


@dataclass(frozen=True)
class Content:
    """The arrays of one pack and its media."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    cu_seqlens: npt.NDArray[np.int32]
    spans: tuple[SampleSpan, ...]


def mixed_sample(row: int, *, source: str = "mixed") -> Sample:
    """Return a sample with an image, a text, and by ``row`` a clip, its sound, a recording."""
    segments = [media_segment(Modality.IMAGE, (1, 2 + 2 * (row % 3), 4)), text_segment(3 + row % 5)]
    if row % 4 == 1:
        segments.append(media_segment(Modality.VIDEO, (2, 4, 2)))
    elif row % 4 == 3:
        # Six seconds in three chunks, and 4.2 s of sound: 50, 50 and 5 rows.
        segments += clip_with_sound((3, 4, 2), 420, patch_s=2.0)
    if row % 3:
        segments.append(media_segment(Modality.AUDIO, (9 + row % 7, 1, 1)))
    segments.append(text_segment(2, loss=row % 4 != 1))
    return make_sample(segments, source=source, row=row)


def text_sample(row: int, *, loss: bool = True, source: str = "text") -> Sample:
    """Return a sample without media."""
    return make_sample([text_segment(5 + row % 4, loss=loss)], source=source, row=row)


def make_planner(topology: Topology, *, num_packs: int, balance: bool, **settings: Any) -> GroupPlanner:
    """Return a planner with one lane per pack, and other ``settings`` of ``BalanceConfig``."""
    return GroupPlanner(
        topology,
        cost_model=_cost_model(),
        config=BalanceConfig(enabled=balance, **settings),
        num_lanes=num_packs,
        packs_per_step=num_packs,
        encoders=ENCODERS,
    )


def pack_content(pack: Pack) -> Content:
    """Return tokens, labels and positions of ``pack``; padding is tokens like any other."""
    tokens: list[int] = []
    labels: list[int] = []
    spans, bounds = [], [0]
    for sample in pack.samples:
        ids, has_loss = _sample_tokens(sample)
        spans.append(SampleSpan(sample.id, sample.key, len(tokens), len(tokens) + len(ids)))
        shifted = zip(ids[1:], has_loss[1:], strict=True)
        labels += [token if loss else IGNORE_LABEL for token, loss in shifted] + [IGNORE_LABEL]
        tokens += ids
        padding = max(0, pack.padded_len - len(ids))
        labels += [IGNORE_LABEL] * padding
        tokens += [7] * padding
        bounds.append(len(tokens))
    columns = [np.arange(end - start) for start, end in itertools.pairwise(bounds)]
    place = np.concatenate([*columns, np.empty(0, dtype=np.int64)]).astype(np.int64)
    return Content(
        tokens=np.array(tokens, dtype=np.int64),
        labels=np.array(labels, dtype=np.int64),
        positions=np.stack([place, place // 2, place % 3]),
        cu_seqlens=np.array(bounds, dtype=np.int32),
        spans=tuple(spans),
    )


def media_content(sample: Sample, segment_index: int) -> EncoderInput:
    """Return the input of the encoder for one media segment."""
    segment = sample.segments[segment_index]
    random = generator(7, "parity media", sample.id.row, segment_index)
    grids = np.array([segment.grid], dtype=np.int64)
    if segment.modality is Modality.AUDIO:
        shape = segment.num_units, CONFIG.sizes.audio.num_mels
        return EncoderInput(random.standard_normal(shape, dtype=np.float32), grids)
    shape = segment.num_units, CONFIG.patch_values
    return EncoderInput(random.integers(0, 256, shape, dtype=np.uint8), grids)


def build_batch(
    plan: StepPlan,
    planner: GroupPlanner,
    *,
    rank: int,
    failed: frozenset[SampleId] = frozenset(),
    state: dict[str, Any] | None = None,
) -> Batch:
    """Return what a loader would give ``rank`` for ``plan``."""
    microbatches = tuple(
        _build_microbatch(plan, planner, index=index, rank=rank) for index in range(plan.num_microbatches)
    )
    return Batch(plan, microbatches, failed=failed, state=state or {}, num_bytes=0, timings={})


@dataclass(frozen=True)
class Reference:
    """Loss (mean over labels), gradient norm and gradients of a step; of experts, how they were used."""

    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    num_labels: int
    balance_loss: float
    expert_counts: torch.Tensor
    z_loss: float


def reference_step(
    model: OmniModel,
    packs: Sequence[Pack],
    *,
    failed: frozenset[SampleId] = frozenset(),
    balance_loss: float = 0.0,
    z_loss: float = 0.0,
) -> Reference:
    """Return loss and gradients of one plain process; ``model`` keeps no gradient.

    Args:
        model: Without sharding.
        packs: Of all ranks.
        failed: Samples without loss.
        balance_loss: Weight of the load-balancing loss of a model with experts.
        z_loss: Weight of the squared log-partitions of the head, made from all logits at once.
    """
    dtype = next(model.parameters()).dtype
    loss_sum, balance_sum, z_sum = torch.zeros(3, dtype=dtype)
    expert_counts = torch.zeros((), dtype=dtype)
    num_tokens = 0
    num_labels = 0
    for pack in packs:
        content = pack_content(pack)
        labels = content.labels.copy()
        for span in content.spans:
            if span.id in failed:
                labels[span.start : span.end] = IGNORE_LABEL
        num_labels += int((labels != IGNORE_LABEL).sum())
        rows, positions = _encode_pack(model, pack)
        output = model.llm(
            torch.from_numpy(content.tokens),
            torch.from_numpy(content.positions),
            content.cu_seqlens,
            rows,
            positions,
            torch.from_numpy(labels),
            spans=np.array([(span.start, span.end) for span in content.spans if span.id not in failed]),
        )
        loss_sum = loss_sum + output.loss_sum
        log_partition = (output.hidden @ _head(model).T).logsumexp(dim=-1)
        z_sum = z_sum + log_partition[torch.from_numpy(labels) != IGNORE_LABEL].square().sum()
        if output.balance_sum is not None:
            balance_sum = balance_sum + output.balance_sum
            expert_counts = expert_counts + output.expert_counts
        num_tokens += sum(span.end - span.start for span in content.spans if span.id not in failed)
    objective = (loss_sum + z_loss * z_sum) / num_labels + balance_loss * balance_sum / num_tokens
    torch.autograd.backward(objective)
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    model.zero_grad()
    norm = torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).sum().sqrt()
    return Reference(
        float(loss_sum.detach()) / num_labels,
        float(norm),
        gradients,
        num_labels,
        float(balance_sum.detach()) / num_tokens,
        expert_counts,
        float(z_sum.detach()) / num_labels,
    )


def _head(model: OmniModel) -> torch.Tensor:
    return model.llm.embed_tokens.weight if model.llm.lm_head is None else model.llm.lm_head.weight


def _cost_model() -> CostModel:
    """Slow ranks and free messages, so that plans move all they can."""
    return CostModel(
        encoders=encoder_shapes(CONFIG),
        llm=llm_shape(CONFIG),
        encoder_of=ENCODER_OF,
        hardware=flat_hardware(bytes_per_s=1e15),
    )


def _encode_pack(model: OmniModel, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [next(model.parameters()).new_zeros((0, CONFIG.llm.hidden))]
    positions: list[int] = []
    for start, sample in zip(pack.starts, pack.samples, strict=True):
        for index, segment in enumerate(sample.segments):
            if segment.is_media:
                inputs = media_content(sample, index)
                encoder = model.encoders[ENCODER_OF[segment.modality]]
                rows.append(encoder(torch.from_numpy(inputs.values), inputs.grids))
                positions += [start + position for position in row_positions(sample, index)]
    return torch.cat(rows), torch.tensor(positions, dtype=torch.int64)


def _build_microbatch(plan: StepPlan, planner: GroupPlanner, *, index: int, rank: int) -> MicroBatch:
    (replica,) = [item for item in plan.replicas if rank in planner.topology.ranks_of_replica(item)]
    pack_index = plan.pack_at(replica, index)
    content = pack_content(Pack(0, 0, ()) if pack_index is None else plan.packs[pack_index])
    pieces = pieces_of(plan, microbatch=index, rank=rank, replica=replica, with_text=False, model=INPUTS)
    arrays = {
        piece: media_content(segment_of(plan, piece)[0], piece.segment).values[units.start : units.stop]
        for piece, units in pieces.items()
    }
    inputs = encoder_inputs(plan, index, rank=rank, arrays=arrays, failed=NO_FAILURES, model=INPUTS)
    return MicroBatch(
        index=index,
        tokens=content.tokens,
        labels=content.labels,
        positions=content.positions,
        cu_seqlens=content.cu_seqlens,
        spans=content.spans,
        inputs=inputs,
        reshard=planner.reshard(plan, microbatch=index, rank=rank),
    )


def _sample_tokens(sample: Sample) -> tuple[list[int], list[bool]]:
    """Return the tokens of a sample and which of them are predicted; 1 and 2 mark media, 0 ends."""
    random = generator(7, "parity tokens", sample.id.row)
    tokens: list[int] = []
    has_loss: list[bool] = []
    for kind, index, _ in token_walk(sample)[:-1]:
        tokens.append(
            _TOKEN_OF[kind] if kind in _TOKEN_OF else int(random.integers(4, CONFIG.llm.vocab_size))
        )
        has_loss.append(sample.segments[index].loss)
    any_loss = any(segment.loss for segment in sample.segments)
    return [*tokens, 0], [*has_loss, any_loss]
