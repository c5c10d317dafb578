"""The KV plane as the control plane sees it: a unit's arena, written by its peers without its doing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Literal, Protocol

import numpy as np
from msgspec import Meta, Struct, msgpack

from kvloom.types.errors import BadRequest
from kvloom.types.geometry import I32, Geometry


@dataclass(frozen=True, slots=True)
class Parcel:
    """Copies of one shipment that may begin at once: for each i, tokens [offsets[i], offsets[i] + counts[i])
    of K and of V of own block own[i] into the peer's block peer[i]. All four are [n]."""

    own: I32
    peer: I32
    offsets: I32
    counts: I32


class Shipment(Protocol):
    """Tokens on their way into a peer's arena. Whoever has one awaits `arrived` or calls `abandon`."""

    def put(self, parcel: Parcel) -> None:
        """Copy this, on the transport's thread. Callable from any thread; never waits, never raises: what
        goes wrong, `arrived` tells."""

    async def arrived(self) -> None:
        """After the last `put`: wait for all copies and for what was claimed before this, and tell the
        receiver's ledger. Raises Unavailable where the peer is gone, BadRequest where its reservation is."""

    def abandon(self) -> None:
        """Copy no more, and let others claim these tokens. At most one piece is copied after it, milliseconds
        long. Without effect once `arrived` has returned."""


@dataclass(frozen=True, slots=True)
class PlannedSend:
    """What a forward owes a shipment after each layer's write: for each i, tokens [offsets[i],
    offsets[i] + counts[i]) of our page pages[i] go to the peer's blocks targets[i].

    pages, offsets, counts: [n]; targets: [n, layers, kv_heads].
    """

    shipment: Shipment
    pages: I32
    targets: I32
    offsets: I32
    counts: I32

    def parcel(self, page_map: I32, layer: int) -> Parcel:
        """One layer's part. page_map: [pages, layers, kv_heads]."""
        return self._parcel(page_map[self.pages, layer], self.targets[:, layer])

    def whole(self, page_map: I32) -> Parcel:
        """All layers at once, for pages that are computed already."""
        heads = self.targets.shape[2]
        return self._parcel(
            page_map[self.pages].reshape(-1, heads), self.targets.reshape(-1, heads), self.targets.shape[1]
        )

    def _parcel(self, own: I32, peer: I32, layers: int = 1) -> Parcel:
        each = layers * own.shape[1]
        offsets, counts = np.repeat(self.offsets, each), np.repeat(self.counts, each)
        return Parcel(own.ravel(), peer.ravel(), offsets, counts)


Position = Annotated[int, Meta(ge=0, lt=2**31)]
Digest = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Kind = Literal["shm", "cuda", "nixl", "nixl-cuda", "modelled"]
_Size = Annotated[int, Meta(ge=1, lt=2**31)]
_RUN = np.dtype([("first", "<i4"), ("length", "<i4")])


class KVForm(Struct, frozen=True, kw_only=True):
    """What two units must have in common to exchange a model's K and V. dtype: torch's name."""

    layers: _Size
    kv_heads: _Size
    head_dim: _Size
    dtype: str
    block_bytes: _Size
    tokens_per_block: _Size

    @staticmethod
    def of(geometry: Geometry, dtype: str) -> KVForm:
        return KVForm(
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            dtype=dtype,
            block_bytes=geometry.block_bytes,
            tokens_per_block=geometry.tokens_per_block,
        )

    def refuse_unlike(self, other: KVForm, *, model: str) -> None:
        """Raises BadRequest that names what the two differ in."""
        unlike = [
            f"{name} {getattr(other, name)} instead of {getattr(self, name)}"
            for name in self.__struct_fields__
            if getattr(other, name) != getattr(self, name)
        ]
        if unlike:
            raise BadRequest(f"the peer's {model} has {', '.join(unlike)}; K and V cannot be exchanged")


class Endpoint(Struct, frozen=True, kw_only=True):
    """How peers reach one unit's arena; a restarted unit has another. `where` is the transport's own."""

    unit: str
    kind: Kind
    where: bytes


class Ticket(Struct, frozen=True, array_like=True):
    """A reservation as the receiver's ledger knows it. Tickets of one slot differ in generation."""

    slot: Annotated[int, Meta(ge=0, lt=1 << 20)]
    generation: Annotated[int, Meta(ge=1, lt=1 << 62)]


class KVAddress(Struct, frozen=True, kw_only=True, dict=True):
    """Tokens [begin, end) of a sequence at the receiver.

    blocks: runs of the receiver's block ids, in order [page, layer, head], for the pages that hold these
    tokens: first and length of each, as little-endian int32 (base64 in JSON). Position p lies at offset
    p mod tokens_per_block in its page, at both sides.
    """

    model: str
    form: KVForm
    begin: Position
    end: Position
    blocks: bytes
    ticket: Ticket

    @property
    def first_page(self) -> int:
        """The sequence's page, counted from its start, that `blocks` begins with."""
        return self.begin // self.form.tokens_per_block

    @property
    def pages(self) -> int:
        return -(-self.end // self.form.tokens_per_block) - self.first_page if self.end > self.begin else 0

    @cached_property
    def block_map(self) -> I32:
        """[pages, layers, kv_heads], not to be written to. Raises BadRequest where the runs do not make up as
        many blocks."""
        shape = (self.pages, self.form.layers, self.form.kv_heads)
        if len(self.blocks) % _RUN.itemsize:
            raise BadRequest("address: its blocks are no pairs of int32")
        runs = np.frombuffer(self.blocks, _RUN)
        firsts, lengths = runs["first"].astype(np.int64), runs["length"].astype(np.int64)
        if (firsts < 0).any() or (lengths < 1).any() or (firsts + lengths > 2**31).any():
            raise BadRequest("address: a run of blocks has no length, or ids that cannot be")
        wanted, found = int(np.prod(shape)), int(lengths.sum())
        if found != wanted:
            raise BadRequest(f"address: {found} blocks for {self.pages} pages of {self.model}, not {wanted}")
        steps = np.repeat(firsts - np.cumsum(lengths) + lengths, lengths)
        blocks: I32 = (np.arange(wanted) + steps).astype(np.int32).reshape(shape)
        blocks.flags.writeable = False
        return blocks

    def digest(self, prompt: Sequence[int], peer: Endpoint) -> int:
        """What the address takes, and where, as one word: its receiver keeps it, and each sender shows it.
        peer: the receiver's endpoint."""
        return digest_of(
            model=self.model,
            form=self.form,
            begin=self.begin,
            end=self.end,
            blocks=self.blocks,
            where=peer.where,
            prompt=prompt,
        )

    @staticmethod
    def compress(block_map: I32) -> bytes:
        """[pages, layers, kv_heads] → the shortest run list in that order."""
        ids = block_map.ravel()
        if not ids.size:
            return b""
        starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
        runs = np.empty(starts.size, _RUN)
        runs["first"], runs["length"] = ids[starts], np.diff(starts, append=ids.size)
        return runs.tobytes()


def digest_of(
    *, model: str, form: KVForm, begin: int, end: int, blocks: bytes, where: bytes, prompt: Sequence[int]
) -> int:
    """64 bits of BLAKE2b (RFC 7693) over an address' fields but its ticket, over `where` of the receiver's
    endpoint, from which a sender counts the blocks, and over prompt[:end]: what comes after the address does
    not change its K and V."""
    whole = msgpack.encode((model, form, begin, end, blocks, where, prompt[:end]))
    return int.from_bytes(blake2b(whole, digest_size=8).digest(), "little", signed=True)


def other_address(unit: str) -> str:
    """What a sender is told whose digest is not the reservation's."""
    return (
        f"address: the reservation at {unit} is for other blocks, tokens, or another model, prompt or "
        "endpoint; send to the address and peer that prep_recv answered, and the prompt that it was asked for"
    )


def resolve(position: int | None, length: int, name: str) -> int:
    """Negative positions count from the back, None is the whole. Raises BadRequest naming `name`."""
    found = length if position is None else position + length if position < 0 else position
    if not 0 <= found <= length:
        raise BadRequest(f"{name}: {position} is outside a prompt of {length} tokens", param=name)
    return found


class Transport(Protocol):
    """One unit's end of the plane. Its methods are called on one event loop, and none of them waits."""

    @property
    def endpoint(self) -> Endpoint: ...

    # receiving

    def open(self, begin: int, digest: int) -> Ticket:
        """A reservation begins, with nothing arrived past token `begin`, for whoever shows `digest`, that of
        its address, this endpoint and the prompt. Raises QueueFull where there are too many, Unavailable
        where nothing can arrive any more."""

    def received(self, ticket: Ticket) -> int:
        """The position up to which everything has arrived. Raises BadRequest where the ticket is closed."""

    def close(self, ticket: Ticket) -> bool:
        """From here on no sender begins to write for this ticket, and what has not arrived never does. True:
        nobody is writing either, and its blocks may be used again. False: a sender is, for milliseconds (for
        as long as its grant where it cannot be asked); ask again."""

    # sending

    def ship(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> Shipment:
        """Claim tokens [begin, end) of the address: the next ones that nobody has claimed. digest: of the
        address, `peer` and the prompt that is sent. Raises BadRequest where that is not the reservation's, so
        that one of them is another than at `open`, where the reservation is over, and where another send
        has claimed the tokens; Unavailable where the peer cannot be reached, or nothing can be sent any more.
        What only the peer can tell, the shipment's `arrived` raises instead; nothing is written before."""
