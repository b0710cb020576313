"""A small tokenizer of the kind that Qwen2.5-Omni has, made by the reference library on the spot."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.support.reference_library import transformers

# The names that the published tokenizer gives to what a processor needs.
MEDIA_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and then it doesn't: it'll rest.",
    "Ein Bild zeigt drei Kühe auf einer grünen Wiese, dahinter Berge und ein See.",
    "几只猫坐在窗台上看雨。視聴者は静かに映画を見ている。",
    "def walk(tree):\n    for node in tree:\n        yield node\n\n\treturn 12345.678",
]


def omni_tokenizer() -> Any:
    """Return a byte-level BPE with the family's splitting and special tokens, of some hundred merges."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    bare.train_from_iterator(TEXTS * 4, trainer)
    made = transformers.Qwen2Tokenizer(
        vocab=bare.get_vocab(),
        merges=[tuple(pair) for pair in json.loads(bare.to_str())["model"]["merges"]],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=MEDIA_TOKENS,
    )
    made.add_tokens(["<|im_start|>"], special_tokens=True)
    made.add_tokens(["<tool_call>", "</tool_call>"])
    return made
