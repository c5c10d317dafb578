"""How long an offloaded attention waits for the operator that runs when it arrives, and into how many parts
operators are split so that it waits less (Weaver, section 4.2).

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

from kvloom.core.arrays import F64, I64
from kvloom.core.spec import Splitting


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
