"""The prefix cache: what is found, what is held once only, and what it costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvloom.types.errors import OutOfBlocks
from tests.kv.trees import (
    PAGE,
    cached_tokens,
    check_form,
    found,
    ids,
    longest,
    make,
    nodes,
    salts,
    serve,
)


@pytest.mark.parametrize("length", range(1, 18))
@pytest.mark.parametrize("tail", [True, False])
def test_match_at_every_length(length: int, tail: bool) -> None:
    """Of `length` cached tokens, prompts that part from them at every position find just what is equal."""
    pool = make()
    cache = pool.caches["m"]
    tokens = list(range(length))
    serve(cache, tokens, tail=tail)
    kept = length if tail else length // 4 * 4
    assert pool.cached == PAGE.blocks(kept)
    for same in range(length + 1):
        for more in range(6):
            prompt = tokens[:same] + [99] * more
            for limit in range(len(prompt) + 2):
                pages, matched = cache.prefixes.match(prompt, limit)
                assert matched == min(same, kept, limit)
                assert len(pages) == PAGE.pages(matched)
            sequence = next(ids)
            assert cache.adopt(sequence, prompt, len(prompt), whole_pages=True) == min(same, kept) // 4 * 4
            cache.remove_sequence(sequence)
    pool.check()
    assert pool.free + pool.cached == pool.available == pool.total


def test_arrays_are_tokens_too() -> None:
    cache = make().caches["m"]
    tokens = np.arange(10)
    cache.adopt(1, tokens, 9)
    cache.end_forward(cache.begin_forward([1], [10]))
    cache.keep(1, tokens, tail=True)
    tree = cache.prefixes
    assert {type(token) for path, _ in nodes(tree) for token in path} == {int}
    path = tree.pin(tokens)
    assert path is not None
    assert tree.match(tokens, 10)[1] == path.tokens == 10
    tree.unpin(path)
    cache.remove_sequence(1)
    assert tree.evict(tokens[:6]) == 10


def test_one_of_many_pages_has_the_most() -> None:
    cache = make().caches["m"]
    runs = [[1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 8, 0], [1, 7], [5, 5, 5], [1, 2, 3, 0]]
    for run in runs:
        serve(cache, [0, 0, 0, 0, *run])
    for probe in itertools.product(range(10), [2, 7, 9], [3, 8, 0], range(0, 10, 3)):
        assert found(cache, [0, 0, 0, 0, *probe]) == longest(cache.prefixes, [0, 0, 0, 0, *probe])


def test_the_same_tokens_are_held_once() -> None:
    pool = make()
    cache = pool.caches["m"]
    tokens = list(range(10))
    for sequence in (1, 2, 3):
        cache.add_sequence(sequence)
        cache.end_forward(cache.begin_forward([sequence], [10]))
    assert pool.total - pool.free == 3 * PAGE.blocks(10)
    for sequence in (1, 2, 3):
        cache.keep(sequence, tokens)
    assert cache.page_list(1)[:2] == cache.page_list(2)[:2] == cache.page_list(3)[:2]
    assert len({cache.page_list(sequence)[2] for sequence in (1, 2, 3)}) == 3  # tails stay their own
    assert pool.cached == 0
    assert cache.used_blocks == pool.total - pool.free == PAGE.blocks(8) + 3 * PAGE.blocks(1)
    pool.check()
    for sequence in (2, 3):
        cache.keep(sequence, tokens, tail=True)
        cache.remove_sequence(sequence)
    assert cache.cached_blocks == PAGE.blocks(1)  # one tail of the two
    cache.keep(1, tokens, tail=True)
    cache.remove_sequence(1)
    assert pool.cached == cache.cached_blocks == PAGE.blocks(10)
    pool.check()


def test_a_tail_gives_way_to_what_begins_with_it() -> None:
    pool = make()
    cache = pool.caches["m"]
    for length in (5, 6, 7, 8, 6, 11, 9, 13):
        before = longest(cache.prefixes, list(range(20)))
        serve(cache, list(range(length)))
        assert cached_tokens(cache.prefixes) == max(length, before)
        assert pool.cached == PAGE.blocks(max(length, before))
        check_form(pool)
        pool.check()
    serve(cache, [*range(9), 50])  # parts from the page of 8…11 in its second token: beside it
    assert pool.cached == PAGE.blocks(13) + PAGE.blocks(1)


def test_a_pinned_tail_that_gives_way_stays_pinned() -> None:
    pool = make(blocks=20)
    cache = pool.caches["m"]
    serve(cache, list(range(6)))
    path = cache.prefixes.pin(list(range(6)))
    assert path is not None
    serve(cache, list(range(8)))
    pool.check()
    assert (pool.cached, cache.used_blocks, cache.pages.promised_blocks) == (0, 4, 4)
    serve(cache, [7] * 32)
    assert found(cache, list(range(8))) == 8
    assert path.tokens == 6
    cache.prefixes.unpin(path)
    pool.check()
    assert pool.available == pool.total


def test_a_partly_matched_page_is_copied_and_stays() -> None:
    pool = make()
    cache = pool.caches["m"]
    serve(cache, [1, 2, 3, 4, 5, 6, 7])
    assert cache.adopt(1, [1, 2, 3, 4, 5, 6, 0, 0], 7) == 6
    shared = cache.page_list(1)
    assert cache.blocks_for(1, 2) == 0  # at least: where blocks are short it takes the page over
    plan = cache.begin_forward([1], [2])
    assert [(copy.source, copy.tokens) for copy in plan.copies] == [(shared[1], 2)]
    cache.end_forward(plan)
    cache.keep(1, [1, 2, 3, 4, 5, 6, 0, 0])
    assert found(cache, [1, 2, 3, 4, 5, 6, 7]) == 7
    assert found(cache, [1, 2, 3, 4, 5, 6, 0, 0]) == 8
    pool.check()


def test_what_is_cached_never_costs_more() -> None:
    """The whole pool is one sequence's, and a part of its last page is cached: that page becomes its own."""
    pool = make(blocks=12)
    cache = pool.caches["m"]
    serve(cache, list(range(23)))
    prompt = [*range(22), 99, 98]
    assert cache.adopt(1, prompt, 23) == 22
    assert cache.blocks_for(1, 2) == 0 == pool.available
    plan = cache.begin_forward([1], [2])
    assert not plan.copies
    pool.check()
    cache.abort_forward(plan)
    assert cache.length(1) == 22
    cache.end_forward(cache.begin_forward([1], [2]))
    pool.check()
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 0 of 12 available"):
        cache.begin_forward([1], [1])
    cache.keep(1, prompt)
    cache.remove_sequence(1)
    assert found(cache, prompt) == 24


def test_two_that_share_a_tail_when_blocks_are_short() -> None:
    """The one with more of the page takes it over, so that the other's copy finds it as it was."""
    pool = make(blocks=4)
    cache = pool.caches["m"]
    serve(cache, [1, 2, 3])
    assert (cache.adopt(1, [1, 2, 0], 2), cache.adopt(2, [1, 0], 1)) == (2, 1)
    page = cache.page_list(1)
    plan = cache.begin_forward([2, 1], [1, 1])
    assert [(copy.source, copy.tokens) for copy in plan.copies] == [(page[0], 1)]
    assert cache.page_list(1) == page != cache.page_list(2)
    pool.check()
    cache.abort_forward(plan)
    assert cache.page_list(1) == page == cache.page_list(2)
    pool.check()


def test_a_tail_that_nobody_computed_to_its_end() -> None:
    """keep takes what is valid and no more, and refuses tokens that it does not know."""
    pool = make()
    cache = pool.caches["m"]
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [6]))
    plan = cache.begin_forward([1], [3])
    with pytest.raises(ValueError, match="in a running forward"):
        cache.keep(1, list(range(9)))
    cache.abort_forward(plan)
    with pytest.raises(ValueError, match="cannot keep 6 tokens: 5 are known"):
        cache.keep(1, list(range(5)))
    cache.prepare_receive(1, 1)
    with pytest.raises(ValueError, match="1 more reserved"):
        cache.keep(1, list(range(9)))
    cache.commit_receive(1, 0)
    cache.keep(1, list(range(9)), tail=True)
    assert found(cache, list(range(9))) == 6
    assert cached_tokens(cache.prefixes) == 6


def test_adopting_where_there_is_no_room_changes_nothing() -> None:
    pool = make()
    cache = pool.caches["m"]
    serve(cache, list(range(9)))
    for sequence in range(6):
        cache.adopt(sequence, list(range(9)), 9)
    for sequence, match in ((6, "no room"), (5, "exists already")):
        with pytest.raises(ValueError, match=match):
            cache.adopt(sequence, list(range(9)), 9)
    pool.check()


def test_salts_share_nothing() -> None:
    """Of the same tokens each salt finds what it has left itself, in blocks of its own."""
    pool = make()
    cache = pool.caches["m"]
    tokens = list(range(10))
    for n, salt in enumerate(("", "alice", "bob"), 1):
        assert serve(cache, tokens, salt=salt) == 0
        assert pool.cached == n * PAGE.blocks(10)
        assert serve(cache, tokens, salt=salt) == 10
        check_form(pool)
    pages = {salt: cache.prefixes.match(tokens, 10, salt)[0] for salt in salts(cache.prefixes)}
    assert len({page for some in pages.values() for page in some}) == 9
    assert found(cache, tokens, "eve") == 0
    assert "eve" not in salts(cache.prefixes)
    pool.check()


def test_a_sequence_leaves_what_it_computes_with_its_own_salt() -> None:
    """Also if it began empty, or as another's fork."""
    cache = make().caches["m"]
    cache.add_sequence(1, "alice")
    cache.end_forward(cache.begin_forward([1], [6]))
    cache.fork_sequence(1, 2)
    cache.end_forward(cache.begin_forward([2], [3]))
    cache.keep(2, list(range(9)), tail=True)
    assert (found(cache, list(range(9)), "alice"), found(cache, list(range(9)))) == (9, 0)


def test_a_pin_keeps_what_its_salt_has() -> None:
    pool = make(blocks=20)
    cache = pool.caches["m"]
    serve(cache, list(range(8)), salt="alice")
    assert cache.prefixes.pin(list(range(8))) is None
    path = cache.prefixes.pin(list(range(8)), "alice")
    assert path is not None
    serve(cache, [7] * 32)
    assert found(cache, list(range(8)), "alice") == 8
    assert cache.prefixes.evict(list(range(8)), "alice") == 0
    cache.prefixes.unpin(path)
    assert cache.prefixes.evict(list(range(8)), "alice") == 8
    pool.check()


def test_evicting_takes_one_salt_unless_nothing_is_named() -> None:
    pool = make()
    cache = pool.caches["m"]
    for salt in ("", "alice", "bob"):
        serve(cache, list(range(10)), salt=salt)
    assert cache.prefixes.evict(list(range(10)), "eve") == 0
    assert cache.prefixes.evict(list(range(4))) == 10
    assert [found(cache, list(range(10)), salt) for salt in ("", "alice", "bob")] == [0, 10, 10]
    assert cache.prefixes.evict([], "alice") == 10
    assert salts(cache.prefixes) == ["bob"]
    serve(cache, list(range(10)))
    assert cache.prefixes.evict([]) == 20
    assert not salts(cache.prefixes)
    assert pool.free == pool.total
