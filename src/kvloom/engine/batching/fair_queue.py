"""The sequences of a model that wait, and which of them is next: fair between tenants, in tokens.

Each tenant has a virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024,
algorithm 2). The next sequence is the first of the tenant with the smallest counter. Among tenants that wait
all the time, counters differ by no more than one prompt, or the output of one batch (theorem 4.4 there).

Two things go beyond the paper. Counters are kept for each priority apart, because a more urgent request goes
first whatever its tenant has had. And a tenant is charged for what is computed for it, once: cached and
received tokens cost nothing, and neither do tokens that are computed again after a preemption.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from heapq import merge
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeVar

from kvloom.engine.batching.view import Order

INPUT_COST: Final = 1  # of a token of a prompt; both costs are the paper's
OUTPUT_COST: Final = 2  # of a token that is made
REMEMBERED: Final = 1024  # tenants that nothing waits of, and whose counters are kept


class Waiting(Protocol):
    """A request, or a part of one, that waits."""

    order: Order
    tenant: str


T = TypeVar("T", bound=Waiting)

_Key = tuple[int, str]  # a tenant at a priority
_ORDER = attrgetter("order")


class FairQueue(Generic[T]):
    """The sequences that wait. With one tenant they are in their order."""

    def __init__(self) -> None:
        self._lines: dict[_Key, list[T]] = {}  # none is empty; each is sorted by order
        self._counters: dict[_Key, int] = {}  # whoever came to wait last is last
        self._left: dict[
            int, _Key
        ] = {}  # by priority: the tenant whose last waiting sequence left most recently

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
        with equal counters it is the one whose first sequence came first, so that no newcomer takes the place
        of whoever is next."""
        if len(self._lines) > 1:
            return min(self._lines.items(), key=self._rank)[1][0]
        return next((line[0] for line in self._lines.values()), None)

    def _rank(self, item: tuple[_Key, list[T]]) -> tuple[int, int, Order]:
        key, line = item
        return key[0], self._counters[key], line[0].order

    def add(self, one: T) -> None:
        """Lets a sequence wait. If nothing waits of its tenant, its counter is lifted to the smallest of
        those of whom something does, or else to that of the last one: who was idle has saved up nothing."""
        key = _key(one)
        self._insert(one, self._lowest(key[0]) if key not in self._lines else 0)

    def put_back(self, one: T) -> None:
        """Lets a sequence wait again that ran. Its tenant was not idle, so its counter stays."""
        self._insert(one, 0)

    def _insert(self, one: T, least: int) -> None:
        key = _key(one)
        if key not in self._lines:
            self._counters[key] = max(self._counters.pop(key, 0), least)
            self._lines[key] = []
            self._forget()
        insort(self._lines[key], one, key=_ORDER)

    def has_had_less(self, one: T, other: T) -> bool:
        """Returns whether the tenant of `one` has had no more than that of `other`."""
        return self._counters.get(_key(one), 0) <= self._counters.get(_key(other), 0)

    def _lowest(self, priority: int) -> int:
        waiting = [self._counters[key] for key in self._lines if key[0] == priority]
        return min(waiting) if waiting else self._counters.get(self._left.get(priority, (priority, "")), 0)

    def _forget(self) -> None:
        """Forgets the tenant that has not come for the longest time, if too many are idle."""
        if len(self._counters) <= REMEMBERED + len(self._lines):
            return
        oldest = next(key for key in self._counters if key not in self._lines)
        del self._counters[oldest]
        if self._left.get(oldest[0]) == oldest:
            del self._left[oldest[0]]

    def discard(self, one: T) -> None:
        """Takes a sequence out, if it is here."""
        key = _key(one)
        line = self._lines.get(key, [])
        at = bisect_left(line, one.order, key=_ORDER)
        if line[at : at + 1] != [one]:
            return
        del line[at]
        if not line:
            del self._lines[key]
            self._left[key[0]] = key

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
        for (_, name), line in self._lines.items():
            counts[name] += len(line)
        crowd, most = max(counts.items(), key=lambda item: item[1], default=("", 0))
        if most > counts[tenant] + 1:
            lines = (
                line for (level, name), line in self._lines.items() if name == crowd and level >= priority
            )
            yield from sorted((one for line in lines for one in line), key=_ORDER, reverse=True)


def _key(one: Waiting) -> _Key:
    return one.order[0], one.tenant
