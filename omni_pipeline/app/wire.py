"""Settings to objects: the one place where loaders, balancer and trainer meet.

Everything here is free of torch but ``build_loader`` (which imports it late), so plans, checks and reports
start quickly and need no device.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from balancer.cost import CostModel
from balancer.planner import GroupPlanner
from balancer.reorder import lanes_of_group
from loaders.assemble import ModelInputs
from loaders.cache import set_up_storage
from loaders.decode.text import Tokenizer, load_tokenizer, with_markers
from loaders.identity import sources_identity
from loaders.mixture import Mixture, Moment
from loaders.order import Order, OrderConfig
from loaders.source import Source, open_source
from loaders.source_config import SourceConfig
from loaders.step import Place
from loaders.weight import Weight
from omni_pipeline.app.costs import cost_model, costs_content, encoder_of
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.run_dir import RunDir
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.topology import Topology
from trainer.parallel.config import ranks_per_copy

if TYPE_CHECKING:
    from loaders.loader import OmniLoader

# Settings that may differ between ranks: they change no sample and no number.
LOCAL_SETTINGS = {"loader": ("num_workers", "deadline_s", "prefetch_steps", "prefetch_bytes", "storage")}


@dataclass(frozen=True)
class Stream:
    """One ordered stream of samples: sources, how they are packed, and their weights.

    Args:
        order: Settings of the order.
        sources: Opened sources.
        configs: Their settings, in the same order.
        groups: Weight of each group of sources, by path.
        seed: Seed of the order.
    """

    order: OrderConfig
    sources: tuple[Source, ...]
    configs: tuple[SourceConfig, ...]
    groups: Mapping[str, Weight]
    seed: int

    def lanes_of_group(self, group: int, topology: Topology) -> tuple[int, ...]:
        """Return the lanes that ``group`` owns."""
        return lanes_of_group(group, self.order.lanes, topology)

    def order_of_group(self, group: int, topology: Topology) -> Order:
        """Return the order of the lanes that ``group`` owns."""
        return self.order_of_lanes(self.lanes_of_group(group, topology))

    def order_of_lanes(self, lanes: Iterable[int]) -> Order:
        """Return the order of these lanes."""
        return Order(
            self.order,
            sources=self.sources,
            weights={config.name: config.weight for config in self.configs},
            seed=self.seed,
            lanes=lanes,
            epochs={config.name: config.epochs for config in self.configs if config.epochs is not None},
            group_of=self._group_of,
            groups=self.groups,
        )

    def is_drawn(self, name: str) -> bool:
        """Return whether the source has a weight above 0 at any step."""
        return self.mixture.names.index(name) in self.mixture.drawn_from(Moment(0))

    @functools.cached_property
    def mixture(self) -> Mixture:
        """The weights of the sources."""
        weights = {config.name: config.weight for config in self.configs}
        return Mixture(weights, group_of=self._group_of, groups=self.groups)

    @property
    def _group_of(self) -> dict[str, str]:
        return {config.name: config.group for config in self.configs if config.group is not None}

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal for a saved loader state to fit."""
        by_source = sources_identity(self.sources)
        for source, config in zip(self.sources, self.configs, strict=True):
            # The last epochs of fewer rows than lanes are shared out among lanes by how many they are.
            if config.epochs is not None and len(source) < self.order.lanes:
                by_source["sources"][source.name] += f", {config.epochs} epochs"
        return {
            "seed": self.seed,
            # Not the end: a run that dropped the last samples may go on to see them.
            "order": self.order.model_dump(mode="json", exclude={"end"}),
            **by_source,
        }


def build_topology(
    config: RunConfig, *, world_size: int, ranks_per_node: int, tp: int = 1, cp: int = 1, pp: int = 1
) -> Topology:
    """Return the layout of the run.

    Args:
        world_size: Ranks.
        ranks_per_node: Ranks of each machine.
        tp: Tensor-parallel degree of the LLM.
        cp: Context-parallel degree of the LLM.
        pp: Pipeline stages of the LLM.

    Raises:
        ConfigError: Degrees or machines do not divide the ranks, or groups the replicas.
    """
    size = config.balance.replicas_per_group(
        world_size=world_size, ranks_per_node=ranks_per_node, tp=tp, cp=cp, pp=pp
    )
    return Topology(world_size, tp=tp, cp=cp, pp=pp, replicas_per_group=size, ranks_per_node=ranks_per_node)


def build_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the run's tokenizer.

    Raises:
        ConfigError: No such file, or it has more tokens than the model's table.
    """
    tokenizer = load_tokenizer(config.tokenizer.path)
    if tokenizer.vocab_size > config.model.llm.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.model.llm.vocab_size}",
            fix=f"set model.llm.vocab_size = {tokenizer.vocab_size}",
        )
    markers = with_markers(tokenizer, [encoder.kind for encoder in config.added_encoders]).added
    needed = 1 + max(itertools.chain.from_iterable(markers.values()), default=0)
    if needed > config.model.llm.vocab_size:
        raise ConfigError(
            f"the tokens around media of {', '.join(markers)} are {needed - tokenizer.vocab_size} more than "
            f"the tokenizer's {tokenizer.vocab_size}; the model has {config.model.llm.vocab_size}",
            fix=f"set model.llm.vocab_size = {needed}",
        )
    return tokenizer


def training_stream(config: RunConfig, tokenizer: Tokenizer) -> Stream:
    """Open the run's sources.

    Raises:
        ConfigError: A source is missing, empty, or without an index.
    """
    sources = [source.model_copy(update={"deny": (*source.deny, *config.deny)}) for source in config.sources]
    stream = _stream(config, sources, tokenizer, order=config.order, groups=config.groups)
    if not any(source.has_labels for source in stream.sources if stream.is_drawn(source.name)):
        raise ConfigError(
            "no source has text that is trained on, so there is nothing to learn",
            fix="add a text field with loss to a source whose weight is above 0",
        )
    return stream


def held_out_stream(config: RunConfig, source: SourceConfig, tokenizer: Tokenizer) -> Stream:
    """Open one held-out source, to be seen exactly once."""
    alone = source.model_copy(update={"weight": 1.0, "group": None, "epochs": 1})
    order = config.order.model_copy(update={"end": "pad"})
    return _stream(config, [alone], tokenizer, order=order, groups={})


def build_planner(config: RunConfig, topology: Topology, *, model: CostModel | None = None) -> GroupPlanner:
    """Return the planner of the run. ``model``: its costs; default: those of ``balance``."""
    return GroupPlanner(
        topology,
        cost_model=model or cost_model(config),
        config=config.balance,
        num_lanes=config.order.lanes,
        packs_per_step=config.order.packs_per_step,
        encoders=config.encoder_names,
    )


def model_inputs(config: RunConfig, tokenizer: Tokenizer) -> ModelInputs:
    """Return what the run's model reads."""
    encoders = {
        name: tuple(modality for modality, encoder in encoder_of(config).items() if encoder == name)
        for name in config.encoder_names
    }
    special = with_markers(tokenizer, [encoder.kind for encoder in config.added_encoders])
    return ModelInputs(sizes=config.model.sizes, special=special, encoders=encoders)


def build_loader(
    config: RunConfig,
    stream: Stream,
    *,
    tokenizer: Tokenizer,
    topology: Topology,
    rank: int,
    quarantine: Path,
) -> OmniLoader:
    """Return the loader of one rank over ``stream``, at its beginning."""
    from loaders.loader import OmniLoader  # imports torch

    place = Place(topology, rank)
    return OmniLoader(
        config.loader,
        order=stream.order_of_group(place.group, topology),
        planner=build_planner(config, topology),
        place=place,
        model=model_inputs(config, tokenizer),
        tokenizer_path=config.tokenizer.path,
        quarantine=quarantine,
        identity=stream.identity,
    )


def check_run(config: RunConfig, *, world_size: int) -> None:
    """Open all that needs no device, so that wrong settings and data are told once, before ranks start.

    Raises:
        ConfigError: As the functions above.
    """
    RunDir(config.run.dir).make()
    topology = build_topology(config, world_size=world_size, ranks_per_node=world_size)
    tokenizer = build_tokenizer(config)
    build_planner(config, topology)
    stream = training_stream(config, tokenizer)
    stream.order_of_group(0, topology)  # what can be wrong with an order is the same in all groups
    for source in config.evaluation.sources:
        held_out_stream(config, source, tokenizer)
    parts = [("llm", config.llm), *((f"encoders.{name}", part) for name, part in config.encoders.items())]
    for prefix, part in parts:
        setting = f"{prefix}.parallel.dp_shard"
        ranks_per_copy(part.parallel.dp_shard, world_size=world_size, setting=setting)


def section_digests(config: RunConfig) -> dict[str, str]:
    """Return a digest of every section that must be equal on all ranks, by name.

    Of the files of costs and encoders, their content counts, not where they lie.

    Raises:
        ConfigError: Such a file is missing or wrong.
    """
    data = config.model_dump(mode="json")
    for name, local in LOCAL_SETTINGS.items():
        data[name] = {key: value for key, value in data[name].items() if key not in local}
    data["balance"] |= costs_content(config)
    for name, digest in encoder_digests(config).items():
        data["encoders"][name]["file"] = digest
    return {
        name: hashlib.blake2b(json.dumps(section, sort_keys=True).encode(), digest_size=8).hexdigest()
        for name, section in data.items()
    }


def encoder_digests(config: RunConfig) -> dict[str, str]:
    """Return a digest of the file of each encoder that is attached, by name."""
    return {encoder.name: encoder.file.digest for encoder in config.added_encoders}


def _stream(
    config: RunConfig,
    sources: Sequence[SourceConfig],
    tokenizer: Tokenizer,
    *,
    order: OrderConfig,
    groups: Mapping[str, Weight],
) -> Stream:
    set_up_storage(config.loader.storage)
    for source in sources:
        _check_deny(source, RunDir(config.run.dir))
    opened = tuple(open_source(source, sizes=config.model.sizes, tokenizer=tokenizer) for source in sources)
    return Stream(order=order, sources=opened, configs=tuple(sources), groups=groups, seed=config.run.seed)


def _check_deny(source: SourceConfig, folder: RunDir) -> None:
    """Raise if a deny-list would grow while the run goes on, so that it could never be resumed."""
    growing = {path.resolve() for path in (folder.quarantine_path, folder.quarantine_of(source.name))}
    for path in source.deny:
        if path.resolve() in growing:
            raise ConfigError(
                f"deny names this run's own quarantine, {path}, which grows while it runs",
                where=f"source {source.name!r}",
                fix="copy that file and name the copy, and start a new run.dir",
            )
