"""The language model: the decoder of Qwen2.5 or Qwen3-MoE with M-RoPE, over packed samples that do not see
each other.

Embedding rows of media are written over the placeholder tokens; from there on nothing knows where a row came
from. The head and its loss run inside the same forward, so that a sharded model gathers their weight there.

Shapes: S positions, D width, N query heads, K key and value heads, H head width, R media rows, V vocabulary,
A sparse layers, E experts.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from trainer.config import LlmConfig
from trainer.loss import chunk_size_for, chunked_cross_entropy, token_losses
from trainer.model.attention import Integers, Segments, attend
from trainer.model.expert_balance import RoutedSamples, RouterSums
from trainer.model.mlp import SwiGlu
from trainer.model.moe import SparseMlp
from trainer.model.norm import RMSNorm
from trainer.model.rotary import Rotary, mrope


class LlmOutput(NamedTuple):
    """What a forward gives; a tuple, because FSDP finds the tensors in it.

    Args:
        loss_sum: float32 scalar: cross entropy, and z-loss by its weight, summed over positions with a label.
        predictions: int64 [S]: the likeliest next token at each position.
        hidden: [S, D] after the last norm.
        losses: float32 [S], without gradient: cross entropy at each position, if asked for.
        balance_sum: float32 scalar: sum over samples of (tokens x load-balancing loss); with experts, and
            without ``losses``.
        expert_counts: float32 [A, E], without gradient: tokens of samples that chose each expert; likewise.
        z_sum: float32 scalar, without gradient: z-loss summed, without its weight; if that is not 0.
    """

    loss_sum: Tensor
    predictions: Tensor
    hidden: Tensor
    losses: Tensor | None = None
    balance_sum: Tensor | None = None
    expert_counts: Tensor | None = None
    z_sum: Tensor | None = None


class LlmAttention(nn.Module):
    """Causal grouped-query attention with rotary positions, inside samples."""

    def __init__(self, config: LlmConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden, query, bias=bias)
        self.k_proj = nn.Linear(config.hidden, key_value, bias=bias)
        self.v_proj = nn.Linear(config.hidden, key_value, bias=bias)
        self.o_proj = nn.Linear(query, config.hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x_SD: Tensor, rotary: Rotary, segments: Segments) -> Tensor:
        """Return [S, D]."""
        q_SNH, k_SKH, v_SKH = (
            # Heads are counted from the output: under tensor parallelism it holds a part of them.
            rows.reshape(rows.shape[0], rows.shape[1] // self.head_dim, self.head_dim)
            for rows in (self.q_proj(x_SD), self.k_proj(x_SD), self.v_proj(x_SD))
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_SNH, k_SKH = self.q_norm(q_SNH), self.k_norm(k_SKH)
        out_SNH = attend(rotary.rotate(q_SNH), rotary.rotate(k_SKH), v_SKH, segments=segments, causal=True)
        out_SD: Tensor = self.o_proj(out_SNH.flatten(1))
        return out_SD


class LlmBlock(nn.Module):
    """Attention, and a SwiGLU or a mixture of them, each normalised before and added after."""

    def __init__(self, config: LlmConfig, *, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.self_attn = LlmAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp: SwiGlu | SparseMlp
        if config.experts is not None and config.experts.is_sparse(layer):
            self.mlp = SparseMlp(config.hidden, config.experts)
        else:
            self.mlp = SwiGlu(config.hidden, intermediate=config.intermediate, bias=False)

    def forward(
        self, x_SD: Tensor, rotary: Rotary, segments: Segments, samples: RoutedSamples | None = None
    ) -> tuple[Tensor, RouterSums | None]:
        """Return [S, D], and what a router did with the ``samples``, if there are both."""
        x_SD = x_SD + self.self_attn(self.input_layernorm(x_SD), rotary, segments)
        normed_SD = self.post_attention_layernorm(x_SD)
        if isinstance(self.mlp, SparseMlp):
            out_SD, sums = self.mlp(normed_SD, samples)
            return x_SD + out_SD, sums
        return x_SD + self.mlp(normed_SD), None


class Llm(nn.Module):
    """Tokens and media rows to a loss. With a tied head ``lm_head`` is None and the table is used directly,
    so no parameter is ever registered twice.
    """

    def __init__(self, config: LlmConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(LlmBlock(config, layer=layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.lm_head = None if config.tied_head else nn.Linear(config.hidden, config.vocab_size, bias=False)

    @property
    def block_list(self) -> nn.ModuleList:
        """The blocks to shard and to checkpoint one by one; the rest belongs to the root."""
        return self.layers

    def forward(
        self,
        tokens_S: Tensor,
        positions_3S: Tensor,
        cu_seqlens: Integers,
        media_rows_RD: Tensor,
        media_positions_R: Tensor,
        labels_S: Tensor,
        *,
        spans: Integers | None = None,
        with_losses: bool = False,
        z_loss: float = 0.0,
    ) -> LlmOutput:
        """Return the loss and what belongs to it.

        Args:
            tokens_S: int64 [S]; any valid token at media positions.
            positions_3S: int64 [3, S]; temporal, height and width position, restarting in every sample.
            cu_seqlens: int32 [samples + 1]; a numpy array or a CPU tensor. Positions behind the last
                boundary are padding: they see only each other.
            media_rows_RD: [R, D]; may be empty, and even then hangs on the graph.
            media_positions_R: int64 [R]; distinct positions that the rows take.
            labels_S: int64 [S]; the token to predict after each position, or -100.
            spans: [samples, 2]; rows [start, end) of the samples that the load-balancing loss counts, a numpy
                array; by default all that ``cu_seqlens`` bounds. Without experts it has no use.
            with_losses: Return the loss at each position; then the sum has no gradient either.
            z_loss: Weight of the z-loss in the sum; none is added ``with_losses``.

        Raises:
            ValueError: Rows and positions of media differ in number, ``cu_seqlens`` or ``spans`` do not fit.
        """
        if media_rows_RD.shape[0] != media_positions_R.shape[0]:
            raise ValueError(
                f"{media_rows_RD.shape[0]} media rows for {media_positions_R.shape[0]} media positions"
            )
        segments = Segments.from_cu_seqlens(cu_seqlens, num_rows=tokens_S.shape[0])
        x_SD = self.embed_tokens(tokens_S)
        x_SD = x_SD.index_copy(0, media_positions_R, media_rows_RD.to(x_SD.dtype))
        rotary = mrope(
            positions_3S, sections=self.config.rope_sections, theta=self.config.rope_theta, dtype=x_SD.dtype
        )
        samples = None
        if self.config.experts is not None and not with_losses:
            samples = RoutedSamples(_spans(spans, cu_seqlens), num_rows=x_SD.shape[0], like=x_SD)
        of_layers: list[RouterSums] = []
        for block in self.layers:
            x_SD, sums = block(x_SD, rotary, segments, samples)
            of_layers += [] if sums is None else [sums]
        hidden_SD = self.norm(x_SD)
        weight_VD = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        chunk_size = chunk_size_for(weight_VD.shape[0])
        if with_losses:
            losses_S, predictions_S = token_losses(hidden_SD, weight_VD, labels_S, chunk_size=chunk_size)
            return LlmOutput(losses_S.sum(), predictions_S, hidden_SD, losses_S)
        head = chunked_cross_entropy(hidden_SD, weight_VD, labels_S, chunk_size=chunk_size, z_loss=z_loss)
        output = LlmOutput(head.loss_sum, head.predictions, hidden_SD, z_sum=head.z_sum if z_loss else None)
        if samples is None:
            return output
        counts_AE = torch.stack([sums.counts.sum(dim=0) for sums in of_layers])
        return output._replace(balance_sum=samples.loss_sum(of_layers), expert_counts=counts_AE)


def _spans(spans: Integers | None, cu_seqlens: Integers) -> list[tuple[int, int]]:
    """Return those given, or all that are not empty between the boundaries."""
    if spans is not None:
        return cast("list[tuple[int, int]]", spans.tolist())
    return [(start, end) for start, end in itertools.pairwise(cu_seqlens.tolist()) if start < end]
