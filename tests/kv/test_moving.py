"""Receiving and sending, as the accounting sees it."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from msgspec import structs

from kvloom.kv.pool import Pool
from kvloom.types.errors import BadRequest, OutOfBlocks
from kvloom.types.geometry import Geometry
from tests.kv.transfers import FIRST, Shelf, address_of, tokens_of

PAGE = Geometry(layers=2, kv_heads=2, head_dim=8, itemsize=4, block_bytes=256)  # 4 tokens, 4 blocks a page


def make(blocks: int = 80) -> Pool:
    return Pool(blocks, {"m": PAGE}, max_sequences=4, max_tokens={"m": 64})


@pytest.mark.parametrize(("own", "count"), [(0, 1), (0, 4), (3, 1), (3, 2), (3, 14), (4, 5), (8, 8)])
def test_a_reservation_is_where_the_sequence_will_read(own: int, count: int) -> None:
    pool = make()
    cache = pool.caches["m"]
    cache.add_sequence(1)
    if own:
        cache.end_forward(cache.begin_forward([1], [own]))
    blocks = cache.prepare_receive(1, count)
    pages = cache.page_list(1)[own // 4 :]
    assert (blocks == cache.pages.map[pages]).all()
    assert blocks.shape == (PAGE.pages(own + count) - own // 4, 2, 2)
    blocks[:] = -1  # its own array
    pool.check()
    assert cache.length(1) == own
    for refused in (lambda: cache.begin_forward([1], [1]), lambda: cache.prepare_receive(1, 1)):
        with pytest.raises(ValueError, match=r"idle sequences|reserved already"):
            refused()
    with pytest.raises(ValueError, match="waits for"):
        cache.remove_sequence(1)


@pytest.mark.parametrize("arrived", range(8))
def test_what_has_not_arrived_is_given_up(arrived: int) -> None:
    pool = make()
    cache = pool.caches["m"]
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [3]))
    cache.prepare_receive(1, 7)
    for wrong in (-1, 8):
        with pytest.raises(ValueError, match=f"cannot commit {wrong} of 7"):
            cache.commit_receive(1, wrong)
    cache.commit_receive(1, arrived)
    assert cache.length(1) == 3 + arrived
    assert cache.used_blocks == PAGE.blocks(3 + arrived)
    pool.check()
    cache.end_forward(cache.begin_forward([1], [2]))
    pool.check()


def test_a_reservation_takes_what_is_cached_and_no_more() -> None:
    pool = make(blocks=20)
    cache = pool.caches["m"]
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [10]))
    cache.keep(1, list(range(10)), tail=True)
    cache.remove_sequence(1)
    assert cache.adopt(2, list(range(20)), 20, whole_pages=True) == 8
    with pytest.raises(OutOfBlocks):
        cache.prepare_receive(2, 13)
    assert (pool.cached, pool.free) == (4, 8)
    assert cache.prepare_receive(2, 12).shape[0] == 3
    assert (pool.cached, pool.free) == (0, 0)
    assert cache.prefixes.match(list(range(20)), 20)[1] == 8
    cache.commit_receive(2, 0)
    cache.remove_sequence(2)
    pool.check()
    assert pool.available == pool.total


def test_a_shared_tail_is_not_for_a_peer() -> None:
    cache = make().caches["m"]
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [6]))
    cache.fork_sequence(1, 2)
    with pytest.raises(ValueError, match="shares its last page"):
        cache.prepare_receive(2, 1)


@pytest.mark.parametrize(
    ("first", "begin", "end"), [(0, 0, 20), (0, 3, 17), (5, 6, 19), (8, 8, 9), (4, 7, 8)]
)
def test_forwards_send_what_they_compute(first: int, begin: int, end: int) -> None:
    """[begin, end) of an address from `first` on, in forwards of 3 tokens: each token with its forward."""
    pool = make()
    cache, shelf = pool.caches["m"], Shelf(address_of(PAGE, first, 20), begin, end)
    cache.add_sequence(1)
    cache.sends.mark(1, shelf)
    sent: dict[int, tuple[int, int]] = {}
    for start in range(0, 21, 3):
        plan = cache.begin_forward([1], [3])
        if start % 2:  # a forward that failed sends again
            cache.abort_forward(plan)
            plan = cache.begin_forward([1], [3])
        wanted = [p for p in range(start, start + 3) if begin <= p < end]
        assert len(plan.sends) == bool(wanted)
        for send in plan.sends:
            assert send.transfer is shelf
            found = tokens_of(send, PAGE, first // 4)
            assert sorted(found) == wanted
            sent |= found
            for layer in range(2):
                copies = send.of_layer(plan.page_map, layer)
                assert (copies.own == plan.page_map[send.pages, layer].ravel()).all()
                assert len(copies.own) == len(copies.peer) == 2 * len(send.pages)
        cache.end_forward(plan)
    pages = cache.page_list(1)
    assert sent == {p: (pages[p // 4], p % 4) for p in range(begin, end)}


def test_what_is_computed_already_goes_at_once() -> None:
    pool = make()
    cache, shelf = pool.caches["m"], Shelf(address_of(PAGE, 5, 20), 6, 20)
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [14]))
    pages = cache.page_list(1)
    send = cache.sends.planned(1, shelf, 14)
    assert tokens_of(send, PAGE, 1) == {p: (pages[p // 4], p % 4) for p in range(6, 14)}
    whole = send.whole(cache.pages.map)
    assert whole.own.tolist() == cache.pages.map[pages[1:]].ravel().tolist()
    assert whole.peer.tolist() == list(range(FIRST, FIRST + 12))
    assert whole.offsets.tolist() == [2] * 4 + [0] * 8
    assert whole.counts.tolist() == [2] * 4 + [4] * 4 + [2] * 4
    assert whole.own.dtype == whole.peer.dtype == whole.offsets.dtype == whole.counts.dtype == np.int32
    shelf.advance(14)
    cache.sends.mark(1, shelf)
    (send,) = cache.begin_forward([1], [1]).sends
    assert list(tokens_of(send, PAGE, 1)) == [14]


def test_a_send_that_makes_no_sense_changes_nothing() -> None:
    pool = make()
    cache, address = pool.caches["m"], address_of(PAGE, 4, 12)
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [8]))
    for begin, end in ((3, 8), (8, 8), (9, 8)):
        with pytest.raises(ValueError, match="not within the address"):
            cache.sends.planned(1, Shelf(address, begin, 12), end)
    with pytest.raises(ValueError, match="holds 8 tokens"):
        cache.sends.planned(1, Shelf(address, 4, 9), 9)
    with pytest.raises(ValueError, match="not within the address"):
        cache.sends.mark(1, Shelf(address, 8, 13))
    with pytest.raises(ValueError, match="8 are computed already"):
        cache.sends.mark(1, Shelf(address, 7, 12))
    other = structs.replace(address, form=structs.replace(address.form, tokens_per_block=5))
    for wrong in (other, structs.replace(address, model="n")):
        with pytest.raises(ValueError, match="is none for m"):
            cache.sends.mark(1, Shelf(wrong, 8, 12))
    with pytest.raises(BadRequest, match="7 blocks for 2 pages"):
        cache.sends.mark(1, Shelf(structs.replace(address, blocks=struct.pack("<ii", 0, 7)), 8, 12))
    plan = cache.begin_forward([1], [2])
    assert not plan.sends
    for refused in (
        lambda: cache.sends.mark(1, Shelf(address, 10, 12)),
        lambda: cache.sends.planned(1, Shelf(address, 4, 8), 8),
        lambda: cache.sends.hold(1, 4, 8),
    ):
        with pytest.raises(ValueError, match="in a running forward"):
            refused()


def test_pages_that_copies_read_outlive_the_sequence() -> None:
    pool = make(blocks=24)
    cache = pool.caches["m"]
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [14]))
    pages = cache.page_list(1)
    first, second = cache.sends.hold(1, 5, 13), cache.sends.hold(1, 4, 4)
    assert (first, second) == (pages[1:4], [])
    again = cache.sends.hold(1, 12, 50)  # as far as there are any
    assert again == pages[3:]
    cache.remove_sequence(1)
    pool.check()
    assert cache.used_blocks == 12
    cache.sends.let_go(first)
    pool.check()
    assert cache.used_blocks == 4
    with pytest.raises(ValueError, match="no transfer holds"):
        cache.sends.let_go(again + again)
    cache.sends.let_go(again)
    assert pool.free == pool.total


def test_a_shipping_sequence_keeps_its_own_pages() -> None:
    """Copies may still read them when the same tokens turn out to be cached."""
    pool = make()
    cache = pool.caches["m"]
    for sequence in (1, 2):
        cache.add_sequence(sequence)
        cache.end_forward(cache.begin_forward([sequence], [8]))
    cache.keep(1, list(range(8)))
    pages = cache.page_list(2)
    cache.sends.planned(2, Shelf(address_of(PAGE, 0, 8), 0, 8), 8)
    cache.keep(2, list(range(8)))
    assert cache.page_list(2) == pages != cache.page_list(1)
    pool.check()


@pytest.mark.parametrize("fails", [True, False])
def test_a_copied_page_is_kept_for_what_was_sent_from_it(fails: bool) -> None:
    """A part of a cached page is sent from that page, and then the sequence writes to a copy of its own."""
    pool = make(blocks=16)
    cache = pool.caches["m"]
    cache.add_sequence(1)
    cache.end_forward(cache.begin_forward([1], [7]))
    cache.keep(1, list(range(7)), tail=True)
    cache.remove_sequence(1)
    assert cache.adopt(2, [*range(6), 9], 6) == 6
    shared = cache.page_list(2)[1]
    cache.sends.planned(2, Shelf(address_of(PAGE, 0, 7), 0, 7), 6)
    plan = cache.begin_forward([2], [1])
    assert len(plan.copies) == 1
    if fails:
        cache.abort_forward(plan)
        pool.check()
        plan = cache.begin_forward([2], [1])
    cache.end_forward(plan)
    pool.check()
    assert cache.prefixes.evict([]) == 0  # all of it is used
    held = cache.sends.hold(2, 0, 7)
    assert held == [*cache.page_list(2), shared]
    cache.remove_sequence(2)
    pool.check()
    cache.add_sequence(3)
    with pytest.raises(OutOfBlocks):
        cache.begin_forward([3], [5])
    cache.sends.let_go(held)
    cache.end_forward(cache.begin_forward([3], [5]))
    pool.check()
