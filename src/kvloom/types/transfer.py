"""Transfers: K and V on their way from one unit's arena into another's, from the verb `remote_send` to the
thread that copies, and the plane on which they go."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

import numpy as np

from kvloom.types.address import Endpoint, KVAddress, Ticket
from kvloom.types.errors import BadRequest
from kvloom.types.geometry import I32, over_ranks
from kvloom.types.load import LinkLoad


class TransferState(Enum):
    """The state of a transfer, which tells how far it has come."""

    PLANNED = "planned"
    """Sources and targets are known; the receiver has not agreed yet."""
    CLAIMED = "claimed"
    """The receiver expects these tokens from this transfer alone; none has been copied."""
    COPYING = "copying"
    """The plane's thread has begun to copy."""
    ARRIVED = "arrived"
    """All tokens are in the receiver's blocks, and it knows. Nothing is copied any more."""
    FAILED = "failed"
    """Nothing counts, and nothing is copied any more."""


NEXT: Final[Mapping[TransferState, frozenset[TransferState]]] = {
    TransferState.PLANNED: frozenset({TransferState.CLAIMED, TransferState.FAILED}),
    TransferState.CLAIMED: frozenset({TransferState.COPYING, TransferState.ARRIVED, TransferState.FAILED}),
    TransferState.COPYING: frozenset({TransferState.ARRIVED, TransferState.FAILED}),
    TransferState.ARRIVED: frozenset(),
    TransferState.FAILED: frozenset(),
}
"""The states that may follow each state."""


class Transfer(ABC):
    """Tokens [begin, end) of a sequence, which one unit sends into the blocks of another's reservation.

    A transport makes one with each claim and moves it from state to state. Whoever holds one puts the copies
    and then awaits `arrived`, or calls `abandon`.
    """

    def __init__(self, peer: Endpoint, address: KVAddress, begin: int, end: int) -> None:
        """Plans to send tokens [begin, end) of `address` to `peer`; the range may be empty."""
        self.peer = peer
        self.address = address
        self.begin = begin
        self.end = end
        self.sent = begin
        """The engine has put all tokens before this one."""
        self.held: list[int] = []
        """Pages that copies may still read after the sequence has let go of them, one entry for each hold."""
        self.state = TransferState.PLANNED

    @property
    def over(self) -> bool:
        """Returns whether nothing is copied any more."""
        return not NEXT[self.state]

    def become(self, state: TransferState) -> None:
        """Raises ValueError if `state` cannot follow the present one."""
        if state not in NEXT[self.state]:
            raise ValueError(f"a transfer cannot go from {self.state.value} to {state.value}")
        self.state = state

    def advance(self, computed: int) -> None:
        """Notes that a forward has computed the sequence up to token `computed`, and has put what it owed."""
        self.sent = max(self.sent, min(computed, self.end))

    def owed(self, row: I32, begin: int, end: int, rank_blocks: int = 0) -> PageCopies:
        """Returns the copies of tokens in [begin, end) that this transfer has not sent. `row` [pages] are all
        pages of the sequence, and `rank_blocks` is the number of blocks of each rank of this unit, if it has
        several. Raises BadRequest if the address does not list the blocks of its pages."""
        tokens, first = self.address.form.tokens_per_block, self.address.first_page
        begin, end = max(begin, self.sent), min(end, self.end)
        edges: I32 = np.arange(begin // tokens, -(-end // tokens), dtype=np.int32)
        starts = np.maximum(begin - edges * tokens, 0)
        stops = np.minimum(end - edges * tokens, tokens)
        targets = self.address.block_map[edges - first]
        return PageCopies(self, row[edges], targets, starts, stops - starts, rank_blocks)

    @abstractmethod
    def put(self, copies: BlockCopies) -> None:
        """Copies these blocks, on the transport's thread. Any thread may call it; it never waits and never
        raises: `arrived` tells what goes wrong."""

    @abstractmethod
    async def arrived(self) -> None:
        """Waits, after the last `put`, for all copies and for the tokens that were claimed before these, and
        tells the receiver's ledger. Raises Unavailable if the peer is gone, BadRequest if its reservation
        is."""

    @abstractmethod
    def abandon(self) -> None:
        """Ends the copies, and lets others claim these tokens. At most one piece is copied after it,
        milliseconds long. It has no effect once `arrived` has returned."""


class TransferMeter:
    """Counts the bytes that a unit has sent to its peers, and the time that this took, on any thread."""

    def __init__(self) -> None:
        self.bytes = 0
        self.seconds = 0.0
        """The seconds for which at least one copy was under way."""
        self.links: dict[str, LinkLoad] = {}
        """The measured rate to each peer, by its unit."""
        self._copies = 0
        self._since = 0.0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Notes that a copy begins."""
        with self._lock:
            if not self._copies:
                self._since = time.perf_counter()
            self._copies += 1

    def end(self, size: int) -> None:
        """Notes that a copy has ended, and how many bytes it has sent."""
        with self._lock:
            self._copies -= 1
            self.bytes += size
            if not self._copies:
                self.seconds += time.perf_counter() - self._since

    @contextmanager
    def copying(self, size: int) -> Iterator[None]:
        """Measures a copy of so many bytes; one that fails has sent none."""
        sent = 0
        self.begin()
        try:
            yield
            sent = size
        finally:
            self.end(sent)


class DeviceEvent(Protocol):
    """A point in what a thread has asked its device for."""

    def wait(self) -> None:
        """Returns once everything before the point is done. Raises RuntimeError if that failed."""

    def done(self) -> bool:
        """Returns whether everything before the point is done. Raises RuntimeError if that failed."""


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Copies of one transfer: for each i, tokens [offsets[i], offsets[i] + counts[i]) of K and of V of own
    block own[i] go into the peer's block peer[i]. All four are [n]."""

    own: I32
    peer: I32
    offsets: I32
    counts: I32
    after: DeviceEvent | None = None
    """The point after which the copies may begin; None if they may begin at once."""

    def part(self, rows: slice) -> BlockCopies:
        return BlockCopies(self.own[rows], self.peer[rows], self.offsets[rows], self.counts[rows], self.after)

    def in_order(self) -> BlockCopies:
        """Returns the same copies by the peer's blocks, so that those that lie beside each other follow each
        other."""
        order = np.argsort(self.peer, kind="stable")
        return BlockCopies(
            self.own[order], self.peer[order], self.offsets[order], self.counts[order], self.after
        )


@dataclass(frozen=True, slots=True)
class PageCopies:
    """The copies that a forward owes a transfer after each layer's write: for each i, tokens [offsets[i],
    offsets[i] + counts[i]) of our page pages[i] go to the peer's blocks targets[i]."""

    transfer: Transfer
    pages: I32
    """[n]"""
    targets: I32
    """[n, layers, kv_heads], of all ranks' heads"""
    offsets: I32
    """[n]"""
    counts: I32
    """[n]"""
    rank_blocks: int = 0
    """The blocks of each of our ranks, if there are several. All ranks have the same pages, and the first
    one's map tells all ranks' blocks."""

    def put(self, page_map: I32, layer: int) -> None:
        """Puts one layer's part. `page_map` [pages, layers, heads] has the blocks of our first rank."""
        self.transfer.put(self.of_layer(page_map, layer))

    def put_all(self, page_map: I32) -> None:
        """Puts all layers at once, for pages that are computed already."""
        self.transfer.put(self.whole(page_map))

    def of_layer(self, page_map: I32, layer: int) -> BlockCopies:
        return self._blocks(self._own(page_map[self.pages, layer]), self.targets[:, layer])

    def whole(self, page_map: I32) -> BlockCopies:
        heads, own = self.targets.shape[2], self._own(page_map[self.pages])
        return self._blocks(own.reshape(-1, heads), self.targets.reshape(-1, heads), self.targets.shape[1])

    def _own(self, blocks: I32) -> I32:
        """Returns our blocks [..., kv_heads] of all ranks, given the first one's."""
        return over_ranks(blocks, self.targets.shape[2] // blocks.shape[-1], self.rank_blocks)

    def _blocks(self, own: I32, peer: I32, layers: int = 1) -> BlockCopies:
        each = layers * own.shape[1]
        offsets, counts = np.repeat(self.offsets, each), np.repeat(self.counts, each)
        return BlockCopies(own.ravel(), peer.ravel(), offsets, counts)


class Transport(Protocol):
    """One unit's end of the KV plane: its arena, which peers write without its doing. Its methods are called
    on one event loop, and none of them waits."""

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def meter(self) -> TransferMeter:
        """Counts what this unit has sent."""

    # receiving

    def open(self, begin: int, digest: int, blocks: bytes = b"") -> Ticket:
        """Begins a reservation in which nothing has arrived past token `begin`, for whoever shows `digest`,
        that of its address, this endpoint and the prompt. `blocks` are those of the address, as it tells
        them; a transport whose receiver writes writes into no others. Raises QueueFull if there are too many,
        Unavailable if nothing can arrive any more."""

    def received(self, ticket: Ticket) -> int:
        """Returns the position up to which everything has arrived. Raises BadRequest if the ticket is
        closed."""

    def close(self, ticket: Ticket) -> bool:
        """Lets no sender begin to write for this ticket from here on; what has not arrived never does. True:
        nobody is writing either, and its blocks may be used again. False: a sender is, for milliseconds (for
        as long as its grant if it cannot be asked); ask again."""

    # sending

    def claim(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> Transfer:
        """Claims tokens [begin, end) of the address, which have to be the next ones that nobody has claimed,
        and returns their transfer. `digest` is that of the address, `peer` and the prompt that is sent.
        Raises BadRequest if that is not the reservation's, so that one of them is another than at `open`, if
        the reservation is over, and if another transfer has claimed the tokens; Unavailable if the peer
        cannot be reached, or nothing can be sent any more. What only the peer can tell, the transfer's
        `arrived` raises instead; nothing is written before."""

    # at the end

    def close_all(self) -> None:
        """Fails what has not arrived, and gives all back that the transport holds. Nothing is called any
        more."""


class NoTransport:
    """The `Transport` of a unit of several GPUs, whose K and V lie in as many memories: it takes none and
    sends none. `open` and `claim` raise BadRequest."""

    def __init__(self, unit: str) -> None:
        self.endpoint = Endpoint(unit=unit, kind="shm", where=b"")
        self.meter = TransferMeter()

    def open(self, begin: int, digest: int, blocks: bytes = b"") -> Ticket:
        raise self._refusal()

    def received(self, ticket: Ticket) -> int:
        raise self._refusal()

    def close(self, ticket: Ticket) -> bool:
        return True

    def claim(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> Transfer:
        raise self._refusal()

    def close_all(self) -> None:
        """Does nothing, because nothing is open."""

    def _refusal(self) -> BadRequest:
        return BadRequest(
            f"unit {self.endpoint.unit} has several GPUs: its K and V are neither sent nor received; a "
            "router program that computes a request at one unit, as data_parallel, is right"
        )
