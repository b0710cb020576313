"""Checks of shards as tests want them."""

from __future__ import annotations

from pathlib import Path

from loaders.check import CheckReport, check_shards
from loaders.check_members import CheckSettings, ShardJob
from loaders.decode.text import load_tokenizer
from loaders.index import build_index
from loaders.source_config import FieldsLayout

BYTES = load_tokenizer(None)
CAPTIONS = FieldsLayout(fields=("jpg|png", "txt"))  # type: ignore[arg-type]


def checked(
    *paths: Path,
    layout: FieldsLayout | None = None,
    against: CheckSettings | None = None,
    indexed: bool = True,
    num_workers: int = 0,
    decode: bool = False,
    deny_list: Path | None = None,
) -> CheckReport:
    """Check shards, indexed first, in this process unless workers are asked for."""
    if indexed:
        for path in paths:
            build_index(str(path), tokenizer=BYTES)
    return check_shards(
        [ShardJob(str(path), () if layout is None else (layout,)) for path in paths],
        against or CheckSettings(),
        num_workers=num_workers,
        decode=decode,
        deny_list=deny_list,
    )


def places(report: CheckReport, kind: str) -> list[tuple[str, str]]:
    """Return (member, what) of the first places of a kind."""
    return [(place.member, place.what) for place in report.found.places.get(kind, [])]


def kinds(report: CheckReport) -> dict[str, int]:
    return report.found.counts
