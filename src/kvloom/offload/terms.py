"""The terms of a loan, between a unit that lends blocks and a unit that borrows them (Weaver, section 4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Final, Protocol, runtime_checkable

from msgspec import Meta, Struct

from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket, digest_of
from kvloom.types.errors import BadRequest, Unavailable
from kvloom.types.geometry import I32, AnyArray
from kvloom.types.load import Waits
from kvloom.types.spec import Control, Splitting
from kvloom.types.transfer import Transport
from kvloom.types.verbs import Done, Verb

_Size = Annotated[int, Meta(ge=1, lt=2**31)]


class Borrow(Struct, frozen=True, kw_only=True):
    """A model's request for blocks for its sequences, and for attention over them."""

    model: str
    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    """The process that borrows."""
    form: KVForm
    """The form of the model's K and V."""
    heads: _Size
    """Heads of q, a multiple of form.kv_heads."""
    rows: _Size
    """The most sequences of a decode step."""
    width: _Size
    """Pages of the longest sequence."""
    pages: _Size
    """Pages that are wanted."""
    control: Control = "operators"
    split: Splitting = "auto"
    waits: Annotated[float, Meta(ge=0, le=1)] = 0.05
    """`control`, `split` and `waits` have their meaning in WeaveSpec."""


class Loan(Struct, frozen=True, kw_only=True):
    """The answer to a `Borrow`: the blocks that are lent, and the mailbox that tasks go to."""

    peer: Endpoint
    ticket: Ticket
    """The ticket fences a process that copies into or out of the blocks."""
    pages: _Size
    blocks: bytes
    """`pages` × layers × kv_heads blocks of the lender's arena, as runs like a KVAddress'. The borrower
    counts them from 0 in this order."""
    mailbox: bytes
    """The place of the mailbox, in the encoding of the device."""


class HandBack(Struct, frozen=True, kw_only=True):
    """Blocks of a loan that go back before its end."""

    model: str
    ticket: Ticket
    """The ticket of the loan."""
    blocks: list[Annotated[int, Meta(ge=0, lt=2**31)]]
    """The blocks' numbers within the loan, whole pages of them."""


LEND: Final = Verb("lend", "Lends blocks to a model, and attends over them.", Borrow, Loan)
TAKE_BACK: Final = Verb("take_back", "Takes back a part of what is lent.", HandBack, Done)


class OffloadBackend(Protocol):
    """A device's part in lending and borrowing; its methods are called on one event loop."""

    def heads(self, model: str) -> int:
        """Returns the heads of q. Raises BadRequest if the model cannot be offloaded."""

    def borrow(self, borrow: Borrow, loan: Loan) -> int:
        """Lets rows of the model's decode steps be offloaded from here on. Returns the number of blocks.
        Raises BadRequest if the loan differs from what was asked for, Unavailable if the lender is gone."""

    def give_back(self, model: str) -> None:
        """Ends the model's loan. No step of it has offloaded rows any more."""

    def lend(self, borrow: Borrow, blocks: I32, ended: Callable[[str], None]) -> Loan:
        """Attends for another unit over these own blocks. ended: called once on this loop, with the reason,
        if that unit ends the loan. Raises BadRequest if `borrow` makes no sense, Conflict if there is a loan,
        Unavailable if the borrower's process is gone."""

    def waits(self) -> Waits | None:
        """Returns how long tasks of the other unit have waited; None if this unit lends nothing."""

    def recall(self) -> bool:
        """Ends the loan to the other unit. Returns True once nobody uses its blocks any more; False means
        that the caller has to ask again, in milliseconds."""


@runtime_checkable
class ReturnsParts(Protocol):
    """A backend whose blocks may come back before the loan ends. A GPU's backend is no such one: the device
    keeps what it has been told of its blocks until the loan ends."""

    def take_back(self, numbers: AnyArray) -> None:
        """Lets no task name these blocks of the loan to the other unit any more; that unit does not use them.
        Some others are left."""


# -- what backends of all devices do alike ----------------------------------------------------------------


class LentBlocks:
    """Blocks lent to one model of another unit, for as long as its ticket is open."""

    def __init__(self, borrow: Borrow, blocks: I32, transport: Transport, mailbox: bytes) -> None:
        """blocks: [pages · layers · kv_heads] of the own arena. Raises QueueFull if the ledger is full."""
        form = borrow.form
        pages = len(blocks) // (form.layers * form.kv_heads)
        runs = KVAddress.compress(blocks.reshape(pages, form.layers, form.kv_heads))
        where = transport.endpoint.where
        digest = digest_of(model=borrow.model, form=form, begin=0, end=0, blocks=runs, where=where, prompt=())
        self._transport = transport
        self.ticket = transport.open(0, digest)
        self.loan = Loan(
            peer=transport.endpoint, ticket=self.ticket, pages=pages, blocks=runs, mailbox=mailbox
        )

    def close(self) -> bool:
        """Lets the borrower begin no copy any more. Returns False while a copy is under way, for
        milliseconds."""
        return self._transport.close(self.ticket)


def one_number(model: str, heads: int) -> int:
    """Returns `heads`, the heads of q in all layers of the model. Raises BadRequest for 0: layers differ, or
    score in a way that a task cannot say."""
    if not heads:
        raise BadRequest(
            f"weave: the layers of {model} differ in their heads, or have sinks or slopes, so no one mailbox "
            "fits them"
        )
    return heads


@contextmanager
def watched(borrow: Borrow) -> Iterator[None]:
    """A context in which the borrower's process is opened. Raises Unavailable if that fails with OSError."""
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"weave: process {borrow.pid}, which wants to borrow, cannot be watched: {error.strerror}"
        ) from error


def on_this_loop(ended: Callable[[str], None]) -> Callable[[str], None]:
    """Returns a function that any thread may call, and that calls `ended` on the loop that runs now."""
    loop = asyncio.get_running_loop()

    def call(why: str) -> None:
        loop.call_soon_threadsafe(ended, why)

    return call
