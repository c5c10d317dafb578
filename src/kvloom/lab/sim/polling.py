"""How a lender's device finds another unit's tasks: it runs the pieces of its job one after the other, and
looks for tasks after each; and how long tasks have waited, beside what the queueing model expects."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from kvloom.lab.sim.executor import Progress
from kvloom.offload.queueing import Cut, Exchange, conditional_wait, expected_stall
from kvloom.types.load import Waits


class Pieces:
    """The pieces of one job in the order in which they run, each with the look for tasks after it."""

    def __init__(self, cut: Cut, poll: float) -> None:
        """poll: seconds of a look."""
        self.cut = cut
        self.times = [seconds + poll for seconds in cut.times]
        self._ends = list(accumulate(self.times))

    def seconds_to_poll(self, progress: Progress) -> float | None:
        """Returns the seconds until the job looks for tasks; None if it never does. If the job takes longer
        than all of its pieces, because its host is slow or others run beside it, they are longer by as
        much."""
        if not self._ends:
            return None
        ends, whole = self._ends, self._ends[-1]
        at = progress.part * whole
        end = ends[min(bisect_right(ends, at), len(ends) - 1)]
        return progress.still + progress.seconds * max(0.0, end - at) / whole


def seconds_behind_launches(queued: float, progress: Progress) -> float:
    """Returns the seconds until a task begins that the lender's host launches now: until all is done that
    the host has issued before. The host issues the job's operators evenly, from the job's begin on and ahead
    of the device, and goes on while the device stands still for a task.

    queued: seconds of work in the device's launch queue at the moment the host has issued everything, if the
    device never stood still."""
    whole = progress.seconds
    issuing = max(0.0, whole - queued)
    issued = 1.0 if issuing == 0 else min(1.0, progress.age / issuing)
    return progress.still + whole * max(0.0, issued - progress.part)


@dataclass(slots=True, eq=False)
class WaitTally:
    """The waits of a loan's tasks. Fields of seconds are sums over its tasks; what the model expects is
    summed over its steps."""

    tasks: int = 0
    parts: int = 0
    """The most pieces that the lender's jobs have had; a maximum, and no sum."""
    wait: float = 0.0
    """Seconds that the tasks waited."""
    beyond: float = 0.0
    """Seconds that those waited which waited longer than their `ahead`."""
    late: int = 0
    """The number of these tasks."""
    stall: float = 0.0
    """Seconds that they waited longer than that."""
    ahead: float = 0.0
    service: float = 0.0
    _steps: int = 0
    _expected: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def expect(self, exchange: Exchange, times: Sequence[float]) -> None:
        """Notes what the model expects of one step's tasks. times: the lender's pieces at its begin."""
        self._steps += 1
        self.parts = max(self.parts, len(times))
        found = (
            expected_stall(times, 0.0),
            conditional_wait(times, exchange.ahead),
            expected_stall(times, exchange.ahead),
        )
        self._expected = [total + one for total, one in zip(self._expected, found, strict=True)]

    def add(self, wait: float, exchange: Exchange) -> None:
        """Notes one task."""
        ahead = max(0.0, exchange.ahead)
        self.tasks += 1
        self.wait += wait
        if wait > ahead:
            self.late += 1
            self.beyond += wait
            self.stall += wait - ahead
        self.ahead += exchange.ahead
        self.service += exchange.service

    def waits(self) -> Waits:
        """Returns means over the loan's tasks, and what the model expects of them."""
        tasks, steps = max(1, self.tasks), max(1, self._steps)
        expected = [total / steps for total in self._expected]
        return Waits(
            tasks_total=self.tasks,
            ahead=self.ahead / tasks,
            parts=self.parts,
            service=self.service / tasks,
            wait=self.wait / tasks,
            beyond=self.beyond / max(1, self.late),
            stall=self.stall / tasks,
            expected_wait=expected[0],
            expected_beyond=expected[1],
            expected_stall=expected[2],
        )
