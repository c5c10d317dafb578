"""Addresses: the blocks of a peer's arena that a run of tokens goes to, as they cross the verbs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct, msgpack

from kvloom.types.errors import BadRequest
from kvloom.types.geometry import I32, I64, Geometry, over_ranks

Position = Annotated[int, Meta(ge=0, lt=2**31)]
Digest = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
EndpointKind = Literal["auto", "shm", "cuda", "nixl", "nixl-cuda", "tcp", "modelled"]
_Size = Annotated[int, Meta(ge=1, lt=2**31)]
_RUN = np.dtype([("first", "<i4"), ("length", "<i4")])


class KVForm(Struct, frozen=True, kw_only=True):
    """The form of a model's K and V, which two units must have in common to exchange it."""

    layers: _Size
    kv_heads: _Size  # of all ranks
    head_dim: _Size
    dtype: str  # of their numbers, torch's name; int8 has a scale a row
    block_bytes: _Size
    tokens_per_block: _Size

    @staticmethod
    def of(geometry: Geometry, dtype: str) -> KVForm:
        return KVForm(
            layers=geometry.layers,
            kv_heads=geometry.kv_heads * geometry.ranks,
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
    """The endpoint at which peers reach one unit's arena. A restarted unit has another. `where` is the
    transport's own."""

    unit: str
    kind: EndpointKind
    where: bytes


class Ticket(Struct, frozen=True, array_like=True):
    """A reservation as the receiver's ledger knows it. Tickets of one slot differ in generation."""

    slot: Annotated[int, Meta(ge=0, lt=1 << 20)]
    generation: Annotated[int, Meta(ge=1, lt=1 << 62)]


class KVAddress(Struct, frozen=True, kw_only=True, dict=True):
    """The blocks for tokens [begin, end) of a sequence at the receiver.

    Position p lies at offset p mod tokens_per_block in its page, at both sides.
    """

    model: str
    form: KVForm
    begin: Position
    end: Position
    # Runs of the receiver's block ids, in order [page, layer, head], for the pages that hold these tokens:
    # first and length of each, as little-endian int32 (base64 in JSON). Of a receiver of several ranks they
    # are the first rank's, with its heads.
    blocks: bytes
    ticket: Ticket
    ranks: _Size = 1  # of the receiver, each of which has as many of the heads, one after the other
    rank_blocks: Position = 0  # by which each rank's blocks lie behind those of the rank before it

    @property
    def first_page(self) -> int:
        """The number of the sequence's page, counted from its start, with which `blocks` begins."""
        return self.begin // self.form.tokens_per_block

    @property
    def pages(self) -> int:
        return -(-self.end // self.form.tokens_per_block) - self.first_page if self.end > self.begin else 0

    @cached_property
    def block_map(self) -> I32:
        """Returns the blocks [pages, layers, kv_heads] of all ranks' heads, which nobody may write to. Raises
        BadRequest if the runs do not make up as many blocks."""
        heads, rest = divmod(self.form.kv_heads, self.ranks)
        if rest:
            raise BadRequest(
                f"address: {self.ranks} ranks of {self.form.kv_heads} KV heads; a number that divides them "
                "is right"
            )
        shape = (self.pages, self.form.layers, heads)
        firsts, lengths = self.runs(self.blocks)
        if lengths.size and int((firsts + lengths).max()) + (self.ranks - 1) * self.rank_blocks > 2**31:
            raise BadRequest("address: a rank's blocks have ids that cannot be")
        wanted, found = int(np.prod(shape)), int(lengths.sum())
        if found != wanted:
            raise BadRequest(f"address: {found} blocks for {self.pages} pages of {self.model}, not {wanted}")
        steps = np.repeat(firsts - np.cumsum(lengths) + lengths, lengths)
        first: I32 = (np.arange(wanted) + steps).astype(np.int32).reshape(shape)
        blocks = over_ranks(first, self.ranks, self.rank_blocks)
        blocks.flags.writeable = False
        return blocks

    def digest(self, prompt: Sequence[int], peer: Endpoint, salt: str = "") -> int:
        """Returns one word that stands for the blocks, tokens and model of the address: its receiver keeps
        it, and each sender shows it. `peer` is the receiver's endpoint, and `salt` the one with which the
        receiver caches the prompt."""
        return digest_of(
            model=self.model,
            form=self.form,
            begin=self.begin,
            end=self.end,
            blocks=self.blocks,
            where=peer.where,
            prompt=prompt,
            salt=salt,
            ranks=(self.ranks, self.rank_blocks),
        )

    @staticmethod
    def runs(blocks: bytes) -> tuple[I64, I64]:
        """Returns the first block and the length of each run of a run list, both [n]. Raises BadRequest if it
        is none."""
        if len(blocks) % _RUN.itemsize:
            raise BadRequest("address: its blocks are no pairs of int32")
        runs = np.frombuffer(blocks, _RUN)
        firsts, lengths = runs["first"].astype(np.int64), runs["length"].astype(np.int64)
        if (firsts < 0).any() or (lengths < 1).any() or (firsts + lengths > 2**31).any():
            raise BadRequest("address: a run of blocks has no length, or ids that cannot be")
        return firsts, lengths

    @staticmethod
    def compress(block_map: I32) -> bytes:
        """Returns the shortest run list of [pages, layers, kv_heads] blocks, in that order."""
        ids = block_map.ravel()
        if not ids.size:
            return b""
        starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
        runs = np.empty(starts.size, _RUN)
        runs["first"], runs["length"] = ids[starts], np.diff(starts, append=ids.size)
        return runs.tobytes()

    @staticmethod
    def runs_over_ranks(blocks: bytes, ranks: int, rank_blocks: int) -> bytes:
        """Returns the run list of all ranks' blocks, rank by rank, given the first one's."""
        runs = np.concatenate([np.frombuffer(blocks, _RUN)] * ranks)
        runs["first"] += np.repeat(np.arange(ranks, dtype=np.int32) * rank_blocks, len(runs) // ranks)
        return runs.tobytes()


def digest_of(
    *,
    model: str,
    form: KVForm,
    begin: int,
    end: int,
    blocks: bytes,
    where: bytes,
    prompt: Sequence[int],
    salt: str = "",
    ranks: tuple[int, int] = (1, 0),
) -> int:
    """Returns 64 bits of BLAKE2b (RFC 7693) over an address' fields but its ticket, over `where` of the
    receiver's endpoint, from which a sender counts the blocks, over prompt[:end], because what comes after
    the address does not change its K and V, and over the salt. `ranks` are the address' `ranks` and
    `rank_blocks`."""
    whole = msgpack.encode((model, form, begin, end, blocks, where, prompt[:end], salt, ranks))
    return int.from_bytes(blake2b(whole, digest_size=8).digest(), "little", signed=True)


def other_address(unit: str) -> str:
    """Returns the message to a sender whose digest is not the reservation's."""
    return (
        f"address: the reservation at {unit} is for other blocks, tokens, or another model, prompt or "
        "endpoint; send to the address and peer that prep_recv answered, and the prompt that it was asked for"
    )


def resolve(position: int | None, length: int, name: str) -> int:
    """Returns a position in a prompt of `length` tokens: negative ones count from the back, None is the
    whole. Raises BadRequest naming `name`."""
    found = length if position is None else position + length if position < 0 else position
    if not 0 <= found <= length:
        raise BadRequest(f"{name}: {position} is outside a prompt of {length} tokens", param=name)
    return found
