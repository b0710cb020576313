"""Encoders from files on the model's side: what their module must do, beside the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from omni_pipeline.core.encoder_file import load_encoder
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.media import MediaEncoder
from tests.support.depth import ENCODER_FILE, changed_file, kinds_restored
from trainer.colocation import omni_anchors, parameters_by_part
from trainer.config import ModelConfig
from trainer.model.added import build_added
from trainer.model.blocks import prepare_blocks
from trainer.model.omni import build_model

CONFIG = ModelConfig(size="tiny")


@pytest.fixture(autouse=True)
def _own_kinds() -> Iterator[None]:
    with kinds_restored():
        yield


@pytest.fixture
def encoder() -> MediaEncoder:
    return load_encoder(ENCODER_FILE)


def test_it_is_an_encoder_of_the_model_with_first_weights_of_its_own(encoder: MediaEncoder) -> None:
    model, plain = build_model(CONFIG, added=[encoder], seed=3), build_model(CONFIG, seed=3)
    own = {name for name, _ in model.named_parameters() if name.startswith("encoders.depth.")}
    assert own == {f"encoders.depth.{name}" for name, _ in model.encoders["depth"].named_parameters()}
    values = dict(model.named_parameters())
    assert all(torch.equal(values[name], value) for name, value in plain.named_parameters())
    assert values["encoders.depth.patches.weight"].std() > 0
    anchors = omni_anchors(model)
    assert [anchor.name for anchor in anchors] == ["vision", "audio", "depth"]
    assert [*parameters_by_part(anchors, model.llm)][-2:] == ["depth", "llm"]
    assert (anchors[-1].values_width, anchors[-1].values_dtype, anchors[-1].num_heads) == (256, "float32", 0)


def test_segments_do_not_see_each_other_and_recomputation_changes_nothing(encoder: MediaEncoder) -> None:
    module = build_model(CONFIG, added=[encoder]).encoders["depth"]
    grids = np.array([[1, 2, 3], [2, 1, 2], [1, 1, 1]])
    units = torch.randn(11, 256, generator=torch.Generator().manual_seed(0))
    together = module(units, grids)
    alone = [module(part, grid[None]) for part, grid in zip(units.split([6, 4, 1]), grids, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone))
    together.square().sum().backward()
    gradients = {name: value.grad.clone() for name, value in module.named_parameters()}
    module.zero_grad()
    prepare_blocks(module, recompute=True, compiled=False)
    module(units, grids).square().sum().backward()
    for name, value in module.named_parameters():
        torch.testing.assert_close(value.grad, gradients[name])


def test_frames_may_go_to_different_ranks(encoder: MediaEncoder) -> None:
    (*_, anchor) = omni_anchors(build_model(CONFIG, added=[encoder], device="meta"))
    assert anchor.rows_alone is not None
    assert anchor.rows_alone((5, 2, 3)) == 6


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("return DepthEncoder()", "return None"), "build() returns a NoneType, no module"),
        (
            ("self.norm, ", 'self.register_buffer("scale", torch.ones(1)); self.norm, '),
            "the module has a buffer, 'scale'",
        ),
        (
            ("nn.Linear(HIDDEN, width)", "nn.Linear(HIDDEN, 7)"),
            "without segments the module returns (0, 7), wanted (0, 64)",
        ),
        (
            (
                "            x = self.patches(",
                "            if not len(grids): return values.new_zeros(0, width)\n"
                "            x = self.patches(",
            ),
            "without segments no row depends on parameter 'patches.weight', so other ranks would wait for it",
        ),
        (
            ("self.norm, self.proj =", "self.spare, self.norm, self.proj = nn.Linear(1, 1),"),
            "without segments no row depends on parameter 'spare.weight', so other ranks would wait for it",
        ),
    ],
    ids=["no module", "buffer", "width", "no graph", "unused"],
)
def test_a_module_that_ranks_cannot_rely_on_is_told(
    tmp_path: Path, change: tuple[str, str], what: str
) -> None:
    encoder = load_encoder(changed_file(tmp_path, change))
    with pytest.raises(ConfigError) as caught:
        build_added(encoder, width=64)
    assert (caught.value.what, caught.value.where) == (what, str(tmp_path / "changed.py"))


def test_a_name_that_modules_of_torch_have_is_told(tmp_path: Path) -> None:
    encoder = load_encoder(changed_file(tmp_path, ('name="depth"', 'name="values"')))
    with pytest.raises(ConfigError) as caught:
        build_model(CONFIG, added=[encoder], device="meta")
    assert caught.value.what == "the name 'values' of an encoder is taken: modules of torch have it"


def test_recomputation_without_blocks_is_told(tmp_path: Path) -> None:
    encoder = load_encoder(changed_file(tmp_path, ("self.block_list", "self.blocks")))
    with pytest.raises(ConfigError, match="recompute or compile is set, but DepthEncoder has no block_list"):
        prepare_blocks(build_added(encoder, width=64), recompute=True, compiled=False)
