"""Text to tokens, and the tokenizers: plain bytes by default, or a Hugging Face ``tokenizer.json``.

A tokenizer is known by its ``fingerprint``: token counts in an index belong to one fingerprint, so a run can
tell whether the counts it plans with are those of its own tokenizer. Text of a data set never becomes a
special token, whatever it spells: otherwise a caption that contains a placeholder would claim embedding rows.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from omni_pipeline.core.errors import ConfigError, SampleError
from omni_pipeline.core.media import MediaKind
from omni_pipeline.core.sample import Modality

# Names that published multimodal tokenizers give to each role, in order of preference.
SPECIAL_NAMES: dict[str, tuple[str, ...]] = {
    "eos": ("<|endoftext|>", "<|im_end|>", "</s>", "<eos>"),
    "vision_start": ("<|vision_start|>", "<|vision_bos|>"),
    "vision_end": ("<|vision_end|>", "<|vision_eos|>"),
    "image": ("<|image_pad|>", "<|IMAGE|>"),
    "video": ("<|video_pad|>", "<|VIDEO|>"),
    "audio_start": ("<|audio_start|>", "<|audio_bos|>"),
    "audio_end": ("<|audio_end|>", "<|audio_eos|>"),
    "audio": ("<|audio_pad|>", "<|AUDIO|>"),
}


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids of the tokens that are not text: end of sample, media borders, and media placeholders.

    Args:
        added: (start, placeholder, end) of kinds of media that are not built in, by modality.
    """

    eos: int
    vision_start: int
    vision_end: int
    image: int
    video: int
    audio_start: int
    audio_end: int
    audio: int
    added: Mapping[Modality, tuple[int, int, int]] = field(default_factory=dict)

    def around(self, modality: Modality) -> tuple[int, int, int]:
        """Return (start marker, placeholder, end marker) of media."""
        if modality is Modality.AUDIO:
            return self.audio_start, self.audio, self.audio_end
        if modality is Modality.IMAGE or modality is Modality.VIDEO:
            placeholder = self.image if modality is Modality.IMAGE else self.video
            return self.vision_start, placeholder, self.vision_end
        return self.added[modality]


class Tokenizer(Protocol):
    """Turns text into token ids; equal fingerprints mean equal ids for every text."""

    @property
    def fingerprint(self) -> str:
        """Short digest of all that decides the ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def special(self) -> SpecialTokens:
        """Ids of the special tokens."""
        ...

    def special_id(self, name: str) -> int | None:
        """Return the id of the special token of this name; None where special tokens have no names.

        Raises:
            ConfigError: There is none, or text may spell it.
        """
        ...

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Return the ids of ``text``: int32 [tokens], without any special token."""
        ...

    def decode(self, tokens: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return readable text of ``tokens``, special ones left out."""
        ...


class ByteTokenizer:
    """One token per UTF-8 byte; needs no file, knows every text. Ids 256 to 263 are special."""

    fingerprint = "bytes-1"
    vocab_size = 264
    special = SpecialTokens(
        eos=256,
        vision_start=257,
        vision_end=258,
        image=259,
        video=260,
        audio_start=261,
        audio_end=262,
        audio=263,
    )

    def special_id(self, name: str) -> int | None:
        """Return None: tokens that are not bytes have no names here."""
        return None

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Return the UTF-8 bytes of ``text`` as int32 [tokens]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text of the byte tokens; a broken sequence becomes U+FFFD."""
        return bytes(int(token) for token in tokens if int(token) < 256).decode("utf-8", "replace")


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``; its ids are those that transformers gives to text.

    Args:
        path: The file, or a folder with it, as published or as ``save_pretrained`` writes it.

    Raises:
        ConfigError: The file is missing or no tokenizer, or lacks a special token.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as RustTokenizer  # only runs with a tokenizer file need it

        fix = (
            "set tokenizer.path to a Hugging Face tokenizer.json or a folder that has one, "
            "or leave it out for plain bytes"
        )
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read the tokenizer {path}: {error.strerror}", fix=fix) from error
        try:
            self._tokenizer = RustTokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} is no tokenizer file: {error}", fix=fix) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.fingerprint = hashlib.blake2b(data, digest_size=8).hexdigest()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.special = _special_tokens(vocab, path)
        roles = [getattr(self.special, role) for role in SPECIAL_NAMES if role != "eos"]
        self._reserved = np.array(roles, dtype=np.int32)
        self._path = path

    def special_id(self, name: str) -> int | None:
        """Return the id of the special token of this name.

        Raises:
            ConfigError: There is none, or text may spell it.
        """
        for token_id, token in self._tokenizer.get_added_tokens_decoder().items():
            if token.content == name and token.special:
                return int(token_id)
        raise ConfigError(
            f"tokenizer has no special token {name!r}, which an encoder's file names",
            where=str(self._path),
            fix='add it to "added_tokens" with "special": true, or change the file\'s markers',
        )

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Return int32 [tokens].

        Raises:
            SampleError: The text spells a media token that the tokenizer does not treat as text.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        tokens = np.array(ids, dtype=np.int32)
        if np.isin(tokens, self._reserved).any():
            raise SampleError(
                "text contains a media token of the tokenizer",
                fix='mark the token as "special": true in tokenizer.json, or clean the text',
            )
        return tokens

    def decode(self, tokens: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return readable text of ``tokens``, special ones left out."""
        return str(self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True))


def _special_tokens(vocab: dict[str, int], path: Path) -> SpecialTokens:
    ids: dict[str, Any] = {}
    for role, names in SPECIAL_NAMES.items():
        found = next((vocab[name] for name in names if name in vocab), None)
        if found is None:
            raise ConfigError(
                f"tokenizer has no token for {role!r}: none of {', '.join(names)}",
                where=str(path),
                fix="add one of these tokens to the tokenizer",
            )
        ids[role] = found
    return SpecialTokens(**ids)


@functools.lru_cache(maxsize=4)
def load_tokenizer(path: Path | None = None) -> Tokenizer:
    """Return the tokenizer of ``path``, or the byte-level one; kept per process.

    Args:
        path: A ``tokenizer.json``, or a folder with it; None for plain bytes.

    Raises:
        ConfigError: The file is missing or no tokenizer, or lacks a special token.
    """
    return ByteTokenizer() if path is None else FileTokenizer(path)


def with_markers(tokenizer: Tokenizer, kinds: Sequence[MediaKind]) -> SpecialTokens:
    """Return the special tokens, with those around media of ``kinds``: three for each.

    Where special tokens have no names, the ids behind the tokenizer's own, in the order of ``kinds``.

    Raises:
        ConfigError: The tokenizer lacks a token that a kind names.
    """
    free = itertools.count(tokenizer.vocab_size)
    added = {}
    for kind in kinds:
        start, placeholder, end = (
            next(free) if found is None else found for found in map(tokenizer.special_id, kind.markers)
        )
        added[kind.modality] = start, placeholder, end
    return replace(tokenizer.special, added=added)


def decode_text(data: bytes) -> str:
    """Return UTF-8 ``data`` as text, a byte order mark at its start left out.

    Raises:
        SampleError: Not UTF-8; names the byte.
    """
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SampleError(
            f"text is not UTF-8 at byte {error.start}: {error.reason}",
            fix="convert the text to UTF-8, or let the quarantine take it",
        ) from error
