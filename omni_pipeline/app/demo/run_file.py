"""The demo's run file: an ordinary one, written out so that people can read and change it."""

from __future__ import annotations

from pathlib import Path

RUN_FILE = """\
# Written by `omni demo`; run it again with: omni train {path} --nproc 2
[run]
dir = "{out}/run"
seed = {seed}
steps = {steps}

{sources}
[order]
lanes = 4
packs_per_step = 4
seq_len = 512
look_ahead = 48
oversize = "cut"
shuffle_block = 256

[model]
size = "demo"

[llm.parallel]
reshard = "step"  # a small model: each rank holds it whole within a step, gradients are exchanged once

[encoders.vision.parallel]
reshard = "step"

[encoders.audio.parallel]
reshard = "step"

[balance]
group = "all"
hardware = "cpu"  # rates of one processor core, so that the planner sees what a move costs here

[loader]
num_workers = 1
max_bad_fraction = 0.05

[optimizer]
lr = 1.5e-3
warmup_steps = 20
weight_decay = 0.01

[checkpoint]
every_steps = {save_every}
keep = 2

{held_out}"""

SOURCE = """\
[[{table}]]
name = "{name}"
shards = "{out}/shards/{name}-*.tar"
layout = {{ kind = "fields", fields = [{fields}] }}
{weight}"""

QUESTION = '"{media}", {{ member = "question.txt", loss = false }}, "answer.txt"'
IMAGE, VIDEO, AUDIO = "jpg|png|webp", "mp4|webm", "wav|flac|mp3"

TRAINED = {  # name: (fields, share of the tokens)
    "shapes": (QUESTION.format(media=IMAGE), 0.27),
    "motion": (QUESTION.format(media=VIDEO), 0.27),
    "tones": (QUESTION.format(media=AUDIO), 0.24),
    "photos": (f'"{IMAGE}", "txt"', 0.09),
    "clips": (f'"{VIDEO}", "txt"', 0.08),
    "speech": (f'"{AUDIO}", "txt"', 0.03),
    "prose": ('"txt"', 0.02),
}


def write_run_file(out: Path, *, steps: int, save_every: int, seed: int) -> Path:
    """Write ``out/run.toml`` for the shards in ``out/shards`` and return its path."""
    root = out.resolve()
    sources = [
        SOURCE.format(table="sources", name=name, out=root, fields=fields, weight=f"weight = {share}\n")
        for name, (fields, share) in TRAINED.items()
    ]
    held_out = [
        SOURCE.format(
            table="evaluation.sources", name=f"{kind}-{name}", out=root, fields=TRAINED[name][0], weight=""
        )
        for kind in ("held-out", "swapped")
        for name in ("shapes", "motion", "tones")
    ]
    path = out / "run.toml"
    text = RUN_FILE.format(
        path=path,
        out=root,
        seed=seed,
        steps=steps,
        save_every=save_every,
        sources="\n".join(sources),
        held_out="\n".join(held_out),
    )
    path.write_text(text, encoding="utf-8")
    return path
