"""A run in virtual time as a page plays it: samples of the fleet, and what has happened to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from kvloom.engine.engine import Engine
from kvloom.journal.records import Lost, Record
from kvloom.journal.samples import ModelTotals, Sample, encode_sample, make_sample
from kvloom.lab.sim.virtual_time import VirtualLoop
from kvloom.lab.workload.request import RequestResult
from kvloom.types.spec import EngineSpec

STEP: Final = 0.05  # virtual seconds between two samples of a short run
MOST_SAMPLES: Final = 2000
MOST_BYTES: Final = 12 << 20  # of samples
MOST_RECORDS: Final = 20_000


class Recording:
    """Keeps a run within bounds, however long that is. Samples are at even times; if they become too many,
    every second one goes, and further ones are twice as far apart. It looks on from outside: the run is the
    same as without it."""

    def __init__(self, *, most: int = MOST_SAMPLES, most_bytes: int = MOST_BYTES) -> None:
        self.taken = 0
        """Samples so far."""
        self._most = most
        self._most_bytes = most_bytes
        self._apart = 1  # the times between samples, in steps
        self._next = 0
        self._kept: list[tuple[int, int, Sample]] = []  # each with its number of steps, and its bytes
        self._records: list[Record] = []
        self._lost = 0
        self._totals: dict[str, ModelTotals] = {}
        self._take: Callable[[float, tuple[ModelTotals, ...]], Sample] | None = None

    def begin(self, take: Callable[[float, tuple[ModelTotals, ...]], Sample]) -> None:
        """Looks on from now on, in the running virtual loop. take: makes a sample of a time, with the totals
        of what was answered."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._take, loop.watch = take, self._look

    def end(self) -> None:
        """Takes a last sample."""
        self._add(self._next)

    def keep(self, records: Sequence[Record]) -> None:
        """Takes what the journal has new."""
        room = MOST_RECORDS - len(self._records)
        self._records += records[:room]
        self._lost += len(records[room:])

    def answered(self, result: RequestResult) -> None:
        """Counts a request that is over."""
        model = result.request.model
        had, each = self._totals.get(model, ModelTotals(model=model)), result.per_token
        self._totals[model] = ModelTotals(
            model=model,
            requests=had.requests + 1,
            ttft_sum=had.ttft_sum + (result.first or 0.0),
            ttft_count=had.ttft_count + (result.first is not None),
            tpot_sum=had.tpot_sum + (each or 0.0),
            tpot_count=had.tpot_count + (each is not None),
        )

    @property
    def samples(self) -> list[Sample]:
        return [sample for _, _, sample in self._kept]

    @property
    def records(self) -> list[Record]:
        """Returns the records, the last of which say what was left out, if something was."""
        missing = [
            (self._lost, f"records past the first {MOST_RECORDS}"),
            (self.taken - len(self._kept), f"samples; there is one each {self.apart:g} s"),
        ]
        at = max([0.0, *(sample.at for sample in self.samples[-1:]), *(one.at for one in self._records[-1:])])
        notes = [
            Record(
                journal=0,
                number=len(self._records) + self._lost + place,
                at=at,
                component="recording",
                event=Lost(count=count, reason=reason),
            )
            for place, (count, reason) in enumerate(missing, 1)
            if count
        ]
        return self._records + notes

    @property
    def apart(self) -> float:
        """Returns the virtual seconds between samples."""
        return STEP * self._apart

    def _look(self, when: float) -> None:
        """Takes samples of the time up to `when`, before which nothing changes any more: at its first moment
        and, if it is long, at its last."""
        last = int(when / STEP) // self._apart * self._apart
        if last < self._next:
            return
        for step in dict.fromkeys((self._next, last)):
            self._add(step)
        self._next = (last // self._apart + 1) * self._apart

    def _add(self, step: int) -> None:
        assert self._take is not None
        sample = self._take(round(step * STEP, 6), tuple(self._totals.values()))
        self.taken += 1
        self._kept.append((step, len(encode_sample(sample)), sample))
        while len(self._kept) > self._most or sum(size for _, size, _ in self._kept) > self._most_bytes:
            self._apart *= 2
            self._kept = [one for one in self._kept if one[0] % self._apart == 0]


def fleet_sample(
    at: float,
    totals: tuple[ModelTotals, ...],
    engines: Mapping[str, Engine],
    services: Mapping[str, str],
    specs: Mapping[str, EngineSpec],
    homes: Mapping[str, str] = MappingProxyType({}),
) -> Sample:
    """Returns a sample of engines that run in virtual time. services: the states of all units."""
    loads = {name: engine.load_now() for name, engine in engines.items()}
    borrowers = {cold: unit for unit, spec in specs.items() if spec.weave for cold in spec.weave.colds}
    return make_sample(at, loads, services, totals, homes=homes, borrowers=borrowers)
