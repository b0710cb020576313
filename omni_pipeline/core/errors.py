"""The whole error tree. One class, one cause; each message says what, where and how to mend it.

::

    OmniError
      ConfigError            a setting is wrong                              exit 2
      DataError              the data cannot be used as asked                exit 1
        ShardError           one shard: damaged, missing, without index
        SampleError          one sample: goes to the quarantine
      StateMismatchError     a checkpoint or a member does not fit this run  exit 2
      PlanError              a plan breaks conservation or a cap (our bug)
      WorkerError            a decode worker failed for good
      RankError              another rank failed or left

All take ``where`` and ``fix`` and survive pickling, because they cross process boundaries.
"""

from __future__ import annotations

from typing import Any


class OmniError(Exception):
    """Base of every error that this project raises on purpose.

    Args:
        what: One sentence with the value and the limit.
        where: Source, shard, member, byte; or file and setting.
        fix: What the reader can do about it.
    """

    exit_code = 1
    # Raised alike on every rank, so that one rank of a machine is enough to tell it.
    is_shared = False

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.fix))


def _rebuild(kind: type[OmniError], what: str, where: str, fix: str) -> OmniError:
    return kind(what, where=where, fix=fix)


class ConfigError(OmniError):
    """A setting is wrong; the run never starts."""

    exit_code = 2


class DataError(OmniError):
    """The data cannot be used as asked."""


class ShardError(DataError):
    """One shard is damaged, missing, or has no usable index."""


class SampleError(DataError):
    """One sample cannot be read or decoded; it goes to the quarantine."""


class StateMismatchError(OmniError):
    """A saved state, or another member of the run, does not fit this run."""

    exit_code = 2


class PlanError(OmniError):
    """A plan breaks conservation or a cap: a bug of this project, never of its user."""


class WorkerError(OmniError):
    """A decode worker process failed for good."""


class RankError(OmniError):
    """Another rank failed or left the run."""
