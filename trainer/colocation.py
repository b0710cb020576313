"""How any encoder attaches to the LLM's ranks (encoder-LLM multiplexing).

Every rank hosts all encoders and the LLM and runs one after the other, each sharded over its own mesh. An
encoder is one ``EncoderAnchor``; neither the LLM nor the step knows what kinds there are. A run
attaches its own by naming a file (``core.media``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from omni_pipeline.core.batch import EncoderInput, MicroBatch
from omni_pipeline.core.errors import ConfigError, PlanError
from omni_pipeline.core.media import MediaEncoder
from omni_pipeline.core.plan import MediaPlacement
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.sizes import MEL_FRAMES_PER_ROW
from trainer.model.init import make_storage
from trainer.model.omni import OmniModel
from trainer.parallel.config import ParallelConfig, Precision
from trainer.parallel.mesh import RankGroups, make_module_mesh
from trainer.parallel.sharding import begin_backward, end_without_backward, shard_module
from trainer.parallel.ulysses import Sharing
from trainer.parts import is_frozen, split_projector


@dataclass(frozen=True)
class EncoderAnchor:
    """One encoder, and how what the loader brings becomes its input.

    Args:
        name: Key of its inputs in ``MicroBatch.inputs``, and encoder name in plans.
        module: ``module(values, grids) -> rows [R, E]``, E the width of the LLM. It must accept zero
            segments and give zero rows that hang on the graph of all of its parameters.
        modalities: What it reads.
        values_width: Numbers per unit (patch, mel frame): the second dim of the values.
        values_dtype: numpy type of the values.
        rows_alone: ``rows_alone(grid) -> n``: attention never crosses a multiple of so many rows, so a
            segment may be cut there into shares; by default nowhere.
        num_heads: Attention heads, spread over the ranks that share a joined segment; 0: the encoder cannot
            join shares. One that can takes a ``Sharing`` as its third argument where there are any.
        projector: Names of its children that turn its output into rows of the LLM: a part of its own in
            training options, ``<name>_projector``.
    """

    name: str
    module: nn.Module
    modalities: tuple[Modality, ...]
    values_width: int
    values_dtype: str
    rows_alone: Callable[[tuple[int, int, int]], int] | None = None
    num_heads: int = 0
    projector: tuple[str, ...] = ()

    def encode(self, inputs: EncoderInput, *, groups: RankGroups) -> Tensor:
        """Return the rows [R, E] of all segments and shares of ``inputs``, in plan order.

        A collective of the balance group where segments are joined: all members hold such an input then.

        Raises:
            PlanError: Shares are joined, and this encoder cannot.
        """
        values = torch.from_numpy(inputs.values).to(groups.device, non_blocking=True)
        arguments: tuple[Any, ...] = (values, inputs.grids)
        if inputs.joined:
            if problem := self._join_problem(inputs):
                raise PlanError(problem, fix="report this: the planner is at fault")
            member = groups.members.index(groups.rank)
            arguments += (Sharing(inputs.joined, member=member, group=groups.group),)
        rows: Tensor = self.module(*arguments)
        return rows

    def empty_input(self) -> EncoderInput:
        """Return an input without any segment."""
        values = np.empty((0, self.values_width), dtype=self.values_dtype)
        return EncoderInput(values=values, grids=np.empty((0, 3), dtype=np.int64))

    def problem(self, inputs: EncoderInput, *, member: int) -> str:
        """Return why ``inputs`` cannot be encoded by this member of the group, or ""."""
        if inputs.values.dtype != np.dtype(self.values_dtype):
            return f"{self.name} values are {inputs.values.dtype}, the encoder reads {self.values_dtype}"
        if inputs.values.ndim != 2 or inputs.values.shape[1] != self.values_width:
            return f"{self.name} values have shape {inputs.values.shape}, wanted [units, {self.values_width}]"
        num_units = int(inputs.grids.prod(axis=1).sum())
        for item in inputs.joined:
            if member in item.members:
                own = item.shares[item.members.index(member)]
                num_units += math.prod(item.grid) * own // sum(item.shares)
        if num_units != len(inputs.values):
            return f"{self.name} grids count {num_units} units of {len(inputs.values)}"
        return self._join_problem(inputs)

    def share_problem(self, placement: MediaPlacement, grid: tuple[int, int, int]) -> str:
        """Return why this long segment cannot be cut into shares that are encoded one by one, or ""."""
        rows = self.rows_alone(grid) if self.rows_alone is not None else placement.num_rows
        if all(end % rows == 0 for end in itertools.accumulate(placement.shares[:-1])):
            return ""
        return (
            f"{self.name} shares of {placement.shares} rows are not joined, "
            f"and attention goes over runs of {rows} rows"
        )

    def _join_problem(self, inputs: EncoderInput) -> str:
        for item in inputs.joined:
            if not self.num_heads:
                return f"{self.name} shares are joined, and its attention cannot be"
            if self.num_heads % len(item.members):
                return f"{len(item.members)} ranks join {self.name} shares with {self.num_heads} heads"
        return ""


@dataclass(frozen=True)
class ColocatedModel:
    """Encoders and LLM, sharded, on one rank.

    Args:
        module: The whole model, for checkpoints.
        llm: See ``trainer.model.llm.Llm.forward``.
        anchors: The encoders in the order in which their rows are concatenated.
        groups: The place of this rank.
        parallel: Layout of each part by name.
    """

    module: nn.Module
    llm: nn.Module
    anchors: tuple[EncoderAnchor, ...]
    groups: RankGroups
    parallel: Mapping[str, ParallelConfig]

    @property
    def parts(self) -> dict[str, nn.Module]:
        """The separately sharded modules by name."""
        return {**{anchor.name: anchor.module for anchor in self.anchors}, "llm": self.llm}

    @property
    def parameters_by_part(self) -> dict[str, list[nn.Parameter]]:
        """The parameters of each part that training options name."""
        return parameters_by_part(self.anchors, self.llm)

    def encode(self, microbatch: MicroBatch, *, num_rows: int) -> Tensor:
        """Run every encoder, with or without input, and return all rows [R, E], by encoder.

        A collective where encoders are sharded: all ranks must call it.

        Raises:
            PlanError: The encoders made another number than ``num_rows``, which the plan says.
        """
        rows = torch.cat(
            [anchor.encode(microbatch.inputs[anchor.name], groups=self.groups) for anchor in self.anchors]
        )
        if len(rows) != num_rows:
            raise PlanError(
                f"the encoders made {len(rows)} rows, the plan says {num_rows}",
                where=f"microbatch {microbatch.index} on rank {self.groups.rank}",
                fix="report this: sizes and encoders disagree",
            )
        return rows

    def begin_backward(self, *, is_last: bool) -> None:
        """Prepare the next backward; ``is_last`` is that of the step's last microbatch."""
        for name, module in self.parts.items():
            # A frozen LLM still has one: gradients pass through it to the encoders.
            if name != "llm" and is_frozen(module):
                if is_last:
                    end_without_backward(module)
            else:
                begin_backward(module, self.parallel[name], is_last=is_last)

    def release(self) -> None:
        """Free gathered parameters, which a forward without backward leaves in place."""
        for module in self.parts.values():
            end_without_backward(module)


def parameters_by_part(anchors: Sequence[EncoderAnchor], llm: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each part that training options name: encoders, projectors, then ``llm``."""
    parts: dict[str, list[nn.Parameter]] = {}
    for anchor in anchors:
        parts |= split_projector(anchor.name, anchor.module, projector=anchor.projector)
    return {**parts, "llm": list(llm.parameters())}


def omni_anchors(model: OmniModel) -> tuple[EncoderAnchor, ...]:
    """Return the anchors of a model: vision, audio, then the encoders added to it."""
    vision, audio = model.encoders["vision"], model.encoders["audio"]
    config = model.config
    # Of chunks that end within a row, the least number that does not.
    rows_of_chunks = math.lcm(config.audio.chunk, MEL_FRAMES_PER_ROW) // MEL_FRAMES_PER_ROW
    return (
        EncoderAnchor(
            "vision",
            vision,
            modalities=(Modality.IMAGE, Modality.VIDEO),
            values_width=config.patch_values,
            values_dtype="uint8",
            rows_alone=lambda grid: grid[1] * grid[2] // config.sizes.vision.merge**2,
            num_heads=config.vision.heads,
            projector=("merger",),
        ),
        EncoderAnchor(
            "audio",
            audio,
            modalities=(Modality.AUDIO,),
            values_width=config.sizes.audio.num_mels,
            values_dtype="float32",
            rows_alone=lambda grid: rows_of_chunks,
            projector=("ln_post", "proj"),
        ),
        *(_added_anchor(encoder, model.encoders[encoder.name]) for encoder in model.added),
    )


def _added_anchor(encoder: MediaEncoder, module: nn.Module) -> EncoderAnchor:
    kind = encoder.kind
    return EncoderAnchor(
        encoder.name,
        module,
        modalities=(kind.modality,),
        values_width=kind.unit_values,
        values_dtype=kind.unit_dtype,
        rows_alone=lambda grid: grid[1] * grid[2] // kind.units_per_row,
    )


def colocate(
    model: OmniModel,
    *,
    groups: RankGroups,
    parallel: Mapping[str, ParallelConfig],
    precision: Precision,
    seed: int | None = None,
    anchors: Sequence[EncoderAnchor] = (),
) -> ColocatedModel:
    """Shard every encoder and the LLM over its own mesh, and attach them to this rank.

    All ranks must call this together. A model on the meta device gets storage for its shards only, and its
    first weights from ``seed``.

    Args:
        model: The same weights on every rank, or on the meta device.
        groups: The place of this rank.
        parallel: By encoder name, and ``"llm"``; those not named use all ranks.
        precision: Of forward and backward; parameters and the sums of gradients stay float32.
        seed: Of the first weights; required on the meta device, where nothing else gives them.
        anchors: Encoders in the order of the plans; by default those of the model family.

    Raises:
        ConfigError: ``parallel`` names no part of the model, or a degree does not divide the ranks.
    """
    anchors = tuple(anchors) or omni_anchors(model)
    settings = {f"encoders.{anchor.name}.parallel": (anchor.name, anchor.module) for anchor in anchors}
    settings["llm.parallel"] = ("llm", model.llm)
    names = [name for name, _ in settings.values()]
    unknown = sorted(set(parallel) - set(names))
    if unknown:
        raise ConfigError(
            f"the model has no part {unknown[0]!r}", fix=f"its parts are {', '.join(sorted(names))}"
        )
    layouts = {name: parallel.get(name, ParallelConfig()) for name in names}
    for setting, (name, module) in settings.items():
        config = layouts[name]
        mesh = make_module_mesh(device=groups.device, dp_shard=config.dp_shard, setting=f"{setting}.dp_shard")
        shard_module(module, mesh=mesh, precision=precision, reshard=config.reshard)
    if next(model.parameters()).is_meta:
        if seed is None:
            raise ValueError("a model on the meta device needs a seed for its first weights")
        make_storage(model, device=groups.device)
        model.init_weights(seed)
    return ColocatedModel(module=model, llm=model.llm, anchors=anchors, groups=groups, parallel=layouts)
