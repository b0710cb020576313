"""loaders.decode.text: strict UTF-8, byte tokens, tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaders.decode.text import SPECIAL_NAMES, ByteTokenizer, decode_text, load_tokenizer
from omni_pipeline.core.errors import ConfigError, SampleError

SPECIALS = [names[0] for names in SPECIAL_NAMES.values()]


def write_tokenizer(path: Path, *, specials: list[str] = SPECIALS, special: bool = True) -> Path:
    """Write a tokenizer.json of single letters and ``specials``."""
    letters = [*"abcdefghijklmnopqrstuvwxyz <|>_", "[UNK]"]
    added = [
        {
            "id": len(letters) + place,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": special,
        }
        for place, name in enumerate(specials)
    ]
    model: dict[str, Any] = {
        "type": "BPE",
        "vocab": {letter: place for place, letter in enumerate(letters)},
        "merges": [],
        "unk_token": "[UNK]",
        "fuse_unk": False,
        "byte_fallback": False,
    }
    content = {"version": "1.0", "added_tokens": added, "model": model, "normalizer": None}
    empty = dict.fromkeys(("truncation", "padding", "pre_tokenizer", "post_processor", "decoder"))
    path.write_text(json.dumps({**content, **empty}))
    return path


@given(st.text())
def test_byte_tokens_come_back_as_the_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == "int32"
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode([*tokens, tokenizer.special.eos]) == text


def test_the_default_tokenizer_is_bytes() -> None:
    tokenizer = load_tokenizer(None)
    assert (tokenizer.fingerprint, tokenizer.vocab_size) == ("bytes-1", 264)
    assert load_tokenizer(None) is tokenizer


def test_a_byte_order_mark_is_left_out_and_nul_kept() -> None:
    assert decode_text(b"\xef\xbb\xbfa\0\xc3\xbc") == "a\0ü"
    assert decode_text(b"") == ""


@pytest.mark.parametrize("data", [b"ab\xff", b"ab\xed\xa0\x80", b"ab\xc3"])
def test_text_that_is_no_utf8_is_a_sample_error_that_names_the_byte(data: bytes) -> None:
    with pytest.raises(SampleError, match="text is not UTF-8 at byte 2"):
        decode_text(data)


def test_a_tokenizer_file_gives_its_own_ids(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json"))
    assert tokenizer.encode("abc").tolist() == [0, 1, 2]
    assert tokenizer.decode([0, 1, tokenizer.special.eos, 2]).replace(" ", "") == "abc"
    assert tokenizer.special.eos == 32
    assert tokenizer.vocab_size == 40
    other = load_tokenizer(write_tokenizer(tmp_path / "u.json", specials=[*SPECIALS, "<|more|>"]))
    assert other.fingerprint != tokenizer.fingerprint


def test_text_that_spells_a_special_token_stays_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json"))
    tokens = tokenizer.encode("a<|image_pad|>b")
    assert tokenizer.special.image not in tokens
    assert len(tokens) == len("a<|image_pad|>b")


def test_text_that_becomes_a_media_token_all_the_same_is_a_sample_error(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json", special=False))
    with pytest.raises(SampleError, match="text contains a media token"):
        tokenizer.encode("a<|image_pad|>b")


def test_wrong_tokenizer_files_are_setting_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no tokenizer file"):
        load_tokenizer(tmp_path / "bad.json")
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(write_tokenizer(tmp_path / "few.json", specials=SPECIALS[:3]))
    assert str(caught.value) == (
        "tokenizer has no token for 'image': none of <|image_pad|>, <|IMAGE|>\n"
        f"  where: {tmp_path / 'few.json'}\n"
        "  fix:   add one of these tokens to the tokenizer"
    )
