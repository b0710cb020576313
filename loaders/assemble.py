"""Plan + decoded pieces -> the arrays of a microbatch: pure, so geometry never depends on what failed.

Layout of a sample: its segments in order, then one end-of-sample token. Text is its tokens; media is a start
marker, one placeholder per embedding row, an end marker, where ``core.interleave`` says. A label is the token
after its position, for text tokens that are trained on and for the end token; the first token of a sample has
no position before it.

A failed sample keeps its place: end tokens, no label, and media inputs of zeros in the planned shape. Padding
of a bucket is end tokens without labels, behind its sample and inside its attention segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loaders.decode.text import SpecialTokens
from loaders.positions import pack_positions
from loaders.shares import grid_of_share, units_of_share
from omni_pipeline.core.batch import IGNORE_LABEL, EncoderInput, MicroBatch, SampleSpan, joined_segments
from omni_pipeline.core.errors import ConfigError, PlanError
from omni_pipeline.core.interleave import MediaLayout, sample_layout
from omni_pipeline.core.media import KINDS
from omni_pipeline.core.plan import MediaPlacement, Pack, StepPlan
from omni_pipeline.core.reshard import ReshardPlan
from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment
from omni_pipeline.core.sizes import ModelSizes

RGB_CHANNELS = 3
# tokens and labels int64, positions 3 x int64
BYTES_PER_TOKEN = 8 + 8 + 3 * 8

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """One segment of a step by its place in the plan: indices of pack, sample and segment."""

    pack: int
    sample: int
    segment: int


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What the model wants to read.

    Args:
        sizes: How raw sizes become patches and mel frames.
        special: Ids of markers, placeholders and the end token.
        encoders: Modalities by encoder name, in the order of the run's encoders.

    Raises:
        ConfigError: An encoder reads text, or mixes pictures and sound, or two read the same modality.
    """

    sizes: ModelSizes
    special: SpecialTokens
    encoders: Mapping[str, tuple[Modality, ...]]

    def __post_init__(self) -> None:
        vision = {Modality.IMAGE, Modality.VIDEO}
        seen: set[Modality] = set()
        for name, modalities in self.encoders.items():
            kinds = set(modalities)
            is_one = len(kinds) == 1 and Modality.TEXT not in kinds
            if not kinds or seen & kinds or not (kinds <= vision or is_one):
                raise ConfigError(
                    f"encoder {name!r} reads {', '.join(modalities) or 'nothing'}",
                    fix="give each encoder image and video, or one other, and each modality to one encoder",
                )
            seen |= kinds

    def width(self, modality: Modality) -> int:
        """Return the numbers per encoder input unit (patch or mel frame)."""
        if modality is Modality.AUDIO:
            return self.sizes.audio.num_mels
        if modality is Modality.IMAGE or modality is Modality.VIDEO:
            vision = self.sizes.vision
            return RGB_CHANNELS * vision.temporal_patch * vision.patch * vision.patch
        return KINDS[modality].unit_values

    def dtype(self, modality: Modality) -> np.dtype[Any]:
        """Return the type of those numbers."""
        if modality is Modality.IMAGE or modality is Modality.VIDEO:
            return np.dtype(np.uint8)
        return np.dtype(np.float32 if modality is Modality.AUDIO else KINDS[modality].unit_dtype)

    def unit_bytes(self, modality: Modality) -> int:
        """Return the bytes of one encoder input unit."""
        return self.width(modality) * self.dtype(modality).itemsize


def segment_of(plan: StepPlan, piece: Piece) -> tuple[Sample, Segment]:
    """Return the sample and segment of ``piece``."""
    sample = plan.packs[piece.pack].samples[piece.sample]
    return sample, sample.segments[piece.segment]


def pieces_of(
    plan: StepPlan, *, microbatch: int, rank: int, replica: int, with_text: bool, model: ModelInputs
) -> dict[Piece, range]:
    """Return what ``rank`` has to fetch for a microbatch, and which units (tokens, if text) it keeps of each.

    That is the media placed on it, whole or a share, and with ``with_text`` the text of its replica's pack.

    Raises:
        PlanError: A share cannot be encoded as planned; see ``loaders.shares``.
    """
    texts = _text_pieces(plan, plan.pack_at(replica, microbatch)) if with_text else ()
    pieces = {piece: range(segment_of(plan, piece)[1].num_units) for piece in texts}
    for item in plan.media_of(rank=rank, microbatch=microbatch):
        units = units_of_share(_placed(plan, item), item, rank=rank, sizes=model.sizes)
        pieces[Piece(item.pack, item.sample, item.segment)] = units
    return pieces


def planned_bytes(plan: StepPlan, *, rank: int, replica: int, model: ModelInputs) -> int:
    """Return the bytes of the tokens, labels, positions and encoder values of a step on ``rank``; exact."""
    total = 0
    for microbatch in range(plan.num_microbatches):
        pack = _pack_at(plan, replica, microbatch)
        total += max(1, pack.num_positions if pack else 0) * BYTES_PER_TOKEN
        for placement in plan.media_of(rank=rank, microbatch=microbatch):
            segment = _placed(plan, placement)
            units = units_of_share(segment, placement, rank=rank, sizes=model.sizes)
            total += len(units) * model.unit_bytes(segment.modality)
    return total


def misfit(segment: Segment, array: Array, *, units: range, model: ModelInputs) -> str | None:
    """Return why ``array`` is not what was planned for these ``units`` of ``segment``, or None if it is."""
    if segment.modality is Modality.TEXT:
        if array.shape != (segment.num_tokens,):
            return f"text has {array.size} tokens, planned are {segment.num_tokens}"
        return None
    planned = (len(units), model.width(segment.modality))
    if array.shape != planned or array.dtype != model.dtype(segment.modality):
        wanted = model.dtype(segment.modality)
        return f"{segment.modality} decodes to {array.dtype} {array.shape}, planned is {wanted} {planned}"
    return None


def assemble_microbatch(
    plan: StepPlan,
    reshard: ReshardPlan,
    *,
    microbatch: int,
    rank: int,
    replica: int,
    arrays: Mapping[Piece, Array],
    failed: frozenset[SampleId],
    model: ModelInputs,
) -> MicroBatch:
    """Return one microbatch of ``rank``.

    Args:
        plan: Plan of the rank's group.
        reshard: The rank's part of the exchange in this microbatch.
        microbatch: Which one.
        rank: Rank of the run.
        replica: Its replica.
        arrays: Decoded pieces that fit the plan (``misfit``); text that this rank does not read is absent,
            and its sample then has end tokens and no label here.
        failed: Samples that failed on this rank.
        model: What the model reads.

    Raises:
        PlanError: The labels of a sample are not as many as planned.
    """
    pack_index = plan.pack_at(replica, microbatch)
    pack = _pack_at(plan, replica, microbatch) or Pack(-1, -1, ())
    spans: list[SampleSpan] = []
    num_positions = max(1, pack.num_positions)
    tokens = np.full(num_positions, model.special.eos, dtype=np.int64)
    labels = np.full(num_positions, IGNORE_LABEL, dtype=np.int64)
    for index, (start, sample) in enumerate(zip(pack.starts, pack.samples, strict=True)):
        end = start + sample.num_tokens
        spans.append(SampleSpan(id=sample.id, key=sample.key, start=start, end=end))
        texts = _texts(sample, pack_index, index, arrays)
        if texts is not None and sample.id not in failed:
            tokens[start:end], labels[start:end] = sample_tokens(sample, texts, special=model.special)
    return MicroBatch(
        index=microbatch,
        tokens=tokens,
        labels=labels,
        positions=_positions(pack, model),
        cu_seqlens=np.array([*(pack.starts or (0,)), num_positions], dtype=np.int32),
        spans=tuple(spans),
        inputs=encoder_inputs(plan, microbatch, rank=rank, arrays=arrays, failed=failed, model=model),
        reshard=reshard,
    )


def encoder_inputs(
    plan: StepPlan,
    microbatch: int,
    *,
    rank: int,
    arrays: Mapping[Piece, Array],
    failed: frozenset[SampleId],
    model: ModelInputs,
) -> dict[str, EncoderInput]:
    """Return values and grids by encoder; every encoder is there, if only with zero rows.

    Args:
        plan, microbatch, rank, failed, model: As in ``assemble_microbatch``.
        arrays: The units that ``rank`` keeps of each piece of media, see ``pieces_of``; zeros where absent.
    """
    placements = plan.media_of(rank=rank, microbatch=microbatch)
    inputs: dict[str, EncoderInput] = {}
    for name, modalities in model.encoders.items():
        own = [item for item in placements if item.encoder == name]
        grids = []
        values = [np.zeros((0, model.width(modalities[0])), dtype=model.dtype(modalities[0]))]
        # Stable: in plan order, joined shares last.
        for item in sorted(own, key=lambda item: item.joined):
            segment = _placed(plan, item)
            units = units_of_share(segment, item, rank=rank, sizes=model.sizes)
            if not item.joined:
                grids.append(grid_of_share(segment, units))
            array = arrays.get(Piece(item.pack, item.sample, item.segment))
            if array is None or plan.packs[item.pack].samples[item.sample].id in failed:
                array = np.zeros((len(units), values[0].shape[1]), dtype=values[0].dtype)
            values.append(array)
        inputs[name] = EncoderInput(
            values=np.concatenate(values),
            grids=np.array(grids, dtype=np.int64).reshape(-1, 3),
            joined=joined_segments(plan, microbatch=microbatch, encoder=name, rank=rank),
        )
    return inputs


def sample_tokens(
    sample: Sample, texts: Mapping[int, Array], *, special: SpecialTokens
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (tokens, labels) of one sample, each int64 [num_tokens].

    Args:
        sample: Its segments give the layout.
        texts: Token ids by index of each text segment.
        special: Ids of markers, placeholders and the end token.

    Raises:
        PlanError: Tokens or labels are not as many as planned.
    """
    tokens = np.full(sample.num_tokens, special.eos, dtype=np.int64)
    is_target = np.zeros(sample.num_tokens, dtype=bool)
    start = 0
    for index, segment in enumerate(sample.segments):
        end = start + segment.num_tokens
        if not segment.is_media:
            tokens[start:end] = texts[index]
            is_target[start:end] = segment.loss
        start = end
    for index, layout in sample_layout(sample).items():
        _put_media_tokens(tokens, sample.segments[index].modality, layout, special)
    is_target[start:] = any(segment.loss for segment in sample.segments)
    num_labels = int(is_target[1:].sum())
    if start + 1 != sample.num_tokens or num_labels != sample.num_labels:
        raise PlanError(
            f"sample has {start + 1} tokens and {num_labels} labels, "
            f"planned with {sample.num_tokens} and {sample.num_labels}",
            where=f"sample {sample.key!r} of {sample.shard}",
            fix="report this as a bug, with the index of that shard",
        )
    labels = np.full(sample.num_tokens, IGNORE_LABEL, dtype=np.int64)
    labels[:-1] = np.where(is_target[1:], tokens[1:], IGNORE_LABEL)
    return tokens, labels


def _text_pieces(plan: StepPlan, pack_index: int | None) -> Iterator[Piece]:
    if pack_index is None:
        return
    for sample_index, sample in enumerate(plan.packs[pack_index].samples):
        for segment_index, segment in enumerate(sample.segments):
            if segment.modality is Modality.TEXT:
                yield Piece(pack_index, sample_index, segment_index)


def _pack_at(plan: StepPlan, replica: int, microbatch: int) -> Pack | None:
    index = plan.pack_at(replica, microbatch)
    return None if index is None else plan.packs[index]


def _placed(plan: StepPlan, placement: MediaPlacement) -> Segment:
    return plan.packs[placement.pack].samples[placement.sample].segments[placement.segment]


def _texts(
    sample: Sample, pack_index: int | None, sample_index: int, arrays: Mapping[Piece, Array]
) -> dict[int, Array] | None:
    """Tokens by text segment; None when one of them was not read here."""
    found: dict[int, Array] = {}
    for index, segment in enumerate(sample.segments):
        if segment.modality is Modality.TEXT and pack_index is not None:
            array = arrays.get(Piece(pack_index, sample_index, index))
            if array is None:
                return None
            found[index] = array
    return found


def _put_media_tokens(
    tokens: npt.NDArray[np.int64], modality: Modality, layout: MediaLayout, special: SpecialTokens
) -> None:
    start, placeholder, end = special.around(modality)
    tokens[layout.start], tokens[layout.end] = start, end
    for first, num_rows in layout.runs:
        tokens[first : first + num_rows] = placeholder


def _positions(pack: Pack, model: ModelInputs) -> npt.NDArray[np.int64]:
    if not pack.samples:
        return np.zeros((3, 1), dtype=np.int64)
    return pack_positions(pack, merge=model.sizes.vision.merge)
