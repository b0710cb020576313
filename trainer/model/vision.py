"""The vision encoder: a transformer over the patches of images and clips, in windows and in whole frames.

It is the one of Qwen2.5-VL and Qwen2.5-Omni: RMSNorm, SwiGLU, 2-D rotary positions, attention inside windows
except in a few blocks that attend over a whole temporal patch, and a merger that turns merge x merge patches
into one LLM row. Any number of pictures runs as one packed sequence.

Shapes: P patches, V numbers in a patch, D width, N heads, H head width, R embedding rows, E LLM width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from trainer.config import CHANNELS, ModelConfig, VisionConfig
from trainer.model.attention import Integers, Segments, attend
from trainer.model.blocks import outside_graphs
from trainer.model.layout import Indices, share_layout, vision_layout
from trainer.model.mlp import SwiGlu
from trainer.model.norm import RMSNorm
from trainer.model.rotary import Rotary, angle_dtype, rotary_2d
from trainer.parallel.ulysses import HeadExchange, Sharing

# CLIP's (Radford et al. 2021), for RGB in 0 .. 1; they were measured on its training images.
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


def normalise_patches(values_PV: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return uint8 patches as floats of ``dtype`` with CLIP's mean and deviation; V is channel-major.

    Constants stay Python numbers: a buffer would be lost between the meta device and a real one.
    """
    channels = values_PV.to(angle_dtype(dtype)).chunk(CHANNELS, dim=1)
    scaled = [
        (values - 255 * mean) / (255 * std)
        for values, mean, std in zip(channels, PIXEL_MEAN, PIXEL_STD, strict=True)
    ]
    return torch.cat(scaled, dim=1).to(dtype)


class PatchEmbed(nn.Module):
    """The patch convolution as one matmul: stride equals kernel, so patches do not overlap.

    ``proj.weight`` is the Conv3d weight of transformers with its last four axes flattened.
    """

    def __init__(self, patch_values: int, *, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(patch_values, hidden, bias=False)

    def forward(self, values_PV: Tensor) -> Tensor:
        """Return [P, D] for uint8 patches [P, V]."""
        x_PD: Tensor = self.proj(normalise_patches(values_PV, dtype=self.proj.weight.dtype))
        return x_PD


class Reach:
    """Which patches attend to each other in a block. Not a dataclass: FSDP rebuilds those at every block.

    Args:
        lengths: Patches of each run that attends to itself, of whole segments; their patches come first.
        exchange: Of the patches of shares, which follow; None if no member of the group has any.
        shared: See ``HeadExchange.attend``.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        exchange: HeadExchange | None = None,
        shared: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.segments = Segments(lengths)
        self.exchange = exchange
        self.shared = {degree: Segments(found) for degree, found in (shared or {}).items()}

    @outside_graphs
    def attend(self, q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor) -> Tensor:
        """Return [P, N, H]; a collective of the group if there is an exchange."""
        if self.exchange is None:
            return attend(q_PNH, k_PNH, v_PNH, segments=self.segments, causal=False)
        sizes = [self.segments.num_rows, len(q_PNH) - self.segments.num_rows]
        (q, q_share), (k, k_share), (v, v_share) = (
            torch.split(rows, sizes) for rows in (q_PNH, k_PNH, v_PNH)
        )
        out = attend(q, k, v, segments=self.segments, causal=False)
        out_share = self.exchange.attend(q_share, k_share, v_share, segments=self.shared)
        return torch.cat([out, out_share])


class VisionAttention(nn.Module):
    """Multi-head attention with 2-D rotary positions, inside segments."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.heads
        self.q = nn.Linear(config.hidden, config.hidden)
        self.k = nn.Linear(config.hidden, config.hidden)
        self.v = nn.Linear(config.hidden, config.hidden)
        self.proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x_PD: Tensor, rotary: Rotary, reach: Reach) -> Tensor:
        """Return [P, D]."""
        q_PNH, k_PNH, v_PNH = (
            linear(x_PD).unflatten(1, (self.num_heads, -1)) for linear in (self.q, self.k, self.v)
        )
        out_PNH = reach.attend(rotary.rotate(q_PNH), rotary.rotate(k_PNH), v_PNH)
        out_PD: Tensor = self.proj(out_PNH.flatten(1))
        return out_PD


class VisionBlock(nn.Module):
    """Attention and SwiGLU, each normalised before and added after."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden, eps=config.norm_eps)
        self.norm2 = RMSNorm(config.hidden, eps=config.norm_eps)
        self.attn = VisionAttention(config)
        self.mlp = SwiGlu(config.hidden, intermediate=config.intermediate, bias=True)

    def forward(self, x_PD: Tensor, rotary: Rotary, reach: Reach) -> Tensor:
        """Return [P, D]."""
        x_PD = x_PD + self.attn(self.norm1(x_PD), rotary, reach)
        out_PD: Tensor = x_PD + self.mlp(self.norm2(x_PD))
        return out_PD


class PatchMerger(nn.Module):
    """Turn ``group`` consecutive patches into one row of the LLM."""

    def __init__(self, config: VisionConfig, *, group: int, llm_hidden: int) -> None:
        super().__init__()
        self.group = group
        merged = config.hidden * group
        self.ln_q = RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = nn.Sequential(nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, llm_hidden))

    def forward(self, x_PD: Tensor) -> Tensor:
        """Return [P / group, E]."""
        normed_PD = self.ln_q(x_PD)
        # Sizes are written out: -1 is ambiguous for zero patches.
        merged = normed_PD.reshape(x_PD.shape[0] // self.group, self.group * x_PD.shape[1])
        out_RE: Tensor = self.mlp(merged)
        return out_RE


class VisionEncoder(nn.Module):
    """Images and clips to LLM rows; every parameter takes part in every forward, also without any picture."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        vision, sizes = config.vision, config.sizes.vision
        self.config = vision
        self.merge = sizes.merge
        self.window = vision.window // sizes.factor
        self.patch_embed = PatchEmbed(config.patch_values, hidden=vision.hidden)
        self.blocks = nn.ModuleList(VisionBlock(vision) for _ in range(vision.layers))
        self.merger = PatchMerger(vision, group=sizes.merge**2, llm_hidden=config.llm.hidden)

    @property
    def block_list(self) -> nn.ModuleList:
        """The blocks to shard and to checkpoint one by one."""
        return self.blocks

    def forward(self, values_PV: Tensor, grids: Integers, sharing: Sharing | None = None) -> Tensor:
        """Return the rows of all pictures, and of this rank's shares of others, in plan order.

        Args:
            values_PV: uint8 [P, V], packed as the loader does (see ``trainer/model/layout.py``): whole
                pictures, then shares.
            grids: int64 [pictures, 3], (temporal, rows, columns) in patches, of whole pictures; a numpy
                array or a CPU tensor.
            sharing: The pictures that members of the group encode together. All members must then call
                this, with or without a share.

        Returns:
            [R, E] with R = P / merge^2; [0, E] for no picture, still on the graph of all parameters.

        Raises:
            ValueError: The grids and shares do not count the patches.
        """
        device = values_PV.device
        order, rows, positions, windows, frames = self._lay_out(grids.tolist(), sharing, device)
        if len(order) != len(values_PV):
            raise ValueError(f"grids count {len(order)} patches, there are {len(values_PV)}")
        order_P, rows_R, positions_2P = (
            torch.from_numpy(array).to(device, non_blocking=True) for array in (order, rows, positions)
        )
        x_PD = self.patch_embed(values_PV[order_P])
        rotary = rotary_2d(
            positions_2P,
            head_dim=self.config.hidden // self.config.heads,
            theta=self.config.rope_theta,
            dtype=x_PD.dtype,
        )
        for index, block in enumerate(self.blocks):
            x_PD = block(x_PD, rotary, frames if index in self.config.full_attention_layers else windows)
        out_RE: Tensor = self.merger(x_PD)[rows_R]
        return out_RE

    def _lay_out(
        self, grids: list[list[int]], sharing: Sharing | None, device: torch.device
    ) -> tuple[Indices, Indices, Indices, Reach, Reach]:
        """Return the order of patches inside, that of rows outside, positions, and the reach of blocks."""
        whole = vision_layout(grids, merge=self.merge, window=self.window)
        if sharing is None:
            reaches = Reach(whole.window_lengths), Reach(whole.frame_lengths)
            return whole.patch_order, whole.row_order, whole.positions, *reaches
        shares = share_layout(
            sharing.joined, member=sharing.member, grids=grids, merge=self.merge, window=self.window
        )
        exchange = HeadExchange(
            sharing,
            shares.orders,
            num_heads=self.config.heads,
            patches_per_row=self.merge**2,
            device=device,
        )
        num_whole, num_patches = len(whole.patch_order), len(whole.patch_order) + shares.positions.shape[1]
        inside = np.concatenate([whole.row_order, np.arange(len(whole.row_order), len(shares.row_order))])
        return (
            np.concatenate([whole.patch_order, np.arange(num_whole, num_patches)]),
            inside[shares.row_order],
            np.concatenate([whole.positions, shares.positions], axis=1),
            Reach(whole.window_lengths, exchange=exchange, shared=shares.window_lengths),
            Reach(whole.frame_lengths, exchange=exchange, shared=shares.frame_lengths),
        )
