"""The audio encoder: Whisper's, over chunks of two seconds (Radford et al. 2022; Qwen2.5-Omni).

Log-mel frames are cut into chunks; two convolutions halve their rate, positions count from the start of the
chunk, attention stays inside it. Pairs of rows of a *recording* are averaged and projected. A chunk is even,
so rows per recording depend only on its frames: ``core.sizes.audio_rows``.

Shapes: T mel frames, M mel bands, C chunks, W padded mel frames of a chunk, L rows after the convolutions,
D width, N heads, H head width, R embedding rows, E LLM width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_pipeline.core.sizes import audio_rows
from trainer.config import AudioConfig, ModelConfig
from trainer.model.attention import Integers, Segments, attend
from trainer.model.layout import AudioLayout, audio_layout
from trainer.model.rotary import angle_dtype

LONGEST_PERIOD = 10_000.0


def sinusoids(length: int, *, hidden: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return Whisper's fixed positions [length, hidden]: sines, then cosines, of geometric rates."""
    half = hidden // 2
    wide = angle_dtype(dtype)
    step = math.log(LONGEST_PERIOD) / max(half - 1, 1)
    rates = torch.exp(-step * torch.arange(half, device=device, dtype=wide))
    angles = torch.arange(length, device=device, dtype=wide).unsqueeze(1) * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(dtype)


class AudioAttention(nn.Module):
    """Multi-head attention inside segments; as in Whisper the keys have no bias."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.num_heads = config.heads
        self.q_proj = nn.Linear(config.hidden, config.hidden)
        self.k_proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.hidden)
        self.out_proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x_LD: Tensor, segments: Segments) -> Tensor:
        """Return [L, D]."""
        q_LNH, k_LNH, v_LNH = (
            linear(x_LD).unflatten(1, (self.num_heads, -1))
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_LNH = attend(q_LNH, k_LNH, v_LNH, segments=segments, causal=False)
        out_LD: Tensor = self.out_proj(out_LNH.flatten(1))
        return out_LD


class AudioBlock(nn.Module):
    """Attention and a GELU MLP, each normalised before and added after."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.self_attn = AudioAttention(config)
        self.final_layer_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.fc1 = nn.Linear(config.hidden, config.intermediate)
        self.fc2 = nn.Linear(config.intermediate, config.hidden)

    def forward(self, x_LD: Tensor, segments: Segments) -> Tensor:
        """Return [L, D]."""
        x_LD = x_LD + self.self_attn(self.self_attn_layer_norm(x_LD), segments)
        out_LD: Tensor = x_LD + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x_LD))))
        return out_LD


class AudioEncoder(nn.Module):
    """Recordings to LLM rows. Every parameter takes part in every forward, also with no recording at all."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        audio = config.audio
        self.config = audio
        self.conv1 = nn.Conv1d(config.sizes.audio.num_mels, audio.hidden, 3, padding=1)
        self.conv2 = nn.Conv1d(audio.hidden, audio.hidden, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(AudioBlock(audio) for _ in range(audio.layers))
        self.ln_post = nn.LayerNorm(audio.hidden, eps=audio.norm_eps)
        self.proj = nn.Linear(audio.hidden, config.llm.hidden)

    @property
    def block_list(self) -> nn.ModuleList:
        """The blocks to shard and to checkpoint one by one."""
        return self.layers

    def forward(self, values_TM: Tensor, grids: Integers) -> Tensor:
        """Return the rows of all recordings, in their order.

        Args:
            values_TM: float32 [T, M], log-mel frames of all recordings.
            grids: int64 [recordings, 3], (mel frames, 1, 1); a numpy array or a CPU tensor.

        Returns:
            [R, E] with R the sum of ``audio_rows``; [0, E] for no recording, still on the graph of all
            parameters.

        Raises:
            ValueError: The grids do not count the frames.
        """
        frames = [grid[0] for grid in grids.tolist()]
        if sum(frames) != values_TM.shape[0]:
            raise ValueError(f"grids count {sum(frames)} mel frames, there are {values_TM.shape[0]}")
        layout = audio_layout(frames, chunk=self.config.chunk)
        assert layout.pooled.shape[1] == sum(map(audio_rows, frames)), (layout.pooled.shape, frames)
        x_LD = self._convolve(values_TM.to(self.conv1.weight.dtype), layout)
        segments = Segments(layout.chunk_lengths)
        for block in self.layers:
            x_LD = block(x_LD, segments)
        first_R, second_R = torch.from_numpy(layout.pooled).to(x_LD.device, non_blocking=True)
        pooled_RD = (x_LD[first_R] + x_LD[second_R]) / 2
        out_RE: Tensor = self.proj(self.ln_post(pooled_RD))
        return out_RE

    def _convolve(self, values_TM: Tensor, layout: AudioLayout) -> Tensor:
        """Return the rows [L, D] after both convolutions, with positions; every chunk by itself."""
        device, num_bands = values_TM.device, values_TM.shape[1]
        places_T, rows_L = (
            torch.from_numpy(array).to(device, non_blocking=True)
            for array in (layout.frame_places, layout.row_places)
        )
        num_places = layout.num_chunks * layout.padded_length
        chunk_shape = (layout.num_chunks, layout.padded_length, num_bands)
        padded_CWM = values_TM.new_zeros(num_places, num_bands).index_copy(0, places_T, values_TM)
        x_CDW = F.gelu(self.conv1(padded_CWM.reshape(chunk_shape).transpose(1, 2)))
        # The padding must be zero again for the second convolution, as it is at the end of a lone chunk.
        true_CW = values_TM.new_zeros(num_places).index_fill(0, places_T, 1.0)
        x_CDW = x_CDW * true_CW.reshape(layout.num_chunks, 1, layout.padded_length)
        x_CLD = F.gelu(self.conv2(x_CDW)).transpose(1, 2)
        positions_LD = sinusoids(x_CLD.shape[1], hidden=x_CLD.shape[2], device=device, dtype=x_CLD.dtype)
        return (x_CLD + positions_LD).flatten(0, 1)[rows_L]
