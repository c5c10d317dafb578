"""The queueing model: how long an offloaded attention waits for the operator that runs when it arrives, into
how many parts operators are split so that it waits less (Weaver, section 4.2), and what both sides pay in
time.

It arrives anywhere in an iteration of the unit that is to do it, so it meets operator i with probability T_i
over the sum of all T, and has to wait for the rest of it, uniform in [0, T_i]. All times here are in one
unit, whichever. `ahead` is c = K − N: what the asking unit has to do itself meanwhile, less what the task
takes. A wait that is shorter than that stalls nobody; below zero it counts as zero.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from kvloom.plan.cost.work import Operator, OperatorCostModel, Work
from kvloom.types.geometry import F64
from kvloom.types.spec import Splitting


class Rule(NamedTuple):
    """The rule by which operators are split; both times are in one unit."""

    ahead: float
    """The time for which the asking unit is busy itself meanwhile, less the time of a task (c = K − N)."""
    most: float
    """The most expected stall, once a layer."""

    @staticmethod
    def of(split: Splitting, waits: float, ahead: float, step: float, layers: int) -> Rule | None:
        """Returns the rule by which tasks hold a step of the asking unit up by at most `waits` of it; None if
        nothing is to be split. step: the step's time, 0 if it is not known."""
        return Rule(ahead, waits * step / layers) if split == "auto" and step > 0 else None


class Gap(NamedTuple):
    """The time between two iterations, in which the thread that does tasks sleeps until one comes. It counts
    as operators of 2 · wake, or of its own length if that is less, as many as there is time for, so that a
    task that comes in it waits for `wake` on average."""

    time: float
    wake: float
    """The mean time from a task's arrival until it is found."""


NONE = Gap(0.0, 0.0)


def conditional_wait(times: Sequence[float] | F64, ahead: float, gap: Gap = NONE) -> float:
    """Returns E[W | W > c], the paper's objective (equations 1 and 3): Σ (T² − c²) / (2 Σ (T − c)) over T >
    c; 0 if no operator is longer than c."""
    c = max(0.0, ahead)
    longer, weights = _longer(times, c, gap)
    over = 2 * float((weights * (longer - c)).sum())
    return float((weights * (longer**2 - c * c)).sum()) / over if over > 0 else 0.0


def expected_stall(times: Sequence[float] | F64, ahead: float, gap: Gap = NONE) -> float:
    """Returns E[max(0, W − c)], by which the asking unit is held up: Σ (T − c)² over T > c, over 2 Σ T. At c
    = 0 that is E[W]."""
    c, whole = max(0.0, ahead), float(np.sum(times)) + gap.time
    longer, weights = _longer(times, c, gap)
    return float((weights * (longer - c) ** 2).sum()) / (2 * whole) if whole > 0 else 0.0


def _longer(times: Sequence[float] | F64, c: float, gap: Gap) -> tuple[F64, F64]:
    """Returns the operators longer than c, and how many of each there are."""
    all_, weights = np.asarray(times, np.float64), np.ones(len(times))
    size = min(gap.time, 2 * gap.wake)
    if size > 0:
        all_, weights = np.append(all_, size), np.append(weights, gap.time / size)
    longer = all_ > c
    return all_[longer], weights[longer]


def split(
    times: Sequence[float], ahead: float, most: float, limits: Sequence[int] | None = None
) -> list[int]:
    """Returns the parts of each operator. Algorithm 1 cuts the longest operator into halves while the
    expected stall is more than `most` and that operator longer than c. limits: the most parts of each, if
    there are any.

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


# -- of modelled devices ---------------------------------------------------------------------------------


class Exchange(NamedTuple):
    """The exchange of one layer of a step with offloaded rows, in seconds."""

    own: float
    """The attention at home, which goes on meanwhile."""
    service: float
    """The task at the lender."""
    wire: float
    """The time in which q, k and v get there, and the output comes back."""

    @property
    def ahead(self) -> float:
        """The time that the task may wait without holding up the step; below 0 the step waits in any case."""
        return self.own - self.service - self.wire

    def stall(self, times: Sequence[float]) -> float:
        """Returns the mean time that the step waits. times: those of the operators that the lender runs one
        after the other; none if it runs nothing, and so finds a task at once."""
        return max(0.0, -self.ahead) + expected_stall(times, self.ahead)


class Cut(NamedTuple):
    """The lender's operators in the order in which they run, of which those that are run in parts count as so
    many."""

    times: tuple[float, ...]
    """The seconds of each operator."""
    more: float
    """Seconds by which the job takes longer because further parts are started, with a look for tasks after
    each."""


def parts_of(operators: Sequence[Operator], ahead: float, most: float) -> tuple[int, ...]:
    """Returns the parts of each single operator in order, by algorithm 1. most: seconds of a layer's
    stall."""
    limits = [one.most for one in in_order(operators)]
    return tuple(split(_times(operators), ahead, most, limits))


def cut_up(operators: Sequence[Operator], parts: Sequence[int], cost: OperatorCostModel) -> Cut:
    """Returns the operators cut into parts. parts: the number of parts of each single operator in order;
    empty if all are whole."""
    times = _times(operators)
    pieces = parts or (1,) * len(times)
    start = cost.start
    each = ((start + (t - start) / n, n) for t, n in zip(times, pieces, strict=True))
    cut = tuple(t for t, n in each for _ in range(n))
    return Cut(cut, (len(cut) - len(times)) * start + len(cut) * cost.poll)


def issued(work: Work, cost: OperatorCostModel) -> Cut:
    """Returns the work that a task has to wait for if the lender's host launches it: all that is issued and
    has not begun. The host issues ahead of the device, so that grows until all is issued, and then falls to
    nothing until the job ends. At a moment of the job it is anything from 0 to the most there is, all as
    probable, as if it were the rest of one operator."""
    return Cut((cost.queued(work),), 0.0)


def in_order(operators: Sequence[Operator]) -> list[Operator]:
    """Returns the single operators of a job in the order in which they run: those of each layer, and then
    those of which there are fewer than layers."""
    layers = max((one.number for one in operators), default=0)
    layer = [one for one in operators if one.number == layers]
    return layer * layers + [one for one in operators if one.number < layers for _ in range(one.number)]


def _times(operators: Sequence[Operator]) -> list[float]:
    return [one.seconds for one in in_order(operators)]
