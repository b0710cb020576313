"""Which saved states fit a run: the same order of samples, or a clear refusal that changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loaders.decode.text import ByteTokenizer
from loaders.index import index_shards
from loaders.loader import merge_states
from loaders.source import Source, open_source
from loaders.source_config import SourceConfig
from omni_pipeline.core.errors import StateMismatchError
from tests.support.loading import (
    SIZES,
    Data,
    identity_of,
    make_data,
    make_loader,
)
from tests.support.shards import caption_members, write_tar


def test_states_that_do_not_fit_are_refused_and_change_nothing(good: Data, quarantine: Path) -> None:
    with make_loader(good, quarantine=quarantine) as loader:
        next(loader)
        state = loader.state_dict()
        with pytest.raises(RuntimeError, match="after the first batch"):
            loader.load_state_dict(state)
    with (
        make_loader(good, quarantine=quarantine, identity=identity_of(good.sources, seed=8)) as loader,
        pytest.raises(StateMismatchError, match="'seed' was 7 when saved, is 8 here"),
    ):
        loader.load_state_dict(state)
    with make_loader(good, quarantine=quarantine) as loader:
        before = loader.state_dict()
        for broken in (
            {**state, "version": 99},
            {**state, "identity": 5},
            {**state, "identity": {**state["identity"], "sources": ["captions"]}},
            {**state, "step": -1},
            {**state, "lanes": None},
            {**state, "lanes": {"0": state["lanes"]["0"]}},
        ):
            with pytest.raises(StateMismatchError):
                loader.load_state_dict(broken)
            assert loader.state_dict() == before
    other = {**state, "step": 5}
    with pytest.raises(StateMismatchError, match="are of steps 1 and 5"):
        merge_states([state, other])
    with pytest.raises(StateMismatchError, match="no loader state"):
        merge_states([])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"video_backend": "decord"}, "'loader.video_backend' was 'pyav' when saved, is 'decord' here"),
        ({"max_image_pixels": 1000}, "'loader.max_image_pixels' was 178956970 when saved, is 1000 here"),
    ],
)
def test_a_run_resumes_only_with_the_settings_that_decide_what_media_decode_to(
    good: Data, quarantine: Path, setting: dict[str, Any], message: str
) -> None:
    with make_loader(good, quarantine=quarantine) as loader:
        state = loader.state_dict()
    with make_loader(good, quarantine=quarantine, **setting) as loader:
        with pytest.raises(StateMismatchError, match=message):
            loader.load_state_dict(state)
        assert loader.state_dict()["identity"]["loader"] != state["identity"]["loader"]
    free: dict[str, Any] = {"num_workers": 1, "prefetch_steps": 5, "deadline_s": 3.0, "max_bad_fraction": 0.5}
    with make_loader(good, quarantine=quarantine, **free) as loader:
        loader.load_state_dict(state)


def places(state: Mapping[str, Any], source: str) -> list[int]:
    """Where every lane stands in ``source``."""
    return [lane["sources"][source]["position"] for lane in state["lanes"].values()]


def test_sources_are_added_removed_and_reweighted_and_the_others_keep_their_place(
    good: Data, quarantine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tar(tmp_path / "more-0.tar", caption_members(5))
    index_shards([str(tmp_path / "more-0.tar")])
    config = SourceConfig(
        name="more", shards=str(tmp_path / "more-0.tar"), layout={"kind": "fields", "fields": ["jpg", "txt"]}
    )
    more = open_source(config, SIZES, ByteTokenizer())
    captions, talks = good.sources
    with make_loader(good, quarantine=quarantine) as loader:
        for _ in range(3):
            next(loader)
        state = json.loads(json.dumps(loader.state_dict()))

    def resumed(sources: list[Source], weights: dict[str, float]) -> dict[str, Any]:
        caplog.clear()
        data = Data(tuple(sources), good.folder)
        with make_loader(data, quarantine=quarantine, weights=weights) as loader, caplog.at_level("INFO"):
            loader.load_state_dict(state)
            loaded = loader.state_dict()
            seen = {
                span.id.source
                for _ in range(6)
                for microbatch in next(loader).microbatches
                for span in microbatch.spans
            }
        assert seen == set(weights)
        return loaded

    loaded = resumed([captions, talks, more], {"captions": 0.2, "talks": 0.5, "more": 0.3})
    assert places(loaded, "captions") == places(state, "captions")
    assert places(loaded, "talks") == places(state, "talks")
    assert places(loaded, "more") == [0] * 4
    assert "sources added since the state was saved, read from their start: more" in caplog.text

    loaded = resumed([talks], {"talks": 1.0})
    assert places(loaded, "talks") == places(state, "talks")
    assert any(places(loaded, "talks"))
    assert "sources removed since the state was saved, their place is lost: captions" in caplog.text

    loaded = resumed([captions, talks], {"captions": 0.9, "talks": 0.1})
    assert loaded["lanes"] == state["lanes"]
    assert "since the state was saved" not in caplog.text


def test_a_source_whose_data_changed_is_refused_by_name(good: Data, quarantine: Path, tmp_path: Path) -> None:
    with make_loader(good, quarantine=quarantine) as loader:
        state = loader.state_dict()
    other = make_data(tmp_path / "other", broken=False, num_captions=11)
    with make_loader(other, quarantine=quarantine) as loader:
        before = loader.state_dict()
        with pytest.raises(StateMismatchError, match="the data of source 'captions' changed") as caught:
            loader.load_state_dict(state)
        assert "another name" in caught.value.fix
        assert loader.state_dict() == before
