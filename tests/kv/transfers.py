"""Addresses and transfers for tests of the accounting, where nothing moves."""

from __future__ import annotations

import struct

import numpy as np

from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket
from kvloom.types.geometry import Geometry
from kvloom.types.transfer import BlockCopies, PageCopies, Transfer

FIRST = 10_000  # a block of the peer: no block of a test's own pool


class Shelf(Transfer):
    """A transfer that keeps its copies."""

    def __init__(self, address: KVAddress, begin: int, end: int) -> None:
        super().__init__(Endpoint(unit="peer", kind="modelled", where=b""), address, begin, end)
        self.kept: list[BlockCopies] = []

    def put(self, copies: BlockCopies) -> None:
        self.kept.append(copies)

    async def arrived(self) -> None: ...

    def abandon(self) -> None: ...


def address_of(geometry: Geometry, begin: int, end: int, model: str = "m") -> KVAddress:
    """Blocks FIRST, FIRST + 1, … of the peer take tokens [begin, end)."""
    pages = geometry.pages(end) - begin // geometry.tokens_per_block if end > begin else 0
    count = pages * geometry.blocks_per_page
    return KVAddress(
        model=model,
        form=KVForm.of(geometry, "float32"),
        begin=begin,
        end=end,
        blocks=struct.pack("<ii", FIRST, count) if count else b"",
        ticket=Ticket(0, 1),
    )


def tokens_of(send: PageCopies, geometry: Geometry, first_page: int) -> dict[int, tuple[int, int]]:
    """By position, our page and its offset: for an address from `address_of` that begins in `first_page`."""
    found: dict[int, tuple[int, int]] = {}
    width, each = geometry.tokens_per_block, geometry.blocks_per_page
    for page, target, offset, count in zip(send.pages, send.targets, send.offsets, send.counts, strict=True):
        edge, rest = divmod(int(target[0, 0]) - FIRST, each)
        assert rest == 0
        assert (target.ravel() == FIRST + edge * each + np.arange(each)).all()
        for at in range(int(offset), int(offset + count)):
            position = (first_page + edge) * width + at
            assert position not in found, "a token goes twice"
            found[position] = (int(page), at)
    return found
