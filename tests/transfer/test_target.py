"""Addresses and the blocks they name."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.transfer.target import WriteTarget
from kvloom.types.address import KVAddress, KVForm, Ticket
from kvloom.types.errors import BadRequest
from kvloom.types.transfer import BlockCopies

FORM = KVForm(layers=2, kv_heads=3, head_dim=16, dtype="float32", block_bytes=4096, tokens_per_block=32)
ARENA = 64


class Size(NamedTuple):
    """Of an arena."""

    blocks: int
    block_bytes: int


def _address(blocks: bytes, *, end: int = 64) -> KVAddress:
    return KVAddress(model="m", form=FORM, begin=0, end=end, blocks=blocks, ticket=Ticket(0, 1))


def _packed(runs: Sequence[tuple[int, int]]) -> bytes:
    return b"".join(struct.pack("<ii", *run) for run in runs)


def _room(address: KVAddress) -> WriteTarget:
    return WriteTarget.of(address, 0, address.end, own=Size(9, 4096), peer=Size(ARENA, 4096))


@given(st.lists(st.integers(0, ARENA - 1), min_size=12, max_size=12))
def test_a_map_comes_back_from_its_runs(ids: list[int]) -> None:
    blocks = np.array(ids, np.int32).reshape(2, 2, 3)
    address = _address(KVAddress.compress(blocks))
    np.testing.assert_array_equal(address.block_map, blocks)
    assert set(np.flatnonzero(_room(address).allowed).tolist()) == set(ids)


@pytest.mark.parametrize("runs", [(), ((0, 11),), ((0, 6), (7, 7)), ((60, 12),), ((0, 1), (2**31 - 2, 11))])
def test_runs_that_are_not_the_peers_are_refused(runs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(BadRequest, match="address:"):
        _room(_address(_packed(runs)))


def test_rows_of_int8_have_their_scales() -> None:
    """Tokens of a part of a block are two runs of whole rows, of 20 bytes each."""
    form = replace(FORM, dtype="int8", tokens_per_block=102)
    address = replace(_address(_packed([(0, 6)]), end=100), form=form)
    target = _room(address)
    ids = np.zeros(1, np.int32)
    part = BlockCopies(ids, ids + 1, ids + 3, ids + 7)
    own, peer, sizes = target.spans(part)
    assert (own.tolist(), sizes.tolist()) == ([60, 102 * 20 + 60], [140, 140])
    assert peer.tolist() == [4096 + 60, 4096 + 102 * 20 + 60]
    assert target.size(part) == 280
    for tokens in (101, 128):
        with pytest.raises(BadRequest, match="of 2 x 20 bytes"):
            _room(replace(address, form=replace(form, tokens_per_block=tokens)))


def test_an_address_larger_than_the_arena_is_refused_before_it_is_unpacked() -> None:
    with pytest.raises(BadRequest, match="of an arena of 64"):
        _room(_address(_packed([(0, 2**31 - 1)]), end=2**31 - 1))


@given(
    st.lists(
        st.tuples(
            st.integers(0, ARENA - 1), st.integers(0, ARENA - 1), st.integers(0, 31), st.integers(0, 32)
        ),
        unique_by=(lambda one: one[0], lambda one: one[1]),
        max_size=40,
    ),
    st.booleans(),
    st.sampled_from([1000, 4096, 10_000, 1 << 20]),
    st.sampled_from([1, 3, 512]),
)
def test_pieces_are_the_same_copies(
    rows: list[tuple[int, int, int, int]], whole: bool, size: int, most: int
) -> None:
    """Whatever lies beside what: each byte of K and V goes once, from where it is to where it belongs."""
    target = WriteTarget(4096, 32, 64, ARENA, np.ones(ARENA, np.bool_))
    columns = np.array(rows, np.int32).reshape(-1, 4)
    own, peer = columns[:, 0], columns[:, 1]
    offsets = columns[:, 2] * (not whole)
    counts = np.full_like(offsets, 32) if whole else np.minimum(columns[:, 3], 32 - offsets)
    copies = BlockCopies(own, peer, offsets, counts)
    wanted: dict[int, int] = {}
    found: dict[int, int] = {}
    for i in range(len(rows)):
        for half in (0, 2048):
            for byte in range(offsets[i] * 64, (offsets[i] + counts[i]) * 64):
                wanted[int(peer[i]) * 4096 + half + int(byte)] = int(own[i]) * 4096 + half + int(byte)
    for ours, theirs, sizes in target.pieces(copies, size, most):
        assert 0 < len(sizes) <= most
        assert sizes.sum() < 2 * size
        for at, to, count in zip(ours.tolist(), theirs.tolist(), sizes.tolist(), strict=True):
            assert not found.keys() & set(range(to, to + count))
            found.update(zip(range(to, to + count), range(at, at + count), strict=True))
    assert found == wanted
    assert target.size(copies) == len(wanted)


def test_blocks_beside_each_other_in_both_arenas_are_one_span() -> None:
    target = WriteTarget(4096, 32, 64, ARENA, np.ones(ARENA, np.bool_))
    own, peer = np.array([9, 3, 4, 5, 8], np.int32), np.array([20, 10, 11, 12, 14], np.int32)
    copies = BlockCopies(own, peer, np.zeros(5, np.int32), np.full(5, 32, np.int32))
    ours, theirs, sizes = target.spans(copies)
    assert (ours // 4096).tolist() == [3, 8, 9]
    assert (theirs // 4096).tolist() == [10, 14, 20]
    assert (sizes // 4096).tolist() == [3, 1, 1]
