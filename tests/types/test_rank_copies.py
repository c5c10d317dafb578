"""K and V between units of any numbers of ranks: each head goes to the rank that has it, in its own page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket
from kvloom.types.errors import BadRequest
from kvloom.types.geometry import I32, AnyArray, Geometry
from kvloom.types.transfer import BlockCopies, Transfer

TOKENS = 4  # of a block
PEER = Endpoint(unit="d", kind="modelled", where=b"d")


@dataclass(frozen=True)
class Unit:
    """arena: [ranks · blocks, TOKENS], in which one number stands for K and V of a token in a head."""

    geometry: Geometry
    blocks: int  # of each rank
    page_map: I32  # [pages, layers, heads of a rank]
    arena: AnyArray

    def held(self, rank: int, page: int) -> AnyArray:
        """What a rank finds in a page: [layers, heads of a rank, TOKENS]."""
        mine = self.arena.reshape(self.geometry.ranks, self.blocks, TOKENS)[rank]
        found: AnyArray = mine[self.page_map[page]]
        return found


class Copied(Transfer):
    """Copies as soon as something is put."""

    def __init__(self, address: KVAddress, own: AnyArray, there: AnyArray) -> None:
        super().__init__(PEER, address, address.begin, address.end)
        self.own, self.there = own, there

    def put(self, copies: BlockCopies) -> None:
        for own, peer, offset, count in zip(
            copies.own, copies.peer, copies.offsets, copies.counts, strict=True
        ):
            self.there[peer, offset : offset + count] = self.own[own, offset : offset + count]

    async def arrived(self) -> None: ...

    def abandon(self) -> None: ...


@st.composite
def units(draw: st.DrawFn, layers: int, heads: int) -> Unit:
    ranks = draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]))
    geometry = Geometry(layers, heads // ranks, 8, 4, TOKENS * 64, ranks)
    pages = 5
    blocks = pages * geometry.blocks_per_page + draw(st.integers(0, 7))
    order = np.random.default_rng(draw(st.integers(0, 99))).permutation(blocks).astype(np.int32)
    page_map = order[: pages * geometry.blocks_per_page].reshape(pages, layers, -1)
    return Unit(geometry, blocks, page_map, np.full((ranks * blocks, TOKENS), -1))


def number(page: int, layer: int, head: int, token: int) -> int:
    return ((page * 8 + layer) * 8 + head) * TOKENS + token


def filled(unit: Unit) -> None:
    """Each rank writes its heads of each page, as a forward does."""
    parts = unit.arena.reshape(unit.geometry.ranks, unit.blocks, TOKENS)
    for (page, layer, local), block in np.ndenumerate(unit.page_map):
        for rank in range(unit.geometry.ranks):
            head = rank * unit.geometry.kv_heads + local
            parts[rank, block] = [number(page, layer, head, token) for token in range(TOKENS)]


def address_of(unit: Unit, pages: list[int], begin: int, end: int) -> KVAddress:
    return KVAddress(
        model="m",
        form=KVForm.of(unit.geometry, "float32"),
        begin=begin,
        end=end,
        blocks=KVAddress.compress(unit.page_map[pages]),
        ticket=Ticket(0, 1),
        ranks=unit.geometry.ranks,
        rank_blocks=unit.blocks,
    )


@given(data=st.data(), layers=st.integers(1, 3), heads=st.sampled_from([1, 2, 4, 8]), whole=st.booleans())
def test_each_head_goes_to_the_rank_that_has_it(
    data: st.DataObject, layers: int, heads: int, whole: bool
) -> None:
    here, there = data.draw(units(layers, heads)), data.draw(units(layers, heads))
    filled(here)
    begin = data.draw(st.integers(0, 3 * TOKENS - 1))
    end = data.draw(st.integers(begin + 1, 4 * TOKENS))
    pages = list(range(begin // TOKENS, -(-end // TOKENS)))
    address = address_of(there, pages, begin, end)
    assert address.form == KVForm.of(here.geometry, "float32")
    assert len(address.blocks) <= 8 * len(pages) * layers * there.geometry.kv_heads  # the first rank's alone
    runs = KVAddress.runs(KVAddress.runs_over_ranks(address.blocks, there.geometry.ranks, there.blocks))
    allowed = {
        first + i for first, length in zip(*map(np.ndarray.tolist, runs), strict=True) for i in range(length)
    }
    assert allowed == set(address.block_map.ravel().tolist())
    transfer = Copied(address, here.arena, there.arena)
    row = np.arange(5, dtype=np.int32)  # the sequence's pages here
    owed = transfer.owed(row, begin, end, here.blocks)
    if whole:
        owed.put_all(here.page_map)
    else:
        for layer in range(layers):
            owed.put(here.page_map, layer)
    written = 0
    for page in pages:
        for rank in range(there.geometry.ranks):
            for (layer, local, token), found in np.ndenumerate(there.held(rank, page)):
                inside = begin <= page * TOKENS + token < end
                head = rank * there.geometry.kv_heads + local
                assert found == (number(page, layer, head, token) if inside else -1)
                written += inside
    assert written == (end - begin) * layers * heads == int((there.arena >= 0).sum())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ranks": 3}, "3 ranks of 4 KV heads; a number that divides them is right"),
        ({"ranks": 2, "rank_blocks": 2**31 - 1}, "a rank's blocks have ids that cannot be"),
        ({"ranks": 4}, "address: 8 blocks for 2 pages of m, not 2"),
    ],
)
def test_ranks_that_cannot_be_are_refused(change: dict[str, int], reason: str) -> None:
    geometry = Geometry(1, 4, 8, 4, TOKENS * 64)
    blocks = KVAddress.compress(np.arange(8, dtype=np.int32).reshape(2, 1, 4))
    address = KVAddress(
        model="m", form=KVForm.of(geometry, "float32"), begin=0, end=8, blocks=blocks, ticket=Ticket(0, 1)
    )
    assert address.block_map.shape == (2, 1, 4)
    with pytest.raises(BadRequest, match=reason):
        _ = structs.replace(address, **change).block_map


def test_a_digest_is_of_the_ranks_too() -> None:
    """Another number of them, or another distance, writes elsewhere."""
    form = KVForm.of(Geometry(1, 2, 8, 4, TOKENS * 64, 2), "float32")
    address = KVAddress(
        model="m", form=form, begin=0, end=4, blocks=b"", ticket=Ticket(0, 1), ranks=2, rank_blocks=9
    )
    others = [structs.replace(address, ranks=1), structs.replace(address, rank_blocks=8)]
    assert address.digest([1], PEER) not in [other.digest([1], PEER) for other in others]
