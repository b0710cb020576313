"""The numbers behind ``size``, of the whole model and of a part: plain data, laid under what is given.

- ``3b`` and ``7b`` are the published thinkers of Qwen2.5-Omni; ``tiny`` is for tests, ``demo`` for the demo.
- Sizes of a part are for planning at the scale of MegaScale-Omni (EuroSys 2026), which names its models by
  their number of parameters alone: ViT of 1B, 2.4B and 10B, LLM of 12B, 70B and 175B. Here they have the
  layers of this family (gated, grouped queries, windows, its vocabulary), so that such a model could be
  trained; a test holds their counts to their names. ``balancer.simulator.workloads`` has other shapes under
  the same names: those of published models (GPT-3 has no gate, LLaMA 32000 tokens), to repeat published runs.

Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The published numbers of Qwen2.5-Omni-7B are the defaults of the classes in ``trainer.config``.
PRESETS: dict[str, dict[str, Any]] = {
    "7b": {},
    "3b": {
        "llm": {
            "layers": 36,
            "hidden": 2048,
            "intermediate": 11008,
            "heads": 16,
            "kv_heads": 2,
            "vocab_size": 151_936,
        },
    },
    "demo": {
        "sizes": {
            "vision": {
                "min_pixels": 28 * 28,
                "max_pixels": 100 * 28 * 28,
                "video_fps": 4.0,
                "video_min_frames": 2,
                "video_max_frames": 16,
                "video_min_pixels": 28 * 28,
                "video_max_pixels": 16 * 28 * 28,
            },
            "audio": {"num_mels": 80, "max_duration_s": 30.0},
        },
        "vision": {
            "layers": 2,
            "hidden": 96,
            "intermediate": 192,
            "heads": 4,
            "window": 56,
            "full_attention_layers": (0, 1),
        },
        "audio": {"layers": 2, "hidden": 96, "intermediate": 192, "heads": 4},
        "llm": {
            "layers": 3,
            "hidden": 128,
            "intermediate": 320,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 32,
            "vocab_size": 264,
            "tied_head": True,
            "rope_theta": 10_000.0,
            "rope_sections": (4, 6, 6),
        },
    },
    "tiny": {
        "sizes": {
            "vision": {
                "min_pixels": 28 * 28,
                "max_pixels": 12 * 28 * 28,
                "video_min_frames": 2,
                "video_max_frames": 4,
                "video_min_pixels": 28 * 28,
                "video_max_pixels": 4 * 28 * 28,
            },
            "audio": {"num_mels": 16, "max_duration_s": 10.0},
        },
        "vision": {
            "layers": 2,
            "hidden": 32,
            "intermediate": 48,
            "heads": 2,
            "window": 56,
            "full_attention_layers": (1,),
        },
        "audio": {"layers": 2, "hidden": 32, "intermediate": 64, "heads": 2},
        "llm": {
            "layers": 2,
            "hidden": 64,
            "intermediate": 96,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 16,
            "vocab_size": 264,
            "rope_theta": 10_000.0,
            "rope_sections": (2, 3, 3),
        },
    },
}

# Widths and depths of ViT-g (Zhai et al. 2022) for 1b; every eighth block sees the whole picture, as in 7b.
VISION_PRESETS: dict[str, dict[str, Any]] = {
    "1b": {
        "layers": 40,
        "hidden": 1408,
        "intermediate": 4096,
        "heads": 16,
        "full_attention_layers": (7, 15, 23, 31, 39),
    },
    "2.4b": {
        "layers": 48,
        "hidden": 2048,
        "intermediate": 5440,
        "heads": 16,
        "full_attention_layers": (7, 15, 23, 31, 39, 47),
    },
    "10b": {
        "layers": 48,
        "hidden": 4096,
        "intermediate": 11520,
        "heads": 32,
        "full_attention_layers": (7, 15, 23, 31, 39, 47),
    },
}

# Widths and depths of LLaMA-13B and LLaMA-2-70B (Touvron et al. 2023) and of GPT-3 (Brown et al. 2020);
# Qwen3-30B-A3B as published, its experts the defaults of ``ExpertsConfig``.
LLM_PRESETS: dict[str, dict[str, Any]] = {
    "12b": {"layers": 40, "hidden": 5120, "intermediate": 12800, "heads": 40, "kv_heads": 8},
    "30b-a3b": {
        "layers": 48,
        "hidden": 2048,
        "intermediate": 6144,
        "heads": 32,
        "kv_heads": 4,
        "vocab_size": 151_936,
        "attention_bias": False,
        "qk_norm": True,
        "experts": {},
    },
    "70b": {"layers": 80, "hidden": 8192, "intermediate": 28672, "heads": 64, "kv_heads": 8},
    "175b": {"layers": 96, "hidden": 12288, "intermediate": 39424, "heads": 96, "kv_heads": 8},
}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``above`` laid over ``below``; tables are merged, everything else is replaced."""
    found = dict(below)
    for name, value in above.items():
        lower = found.get(name)
        both_tables = isinstance(lower, Mapping) and isinstance(value, Mapping)
        found[name] = merged(lower, value) if both_tables and lower is not None else value
    return found
