"""Modelled time of packs, media, their shares and the moving of rows, in seconds on one rank.

Seconds are operations and bytes (``balancer.work``) at the rates of a machine (``balancer.hardware``), or,
where a part has been measured, its fitted cost (``balancer.fitted``). Operations and bytes are whole
numbers and what follows are divisions, products and exact sums, so every machine and Python gets the same
float.

Media are priced one by one, as what they add to a microbatch: large kernels run at the best rate, and what
a kernel costs however small it is, every rank pays in any case. ``encoder_cost`` prices a whole microbatch
of an encoder with that constant in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from balancer.fitted import FittedCost
from balancer.hardware import HardwareProfile
from balancer.shapes import TransformerShape
from balancer.split import Cut, cut_segment
from balancer.work import (
    Part,
    Sizes,
    activation_values,
    forward_parts,
    media_sizes,
    packed_sizes,
    sum_of_sizes,
    weight_values,
)
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import ExchangeKind, Pack
from omni_pipeline.core.sample import Modality, Segment

LLM = "llm"
MAX_KNOWN = 1 << 16
KERNELS_PER_LAYER = 16  # three norms and sums, seven products, rotary, attention, activation, and their like
ULYSSES_EXCHANGES = 4  # per layer: queries, keys, values to heads; outputs back to rows


@dataclass(frozen=True, slots=True)
class Split:
    """A media segment in shares over a sequence-parallel subgroup.

    Args:
        shares: Embedding rows of each rank, at least 1: consecutive runs that sum to the segment's rows.
        joined: Whether attention crosses the shares (Ulysses).
        costs: Seconds of each rank, forward and backward, the exchanges of joined shares included.
    """

    shares: tuple[int, ...]
    joined: bool
    costs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Passes:
    """How often the work of a forward is done where a part is trained, beside the forward itself.

    Args:
        backward: Forwards that its backward costs: 2, the gradients of inputs and those of weights; 1 if
            weights are frozen and gradients pass through; 0 if there is no backward.
        again: The backward does the forward again instead of keeping activations (recomputation).
    """

    backward: int = 2
    again: bool = False

    @property
    def total(self) -> int:
        """Forwards that cost as much as all of it."""
        return 1 + self.backward + self.num_again

    @property
    def num_again(self) -> int:
        """Forwards done again: none without a backward."""
        return int(self.again and self.backward > 0)


TRAINED = Passes()
RECOMPUTED = Passes(again=True)


@dataclass(frozen=True)
class CostModel:
    """What one rank needs for packs, media and transfers, in seconds.

    Args:
        encoders: Shape of every encoder of the run, by name.
        llm: Shape of the LLM, its head over the vocabulary included.
        encoder_of: The encoder that reads each media modality.
        hardware: The machine.
        passes: Of encoders by name, and of "llm"; default: trained, without recomputation.
        row_ways: 2: rows travel there and their gradients back; 1: no encoder has a backward.
        row_bytes: Bytes that one embedding row moves, its gradient included; 0 takes a row of the LLM's
            width each way.
        fits: Fitted costs by encoder name, or "llm"; they replace the analytic ones.
        value_bytes: Of a number in a kernel: 2 in bf16, 4 in fp32.

    Raises:
        ConfigError: ``encoder_of`` names an encoder without a shape.
    """

    encoders: Mapping[str, TransformerShape]
    llm: TransformerShape
    encoder_of: Mapping[Modality, str]
    hardware: HardwareProfile
    passes: Mapping[str, Passes] = field(default_factory=dict)
    row_ways: int = 2
    row_bytes: int = 0
    fits: Mapping[str, FittedCost] = field(default_factory=dict)
    value_bytes: int = 2
    # Grids repeat, plans ask for thousands; forgotten when it is full.
    _media_s: dict[tuple[str, tuple[int, int, int]], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for modality, name in self.encoder_of.items():
            if name not in self.encoders:
                raise ConfigError(
                    f"modality {str(modality)!r} is read by encoder {name!r}, which has no shape",
                    fix=f"describe it; known encoders: {', '.join(sorted(self.encoders)) or 'none'}",
                )

    def encoder_name(self, segment: Segment) -> str:
        """Return the encoder that reads a media segment.

        Raises:
            ConfigError: The run has no encoder for its modality.
        """
        name = self.encoder_of.get(segment.modality)
        if name is None:
            raise ConfigError(
                f"member {segment.member!r} is {segment.modality}, and the run has no encoder for it",
                fix="add an encoder for this modality, or leave it out of the source's layout",
            )
        return name

    def media_cost(self, segment: Segment) -> float:
        """Return the seconds that a media segment adds to the rank that encodes it, forward and backward."""
        return self._grid_cost(self.encoder_name(segment), segment.grid)

    def split(self, segment: Segment, degree: int, *, num_positions: int | None = None) -> Split | None:
        """Return the segment in ``degree`` shares, or None if it cannot be split so.

        Shares end where attention ends (frames, chunks) if there are enough of these; else they are joined,
        if the degree divides the encoder's heads, every rank gets a row, and no convolution crosses them.

        Args:
            segment: The media segment.
            degree: Ranks that share it.
            num_positions: Positions in the kernels that joined shares are part of; None is many.
        """
        name = self.encoder_name(segment)
        cut = cut_segment(self.encoders[name], segment.grid, degree)
        if cut is None:
            return None
        if cut.joined:
            costs = self._joined_costs(name, segment.grid, cut, num_positions=num_positions)
        else:
            costs = tuple(self._grid_cost(name, grid) for grid in cut.grids)
        return Split(shares=cut.rows, joined=cut.joined, costs=costs)

    def pack_cost(self, pack: Pack) -> float:
        """Return the seconds that one rank would need for the pack in the LLM, forward and backward.

        Padding costs like any token: the LLM computes it. A pack without samples costs nothing.
        """
        lengths = [pack.padded_len or sample.num_tokens for sample in pack.samples]
        if not lengths:
            return 0.0
        return self._kernels_cost(LLM, self.llm, packed_sizes(lengths), segments=len(lengths))

    def encoder_cost(self, name: str, grids: Sequence[tuple[int, int, int]]) -> float:
        """Return the seconds, forward and backward, of one microbatch of encoder ``name`` on one rank.

        Kernels over few positions are less efficient, and weights are read however few there are: so this is
        not the sum of ``media_cost``. No segments cost what the encoder costs on nothing.
        """
        shape = self.encoders[name]
        sizes = sum_of_sizes([media_sizes(shape, grid) for grid in grids])
        return self._kernels_cost(name, shape, sizes, segments=len(grids))

    def forward_fraction(self, part: str) -> float:
        """Return the share of the forward in the cost of an encoder (by name) or of "llm"."""
        fit = self.fits.get(part)
        return fit.forward_fraction / self._fitted(part, 1.0) if fit else 1 / self.passes_of(part).total

    def passes_of(self, part: str) -> Passes:
        """Return the passes of an encoder (by name) or of "llm"."""
        return self.passes.get(part, TRAINED)

    @property
    def encoders_again(self) -> int:
        """Forwards that encoders do again: 1 if any of them does."""
        return max((self.passes_of(name).num_again for name in self.encoders), default=0)

    def media_bytes(self, segment: Segment, num_rows: int | None = None) -> int:
        """Return the activation bytes that the rank that encodes a segment keeps for the backward.

        Args:
            segment: The media segment.
            num_rows: Rows of a share of it; None is the whole.
        """
        name = self.encoder_name(segment)
        shape, passes = self.encoders[name], self.passes_of(name)
        if not passes.backward:
            return 0
        sizes = media_sizes(shape, segment.grid)
        rows = sizes.rows if num_rows is None else num_rows
        positions = sizes.positions if rows == sizes.rows else rows * shape.positions_per_row
        kept = activation_values(shape, num_positions=positions, num_rows=rows, recompute=passes.again)
        return self.value_bytes * kept

    def pack_bytes(self, pack: Pack) -> int:
        """Return the activation bytes of a pack in the LLM, all layers, as if on one rank."""
        num = pack.num_positions
        kept = activation_values(
            self.llm, num_positions=num, num_rows=num, recompute=self.passes_of(LLM).again
        )
        return self.value_bytes * kept

    def exchange_cost(
        self,
        kind: ExchangeKind,
        *,
        num_rows: int,
        num_messages: int,
        num_rows_network: int = 0,
        num_messages_network: int = 0,
        total_rows: int = 0,
    ) -> float:
        """Return the seconds that one rank spends on rows travelling, and their gradients back.

        Exact messages use both kinds of link at once; the steps of a two-level exchange follow each other.
        A symmetric buffer is an all-reduce of all rows: twice its bytes on every link (Patarasuk and Yuan
        2009); between nodes each rank of a node carries its part of the rows only.

        Args:
            kind: How rows travel; see ``ExchangeKind``.
            num_rows: The larger of the rows that the rank sends and receives inside its node.
            num_messages: The larger of the messages that it sends and receives there, in one direction.
            num_rows_network: As ``num_rows``, between nodes; of a symmetric buffer what a rank carries.
            num_messages_network: As ``num_messages``, between nodes.
            total_rows: Rows of the whole group, the size of a symmetric buffer.
        """
        machine = self.hardware
        one_way_s = num_messages * machine.node_latency_s + num_messages_network * machine.network_latency_s
        latency_s = self.row_ways * one_way_s
        if kind == "symmetric":
            node_s = 2 * total_rows * self.bytes_per_row / machine.node_bytes_per_s if num_messages else 0.0
            network_s = 2 * num_rows_network * self.bytes_per_row / machine.network_bytes_per_s
            return node_s + network_s + latency_s
        node_s = num_rows * self.bytes_per_row / machine.node_bytes_per_s
        network_s = num_rows_network * self.bytes_per_row / machine.network_bytes_per_s
        return (max(node_s, network_s) if kind == "exact" else node_s + network_s) + latency_s

    @property
    def bytes_per_row(self) -> int:
        """Bytes that one embedding row moves, its gradient included."""
        return self.row_bytes or self.row_ways * self.value_bytes * self.llm.hidden

    def _fitted(self, part: str, seconds: float) -> float:
        """Turn seconds measured with a plain forward and backward into those of the part's passes."""
        passes = self.passes_of(part)
        if passes == TRAINED:
            return seconds
        forward = self.fits[part].forward_fraction
        return seconds * (
            forward * (1 + passes.num_again) + (1 - forward) * passes.backward / TRAINED.backward
        )

    def _grid_cost(self, name: str, grid: tuple[int, int, int]) -> float:
        known = self._media_s.get((name, grid))
        if known is None:
            shape = self.encoders[name]
            known = self._added_cost(name, shape, media_sizes(shape, grid))
            if len(self._media_s) >= MAX_KNOWN:
                self._media_s.clear()
            self._media_s[name, grid] = known
        return known

    def _added_cost(
        self, name: str, shape: TransformerShape, sizes: Sizes, *, num_positions: int | None = None
    ) -> float:
        """What this adds to a microbatch of so many positions; None is one that is large already."""
        fit = self.fits.get(name)
        if fit:
            seconds = fit.seconds(pairs=sizes.pairs(shape), positions=sizes.positions, segments=1)
            return self._fitted(name, seconds)
        machine = self.hardware
        rate = machine.best_flops_per_s if num_positions is None else machine.attained(num_positions)
        return self.passes_of(name).total * math.fsum(
            self._part_s(part, rate) for part in forward_parts(shape, sizes)
        )

    def _kernels_cost(self, name: str, shape: TransformerShape, sizes: Sizes, *, segments: int) -> float:
        """One microbatch of so many segments or samples, ``sizes`` together, which share every kernel."""
        fit = self.fits.get(name)
        positions = sizes.positions
        if fit:
            pairs = sizes.pairs(shape)
            seconds = fit.seconds(pairs=pairs, positions=positions, segments=segments) + fit.microbatch_s
            return self._fitted(name, seconds)
        linear, *others = forward_parts(shape, sizes)
        rate = self.hardware.attained(positions)
        linear = Part(linear.flops, linear.values + weight_values(shape))
        work_s = math.fsum(self._part_s(part, rate) for part in (linear, *others))
        starts_s = shape.layers * KERNELS_PER_LAYER * self.hardware.kernel_s
        # The host starts kernels ahead of the device: whichever of the two is slower sets the pace.
        return self.passes_of(name).total * max(work_s, starts_s)

    def _part_s(self, part: Part, flops_per_s: float) -> float:
        return max(part.flops / flops_per_s, self.value_bytes * part.values / self.hardware.hbm_bytes_per_s)

    def _joined_costs(
        self, name: str, grid: tuple[int, int, int], cut: Cut, *, num_positions: int | None
    ) -> tuple[float, ...]:
        """Own rows through the linear layers, a share of the heads through attention, exchanges between."""
        shape, degree = self.encoders[name], len(cut.rows)
        whole = media_sizes(shape, grid)
        costs = []
        for rows, positions in zip(cut.rows, cut.positions, strict=True):
            # Pairs of all positions, with 1 / degree of the heads.
            own = Sizes(positions, rows, whole.full_pairs // degree, whole.window_pairs // degree)
            added_s = self._added_cost(name, shape, own, num_positions=num_positions)
            costs.append(added_s + self._ulysses_s(name, positions, degree))
        return tuple(costs)

    def _ulysses_s(self, name: str, num_positions: int, degree: int) -> float:
        """Exchanges inside a node around all attention; a backward exchanges what a forward does."""
        shape = self.encoders[name]
        values = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * num_positions
        sent = self.value_bytes * values * (degree - 1) // degree
        seconds = sent / self.hardware.node_bytes_per_s + ULYSSES_EXCHANGES * self.hardware.node_latency_s
        passes = self.passes_of(name)
        return (1 + bool(passes.backward) + passes.num_again) * shape.layers * seconds
