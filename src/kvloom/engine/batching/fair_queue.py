"""The sequences of a model that wait, and which of them is next: fair between tenants, in tokens.

Each tenant has a virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024,
algorithm 2). The next sequence is the first of the tenant with the smallest counter. Among tenants that wait
all the time, counters differ by no more than one prompt, or the output of one batch (theorem 4.4 there).

Two things go beyond the paper. Counters are kept for each priority apart, because a more urgent request goes
first whatever its tenant has had. And a tenant is charged for what is computed for it, once: cached and
received tokens cost nothing, and neither do tokens that are computed again after a preemption.

A policy with deadlines puts those behind that cannot be in time any more (`put_behind`). They go after the
others of their priority, but for one of `PASSING` + 1.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from heapq import merge
from itertools import takewhile
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeVar

from kvloom.engine.batching.view import Order

INPUT_COST: Final = 1  # of a token of a prompt; both costs are the paper's
OUTPUT_COST: Final = 2  # of a token that is made
REMEMBERED: Final = 1024  # tenants that nothing waits of, and whose counters are kept
PASSING: Final = 8  # sequences that go before one that was put behind, at most


class Waiting(Protocol):
    """A request, or a part of one, that waits."""

    order: Order
    tenant: str


T = TypeVar("T", bound=Waiting)

_Key = tuple[int, str]  # a tenant at a priority
_Line = tuple[int, bool, str]  # the same, and whether these sequences were put behind
_ORDER = attrgetter("order")


class FairQueue(Generic[T]):
    """The sequences that wait. With one tenant they are in their order."""

    def __init__(self) -> None:
        self._lines: dict[_Line, list[T]] = {}  # none is empty; each is sorted by order
        self._counters: dict[_Key, int] = {}  # whoever came to wait last is last
        self._left: dict[
            int, _Key
        ] = {}  # by priority: the tenant whose last waiting sequence left most recently
        self._passed = 0  # sequences that went before those behind, since one of those went

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[T]:
        """Yields all in their order, which is not the order in which they are admitted."""
        return merge(*self._lines.values(), key=_ORDER)

    @property
    def first(self) -> T | None:
        """Returns the sequence that is next; it looks at one sequence of each tenant that waits. Of tenants
        with equal counters, the one whose first sequence came first is next, so that a newcomer takes
        nobody's turn."""
        if len(self._lines) > 1:
            return min(self._lines.items(), key=self._rank)[1][0]
        return next((line[0] for line in self._lines.values()), None)

    def _rank(self, item: tuple[_Line, list[T]]) -> tuple[int, bool, int, Order]:
        (priority, behind, tenant), line = item
        last = behind is (self._passed < PASSING)
        return priority, last, self._counters[priority, tenant], line[0].order

    def put_behind(self, late: Callable[[T], bool]) -> bool:
        """Lets those that are `late` go after the others of their priority. It looks at each line up to the
        first sequence that is not late, and returns whether any was late."""
        found = [(line, list(takewhile(late, some))) for line, some in self._lines.items() if not line[1]]
        for (priority, behind, tenant), some in found:
            for one in some:
                self._take_out((priority, behind, tenant), one)
                insort(self._lines.setdefault((priority, True, tenant), []), one, key=_ORDER)
        return any(some for _, some in found)

    def went(self, one: T) -> None:
        """Takes out a sequence that is admitted."""
        priority, tenant = _key(one)
        if self._place((priority, False, tenant), one) is None:
            self._passed = 0
        elif any(line[:2] == (priority, True) for line in self._lines):
            self._passed += 1
        self.discard(one)

    def add(self, one: T) -> None:
        """Lets a sequence wait. If its tenant has nothing else waiting, the tenant's counter is lifted to the
        smallest counter of the tenants that have, or else to the counter of the last one: a tenant that was
        idle has saved up nothing."""
        key = _key(one)
        self._insert(one, 0 if self._waits(key) else self._lowest(key[0]))

    def put_back(self, one: T) -> None:
        """Lets a sequence that ran wait again. Its tenant was not idle, so its counter stays."""
        self._insert(one, 0)

    def _insert(self, one: T, least: int) -> None:
        key = priority, tenant = _key(one)
        if not self._waits(key):
            self._counters[key] = max(self._counters.pop(key, 0), least)
        insort(self._lines.setdefault((priority, False, tenant), []), one, key=_ORDER)
        self._forget()

    def _waits(self, key: _Key) -> bool:
        """Returns whether a sequence of the tenant waits."""
        return (key[0], False, key[1]) in self._lines or (key[0], True, key[1]) in self._lines

    def has_had_less(self, one: T, other: T) -> bool:
        """Returns whether the counter of `one`'s tenant is no larger than that of `other`'s."""
        return self._counters.get(_key(one), 0) <= self._counters.get(_key(other), 0)

    def _lowest(self, priority: int) -> int:
        waiting = [self._counters[line[0], line[2]] for line in self._lines if line[0] == priority]
        return min(waiting) if waiting else self._counters.get(self._left.get(priority, (priority, "")), 0)

    def _forget(self) -> None:
        """Forgets the tenant that has not come for the longest time, if too many are idle."""
        if len(self._counters) <= REMEMBERED + len(self._lines):
            return
        oldest = next(key for key in self._counters if not self._waits(key))
        del self._counters[oldest]
        if self._left.get(oldest[0]) == oldest:
            del self._left[oldest[0]]

    def discard(self, one: T) -> None:
        """Takes a sequence out, if it is here."""
        key = priority, tenant = _key(one)
        taken = [self._take_out((priority, behind, tenant), one) for behind in (False, True)]
        if any(taken) and not self._waits(key):
            self._left[priority] = key

    def _place(self, line: _Line, one: T) -> int | None:
        """Returns the sequence's place in the line; None if it is not there."""
        there = self._lines.get(line, [])
        at = bisect_left(there, one.order, key=_ORDER)
        return at if there[at : at + 1] == [one] else None

    def _take_out(self, line: _Line, one: T) -> bool:
        """Takes the sequence out of the line. Returns whether it was there."""
        at = self._place(line, one)
        if at is None:
            return False
        del self._lines[line][at]
        if not self._lines[line]:
            del self._lines[line]
        return True

    def charge(self, one: T, cost: int) -> None:
        """Adds to the counter of a sequence's tenant, whether or not the sequence waits."""
        key = _key(one)
        if key in self._counters:
            self._counters[key] += cost

    def who_gives_way(self, tenant: str, priority: int) -> Iterator[T]:
        """Yields the sequences that may leave a full queue for a newcomer, in the order in which they are to
        be tried: those of the tenant of whom most wait, the last ones first, and none that is more urgent
        than the newcomer. Yields none if the newcomer's tenant would then have more than that one."""
        counts: Counter[str] = Counter()
        for (_, _, name), line in self._lines.items():
            counts[name] += len(line)
        crowd, most = max(counts.items(), key=lambda item: item[1], default=("", 0))
        if most > counts[tenant] + 1:
            lines = (
                line for (level, _, name), line in self._lines.items() if name == crowd and level >= priority
            )
            yield from sorted((one for line in lines for one in line), key=_ORDER, reverse=True)


def _key(one: Waiting) -> _Key:
    return one.order[0], one.tenant
