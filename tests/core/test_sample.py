"""omni_pipeline.core.sample: what is made quickly is what the classes themselves make."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from omni_pipeline.core.sample import Modality, Sample, SampleId, Segment, quick_constructor


def test_a_sample_made_quickly_is_as_any_other() -> None:
    values = (Modality.IMAGE, "a.jpg", 512, 99, (1, 4, 6), 6, 8, False, 0.0, False)
    segment, plain = quick_constructor(Segment)(*values), Segment(*values)
    assert type(segment) is Segment
    assert segment == plain
    assert hash(segment) == hash(plain)
    assert repr(segment) == repr(plain)
    sample_id = quick_constructor(SampleId)(source="s", shard=1, row=2)
    sample = quick_constructor(Sample)(sample_id, "a", "a.tar", (segment,), 9, 0)
    assert sample == Sample(SampleId("s", 1, 2), "a", "a.tar", (plain,), 9, 0)
    assert pickle.loads(pickle.dumps(sample)) == sample
    assert replace(sample, key="b").key == "b"
    assert sample_id < SampleId("s", 1, 3)


def test_a_sample_made_quickly_cannot_be_changed() -> None:
    sample_id = quick_constructor(SampleId)("s", 1, 2)
    with pytest.raises(FrozenInstanceError):
        sample_id.row = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'row'"):
        quick_constructor(SampleId)("s", 1)  # type: ignore[call-arg]
