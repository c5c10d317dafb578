"""A sequence's K and V at a sender, the room for it at a receiver, and what must be there afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from kvloom.kernels import reference
from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket
from kvloom.types.geometry import I32, Geometry
from kvloom.types.transfer import BlockCopies, PageCopies, Transfer
from tests.transfer.units import Unit
from tests.transfer.wire import BLOCK_BYTES, BLOCKS

LAYERS, HEADS = 3, 2


class Nowhere(Transfer):
    """A transfer for those who need its copies only."""

    def put(self, copies: BlockCopies) -> None:
        raise NotImplementedError

    async def arrived(self) -> None:
        raise NotImplementedError

    def abandon(self) -> None:
        raise NotImplementedError


@dataclass
class Context:
    """Tokens [begin, end) lie in pages own_map [pages, layers, kv_heads] of the sender. peer: what
    the sender is told of the receiver."""

    sender: Unit
    receiver: Unit
    address: KVAddress
    own_map: I32
    before: npt.NDArray[np.uint8]
    peer: Endpoint
    prompt: list[int] = field(default_factory=lambda: list(range(1000)))

    @staticmethod
    def make(sender: Unit, receiver: Unit, begin: int, end: int, *, seed: int, head_dim: int = 16) -> Context:
        """Both arenas are filled anew, and blocks are drawn anew."""
        form = KVForm.of(Geometry(LAYERS, HEADS, head_dim, 4, BLOCK_BYTES), "float32")
        sender.call("fill", seed=2 * seed)
        receiver.call("fill", seed=2 * seed + 1)
        rng = np.random.default_rng(seed)
        empty = KVAddress(model="m", form=form, begin=begin, end=end, blocks=b"", ticket=Ticket(0, 1))
        shape = (empty.pages, LAYERS, HEADS)
        own, there = (rng.permutation(BLOCKS)[: np.prod(shape)].astype(np.int32) for _ in range(2))
        address = structs.replace(empty, blocks=KVAddress.compress(there.reshape(shape)))
        before, peer = receiver.arena.copy(), receiver.endpoint
        context = Context(sender, receiver, address, own.reshape(shape), before, peer)
        return context.reserve(address)

    def reserve(self, address: KVAddress) -> Context:
        """With a reservation of this address at the receiver."""
        digest = address.digest(self.prompt, self.receiver.endpoint)
        ticket = self.receiver.open(address.begin, digest, address.blocks)
        return replace(self, address=structs.replace(address, ticket=ticket))

    @property
    def ticket(self) -> Ticket:
        return self.address.ticket

    def claim(self, begin: int, end: int) -> int:
        digest = self.address.digest(self.prompt, self.peer)
        return self.sender.claim(self.peer, self.address, digest, begin, end)

    def layers(self, begin: int, end: int) -> list[BlockCopies]:
        """Tokens [begin, end), a copies for each layer."""
        owed = self._owed(begin, end)
        return [owed.of_layer(self.own_map, layer) for layer in range(LAYERS)]

    def whole(self, begin: int, end: int) -> BlockCopies:
        return self._owed(begin, end).whole(self.own_map)

    def _owed(self, begin: int, end: int) -> PageCopies:
        size, skipped = self.address.form.tokens_per_block, self.address.first_page
        pages = np.arange(begin // size, -(-end // size) if end > begin else 0, dtype=np.int32)
        offsets = np.maximum(begin - pages * size, 0)
        counts = np.minimum(end - pages * size, size) - offsets
        local = (pages - skipped).astype(np.int32)
        targets = self.address.block_map[local]
        return PageCopies(
            Nowhere(self.peer, self.address, begin, end),
            local,
            targets,
            offsets.astype(np.int32),
            counts.astype(np.int32),
        )

    def put(self, transfer: int, copies: BlockCopies) -> int:
        """The call's number; it is not waited for."""
        arrays = [a.tolist() for a in (copies.own, copies.peer, copies.offsets, copies.counts)]
        return self.sender.start("put", number=transfer, copies=arrays)

    def send(self, begin: int, end: int) -> None:
        """Layer by layer, wholly."""
        transfer = self.claim(begin, end)
        for call in [self.put(transfer, copies) for copies in self.layers(begin, end)]:
            self.sender.result(call)
        self.sender.call("arrived", number=transfer)

    def stall(self, where: str, *, skip: int) -> int:
        """A transfer of tokens [0, 100) that stands `where` a piece is written, after `skip` others."""
        transfer = self.claim(0, 100)
        self.sender.call("set_gate", where=where, skip=skip)
        self.put(transfer, self.whole(0, 100))
        self.sender.call("at_gate", number=transfer)
        return transfer

    def received(self) -> int:
        return int(self.receiver.call("received", ticket=self.ticket))

    def check(self, begin: int, end: int) -> None:
        """The receiver's arena is as it was, but for tokens [begin, end), which are the sender's."""
        form, copies = self.address.form, self.whole(begin, end)
        wanted = torch.from_numpy(self.before.copy()).view(-1)
        reference.copy_blocks(
            torch.from_numpy(self.sender.arena.copy()).view(-1),
            wanted,
            *(torch.from_numpy(a) for a in (copies.own, copies.peer, copies.offsets, copies.counts)),
            block_bytes=BLOCK_BYTES,
            page_tokens=form.tokens_per_block,
            token_bytes=4 * form.head_dim,
        )
        np.testing.assert_array_equal(self.receiver.arena.ravel(), wanted.numpy())

    def check_untouched(self) -> None:
        np.testing.assert_array_equal(self.receiver.arena, self.before)
