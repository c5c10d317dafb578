"""The CPU time that a machine spends besides jobs, and how this slows jobs, as a profile measured it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Final

import numpy as np

from kvloom.plan.cost.profile import BesideLoop, CpuOverhead, Oversubscribed, Profile, Role
from kvloom.plan.cost.work import Work
from kvloom.types.job import Phase

SLOWEST: Final = 0.02  # the least part of its speed that a job keeps while its process's loop works

KindOnCores = tuple[str, bool, int]  # a model, whether the job is a decode step, and its cores


class CpuCosts:
    """Tells the CPU time of clients, gateways and engines, and how much slower it makes jobs. Other threads
    slow all jobs alike. The loop of its own process slows a job as was measured of its model."""

    def __init__(self, profile: Profile) -> None:
        self.cores = profile.computer.cores
        """The number of the machine's cores."""
        self._overheads = {overhead.role: overhead for overhead in profile.overheads}
        self._excess, self._slowdowns = _median_slowdowns(profile.oversubscribed)
        self._losses = _losses_beside_loop(profile.beside_loop)
        self._speeds: dict[tuple[str, bool, float], float] = {}

    def overhead(self, role: Role) -> CpuOverhead:
        """Returns the CPU seconds of the role, whose work is simulated as one thread; nothing if that was not
        measured."""
        idle = CpuOverhead(role=role, request=0.0, prompt=0.0, token=0.0, turn=0.0)
        return self._overheads.get(role, idle)

    def slowdown(self, excess: float) -> float:
        """Returns how many times longer a job takes while `excess` more threads want to run than the machine
        has cores, straight between what was measured, and beyond it."""
        most = self._excess[-1]
        if excess <= most or not most:
            return float(np.interp(excess, self._excess, self._slowdowns))
        return 1.0 + (self._slowdowns[-1] - 1.0) * excess / most

    def speed_beside_loop(self, work: Work, cores: float) -> float:
        """Returns the part of its own speed that a job keeps while its process's loop works, as was measured
        of its model, or of all if that was not, on the nearest number of cores."""
        asked = work.model, work.phase is Phase.DECODE, cores
        if asked not in self._speeds:
            self._speeds[asked] = min(1.0, max(SLOWEST, 1.0 - self._nearest_loss(*asked)))
        return self._speeds[asked]

    def _nearest_loss(self, model: str, decode: bool, cores: float) -> float:
        kinds = [kind for kind in self._losses if kind[1] == decode]
        kinds = [kind for kind in kinds if kind[0] == model] or kinds
        near = min((abs(kind[2] - cores) for kind in kinds), default=0.0)
        found = [loss for kind in kinds if abs(kind[2] - cores) == near for loss in self._losses[kind]]
        return median(found) if found else 0.0


def _median_slowdowns(rows: Iterable[Oversubscribed]) -> tuple[list[float], list[float]]:
    """Returns numbers of threads more than there are cores, from 0 on, and how many times longer jobs take
    beside each, in the median of all. Kinds of jobs are not told apart, because which of them lose most
    differs from profile to profile."""
    found: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        found[row.excess].append(row.seconds / row.alone)
    threads = sorted(found)
    return [0.0, *map(float, threads)], [1.0, *(max(1.0, median(found[excess])) for excess in threads)]


def _losses_beside_loop(rows: Iterable[BesideLoop]) -> dict[KindOnCores, list[float]]:
    """Returns the part of the time of its loop's work that jobs of each kind lost."""
    found: dict[KindOnCores, list[float]] = defaultdict(list)
    for row in rows:
        job = row.job
        loss = (row.seconds - row.alone) / row.busy
        found[job.model, job.phase is Phase.DECODE, job.cores].append(loss)
    return found
