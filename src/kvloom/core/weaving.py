"""What a unit that lends blocks and one that borrows them tell each other, once a loan (Weaver, section
4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

from msgspec import Meta, Struct

from kvloom.core.address import Endpoint, KVForm, Ticket
from kvloom.core.arrays import I32
from kvloom.core.load import Waits
from kvloom.core.plan import Plan
from kvloom.core.spec import Control, Splitting

_Size = Annotated[int, Meta(ge=1, lt=2**31)]


class Borrow(Struct, frozen=True, kw_only=True):
    """A model asks for blocks for its sequences, and for attention over them. pid: of the process that asks.
    form: of its K and V. heads: of q, a multiple of form.kv_heads. rows: sequences a step, at most. width:
    pages of the longest sequence. pages: how many are wanted. control, split and waits: as in WeaveSpec."""

    model: str
    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    form: KVForm
    heads: _Size
    rows: _Size
    width: _Size
    pages: _Size
    control: Control = "operators"
    split: Splitting = "auto"
    waits: Annotated[float, Meta(ge=0, le=1)] = 0.05


class Loan(Struct, frozen=True, kw_only=True):
    """blocks of the lender's arena, as runs like a KVAddress', which the borrower counts from 0 in this
    order: `pages` × layers × kv_heads of them. ticket: fences whoever copies into or out of them. mailbox:
    where tasks go, the transport's own."""

    peer: Endpoint
    ticket: Ticket
    pages: _Size
    blocks: bytes
    mailbox: bytes


class Weaver(Protocol):
    """What a unit's device does for weaving; its methods are called on one event loop."""

    def heads(self, model: str) -> int:
        """Of q. Raises BadRequest where the model cannot be woven."""

    def borrow(self, borrow: Borrow, loan: Loan) -> int:
        """The model's decode steps may be away from here on. Returns the blocks that there are. Raises
        BadRequest where the loan is not what was asked for, Unavailable where the lender is gone."""

    def give_back(self, model: str) -> None:
        """No step of it is away any more."""

    def lend(self, borrow: Borrow, blocks: I32, ended: Callable[[str], None]) -> Loan:
        """Attend for another unit over these own blocks; ended: called once on this loop, with the reason,
        where that unit ends it. Raises BadRequest where `borrow` makes no sense, Conflict where there is a
        loan, Unavailable where its process is gone."""

    def waits(self) -> Waits | None:
        """Of the tasks that this unit does for another; None where it lends nothing."""

    def recall(self) -> bool:
        """The loan is over. True: nobody uses its blocks any more. False: ask again, in milliseconds."""


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the first tokens[i] tokens of page home[i] to page away[i] of a loan, in all layers and heads; or,
    where not `out`, back. All are [n]."""

    home: I32
    away: I32
    tokens: I32
    out: bool


@dataclass(frozen=True, slots=True)
class Away:
    """What a decode step does with a loan: first the moves, in order; then it attends for the sequences of
    `plan`, whose rows come after those at home. plan: over the loan's blocks; each sequence appends a
    token."""

    plan: Plan
    moves: tuple[Move, ...] = ()
