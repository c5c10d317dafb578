"""What a unit that lends blocks and one that borrows them tell each other, once a loan (Weaver, section
4).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Annotated, NamedTuple, Protocol

import numpy as np
from msgspec import Meta, Struct

from kvloom.types.geometry import F64, I32, I64
from kvloom.types.load import Waits
from kvloom.types.plan import Plan
from kvloom.types.spec import Control, Splitting
from kvloom.types.transfer import Endpoint, KVForm, Ticket

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


class Rule(NamedTuple):
    """What operators are split by, in one unit of time. ahead: what the other unit has to do meanwhile, less
    what a task takes; most: of expected stall, once a layer."""

    ahead: float
    most: float

    @staticmethod
    def of(split: Splitting, waits: float, ahead: float, step: float, layers: int) -> Rule | None:
        """Tasks may hold a step of the asking unit up by `waits` of it. step: that it takes, 0 where nobody
        knows. None where nothing is to be split."""
        return Rule(ahead, waits * step / layers) if split == "auto" and step > 0 else None


class Gap(NamedTuple):
    """Between two iterations: who is to do tasks sleeps until one comes. time: all of it; wake: the mean time
    from when one comes until it is looked at. It counts as operators of 2 · wake, as many as there is time
    for, so that a task that comes in it waits for `wake` on average; of its own length at most."""

    time: float
    wake: float


NONE = Gap(0.0, 0.0)


def conditional_wait(times: Sequence[float] | F64, ahead: float, gap: Gap = NONE) -> float:
    """E[W | W > c], the paper's objective (equations 1 and 3): Σ (T² − c²) / (2 Σ (T − c)) over T > c. 0
    where no operator is longer than c."""
    c = max(0.0, ahead)
    longer, weights = _longer(times, c, gap)
    over = 2 * float((weights * (longer - c)).sum())
    return float((weights * (longer**2 - c * c)).sum()) / over if over > 0 else 0.0


def expected_stall(times: Sequence[float] | F64, ahead: float, gap: Gap = NONE) -> float:
    """E[max(0, W − c)], by which the asking unit is held up: Σ (T − c)² over T > c, over 2 Σ T. At c = 0 that
    is E[W]."""
    c, whole = max(0.0, ahead), float(np.sum(times)) + gap.time
    longer, weights = _longer(times, c, gap)
    return float((weights * (longer - c) ** 2).sum()) / (2 * whole) if whole > 0 else 0.0


def _longer(times: Sequence[float] | F64, c: float, gap: Gap) -> tuple[F64, F64]:
    """The operators longer than c, and how many of each there are."""
    all_, weights = np.asarray(times, np.float64), np.ones(len(times))
    size = min(gap.time, 2 * gap.wake)
    if size > 0:
        all_, weights = np.append(all_, size), np.append(weights, gap.time / size)
    longer = all_ > c
    return all_[longer], weights[longer]


def split(
    times: Sequence[float], ahead: float, most: float, limits: Sequence[int] | None = None
) -> list[int]:
    """Algorithm 1: while the expected stall is more than `most`, and the longest operator longer than c, cut
    that into halves. Returns the parts of each operator. limits: the most that it can have, if there is one.

    Parts of one operator are to be of one size, whatever halves they came from: as many of one size stall
    less. The paper compares its estimate with 5 % of the asking unit's mean iteration; a stall comes once a
    layer, so `most` is that over the layers.
    """
    c, whole = max(0.0, ahead), sum(times)
    parts = [1] * len(times)
    left = 2 * whole * most  # of the sum of squares
    squares = sum((t - c) ** 2 for t in times if t > c)
    longest = [(-t, i) for i, t in enumerate(times)]
    heapq.heapify(longest)
    bounds = limits if limits is not None else list(repeat(1 << 30, len(times)))
    while squares > left and longest:
        size, i = -longest[0][0], longest[0][1]
        if size <= c:
            break
        if parts[i] >= bounds[i]:
            heapq.heappop(longest)
            continue
        squares -= (size - c) ** 2 - 2 * max(0.0, size / 2 - c) ** 2
        parts[i] += 1
        heapq.heapreplace(longest, (-size / 2, i))
        heapq.heappush(longest, (-size / 2, i))
    return parts


def cut(times: Sequence[float], parts: Sequence[int] | I64) -> F64:
    """The times of all parts."""
    counts = np.asarray(parts, np.int64)
    return np.repeat(np.asarray(times, np.float64) / counts, counts)
