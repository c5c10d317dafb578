"""A forward that fails may not have made its copies, so nothing may depend on them."""

from __future__ import annotations

from kvloom.kv.pool import Pool
from kvloom.types.geometry import Geometry

GEOMETRY = Geometry(
    layers=2, kv_heads=1, head_dim=8, itemsize=4, block_bytes=256
)  # 4 tokens, 2 blocks a page


def test_the_shared_page_comes_back() -> None:
    pool = Pool(40, {"m": GEOMETRY}, max_sequences=4, max_tokens={"m": 64})
    cache = pool.caches["m"]
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [6]))
    cache.fork_sequence(1, 2)
    cache.fork_sequence(1, 3)
    pages = cache.page_list(1)
    free = pool.free
    plan = cache.begin_forward([1, 2, 3], [1, 7, 2])
    assert len(plan.copies) == 3
    pool.check()
    cache.abort_forward(plan)
    pool.check()
    assert pool.free == free
    assert [cache.page_list(s) for s in (1, 2, 3)] == [pages] * 3
    cache.end_forward(cache.begin_forward([2], [1]))
    assert cache.page_list(2)[1] != pages[1]
    for sequence in (1, 2, 3):
        cache.remove_sequence(sequence)
    pool.check()
    assert pool.free == pool.total


def test_the_other_holders_may_have_gone_meanwhile() -> None:
    pool = Pool(40, {"m": GEOMETRY}, max_sequences=4, max_tokens={"m": 64})
    cache = pool.caches["m"]
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [6]))
    cache.fork_sequence(1, 2)
    pages = cache.page_list(1)
    plan = cache.begin_forward([2], [1])
    cache.remove_sequence(1)
    cache.abort_forward(plan)
    pool.check()
    assert cache.page_list(2) == pages
    cache.remove_sequence(2)
    assert pool.free == pool.total
