"""The numbers behind ``model.size``: plain data, laid under what a run file gives. Free of torch."""

from __future__ import annotations

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
                "video_max_frames": 16,
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
                "video_max_frames": 4,
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
