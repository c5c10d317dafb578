"""Run-length compressed addresses: nothing is lost, and no shorter run list says the same."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvloom.core.geometry import Geometry
from kvloom.kv.address import KVAddress
from kvloom.kv.pool import Pool

_RUNS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 7)), max_size=6)
_SLOTS = _RUNS.map(
    lambda runs: list(dict.fromkeys(first + i for first, length in runs for i in range(length)))
)


def _address(slots: list[int]) -> KVAddress:
    return KVAddress.compress("m", 4, slots)


@given(slots=_SLOTS)
def test_the_way_there_and_back(slots: list[int]) -> None:
    address = _address(slots)
    assert list(address.slots()) == slots
    assert address.tokens == len(slots)
    breaks = sum(after != before + 1 for before, after in itertools.pairwise(slots))
    assert len(address.runs) == (breaks + 1 if slots else 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(address), type=KVAddress) == address


@given(slots=_SLOTS, first=st.integers(-3, 40), second=st.integers(0, 40))
def test_skip(slots: list[int], first: int, second: int) -> None:
    address = _address(slots)
    assert list(address.skip(first).slots()) == slots[max(first, 0) :]
    assert address.skip(max(first, 0)).skip(second) == address.skip(max(first, 0) + second)
    assert address.skip(first) == _address(slots[max(first, 0) :])
    assert all(length > 0 for _, length in address.skip(first).runs)


def test_it_is_where_the_sequence_will_read() -> None:
    """prepare_receive names the slots that the sequence's own table gives those positions."""
    geometry = Geometry(layers=2, kv_heads=1, head_dim=8, itemsize=4, block_bytes=256)  # 4 tokens a page
    pool = Pool(40, {"m": geometry}, max_sequences=3, max_tokens={"m": 64})
    cache = pool.caches["m"]
    for sequence in (1, 2, 3):
        cache.add_sequence(sequence)
    for sequence in (1, 2, 1, 2):
        cache.end_forward(cache.begin_forward([sequence], [3]))
    cache.remove_sequence(1)
    for sequence, count in ((2, 9), (3, 17)):
        held = cache.length(sequence)
        address = cache.prepare_receive(sequence, count)
        pages = cache.page_list(sequence)
        wanted = [pages[p // 4] * 4 + p % 4 for p in range(held, held + count)]
        assert list(address.slots()) == wanted
    pool.check()
