"""Assembly is pure: layout, labels, placement of media, and what failure leaves behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loaders.assemble import (
    BYTES_PER_TOKEN,
    ModelInputs,
    Piece,
    assemble_microbatch,
    misfit,
    pieces_of,
    planned_bytes,
    segment_of,
)
from loaders.decode.text import ByteTokenizer
from omni_pipeline.core.batch import IGNORE_LABEL, MicroBatch
from omni_pipeline.core.errors import ConfigError, PlanError
from omni_pipeline.core.plan import Balance, MediaPlacement, Pack, PackSlot, StepPlan
from omni_pipeline.core.reshard import nothing_to_reshard
from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment
from omni_pipeline.core.sizes import AudioSizes, ModelSizes, VisionSizes
from tests.support.strategies import make_sample, media_segment, text_segment

SPECIAL = ByteTokenizer.special
MODEL = ModelInputs(
    sizes=ModelSizes(vision=VisionSizes(patch=14), audio=AudioSizes(num_mels=8)),
    special=SPECIAL,
    encoders={"vision": (Modality.IMAGE, Modality.VIDEO), "audio": (Modality.AUDIO,)},
)
IMAGE = media_segment(Modality.IMAGE, (1, 4, 4))
VIDEO = media_segment(Modality.VIDEO, (2, 2, 2))
AUDIO = media_segment(Modality.AUDIO, (20, 1, 1))
_FLAT = Balance(0.0, 0.0, 0.0)
_NOTHING = nothing_to_reshard()


def plan_of(packs: list[Pack], slots: list[tuple[int, int]], *, media_ranks: dict[Piece, int]) -> StepPlan:
    """Packs at (replica, microbatch) of two replicas; media on the rank of their replica unless told."""
    media = []
    for pack_index, (pack, (replica, microbatch)) in enumerate(zip(packs, slots, strict=True)):
        for sample_index, (start, sample) in enumerate(zip(pack.starts, pack.samples, strict=True)):
            for segment_index, segment in enumerate(sample.segments):
                if segment.is_media:
                    piece = Piece(pack_index, sample_index, segment_index)
                    media.append(
                        MediaPlacement(
                            pack=pack_index,
                            sample=sample_index,
                            segment=segment_index,
                            microbatch=microbatch,
                            encoder="audio" if segment.modality is Modality.AUDIO else "vision",
                            ranks=(media_ranks.get(piece, replica),),
                            shares=(segment.num_rows,),
                            joined=False,
                            position=start + 1,
                            num_rows=segment.num_rows,
                        )
                    )
                start += segment.num_tokens
    return StepPlan(
        step=0,
        group=0,
        ranks=(0, 1),
        replicas=(0, 1),
        num_microbatches=2,
        packs=tuple(packs),
        slots=tuple(PackSlot(index, *slot) for index, slot in enumerate(slots)),
        media=tuple(media),
        exchanges=("exact", "exact"),
        encoder_balance=_FLAT,
        llm_balance=_FLAT,
    )


def array_of(segment: Segment, value: int) -> np.ndarray[Any, Any]:
    if segment.modality is Modality.TEXT:
        return np.arange(segment.num_tokens, dtype=np.int32) + value
    shape = (segment.num_units, MODEL.width(segment.modality))
    return np.full(shape, value, dtype=MODEL.dtype(segment.modality))


def build(
    plan: StepPlan, *, rank: int = 0, microbatch: int = 0, failed: frozenset[SampleId] = frozenset()
) -> tuple[MicroBatch, dict[Piece, Any]]:
    pieces = pieces_of(plan, microbatch=microbatch, rank=rank, replica=rank, with_text=True, model=MODEL)
    arrays = {
        piece: array_of(segment_of(plan, piece)[1], 10 + number)[units.start : units.stop]
        for number, (piece, units) in enumerate(pieces.items())
    }
    built = assemble_microbatch(
        plan,
        _NOTHING,
        microbatch=microbatch,
        rank=rank,
        replica=rank,
        arrays=arrays,
        failed=failed,
        model=MODEL,
    )
    return built, arrays


def test_tokens_and_labels_of_a_sample_with_media_between_texts() -> None:
    sample = make_sample([text_segment(2, loss=False), IMAGE, text_segment(3)])
    built, _ = build(plan_of([Pack(0, 0, (sample,))], [(0, 0)], media_ranks={}))
    start, pad, end, eos = SPECIAL.vision_start, SPECIAL.image, SPECIAL.vision_end, SPECIAL.eos
    none = IGNORE_LABEL
    assert built.tokens.tolist() == [10, 11, start, pad, pad, pad, pad, end, 11, 12, 13, eos]
    assert built.labels.tolist() == [none] * 7 + [11, 12, 13, eos, none]
    assert built.tokens.dtype == built.labels.dtype == built.positions.dtype == np.int64
    assert built.positions.shape == (3, 12)
    assert built.cu_seqlens.tolist() == [0, 12]
    assert built.cu_seqlens.dtype == np.int32


def test_no_label_reaches_over_the_border_of_samples() -> None:
    samples = (make_sample([text_segment(2)], row=0), make_sample([text_segment(1)], row=1))
    built, _ = build(plan_of([Pack(0, 0, samples)], [(0, 0)], media_ranks={}))
    assert built.tokens.tolist() == [10, 11, SPECIAL.eos, 11, SPECIAL.eos]
    assert built.labels.tolist() == [11, SPECIAL.eos, IGNORE_LABEL, SPECIAL.eos, IGNORE_LABEL]
    assert built.cu_seqlens.tolist() == [0, 3, 5]
    assert [(span.id.row, span.start, span.end) for span in built.spans] == [(0, 0, 3), (1, 3, 5)]


def test_padding_is_end_tokens_without_labels_inside_the_segment_of_its_sample() -> None:
    samples = (make_sample([text_segment(2)], row=0), make_sample([text_segment(1)], row=1))
    built, _ = build(plan_of([Pack(0, 0, samples, padded_len=4)], [(0, 0)], media_ranks={}))
    eos, none = SPECIAL.eos, IGNORE_LABEL
    assert built.tokens.tolist() == [10, 11, eos, eos, 11, eos, eos, eos]
    assert built.labels.tolist() == [11, eos, none, none, eos, none, none, none]
    assert built.positions.tolist() == [[0, 1, 2, 2, 0, 1, 1, 1]] * 3
    assert built.cu_seqlens.tolist() == [0, 4, 8]
    assert [(span.id.row, span.start, span.end) for span in built.spans] == [(0, 0, 3), (1, 4, 6)]


def test_video_and_audio_have_their_own_placeholders() -> None:
    built, _ = build(plan_of([Pack(0, 0, (make_sample([VIDEO, AUDIO]),))], [(0, 0)], media_ranks={}))
    assert built.tokens.tolist() == [
        *(SPECIAL.vision_start, SPECIAL.video, SPECIAL.video, SPECIAL.vision_end),
        *(SPECIAL.audio_start, *[SPECIAL.audio] * AUDIO.num_rows, SPECIAL.audio_end),
        SPECIAL.eos,
    ]
    assert set(built.labels.tolist()) == {IGNORE_LABEL}


def test_media_is_read_by_the_rank_it_is_placed_on_in_plan_order_and_text_by_its_replica() -> None:
    samples = (make_sample([IMAGE, text_segment(2), AUDIO], row=0), make_sample([VIDEO, IMAGE], row=1))
    other = make_sample([IMAGE, text_segment(1)], row=2)
    packs = [Pack(0, 0, samples), Pack(1, 0, (other,))]
    moved = {Piece(0, 0, 0): 1, Piece(1, 0, 0): 0}
    plan = plan_of(packs, [(0, 0), (1, 0)], media_ranks=moved)

    def pieces(rank: int) -> list[tuple[int, int, int]]:
        found = pieces_of(plan, microbatch=0, rank=rank, replica=rank, with_text=True, model=MODEL)
        return [(piece.pack, piece.sample, piece.segment) for piece in found]

    assert pieces(0) == [(0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (1, 0, 0)]
    assert pieces(1) == [(1, 0, 1), (0, 0, 0)]
    built, arrays = build(plan)
    order = [Piece(0, 1, 0), Piece(0, 1, 1), Piece(1, 0, 0)]
    np.testing.assert_array_equal(
        built.inputs["vision"].values, np.concatenate([arrays[piece] for piece in order])
    )
    assert built.inputs["vision"].grids.tolist() == [[2, 2, 2], [1, 4, 4], [1, 4, 4]]
    np.testing.assert_array_equal(built.inputs["audio"].values, arrays[Piece(0, 0, 2)])
    assert built.inputs["audio"].grids.tolist() == [[20, 1, 1]]


def test_an_empty_place_is_one_end_token_and_zero_rows_for_every_encoder() -> None:
    plan = plan_of([Pack(0, 0, ())], [(1, 0)], media_ranks={})
    for rank, microbatch in ((0, 0), (1, 0), (1, 1)):
        built, _ = build(plan, rank=rank, microbatch=microbatch)
        assert built.tokens.tolist() == [SPECIAL.eos]
        assert built.labels.tolist() == [IGNORE_LABEL]
        assert built.positions.tolist() == [[0], [0], [0]]
        assert built.cu_seqlens.tolist() == [0, 1]
        assert built.spans == ()
        vision, audio = built.inputs["vision"], built.inputs["audio"]
        assert vision.values.shape == (0, 3 * 2 * 14 * 14)
        assert vision.values.dtype == np.dtype(np.uint8)
        assert audio.values.shape == (0, 8)
        assert audio.values.dtype == np.dtype(np.float32)
        assert vision.grids.shape == audio.grids.shape == (0, 3)


def test_a_failed_sample_keeps_its_place_without_labels_and_with_zero_inputs() -> None:
    bad, good = make_sample([IMAGE, text_segment(3)], row=0), make_sample([IMAGE, text_segment(3)], row=1)
    plan = plan_of([Pack(0, 0, (bad, good))], [(0, 0)], media_ranks={})
    whole, _ = build(plan)
    built, _ = build(plan, failed=frozenset({bad.id}))
    end = bad.num_tokens
    assert set(built.tokens[:end].tolist()) == {SPECIAL.eos}
    assert set(built.labels[:end].tolist()) == {IGNORE_LABEL}
    np.testing.assert_array_equal(built.tokens[end:], whole.tokens[end:])
    np.testing.assert_array_equal(built.labels[end:], whole.labels[end:])
    np.testing.assert_array_equal(built.positions, whole.positions)
    assert not built.inputs["vision"].values[: IMAGE.num_units].any()
    np.testing.assert_array_equal(
        built.inputs["vision"].values[IMAGE.num_units :], whole.inputs["vision"].values[IMAGE.num_units :]
    )
    np.testing.assert_array_equal(built.inputs["vision"].grids, whole.inputs["vision"].grids)
    np.testing.assert_array_equal(whole.labels_without(frozenset({bad.id})), built.labels)


def test_a_rank_that_reads_no_text_still_has_the_geometry() -> None:
    plan = plan_of([Pack(0, 0, (make_sample([IMAGE, text_segment(3)]),))], [(0, 0)], media_ranks={})
    built = assemble_microbatch(
        plan, _NOTHING, microbatch=0, rank=0, replica=0, arrays={}, failed=frozenset(), model=MODEL
    )
    whole, _ = build(plan)
    np.testing.assert_array_equal(built.positions, whole.positions)
    assert set(built.labels.tolist()) == {IGNORE_LABEL}
    pieces = pieces_of(plan, microbatch=0, rank=0, replica=0, with_text=False, model=MODEL)
    assert pieces == {Piece(0, 0, 0): range(16)}


def test_planned_bytes_are_those_of_the_arrays() -> None:
    packs = [
        Pack(0, 0, (make_sample([IMAGE, text_segment(3), AUDIO]),)),
        Pack(1, 0, ()),
        Pack(2, 0, (make_sample([text_segment(3)]),), padded_len=9),
    ]
    plan = plan_of(packs, [(0, 1), (1, 0), (0, 0)], media_ranks={})
    total = 0
    for microbatch in range(2):
        built, _ = build(plan, microbatch=microbatch)
        arrays = [built.tokens, built.labels, built.positions]
        total += sum(array.nbytes for array in [*arrays, *(item.values for item in built.inputs.values())])
    assert planned_bytes(plan, rank=0, replica=0, model=MODEL) == total
    assert planned_bytes(plan, rank=1, replica=1, model=MODEL) == 2 * BYTES_PER_TOKEN


@pytest.mark.parametrize(
    ("segment", "array", "reason"),
    [
        (text_segment(3), np.zeros(4, np.int32), "text has 4 tokens, planned are 3"),
        (
            IMAGE,
            np.zeros((15, 1176), np.uint8),
            "image decodes to uint8 (15, 1176), planned is uint8 (16, 1176)",
        ),
        (AUDIO, np.zeros((20, 8)), "audio decodes to float64 (20, 8), planned is float32 (20, 8)"),
    ],
)
def test_a_piece_of_another_size_than_planned_is_found(
    segment: Segment, array: np.ndarray[Any, Any], reason: str
) -> None:
    units = range(segment.num_units)
    assert misfit(segment, array, units=units, model=MODEL) == reason
    assert misfit(segment, array_of(segment, 1), units=units, model=MODEL) is None
    if segment.is_media:
        share = range(1, segment.num_units)
        assert misfit(segment, array_of(segment, 1)[1:], units=share, model=MODEL) is None


def test_a_sample_planned_with_other_counts_than_its_segments_give_is_a_bug_of_the_plan() -> None:
    right = make_sample([text_segment(3)])
    wrong = Sample(
        right.id, right.key, right.shard, right.segments, num_tokens=right.num_tokens, num_labels=9
    )
    with pytest.raises(PlanError, match="4 tokens and 3 labels, planned with 4 and 9"):
        build(plan_of([Pack(0, 0, (wrong,))], [(0, 0)], media_ranks={}))


def test_encoders_that_mix_pictures_and_sound_are_refused() -> None:
    with pytest.raises(ConfigError, match="encoder 'all' reads image, audio"):
        ModelInputs(MODEL.sizes, SPECIAL, {"all": (Modality.IMAGE, Modality.AUDIO)})
