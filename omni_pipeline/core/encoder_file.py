"""Attaching an encoder from one file: run it, take its ``ENCODER``, and make that known in this process.

A file is run only because a run file, a command or the parent process names it; nothing is looked for. It
gets a module name of its own, so it shadows nothing and nothing shadows it. Other processes of a run are sent
the text that was read, not the path: an edit during a run reaches none of them.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.media import KINDS, EncoderFile, MediaEncoder

FIX = "see docs/encoders.md for what such a file must hold"


def load_encoder(path: Path) -> MediaEncoder:
    """Return the encoder of a file, and make it known; the file runs once, however often it is asked for.

    Raises:
        ConfigError: The file is missing, fails, holds no encoder, imports torch outside of its functions, or
            its name or a suffix is taken.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read the encoder's file {path}: {reason}", fix=FIX) from error
    return _run(EncoderFile(str(path), text))


def run_encoder_files(files: Iterable[EncoderFile]) -> None:
    """Make known what another process has read; raises as ``load_encoder``."""
    for file in files:
        _run(file)


def _run(file: EncoderFile) -> MediaEncoder:
    for known in KINDS.encoders.values():
        if known.file.digest == file.digest:
            return known
    module = ModuleType(f"omni_encoder_{file.digest}")
    module.__file__ = file.path
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    had_torch = "torch" in sys.modules
    try:
        exec(compile(file.text, file.path, "exec"), module.__dict__)
    except Exception as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file.path
        ]
        place = f"{file.path}, line {lines[-1]}" if lines else file.path
        what = f"the encoder's file fails: {type(error).__name__}: {error}"
        raise ConfigError(what, where=place, fix=FIX) from error
    encoder = getattr(module, "ENCODER", None)
    if not isinstance(encoder, MediaEncoder):
        raise ConfigError("the file has no ENCODER, a MediaEncoder", where=file.path, fix=FIX)
    if "torch" in sys.modules and not had_torch:
        raise ConfigError(
            "the encoder's file imports torch when it is run, and decode workers have none",
            where=file.path,
            fix="import torch inside build()",
        )
    encoder = encoder.model_copy(update={"file": file})
    KINDS.add(encoder)
    return encoder
