"""Addresses and the blocks they name."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.transfer.target import WriteTarget
from kvloom.types.address import KVAddress, KVForm, Ticket
from kvloom.types.errors import BadRequest

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


def test_an_address_larger_than_the_arena_is_refused_before_it_is_unpacked() -> None:
    with pytest.raises(BadRequest, match="of an arena of 64"):
        _room(_address(_packed([(0, 2**31 - 1)]), end=2**31 - 1))
