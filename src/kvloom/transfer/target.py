"""The blocks that a transfer may write to, and how they are laid out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvloom.types.address import KVAddress, KVForm
from kvloom.types.errors import BadRequest
from kvloom.types.geometry import I32, I64, SCALED, row_bytes
from kvloom.types.transfer import BlockCopies


class Blocks(Protocol):
    """An arena, or what another process tells of one."""

    @property
    def blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class WriteTarget:
    """The blocks of an address. The blocks of both arenas are [2, page_tokens, token_bytes]; 0 is K, 1 is
    V."""

    block_bytes: int
    page_tokens: int
    token_bytes: int
    own_blocks: int
    """Blocks that the sender's arena has."""
    allowed: npt.NDArray[np.bool_]
    """[the peer's blocks], true for those of the address."""

    @staticmethod
    def of(
        address: KVAddress,
        begin: int,
        end: int,
        *,
        own: Blocks,
        peer: Blocks,
    ) -> WriteTarget:
        """Raises BadRequest if the address cannot be the peer's, or [begin, end) is not in it."""
        if not address.begin <= begin <= end <= address.end:
            raise BadRequest(
                f"begin, end: tokens [{begin}, {end}) are not all in the address' "
                f"[{address.begin}, {address.end})"
            )
        if own.block_bytes != peer.block_bytes:
            raise BadRequest(f"peer: blocks of {peer.block_bytes} bytes; here they have {own.block_bytes}")
        token_bytes = _token_bytes(address.form, own.block_bytes)
        blocks = _blocks(address, peer.blocks)
        allowed = np.zeros(peer.blocks, dtype=np.bool_)
        allowed[blocks] = True
        return WriteTarget(own.block_bytes, address.form.tokens_per_block, token_bytes, own.blocks, allowed)

    def check(self, copies: BlockCopies) -> None:
        """Raises BadRequest if some copies leave the target: an error of this unit, not of the peer."""
        if not len(copies.own):
            return
        inside = (
            copies.own.min() >= 0
            and copies.own.max() < self.own_blocks
            and copies.peer.min() >= 0
            and copies.peer.max() < len(self.allowed)
            and self.allowed[copies.peer].all()
            and copies.offsets.min() >= 0
            and copies.counts.min() >= 0
            and (copies.offsets + copies.counts).max() <= self.page_tokens
        )
        if not inside:
            raise BadRequest("copies: blocks or tokens outside the address")

    def size(self, copies: BlockCopies) -> int:
        """Returns the bytes of K and V of these copies."""
        return 2 * self.token_bytes * int(copies.counts.sum())

    def spans(self, copies: BlockCopies) -> tuple[I64, I64, I64]:
        """Returns the bytes of the own and of the peer's arena at which runs of bytes begin that are to be
        copied, and their sizes; all [n], by the peer's. A whole block is one, tokens of a part are two. Those
        that lie beside each other in both arenas are one: block fusion (Llumnix, section 5)."""
        whole = copies.counts == self.page_tokens
        skipped = np.where(whole, 0, copies.offsets.astype(np.int64) * self.token_bytes)
        size = np.where(whole, self.block_bytes, copies.counts.astype(np.int64) * self.token_bytes)
        some, part = size > 0, ~whole & (size > 0)
        values = self.page_tokens * self.token_bytes  # V begins behind so many bytes of a block
        own, peer = (
            np.concatenate((start[some], start[part] + values))
            for start in (
                blocks.astype(np.int64) * self.block_bytes + skipped for blocks in (copies.own, copies.peer)
            )
        )
        size = np.concatenate((size[some], size[part]))
        order = np.argsort(peer, kind="stable")
        own, peer, size = own[order], peer[order], size[order]
        ends = size[:-1]
        apart = np.flatnonzero((own[:-1] + ends != own[1:]) | (peer[:-1] + ends != peer[1:])) + 1
        firsts = np.concatenate(([0], apart)).astype(np.int64)[: len(size)]
        fused: I64 = np.add.reduceat(size, firsts) if len(size) else size
        return own[firsts], peer[firsts], fused

    def pieces(self, copies: BlockCopies, size: int, most: int) -> Iterator[tuple[I64, I64, I64]]:
        """Yields the same spans in pieces of about `size` bytes, and less than twice as many, and of `most`
        spans at most."""
        own, peer, sizes = self.spans(copies)
        parts = -(-sizes // size)  # of each span
        span = np.repeat(np.arange(len(sizes)), parts)
        skipped = (np.arange(len(span)) - np.repeat(np.cumsum(parts) - parts, parts)) * size
        own, peer, sizes = own[span] + skipped, peer[span] + skipped, sizes[span] - skipped
        sizes = np.minimum(sizes, size)
        edges = np.flatnonzero(np.diff((np.cumsum(sizes) - sizes) // size)) + 1
        for first, behind in pairwise((0, *edges.tolist(), len(sizes))):
            for at in range(first, behind, most):
                some = slice(at, min(behind, at + most))
                yield own[some], peer[some], sizes[some]


class WritableBytes:
    """The bytes of an arena that a reservation's senders may have written."""

    def __init__(self, blocks: bytes, block_bytes: int) -> None:
        """blocks: the address' runs of blocks. Raises BadRequest if they are none."""
        firsts, lengths = KVAddress.runs(blocks)
        order = np.argsort(firsts)
        starts, stops = firsts[order], (firsts + lengths)[order]
        edges = np.r_[True, starts[1:] != stops[:-1], True]  # runs that lie beside each other are one
        self._starts: I64 = starts[edges[: len(starts)]] * block_bytes
        self._stops: I64 = stops[edges[1 : 1 + len(stops)]] * block_bytes

    def hold(self, starts: I64, sizes: I64) -> bool:
        """Returns whether all these spans of the arena lie in them."""
        if not len(self._starts):
            return False
        run = np.searchsorted(self._starts, starts, "right") - 1
        return bool(((run >= 0) & (sizes > 0) & (sizes <= self._stops[run] - starts)).all())


def _blocks(address: KVAddress, peer_blocks: int) -> I32:
    """Returns the address' blocks [pages, layers, kv_heads]. Raises BadRequest if an arena of `peer_blocks`
    does not hold them all."""
    wanted = address.pages * address.form.layers * address.form.kv_heads
    if wanted > peer_blocks:
        raise BadRequest(f"address: {wanted} blocks of an arena of {peer_blocks}")
    blocks = address.block_map
    if blocks.size and blocks.max() >= peer_blocks:
        raise BadRequest(f"address: block {blocks.max()} of an arena of {peer_blocks}")
    return blocks


def _token_bytes(form: KVForm, block_bytes: int) -> int:
    """Returns the bytes of one token's K in a block. Raises BadRequest if the blocks of both arenas are not
    of this form."""
    dtype = getattr(torch, form.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise BadRequest(f"address: no number format is called {form.dtype!r}")
    if min(form.layers, form.kv_heads, form.head_dim, form.tokens_per_block) < 1:
        raise BadRequest("address: its form has sizes below 1")
    token_bytes = row_bytes(form.head_dim, dtype.itemsize, form.dtype in SCALED)
    if form.block_bytes != block_bytes or form.tokens_per_block != block_bytes // (2 * token_bytes):
        raise BadRequest(
            f"address: blocks of {form.block_bytes} bytes for {form.tokens_per_block} tokens of "
            f"2 x {token_bytes} bytes; here they have {block_bytes} bytes"
        )
    return token_bytes
