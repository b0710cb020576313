"""One random generator per (seed, purpose, indices): no global state, no order of calls.

numpy's ``SeedSequence`` spreads any list of integers into independent streams (O'Neill 2014), so every
decision can name the place it belongs to and be made again anywhere.
"""

from __future__ import annotations

import hashlib

import numpy as np


def generator(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """Return the generator for one purpose at one place; equal arguments give equal streams."""
    name = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, name, *indices])))
