"""Naive versions to compare with: dense masks, Python loops, one sample at a time. Meant to be obvious."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config import ModelConfig
from trainer.model.audio import AudioEncoder, sinusoids
from trainer.model.omni import OmniModel, build_model
from trainer.model.vision import VisionEncoder, normalise_patches


def build(config: ModelConfig | None = None, *, seed: int = 0) -> OmniModel:
    """Return a float64 model whose every parameter is random, so that none can hide."""
    model = build_model(config or ModelConfig(size="tiny"), seed=seed).double()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=random, dtype=torch.float64))
    return model


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by name; a missing one is an error of the test."""
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    missing = [name for name, gradient in found.items() if gradient is None]
    assert not missing, missing
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def block_mask(lengths: Sequence[int], *, causal: bool) -> Tensor:
    """Return bool [L, L]: who may see whom."""
    segment = torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor(list(lengths), dtype=torch.int64)
    )
    mask = segment[:, None] == segment[None, :]
    return mask.tril() if causal else mask


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Sequence[int] = (),
    causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Return attention [L, N, H] by one softmax over a masked matrix."""
    if mask is None:
        mask = block_mask(lengths, causal=causal)
    repeat = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(repeat, dim=1) for tensor in (k, v))
    scores = torch.einsum("lnh,mnh->nlm", q, k) / q.shape[2] ** 0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("nlm,mnh->lnh", weights, v)


def turn(x: Tensor, angle: Tensor) -> Tensor:
    """Return [L, N, H] turned by angle [L, H / 2], as complex numbers."""
    half = x.shape[2] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def one_picture(encoder: VisionEncoder, values: Tensor, grid: Sequence[int]) -> Tensor:
    """Return the rows of one picture: patches stay in packed order, windows are a dense mask."""
    temporal, rows, columns = grid
    merge, config = encoder.merge, encoder.config
    places = [
        (frame, unit_row * merge + inner_row, unit_column * merge + inner_column)
        for frame in range(temporal)
        for unit_row in range(rows // merge)
        for unit_column in range(columns // merge)
        for inner_row in range(merge)
        for inner_column in range(merge)
    ]
    side = encoder.window * merge
    frames = torch.tensor([frame for frame, _, _ in places])
    windows = torch.tensor(
        [(frame * 1000 + row // side) * 1000 + column // side for frame, row, column in places]
    )
    quarter = config.hidden // config.heads // 4
    rates = config.rope_theta ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    position = torch.tensor([(row, column) for _, row, column in places], dtype=torch.float64)
    angle = torch.cat([position[:, :1] * rates, position[:, 1:] * rates], dim=1)
    x: Tensor = encoder.patch_embed.proj(normalise_patches(values, dtype=torch.float64))
    block: Any
    for index, block in enumerate(encoder.blocks):
        group = frames if index in config.full_attention_layers else windows
        normed = block.norm1(x)
        q, k, v = (
            linear(normed).reshape(len(places), config.heads, -1)
            for linear in (block.attn.q, block.attn.k, block.attn.v)
        )
        mask = group[:, None] == group[None, :]
        x = x + block.attn.proj(dense_attention(turn(q, angle), turn(k, angle), v, mask=mask).flatten(1))
        x = x + block.mlp(block.norm2(x))
    out: Tensor = encoder.merger.mlp(encoder.merger.ln_q(x).reshape(len(places) // merge**2, -1))
    return out


def one_recording(encoder: AudioEncoder, values: Tensor) -> Tensor:
    """Return the rows of one recording, chunk by chunk, without padding."""
    pieces = []
    block: Any
    for chunk in torch.split(values, encoder.config.chunk):
        x = F.gelu(encoder.conv2(F.gelu(encoder.conv1(chunk.T[None]))))[0].T
        x = x + sinusoids(len(x), hidden=x.shape[1], device=x.device, dtype=x.dtype)
        for block in encoder.layers:
            normed = block.self_attn_layer_norm(x)
            attention = block.self_attn
            q, k, v = (
                linear(normed).reshape(len(x), encoder.config.heads, -1)
                for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            x = x + attention.out_proj(dense_attention(q, k, v, lengths=[len(x)]).flatten(1))
            x = x + block.fc2(F.gelu(block.fc1(block.final_layer_norm(x))))
        pieces.append(x)
    rows = F.avg_pool1d(torch.cat(pieces).T[None], 2)[0].T
    out: Tensor = encoder.proj(encoder.ln_post(rows))
    return out
