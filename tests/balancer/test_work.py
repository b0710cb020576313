"""Memory traffic and activations, written out tensor by tensor, and how times follow from them."""

from __future__ import annotations

import pytest

from balancer.cost import KERNELS_PER_LAYER, RECOMPUTED, CostModel, Passes
from balancer.fitted import FittedCost
from balancer.hardware import HardwareProfile, load_hardware
from balancer.shapes import TransformerShape, audio_shape, vision_shape
from balancer.work import (
    activation_values,
    forward_parts,
    media_flops,
    media_sizes,
    sample_sizes,
    weight_values,
)
from omni_pipeline.core.plan import ExchangeKind, Pack
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.topology import Topology
from tests.balancer.worlds import Step
from tests.balancer.worlds import cost_model as small_costs
from tests.support.hardware import flat_hardware
from tests.support.strategies import make_sample, media_segment, text_segment

D, F, N, K, H, V = 8, 16, 4, 2, 2, 50
LLM = TransformerShape(
    hidden=D, layers=3, ffn=F, heads=N, kv_heads=K, head_dim=H, causal=True, output_widths=(D, V)
)
VISION = vision_shape(
    layers=4,
    hidden=8,
    ffn=12,
    heads=2,
    patch_values=24,
    merge=2,
    window_patches=4,
    full_attention_layers=1,
    llm_hidden=8,
)
AUDIO = audio_shape(layers=2, hidden=8, ffn=32, heads=2, num_mels=16, chunk_frames=20, llm_hidden=8)
IMAGE = media_segment(Modality.IMAGE, (1, 8, 8))


def model(hardware: HardwareProfile | None = None, **changes: object) -> CostModel:
    """Return a cost model of these shapes."""
    return CostModel(
        encoders={"vision": VISION, "audio": AUDIO},
        llm=LLM,
        encoder_of={Modality.IMAGE: "vision", Modality.AUDIO: "audio"},
        hardware=hardware or flat_hardware(),
        **changes,  # type: ignore[arg-type]
    )


def text_pack(*lengths: int) -> Pack:
    """Return a pack of texts of so many tokens."""
    samples = tuple(make_sample([text_segment(n - 1)], row=row) for row, n in enumerate(lengths))
    return Pack(lane=0, number=0, samples=samples)


def test_memory_traffic_is_that_of_every_tensor_of_a_layer() -> None:
    tokens = 10
    linear, full, window, elementwise, head = forward_parts(LLM, sample_sizes(tokens))
    products = [(D, N * H), (D, K * H), (D, K * H), (N * H, D), (D, F), (D, F), (F, D)]
    # No first layer: a table look-up writes its row.
    assert linear.values == tokens * (3 * sum(a + b for a, b in products) + D)
    assert full.values == tokens * 3 * (N * H + 2 * K * H + N * H)
    assert (window.flops, window.values) == (0, 0)
    norms, sums, rotary, gate = 2 * (D + D), 2 * (2 * D + D), 2 * (N * H + K * H), 3 * F
    assert (elementwise.flops, elementwise.values) == (0, tokens * 3 * (norms + sums + rotary + gate))
    assert head.values == tokens * (D + V)
    assert weight_values(LLM) == 3 * sum(a * b for a, b in products) + D * V


def test_windows_and_whole_frames_are_parts_of_their_own() -> None:
    linear, full, window, _, merger = forward_parts(VISION, media_sizes(VISION, (3, 8, 8)))
    assert full.flops == 1 * 3 * 64**2 * 4 * 8
    assert window.flops == 3 * 3 * 4 * 16**2 * 4 * 8
    assert full.values == 1 * 192 * 4 * 8
    assert window.values == 3 * 192 * 4 * 8
    assert linear.flops == 2 * 192 * (4 * (4 * 64 + 3 * 8 * 12) + 24 * 8)
    assert merger.flops == 2 * 48 * (32 * 32 + 32 * 8)


def test_each_part_takes_what_is_slower_of_computing_and_memory() -> None:
    parts = forward_parts(VISION, media_sizes(VISION, IMAGE.grid))
    assert model(flat_hardware(flops_per_s=1e30, hbm_bytes_per_s=1e6)).media_cost(IMAGE) == pytest.approx(
        3 * 2 * sum(part.values for part in parts) / 1e6
    )
    both = model(flat_hardware(flops_per_s=1e6, hbm_bytes_per_s=1e5))
    expected = 3 * sum(max(part.flops / 1e6, 2 * part.values / 1e5) for part in parts)
    assert any(part.flops / 1e6 < 2 * part.values / 1e5 for part in parts[:3])
    assert both.media_cost(IMAGE) == pytest.approx(expected)
    wide = model(flat_hardware(flops_per_s=1e30, hbm_bytes_per_s=1e6), value_bytes=4)
    assert wide.media_cost(IMAGE) == pytest.approx(3 * 4 * sum(part.values for part in parts) / 1e6)


def test_recomputation_does_one_more_forward_and_keeps_one_layer() -> None:
    plain, again = model(), model(passes={"vision": RECOMPUTED, "llm": RECOMPUTED})
    assert again.media_cost(IMAGE) == pytest.approx(plain.media_cost(IMAGE) * 4 / 3)
    assert again.pack_cost(text_pack(20)) == pytest.approx(plain.pack_cost(text_pack(20)) * 4 / 3)
    assert plain.forward_fraction("llm") == pytest.approx(1 / 3)
    assert again.forward_fraction("vision") == pytest.approx(1 / 4)
    # Stream and norm twice; queries, keys, values, output; sums of exponents, float32; gate, up, product.
    layer = 4 * D + (2 * N + 2 * K) * H + 2 * N + 3 * F
    assert plain.pack_bytes(text_pack(20)) == 2 * 20 * (3 * layer + D)
    assert again.pack_bytes(text_pack(20)) == 2 * 20 * (3 * D + layer + D)


def test_frozen_parts_cost_their_forward_and_what_passes_through_them() -> None:
    plain = model()
    frozen = model(passes={"vision": Passes(backward=0, again=True), "llm": Passes(backward=1)}, row_ways=1)
    assert frozen.media_cost(IMAGE) == pytest.approx(plain.media_cost(IMAGE) / 3)
    assert frozen.encoder_cost("vision", [IMAGE.grid]) == pytest.approx(
        plain.encoder_cost("vision", [IMAGE.grid]) / 3
    )
    assert frozen.pack_cost(text_pack(20)) == pytest.approx(plain.pack_cost(text_pack(20)) * 2 / 3)
    assert (frozen.forward_fraction("vision"), frozen.forward_fraction("llm")) == (1, pytest.approx(1 / 2))
    assert frozen.media_bytes(IMAGE) == 0
    for kind in ("exact", "two_level", "symmetric"):
        rows = {"num_rows": 3, "num_messages": 2, "num_rows_network": 1, "num_messages_network": 1}
        whole = plain.exchange_cost(kind, **rows, total_rows=5)
        assert frozen.exchange_cost(kind, **rows, total_rows=5) == pytest.approx(whole / 2)
    sound = media_segment(Modality.AUDIO, (40, 1, 1))
    assert frozen.media_cost(sound) == plain.media_cost(sound)


def test_a_share_keeps_the_activations_of_its_rows() -> None:
    costs = model()
    whole = costs.media_bytes(IMAGE)
    assert whole == 2 * activation_values(VISION, num_positions=64, num_rows=16, recompute=False)
    assert costs.media_bytes(IMAGE, 4) * 4 == whole
    assert model(value_bytes=4).media_bytes(IMAGE) == 2 * whole
    # An odd recording has positions that make no row; the whole keeps them.
    sound = media_segment(Modality.AUDIO, (21, 1, 1))
    assert costs.media_bytes(sound) > costs.media_bytes(sound, 4) * sound.num_rows / 4


def test_small_packs_pay_for_weights_few_tokens_and_starts_of_kernels() -> None:
    flat = flat_hardware(flops_per_s=1e6)
    curve = flat.model_copy(update={"efficiency": ((16.0, 0.25), (64.0, 1.0))})
    assert model(curve).pack_cost(text_pack(16)) == pytest.approx(4 * model(flat).pack_cost(text_pack(16)))
    # Two samples share the kernels of one pack.
    assert model(curve).pack_cost(text_pack(32, 32)) == pytest.approx(
        2 * model(flat).pack_cost(text_pack(32))
    )
    slow = model(flat_hardware(flops_per_s=1e30, hbm_bytes_per_s=1e3))
    one, two = slow.pack_cost(text_pack(1)), slow.pack_cost(text_pack(2))
    assert 2 * one - two == pytest.approx(3 * 2 * weight_values(LLM) / 1e3)
    starts = model(flat.model_copy(update={"flops_per_s": 1e30, "kernel_s": 0.1}))
    assert starts.pack_cost(text_pack(1)) == pytest.approx(3 * 3 * KERNELS_PER_LAYER * 0.1)
    assert starts.encoder_cost("vision", []) == pytest.approx(3 * 4 * KERNELS_PER_LAYER * 0.1)


def test_a_microbatch_of_an_encoder_is_more_than_its_media_alone() -> None:
    costs = model(load_hardware("h100"))
    alone = [media_segment(Modality.IMAGE, (1, 2 * n, 4)) for n in range(1, 9)]
    together = costs.encoder_cost("vision", [segment.grid for segment in alone])
    assert together > sum(costs.media_cost(segment) for segment in alone)
    flat = model(flat_hardware(flops_per_s=1e6))
    assert flat.encoder_cost("vision", [IMAGE.grid] * 3) == pytest.approx(3 * flat.media_cost(IMAGE))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("exact", max(40 * 32 / 1e3, 10 * 32 / 1e2) + 2 * (7 * 0.5 + 3 * 2)),
        ("two_level", 40 * 32 / 1e3 + 10 * 32 / 1e2 + 2 * (7 * 0.5 + 3 * 2)),
        ("symmetric", 2 * 100 * 32 / 1e3 + 2 * 10 * 32 / 1e2 + 2 * (7 * 0.5 + 3 * 2)),
    ],
)
def test_exchanges_cost_bytes_of_both_links_and_messages_both_ways(
    kind: ExchangeKind, expected: float
) -> None:
    machine = flat_hardware(bytes_per_s=1e3, latency_s=0.5).model_copy(
        update={"network_bytes_per_s": 1e2, "network_latency_s": 2.0}
    )
    costs = model(machine)
    counts = {"num_rows": 40, "num_messages": 7, "num_rows_network": 10, "num_messages_network": 3}
    assert costs.exchange_cost(kind, total_rows=100, **counts) == pytest.approx(expected)
    inside = costs.exchange_cost(kind, num_rows=40, num_messages=7, total_rows=100)
    rows = 2 * 100 if kind == "symmetric" else 40
    assert inside == pytest.approx(rows * 32 / 1e3 + 2 * 7 * 0.5)
    assert costs.exchange_cost(kind, num_rows=0, num_messages=0) == 0


def test_the_bytes_of_a_row_can_be_given() -> None:
    costs = model(flat_hardware(bytes_per_s=1e3), row_bytes=100)
    assert costs.exchange_cost("exact", num_rows=3, num_messages=0) == pytest.approx(0.3)


def fit(**seconds: float) -> FittedCost:
    """Return a fitted cost of these coefficients, 0 for all others."""
    zero = {"pair_s": 0.0, "position_s": 0.0, "segment_s": 0.0, "microbatch_s": 0.0}
    kept = {"forward_fraction": 0.4, "median_error": 0.0, "max_error": 0.0, "worst": "", "num_measured": 9}
    return FittedCost.model_validate({**zero, **kept, "shape": "", **seconds})


def test_fitted_costs_are_those_of_a_plain_forward_and_backward() -> None:
    fits = {"vision": fit(segment_s=1.0), "llm": fit(segment_s=1.0)}
    again = model(fits=fits, passes={"vision": RECOMPUTED, "llm": Passes(backward=1)})
    assert again.media_cost(IMAGE) == pytest.approx(1.4)
    assert again.forward_fraction("vision") == pytest.approx(0.4 / 1.4)
    assert again.pack_cost(text_pack(20)) == pytest.approx(0.4 + 0.3)
    assert model(fits=fits, passes={"vision": Passes(backward=0)}).encoder_cost(
        "vision", [IMAGE.grid]
    ) == pytest.approx(0.4)


def test_fitted_costs_take_the_place_of_modelled_ones() -> None:
    fits = {
        "vision": fit(pair_s=1e-6, position_s=1e-3, segment_s=0.5, microbatch_s=7),
        "llm": fit(pair_s=1e-5, position_s=1e-2, segment_s=0.25, microbatch_s=3),
    }
    costs = model(fits=fits)
    pairs = 1 * 64**2 + 3 * 4 * 16**2
    seconds = 1e-6 * pairs + 1e-3 * 64 + 0.5
    assert costs.media_cost(IMAGE) == pytest.approx(seconds)
    assert costs.encoder_cost("vision", [IMAGE.grid] * 2) == pytest.approx(2 * seconds + 7)
    assert costs.pack_cost(text_pack(10, 20)) == pytest.approx(1e-5 * 3 * 500 + 1e-2 * 30 + 2 * 0.25 + 3)
    assert costs.pack_cost(text_pack()) == 0
    assert costs.forward_fraction("vision") == 0.4
    sound = media_segment(Modality.AUDIO, (40, 1, 1))
    assert costs.media_cost(sound) == model().media_cost(sound)
    free = model(flat_hardware(bytes_per_s=1e30), fits=fits).split(IMAGE, 2)
    assert free is not None
    assert free.costs == pytest.approx([1e-6 * pairs / 2 + 1e-3 * 32 + 0.5] * 2)


def test_fitted_costs_change_plans() -> None:
    """One large picture and four small ones: how many small ones weigh as much as the large one is fitted."""
    sizes = [16, 4, 4, 4, 4]
    images = [media_segment(Modality.IMAGE, (1, side, side)) for side in sizes]
    packs = tuple(
        Pack(lane=lane, number=0, samples=(make_sample([*(images if lane == 0 else []), text_segment(4)]),))
        for lane in range(2)
    )
    step = Step(Topology(world_size=2), 2, 1, packs)
    counts = {}
    for name, fitted in {"positions": fit(position_s=1.0), "segments": fit(segment_s=1.0)}.items():
        costs = small_costs()
        planner = step.planner(
            model=CostModel(
                encoders=costs.encoders,
                llm=costs.llm,
                encoder_of=costs.encoder_of,
                hardware=costs.hardware,
                fits={"vision": fitted},
            )
        )
        plan = planner.plan(packs, step=0, group=0)
        large = next(item for item in plan.media if item.num_rows == 64)
        counts[name] = sum(item.ranks == large.ranks for item in plan.media)
    # By positions the large one is alone; by segments it is one of two or three.
    assert counts["positions"] == 1
    assert counts["segments"] in (2, 3)


def test_costs_are_the_same_bits_on_every_machine() -> None:
    encoder = vision_shape(
        layers=32,
        hidden=1280,
        ffn=3420,
        heads=16,
        patch_values=1176,
        merge=2,
        window_patches=8,
        full_attention_layers=4,
        llm_hidden=3584,
    )
    llm = TransformerShape(
        hidden=3584,
        layers=28,
        ffn=18944,
        heads=28,
        kv_heads=4,
        head_dim=128,
        causal=True,
        output_widths=(3584, 152_064),
    )
    costs = CostModel(
        encoders={"vision": encoder},
        llm=llm,
        encoder_of={Modality.IMAGE: "vision"},
        hardware=load_hardware("h100"),
    )
    picture = media_segment(Modality.IMAGE, (1, 46, 34))
    split = costs.split(picture, 4)
    assert split is not None
    found = [costs.media_cost(picture), costs.pack_cost(text_pack(1000, 333)), split.costs[0]]
    found.append(costs.exchange_cost("exact", num_rows=77, num_messages=3))
    assert media_flops(encoder, picture.grid) == 6_220_359_843_840
    expected = "0x1.9af8eedf3e0e6p-7 0x1.f75b0d06955d4p-4 0x1.91d5a55b26116p-8 0x1.05f2735c609b1p-14"
    assert [value.hex() for value in found] == expected.split()
