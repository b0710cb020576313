"""Jobs for the decode pool that misbehave in the ways of real decoders. Run in worker processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np


def run(request: Any, settings: Any) -> tuple[Any, float, float]:
    """Do what ``request`` = (word, *details) says; return an array as a decoder would."""
    word, *details = request
    if word == "fill":
        return np.full(details[0], details[1], dtype=np.int64), 0.25, 0.5
    if word == "settings":
        return settings, 0.0, 0.0
    if word == "raise":
        raise ValueError(details[0])
    if word == "stick":
        while True:
            time.sleep(60)
    if word == "spin":
        Path(details[0]).write_text(str(os.getpid()), encoding="ascii")
        while True:
            pass
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "die-once":
        marker = Path(details[0])
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.arange(3), 0.0, 0.0
    if word == "maps":
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        return np.array([sum("libtorch" in line for line in lines)]), 0.0, 0.0
    raise AssertionError(word)
