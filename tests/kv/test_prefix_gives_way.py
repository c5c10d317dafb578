"""Cached pages give way when blocks are short: which, in what order, and what pins and verbs do about it."""

from __future__ import annotations

import pytest

from kvloom.types.errors import OutOfBlocks
from tests.kv.trees import cached_tokens, check_form, found, longest, make, serve


def test_least_recently_used_of_all_models_goes_first() -> None:
    pool = make(blocks=30)
    wide, thick = pool.caches["m"], pool.caches["t"]
    serve(wide, [1] * 8)  # 4 blocks
    serve(thick, [2] * 2)  # 6
    serve(wide, [3] * 8)  # 4
    serve(thick, [4] * 2)  # 6
    assert (pool.free, pool.cached) == (10, 20)
    found(wide, [1] * 8)  # used again: 2 is the oldest now, then 3, 4, 1

    def kept() -> list[int]:
        trees = [(wide, [1] * 8), (thick, [2] * 2), (wide, [3] * 8), (thick, [4] * 2)]
        return [longest(cache.prefixes, tokens) for cache, tokens in trees]

    wide.add_sequence(1)
    wanted = {
        10: [8, 2, 8, 2],
        12: [8, 0, 8, 2],
        16: [8, 0, 8, 2],
        18: [8, 0, 4, 2],  # a leaf, not the page that leads to it
        20: [8, 0, 0, 2],
        22: [8, 0, 0, 0],
        26: [8, 0, 0, 0],
        28: [4, 0, 0, 0],
        30: [0, 0, 0, 0],
    }
    for used in range(2, 31, 2):
        wide.end_forward(wide.begin_forward([1], [4]))
        assert wide.used_blocks == used
        if used in wanted:
            assert kept() == wanted[used], used
        pool.check()
        check_form(pool)
    with pytest.raises(OutOfBlocks):
        wide.begin_forward([1], [1])


def test_nothing_gives_way_for_what_cannot_be() -> None:
    pool = make(blocks=20)
    cache = pool.caches["m"]
    serve(cache, [1] * 20)
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [8]))
    with pytest.raises(OutOfBlocks, match="18 blocks asked for, 16 of 20"):
        cache.begin_forward([1], [36])
    assert (pool.free, pool.cached, cache.used_blocks) == (6, 10, 4)
    cache.begin_forward([1], [32])
    assert (pool.free, pool.cached, cache.used_blocks) == (0, 0, 20)


def test_what_is_used_does_not_give_way() -> None:
    pool = make(blocks=20)
    cache = pool.caches["m"]
    serve(cache, [1] * 12)
    serve(cache, [2] * 8)
    assert cache.adopt(1, [1] * 12, 7) == 7
    assert (pool.cached, cache.used_blocks) == (6, 4)  # the third page is idle, and older than 2's
    cache.add_sequence(2)
    cache.end_forward(cache.begin_forward([2], [32]))
    assert longest(cache.prefixes, [1] * 12) == 8
    assert longest(cache.prefixes, [2] * 8) == 0
    with pytest.raises(OutOfBlocks):
        cache.begin_forward([2], [1])
    pool.check()


def test_a_page_in_use_below_one_that_is_not() -> None:
    """A transfer holds a page whose parent gives way: it leaves the tree with it, and stays as it is."""
    pool = make(blocks=12)
    cache = pool.caches["m"]
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [12]))
    pages = cache.page_list(1)
    held = cache.sends.hold(1, 4, 8)
    assert held == pages[1:2]
    cache.keep(1, [1] * 12, tail=True)
    cache.remove_sequence(1)
    assert (pool.cached, cache.used_blocks) == (4, 2)
    cache.add_sequence(2)
    cache.end_forward(cache.begin_forward([2], [20]))
    assert pages[1] not in cache.page_list(2)
    assert cached_tokens(cache.prefixes) == 0
    pool.check()
    cache.sends.let_go(held)
    assert pool.free == 2
    with pytest.raises(ValueError, match="no transfer holds"):
        cache.sends.let_go(held)
    pool.check()


def test_pins_are_counted_and_undone_one_by_one() -> None:
    pool = make(blocks=20)
    cache, tokens = pool.caches["m"], list(range(10))
    tree = cache.prefixes
    assert tree.pin(tokens) is None
    serve(cache, tokens)
    part, first, second = tree.pin([0, 1, 2, 3, 4, 77]), tree.pin(tokens), tree.pin(tokens)
    assert part is not None
    assert first is not None
    assert second is not None
    assert (part.tokens, first.tokens, second.tokens) == (5, 10, 10)
    assert (pool.cached, cache.used_blocks, tree.pinned_blocks) == (0, 6, 6)
    tree.unpin(second)
    serve(cache, [9] * 28)
    assert longest(tree, tokens) == 10
    tree.unpin(first)
    assert cache.used_blocks == cache.pages.promised_blocks == tree.pinned_blocks == 4
    pool.check()
    serve(cache, [8] * 32)
    assert longest(tree, tokens) == 8
    tree.unpin(part)
    pool.check()
    assert pool.available == pool.total


def test_a_promise_is_a_holders() -> None:
    """Pages are counted once, however many have promises of them, and nobody promises what is not held."""
    pool = make(blocks=20)
    cache = pool.caches["m"]
    serve(cache, list(range(8)))
    pages, _ = cache.prefixes.match(list(range(8)), 8)
    cache.pages.promise(pages[:1])
    with pytest.raises(ValueError, match="1 holders, and as many promises"):
        cache.pages.promise(pages[:1])
    cache.pages.unpromise(pages[:1])
    cache.adopt(1, list(range(8)), 8, whole_pages=True)
    cache.pages.promise(pages)
    path = cache.prefixes.pin(list(range(8)))
    assert path is not None
    assert cache.pages.promised_blocks == cache.prefixes.pinned_blocks == 4
    pool.check()
    cache.prefixes.unpin(path)
    assert (cache.pages.promised_blocks, cache.prefixes.pinned_blocks) == (4, 0)
    cache.pages.unpromise(pages)
    with pytest.raises(ValueError, match="promised to nobody"):
        cache.pages.unpromise(pages)
    cache.remove_sequence(1)
    assert pool.available == pool.total


def test_evict() -> None:
    pool = make()
    cache = pool.caches["m"]
    tree, trunk = cache.prefixes, list(range(8))

    def fill() -> None:
        for tokens in ([*trunk, 1, 1, 1, 1, 5], [*trunk, 1, 1, 2], [*trunk, 3], [6] * 5):
            serve(cache, tokens)

    fill()
    assert tree.evict([*trunk, 7]) == 0  # its pages lead to others
    assert tree.evict([*trunk, 1, 1]) == 4 + 1 + 3
    assert tree.evict([*trunk, 1, 1]) == 0
    assert tree.evict([6] * 3) == 5
    assert (tree.evict([*trunk, 4, 4]), cached_tokens(tree)) == (0, 9)  # what goes on otherwise stays
    assert (tree.evict([*trunk, 3, 4]), cached_tokens(tree)) == (9, 0)
    fill()
    assert tree.evict(trunk[:4]) == 8 + 4 + 1 + 3 + 1
    fill()
    path = tree.pin([*trunk, 3])
    assert path is not None
    cache.adopt(1, [6] * 5, 5)
    assert tree.evict([]) == 4 + 1 + 3
    pool.check()
    cache.remove_sequence(1)
    tree.unpin(path)
    assert tree.evict([]) == 9 + 5
    pool.check()
    assert pool.free == pool.total
