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

SLOWEST: Final = 0.02  # the least part of its pace that a job keeps while its process's loop works

Kind = tuple[str, bool, int]  # a model, whether the job is a decode step, and its cores


class CpuCosts:
    """Tells the CPU time of clients, gateways and engines, and how much slower it makes jobs. Answers of a
    model that was not measured take no longer for being served, and its jobs are slowed as other models'."""

    def __init__(self, profile: Profile) -> None:
        self.cores = profile.computer.cores
        """The number of the machine's cores."""
        self._overheads = {overhead.role: overhead for overhead in profile.overheads}
        self._calibrated = {row.model: row for row in profile.calibrated}
        self.closing = profile.closing
        """The part of a request's CPU time that comes after its answer."""
        self._slower = _slower(profile.oversubscribed)
        self._lost = _lost(profile.beside_loop)
        self._nearest: dict[tuple[str, bool, float], float] = {}

    def overhead(self, role: Role) -> CpuOverhead:
        """Returns the CPU seconds of the role, whose work is simulated as one thread; nothing if that was not
        measured."""
        idle = CpuOverhead(role=role, request=0.0, prompt=0.0, token=0.0, turn=0.0)
        return self._overheads.get(role, idle)

    def slower(self, over: float) -> float:
        """Returns how many times longer a job takes while `over` more threads want to run than the machine
        has cores, straight between what was measured, and beyond it."""
        if over <= 0.0 or len(self._slower) == 1:
            return 1.0
        threads, times = zip(*self._slower, strict=True)
        if over <= threads[-1]:
            return float(np.interp(over, threads, times))
        return float(1.0 + (times[-1] - 1.0) * over / threads[-1])

    def admission_delay(self, model: str) -> float:
        """Returns the seconds by which a request for the model reaches the router later than by CPU time
        alone."""
        return self._calibrated[model].first if model in self._calibrated else 0.0

    def calibration(self, work: Work) -> float:
        """Returns the seconds by which a job takes longer under a server than all else says."""
        extra = self._calibrated.get(work.model)
        if extra is None:
            return 0.0
        if work.phase is Phase.DECODE:
            return extra.row * work.batch
        return extra.row * work.rows + extra.prompt * (work.tokens - work.rows)

    def pace(self, work: Work, cores: float) -> float:
        """Returns the part of its own pace that a job keeps while its process's loop works, as was measured
        of its model, or of all if that was not, on the nearest number of cores."""
        asked = work.model, work.phase is Phase.DECODE, cores
        if asked not in self._nearest:
            self._nearest[asked] = min(1.0, max(SLOWEST, 1.0 - self._nearest_loss(*asked)))
        return self._nearest[asked]

    def _nearest_loss(self, model: str, decode: bool, cores: float) -> float:
        kinds = [kind for kind in self._lost if kind[1] == decode]
        kinds = [kind for kind in kinds if kind[0] == model] or kinds
        near = min((abs(kind[2] - cores) for kind in kinds), default=0.0)
        found = [loss for kind in kinds if abs(kind[2] - cores) == near for loss in self._lost[kind]]
        return median(found) if found else 0.0


def _slower(rows: Iterable[Oversubscribed]) -> list[tuple[float, float]]:
    """Returns how many times longer jobs take, in the median of all of them, by how many threads more there
    are than cores. Jobs are not told apart: what one kind loses more than another in one profile, it does not
    lose more in the next."""
    found: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        found[row.over].append(row.seconds / row.alone)
    return [(0.0, 1.0), *((over, max(1.0, median(times))) for over, times in sorted(found.items()))]


def _lost(rows: Iterable[BesideLoop]) -> dict[Kind, list[float]]:
    """Returns the part of the time of its loop's work that jobs of each kind lost."""
    found: dict[Kind, list[float]] = defaultdict(list)
    for row in rows:
        doing = row.doing
        loss = (row.seconds - row.alone) / row.busy
        found[doing.model, doing.phase is Phase.DECODE, doing.cores].append(loss)
    return found
