"""RunConfig: the root of the TOML schema of a run. Each section lives beside the class that it configures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from balancer.planner import BalanceConfig
from loaders.loader_config import LoaderConfig
from loaders.mixture import group_problems
from loaders.order import OrderConfig
from loaders.source_config import SourceConfig
from loaders.weight import Weight
from omni_pipeline.core.encoder_file import load_encoder
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.media import KINDS, MediaEncoder
from trainer.checkpoint_config import CheckpointConfig
from trainer.config import ModelConfig
from trainer.optimizer_config import OptimizerConfig
from trainer.parallel.config import ParallelConfig
from trainer.parts_config import PART_NAMES
from trainer.weights.folder import open_weights

ENCODERS = ("vision", "audio")


class Section(BaseModel):
    """A table of the run file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """What run this is."""

    dir: Path = Field(description="Folder of the run: checkpoints, metrics, quarantine, report.")
    seed: int = Field(0, ge=0, description="Seed of the order of samples and of the initial weights.")
    steps: int = Field(ge=1, description="Optimizer steps of the whole run.")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="Type of the forward and backward.")
    gallery_packs: int = Field(6, ge=0, description="Packs of the last step shown in the report.")


class TokenizerSection(Section):
    """How text becomes tokens."""

    path: Path | None = Field(
        None,
        description="A Hugging Face tokenizer.json or a folder with it; "
        "default: that of model.weights, or else bytes.",
    )


class PartSection(Section):
    """Settings of the LLM or of one encoder."""

    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Its own parallelism.")
    recompute: bool = Field(
        False,
        description="Keep only the input of each block and run it again in the backward: less memory, "
        "a third more operations.",
    )
    compile: bool = Field(
        False,
        description="Compile each block (torch.compile), attention left out; needs a C++ compiler. The first "
        "step takes minutes.",
    )


class EncoderSection(PartSection):
    """Settings of one encoder, built in or attached."""

    file: Path | None = Field(
        None, description="The Python file of an encoder that is not built in; it is run at the start."
    )


class EvaluationSection(Section):
    """Held-out sources: evaluated, never trained on."""

    sources: list[SourceConfig] = Field(default_factory=list, description="Held-out sources.")
    every_steps: int = Field(0, ge=0, description="Evaluate each so many steps; 0: only at the end.")


class RunConfig(Section):
    """A run file."""

    run: RunSection = Field(description="What run this is.")
    # Before the sources, whose members may be of kinds that these bring.
    encoders: dict[str, EncoderSection] = Field(
        default_factory=dict, description="How each encoder runs, and those that are attached."
    )
    sources: list[SourceConfig] = Field(min_length=1, description="The mixture.")
    groups: dict[str, Weight] = Field(
        default_factory=dict,
        description="Weight of each group of sources, by path; forms as sources.N.weight.",
    )
    deny: tuple[Path, ...] = Field(
        (), description="Deny-lists of every source of the mixture, as sources.N.deny; not of held-out ones."
    )
    order: OrderConfig = Field(description="Lanes, packs, look-ahead.")
    tokenizer: TokenizerSection = Field(default_factory=TokenizerSection, description="Text to tokens.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="Encoders and LLM.")
    llm: PartSection = Field(default_factory=PartSection, description="How the LLM runs.")
    balance: BalanceConfig = Field(default_factory=BalanceConfig, description="Grouped reordering.")
    loader: LoaderConfig = Field(default_factory=LoaderConfig, description="Fetching and decoding.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW and its schedule.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="When to save.")
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection, description="Held-out samples.")

    @model_validator(mode="before")
    @classmethod
    def _take_tokenizer_of_weights(cls, data: Any) -> Any:
        """Without a tokenizer of its own a run has that of the weights it starts from, if they have one."""
        if not isinstance(data, Mapping):
            return data
        model, tokenizer = data.get("model"), data.get("tokenizer", {})
        weights = model.get("weights") if isinstance(model, Mapping) else None
        if not isinstance(weights, str | Path) or not isinstance(tokenizer, Mapping) or "path" in tokenizer:
            return data
        try:
            path = open_weights(Path(weights)).tokenizer
        except ConfigError:  # the model says it
            return data
        return data if path is None else {**data, "tokenizer": {**tokenizer, "path": path}}

    @field_validator("encoders", mode="after")
    @classmethod
    def _attach_encoders(cls, encoders: dict[str, EncoderSection]) -> dict[str, EncoderSection]:
        for name, section in encoders.items():
            if (section.file is None) != (name in ENCODERS):
                raise ValueError(
                    f"{name}.file is not allowed: {name} is built in"
                    if section.file
                    else f"{name} is not built in, as {' and '.join(ENCODERS)} are: set {name}.file"
                )
            if section.file is not None and (found := load_encoder(section.file).name) != name:
                raise ValueError(
                    f"the encoder of {section.file} is named {found!r}: write [encoders.{found}]"
                )
        return encoders

    @model_validator(mode="after")
    def _source_names_are_unique(self) -> RunConfig:
        for sources in (self.sources, self.evaluation.sources):
            names = [source.name for source in sources]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"source names must be unique; used twice: {', '.join(twice)}")
        return self

    @model_validator(mode="after")
    def _groups_fit_sources(self) -> RunConfig:
        group_of = {source.name: source.group for source in self.sources if source.group is not None}
        for problem in group_problems(group_of, self.groups):
            raise ValueError(f"groups: {problem}")
        return self

    @model_validator(mode="after")
    def _parts_are_known(self) -> RunConfig:
        parts = self.part_names
        for setting, names in (("freeze", self.optimizer.freeze), ("parts", self.optimizer.parts)):
            unknown = next((name for name in names if name not in parts), None)
            if unknown is not None:
                raise ValueError(
                    f"optimizer.{setting} names {unknown!r}; parts of the model are {', '.join(parts)}"
                )
        if set(self.optimizer.freeze) == set(parts):
            raise ValueError("optimizer.freeze names every part of the model, so there is nothing to train")
        return self

    @property
    def added_encoders(self) -> tuple[MediaEncoder, ...]:
        """The encoders that are not built in, by name, so that their order in the file changes nothing."""
        return tuple(KINDS.encoders[name] for name in sorted(set(self.encoders) - {*ENCODERS}))

    @property
    def encoder_names(self) -> tuple[str, ...]:
        """All encoders, in the order in which their rows follow each other."""
        return (*ENCODERS, *(encoder.name for encoder in self.added_encoders))

    @property
    def part_names(self) -> tuple[str, ...]:
        """All parts that are trained or frozen by themselves."""
        return (*PART_NAMES, *(encoder.name for encoder in self.added_encoders))

    @property
    def parts(self) -> dict[str, PartSection]:
        """The settings of the LLM and of every encoder, by name."""
        return {"llm": self.llm, **{name: self.encoder(name) for name in self.encoder_names}}

    def encoder(self, name: str) -> EncoderSection:
        """Return the settings of one encoder, by default those of an empty table."""
        return self.encoders.get(name, EncoderSection())
