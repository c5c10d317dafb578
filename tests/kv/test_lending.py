"""Blocks lent to another unit: of the one pool, and conserved."""

from __future__ import annotations

import numpy as np
import pytest

from kvloom.kv.pool import Pool
from kvloom.types.errors import OutOfBlocks
from kvloom.types.geometry import Geometry

GEOMETRY = Geometry(layers=2, kv_heads=2, head_dim=8, itemsize=4, block_bytes=512)


def make(blocks: int) -> Pool:
    return Pool(blocks, {"m": GEOMETRY}, max_sequences=4, max_tokens={"m": 64})


def test_lent_blocks_are_nobody_elses_and_come_back() -> None:
    pool = make(40)
    cache = pool.caches["m"]
    cache.add_sequence(1)
    plan = cache.begin_forward([1], [20])
    cache.end_forward(plan)
    lent = pool.lend(14)
    own = cache.pages.map[cache.page_list(1)].ravel()
    assert not np.intersect1d(lent, own).size
    assert (pool.lent, pool.free) == (14, 40 - 14 - own.size)
    pool.check()
    with pytest.raises(OutOfBlocks):
        pool.lend(pool.available + 1)
    assert pool.lent == 14
    pool.take_back(lent)
    cache.remove_sequence(1)
    pool.check()
    assert (pool.lent, pool.available) == (0, 40)


def test_what_is_cached_gives_way_to_a_loan() -> None:
    pool = make(16)
    cache = pool.caches["m"]
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [32]))
    cache.keep(1, tuple(range(32)), tail=True)
    cache.remove_sequence(1)
    assert (pool.free, pool.cached) == (0, 16)
    lent = pool.lend(10)
    pool.check()
    pool.take_back(lent)
    pool.check()
    with pytest.raises(ValueError, match="freed twice"):
        pool.take_back(lent)
