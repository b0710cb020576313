"""Fill: packs of a realistic mixture are nearly full, under every budget; look-ahead is what fills them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.order import WEIGHTS, make_sources
from loaders.order import Order, OrderConfig

STEPS = 4


@pytest.mark.parametrize(
    ("seq_len", "changes"),
    [
        (8192, {"oversize": "cut"}),
        (8192, {"oversize": "drop"}),
        (8192, {"oversize": "cut", "max_patches": 4 * 8192}),
        (16_384, {"oversize": "cut"}),
    ],
)
def test_log_normal_text_captions_and_long_videos_fill_packs_to_98_percent(
    seq_len: int, changes: dict[str, Any]
) -> None:
    config = OrderConfig(lanes=16, packs_per_step=64, seq_len=seq_len, **changes)
    order = Order(config, sources=make_sources(pool=4000), weights=WEIGHTS, seed=0, lanes=range(16))
    packs = [pack for step in range(STEPS) for pack in order.next_step(step)]
    fill = sum(pack.num_tokens for pack in packs) / (seq_len * len(packs))
    assert 0.98 <= fill <= 1
    assert min(pack.num_tokens for pack in packs) > 0.5 * seq_len


def test_without_look_ahead_packs_are_far_from_full() -> None:
    config = OrderConfig(lanes=16, packs_per_step=64, seq_len=8192, look_ahead=1, oversize="cut")
    order = Order(config, sources=make_sources(pool=4000), weights=WEIGHTS, seed=0, lanes=range(16))
    packs = [pack for step in range(STEPS) for pack in order.next_step(step)]
    assert sum(pack.num_tokens for pack in packs) < 0.9 * 8192 * len(packs), "the test above can fail"
