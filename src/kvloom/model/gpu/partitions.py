"""The device's compute, cut in two in several ways; a job takes the side that is nearest to its share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from kvloom.model.gpu.streams import Mark, Recording, Stream


class Lane:
    """A stream that has `compute` units of the device for itself. Jobs that share it take turns: what a job
    asks for is put into the stream while it holds `lock`."""

    def __init__(self, compute: int, stream: Stream) -> None:
        self.compute = compute
        self.stream = stream
        self.lock = threading.Lock()
        self.jobs = 0

    def entered(self) -> AbstractContextManager[object]:
        return self.stream.entered()

    def mark(self) -> Mark:
        return self.stream.mark()

    def record(self, work: Callable[[], None]) -> Recording:
        return self.stream.record(work)


class Partitions:
    """One lane with everything, and pairs of lanes that together are everything and share nothing. To be
    asked on one thread."""

    def __init__(self, whole: Lane, pairs: Sequence[tuple[Lane, Lane]]) -> None:
        self.whole = whole
        self.pairs = list(pairs)

    @property
    def lanes(self) -> list[Lane]:
        return [self.whole, *(lane for pair in self.pairs for lane in pair)]

    def take(self, share: int) -> Lane:
        """For a job of so many units, until `give_back`. While jobs run in a pair, others join it: the sides
        of two pairs would share multiprocessors. A job with room for itself alone has everything."""
        lane = self._choose(share)
        lane.jobs += 1
        return lane

    def give_back(self, lane: Lane) -> None:
        lane.jobs -= 1

    def _choose(self, share: int) -> Lane:
        if share >= self.whole.compute or not self.pairs:
            return self.whole
        busy = [pair for pair in self.pairs if pair[0].jobs or pair[1].jobs]
        pairs = busy or self.pairs
        fewest = min(lane.jobs for pair in pairs for lane in pair)
        idle = [lane for pair in pairs for lane in pair if lane.jobs == fewest]
        return min(idle, key=lambda lane: (abs(lane.compute - share), lane.compute))
