"""What a run file says of shards that are checked: layouts, sizes, budgets."""

from __future__ import annotations

from collections.abc import Sequence

from loaders.check_members import CheckSettings, ShardJob
from loaders.manifest import list_shards
from loaders.source_config import FieldsLayout
from loaders.step import decode_settings
from omni_pipeline.app.run_config import RunConfig
from omni_pipeline.app.wire import build_tokenizer, model_inputs
from omni_pipeline.core.errors import ConfigError


def run_jobs(config: RunConfig, shards: Sequence[str]) -> list[ShardJob]:
    """Return ``shards``, or without any those of all sources, with the layouts of the sources that have them.

    Raises:
        ConfigError: A shard is in no source, or a source names what does not exist.
    """
    layouts: dict[str, dict[FieldsLayout, None]] = {}
    for source in (*config.sources, *config.evaluation.sources):
        try:
            found = list_shards(source.shards)
        except ConfigError as error:
            raise ConfigError(error.what, where=f"source {source.name!r}", fix=error.fix) from error
        for shard in found:
            layouts.setdefault(shard, {})[source.layout] = None
    for shard in shards:
        if shard not in layouts:
            raise ConfigError(
                f"no source of the run has the shard {shard}",
                fix="spell it as in sources.shards, or leave out --run",
            )
    return [ShardJob(shard, tuple(layouts[shard])) for shard in shards or layouts]


def run_check_settings(config: RunConfig) -> CheckSettings:
    """Return what shards are held against: the sizes, limits and tokenizer of the run.

    Raises:
        ConfigError: The tokenizer cannot be used, or has more tokens than the model.
    """
    model = model_inputs(config, build_tokenizer(config))
    decode = decode_settings(config.loader, model=model, tokenizer_path=config.tokenizer.path)
    return CheckSettings(decode, budgets=config.order.budgets, oversize=config.order.oversize)
