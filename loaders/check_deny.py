"""Writing a deny-list: the samples that no run can use, as ``loaders.deny`` reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from loaders.deny import QUARANTINE_SUFFIX
from omni_pipeline.core.errors import ConfigError

FIRST_LINE = "# Samples that cannot be used, found by `omni data check`; SHARD/KEY, one a line.\n"


class DenyListWriter:
    """Writes a list as shards are checked; the file appears whole, with ``finish``, or not at all.

    Attributes:
        num_listed: Samples written so far.
        num_unlisted: Samples whose shard or key no line can hold: it has a line break, or ends in a space.

    Raises:
        ConfigError: The file cannot be written, is named as a quarantine, or is one that somebody else wrote.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_listed = self.num_unlisted = 0
        self._reason = ""
        if path.suffix == QUARANTINE_SUFFIX:
            raise ConfigError(
                f"a deny-list must not be named {QUARANTINE_SUFFIX}: runs take such a file for a quarantine",
                where=f"--fix {path}",
                fix="name it deny.txt, for instance",
            )
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            self._refuse_foreign()
            self._file: IO[str] = self._temporary.open("w", encoding="utf-8", newline="\n")
            self._file.write(FIRST_LINE)
        except OSError as error:
            raise self._unwritable(error) from error

    def add(self, shard: str, unusable: Mapping[str, str]) -> None:
        """Write the samples of one shard, by key with the reason, which becomes a comment."""
        try:
            for key, reason in unusable.items():
                line = f"{shard}/{key}"
                if not _can_be_read_back(line):
                    self.num_unlisted += 1
                    continue
                comment = " ".join(reason.split())
                if comment != self._reason:
                    self._reason = comment
                    self._file.write(f"# {comment}\n")
                self._file.write(f"{line}\n")
                self.num_listed += 1
        except OSError as error:
            raise self._unwritable(error) from error

    def finish(self) -> None:
        """Put the list in its place."""
        try:
            self._file.close()
            os.replace(self._temporary, self._path)
        except OSError as error:
            raise self._unwritable(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _refuse_foreign(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            if file.readline() == FIRST_LINE.encode():
                return
        raise ConfigError(
            f"{self._path} exists and was not written by `omni data check`",
            where=f"--fix {self._path}",
            fix="name another file; a run reads several deny-lists",
        )

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"the deny-list cannot be written: {error.strerror}",
            where=f"--fix {self._path}",
            fix="name a file in a folder that exists and is writable",
        )


def _can_be_read_back(line: str) -> bool:
    try:
        line.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\n" not in line and line == line.strip() and not line.startswith("#")
