"""A small pool of two models, and prompts that leave what they computed."""

from __future__ import annotations

import itertools

from kvloom.kv.cache import ModelCache
from kvloom.kv.pool import Pool
from kvloom.types.geometry import Geometry

PAGE = Geometry(layers=2, kv_heads=1, head_dim=8, itemsize=4, block_bytes=256)  # 4 tokens, 2 blocks a page
THICK = Geometry(layers=3, kv_heads=2, head_dim=16, itemsize=4, block_bytes=256)  # 2 tokens, 6 blocks a page

ids = itertools.count(1000)


def make(blocks: int = 400) -> Pool:
    return Pool(blocks, {"m": PAGE, "t": THICK}, max_sequences=6, max_tokens={"m": 200, "t": 200})


def serve(cache: ModelCache, tokens: list[int], *, tail: bool = True) -> int:
    """Compute `tokens`, as far as they are not cached, and leave them cached. Returns what was cached."""
    sequence = next(ids)
    found = cache.adopt(sequence, tokens, len(tokens))
    if found < len(tokens):
        cache.end_forward(cache.begin_forward([sequence], [len(tokens) - found]))
    cache.keep(sequence, tokens, tail=tail)
    cache.remove_sequence(sequence)
    return found


def found(cache: ModelCache, tokens: list[int]) -> int:
    """What would be adopted; counts as use."""
    return cache.prefixes.match(tokens, len(tokens))[1]
