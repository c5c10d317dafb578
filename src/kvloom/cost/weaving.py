"""What weaving costs both of its sides, in time (Weaver, sections 4.1 and 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvloom.core.splitting import expected_stall, split
from kvloom.cost.operators import Operated, Operator
from kvloom.cost.work import Work


class Exchange(NamedTuple):
    """One layer of a step of which some rows are away, in seconds. own: the attention at home, which goes on
    meanwhile. service: of the task at the lender. wire: on which q, k and v go there, and the output comes
    back."""

    own: float
    service: float
    wire: float

    @property
    def ahead(self) -> float:
        """For which the task may wait before anybody waits for it; less than 0 where the step waits in any
        case."""
        return self.own - self.service - self.wire

    def stall(self, times: Sequence[float]) -> float:
        """For which the step waits, in the mean. times: of the operators that the lender runs one after the
        other; none where it runs nothing, and so finds a task at once."""
        return max(0.0, -self.ahead) + expected_stall(times, self.ahead)


class Cut(NamedTuple):
    """The lender's operators, those that are run in parts as so many. times: of each of these. more: seconds
    that the job takes longer for the starts of further parts, and for a look for tasks after each."""

    times: tuple[float, ...]
    more: float


def parts_of(operators: Sequence[Operator], ahead: float, most: float) -> tuple[int, ...]:
    """Algorithm 1, for each single operator in order. most: seconds of a layer's stall."""
    limits = [one.most for one in operators for _ in range(one.number)]
    return tuple(split(_times(operators), ahead, most, limits))


def cut_up(operators: Sequence[Operator], parts: Sequence[int], cost: Operated) -> Cut:
    """parts: of each single operator in order; all whole where it is empty."""
    times = _times(operators)
    pieces = parts or (1,) * len(times)
    start = cost.start
    each = ((start + (t - start) / n, n) for t, n in zip(times, pieces, strict=True))
    cut = tuple(t for t, n in each for _ in range(n))
    return Cut(cut, (len(cut) - len(times)) * start + len(cut) * cost.poll)


def issued(work: Work, cost: Operated) -> Cut:
    """What a task is behind that the lender's host launches: all that is issued, and has not begun. The host
    issues ahead of the device, so that grows until all is issued, and then falls to nothing until the job
    ends. At a moment of the job it is anything from 0 to the most there is, all as probable, as if it were
    the rest of one operator."""
    return Cut((cost.queued(work),), 0.0)


def _times(operators: Sequence[Operator]) -> list[float]:
    return [one.seconds for one in operators for _ in range(one.number)]
