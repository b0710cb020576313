"""Token ids of text against the reference's tokenizer of the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaders.decode.text import FileTokenizer, load_tokenizer
from omni_pipeline.core.errors import ConfigError
from tests.support.omni_tokenizer import MEDIA_TOKENS, TEXTS, omni_tokenizer
from tests.support.reference_library import transformers

TRICKY = [
    "",
    " ",
    "  two  spaces \t tabs\r\n\r\n  lines\n\n\n",
    "don't DON'T we'll it's",
    "12345 1,234.5 ½ ² ٣",
    "e\u0301 and \u00e9, \ufb01, A\u030a, \u1100\u1161",  # normal forms
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\u202eabc\u202c \ufeff\x00\x7f \u2028 \u3000",
    "a<tool_call>{}</tool_call> <tool_call",
    *TEXTS,
    "".join(f"{word}{word} " for word in TEXTS) * 500,
    "ab" * 50_000,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    omni_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def ours(folder: Path) -> FileTokenizer:
    return FileTokenizer(folder)


@pytest.mark.parametrize("text", TRICKY, ids=range(len(TRICKY)))
def test_ids_are_those_of_the_reference(text: str, ours: FileTokenizer, theirs: Any) -> None:
    assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]


@given(text=st.text(max_size=200))
def test_ids_of_any_text_are_those_of_the_reference(text: str, ours: FileTokenizer, theirs: Any) -> None:
    assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]


def test_text_that_spells_special_tokens_has_the_ids_of_its_letters(ours: FileTokenizer, theirs: Any) -> None:
    text = "a<|IMAGE|>b <|im_start|>c<|vision_bos|><|VIDEO|><|endoftext|>"
    expected = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ours.encode(text).tolist() == expected
    assert not np.isin(expected, theirs.all_special_ids).any()


def test_special_tokens_are_those_that_a_processor_uses(ours: FileTokenizer, theirs: Any) -> None:
    special = ours.special
    names = {"vision_start": "vision_bos", "vision_end": "vision_eos", "image": "image", "video": "video"}
    names |= {"audio_start": "audio_bos", "audio_end": "audio_eos", "audio": "audio"}
    for role, name in names.items():
        assert getattr(special, role) == getattr(theirs, f"{name}_token_id")
    assert special.eos == theirs.convert_tokens_to_ids("<|endoftext|>") == theirs.pad_token_id
    assert ours.vocab_size == len(theirs)
    assert set(MEDIA_TOKENS.values()) < set(theirs.all_special_tokens)


def test_a_folder_and_its_file_are_one_tokenizer(folder: Path, ours: FileTokenizer) -> None:
    assert load_tokenizer(folder / "tokenizer.json").fingerprint == ours.fingerprint


def test_a_folder_without_the_file_is_a_setting_error(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == (
        f"cannot read the tokenizer {tmp_path / 'tokenizer.json'}: No such file or directory\n"
        "  fix:   set tokenizer.path to a Hugging Face tokenizer.json or a folder that has one, "
        "or leave it out for plain bytes"
    )
