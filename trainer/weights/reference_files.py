"""What lies beside the weights of the reference: settings, tokenizer, processor. Free of torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from omni_pipeline.core.errors import ConfigError
from trainer.checkpoint_files import drafted
from trainer.weights.folder import KEPT_NAME, REFERENCE_NAME, TOKENIZER_NAME, WeightsFolder

SETTINGS_NAME = "config.json"
# Belong together: one of another tokenizer among them would contradict the rest.
TOKENIZER_FILES = (
    TOKENIZER_NAME,
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "vocab.json",
)
COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt")


def read_settings(source: Path) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        ConfigError: There is none, or it is no JSON object.
    """
    path = source / SETTINGS_NAME
    fix = "give a folder as `save_pretrained` writes it"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {path}", fix=fix) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", fix=fix) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is no JSON object", fix=fix)
    return data


def check_free(out: Path) -> None:
    """Raise a ``ConfigError`` unless ``out`` can be made."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} is there already", fix="give a new folder, or remove that one")


def copy_files(source: Path, target: Path) -> None:
    """Copy settings, tokenizer and processor files, but neither weights nor their index."""
    for path in sorted(source.iterdir()):
        is_index = path.name.endswith(".index.json")
        if path.is_file() and path.suffix in COPIED_SUFFIXES and not is_index:
            shutil.copyfile(path, target / path.name)


def keep_reference(run: Path, *, weights: WeightsFolder | None, tokenizer: Path | None) -> None:
    """Keep in the folder of a run what its weights will be exported with; nothing if it is kept already.

    Args:
        run: Folder of the run.
        weights: What the run starts from.
        tokenizer: That of the run, which replaces that of ``weights`` if it is another one.
    """
    target = run / REFERENCE_NAME
    source = None if weights is None else weights.reference
    if target.is_dir() or (source is None and tokenizer is None):
        return
    with drafted(target) as draft:
        if source is not None:
            copy_files(source, draft)
            if (source / KEPT_NAME).exists():
                shutil.copyfile(source / KEPT_NAME, draft / KEPT_NAME)
        own = draft / TOKENIZER_NAME
        if tokenizer is not None and not (own.exists() and own.read_bytes() == tokenizer.read_bytes()):
            for name in TOKENIZER_FILES:
                (draft / name).unlink(missing_ok=True)
            shutil.copyfile(tokenizer, own)
