"""The CPU time that a machine spends besides jobs, and how this slows jobs, as a profile measured it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Final

import numpy as np

from kvloom.plan.cost.profile import HostedSeconds, JobMeasured, Profile, Role
from kvloom.plan.cost.work import Work
from kvloom.types.job import Phase

SLOWEST: Final = 0.02  # the least part of its pace that a job keeps while its process's loop works

HostedKind = tuple[str, bool, int]  # a model, whether the job is a decode step, and its cores
Point = tuple[int, float]


class Hosting:
    """Tells the CPU time of clients, gateways and engines, and how much slower it makes jobs. Jobs of a model
    that was not measured are slowed as other models' jobs of their phase, and its answers take no longer
    for being served."""

    def __init__(self, profile: Profile) -> None:
        self.cores = profile.computer.cores
        """The number of the machine's cores."""
        self._hosted = {hosted.role: hosted for hosted in profile.hosted}
        self._pressing = profile.pressing
        self._slower = _Known((row.doing, (row.over, row.seconds / row.alone)) for row in profile.pressed)
        self._served = {row.model: row for row in profile.served}
        self.closing = profile.closing
        """The part of a request's CPU time that comes after its answer."""
        self._lost = _Known((row.doing, (1, (row.seconds - row.alone) / row.busy)) for row in profile.stalled)

    def upkeep(self, role: Role) -> HostedSeconds:
        """Returns the CPU seconds of the role, whose work is simulated as one thread; nothing if that was not
        measured."""
        idle = HostedSeconds(role=role, request=0.0, prompt=0.0, token=0.0, turn=0.0)
        return self._hosted.get(role, idle)

    def slower(self, work: Work, cores: float, over: float) -> float:
        """Returns how many times longer a job on so many cores takes while `over` more threads want to run
        than the machine has cores, straight between what was measured, and beyond it."""
        known = self._slower.of(work, cores)
        if over <= 0.0 or not known:
            return 1.0
        threads, losses = [0.0, *(at for at, _ in known)], [0.0, *(times - 1.0 for _, times in known)]
        if over <= threads[-1]:
            lost = float(np.interp(over, threads, losses))
        else:
            lost = losses[-1] * over / threads[-1]
        return 1.0 + max(0.0, self._pressing * lost)

    def admission_delay(self, model: str) -> float:
        """Returns the seconds by which a request for the model reaches the router later than by CPU time
        alone."""
        return self._served[model].first if model in self._served else 0.0

    def served(self, work: Work) -> float:
        """Returns the seconds by which a job takes longer under a server than all else says."""
        extra = self._served.get(work.model)
        if extra is None:
            return 0.0
        if work.phase is Phase.DECODE:
            return extra.row * work.batch
        return extra.row * work.rows + extra.prompt * (work.tokens - work.rows)

    def pace(self, work: Work, cores: float) -> float:
        """Returns the part of its own pace that a job keeps while its process's loop works."""
        known = self._lost.of(work, cores)
        return min(1.0, max(SLOWEST, 1.0 - known[0][1])) if known else 1.0


class _Known:
    """Measured slowdowns by kind of job, as points (x, y). If several rows of a kind have the same x, the
    point has the median of their y."""

    def __init__(self, rows: Iterable[tuple[JobMeasured, Point]]) -> None:
        found: dict[HostedKind, list[Point]] = defaultdict(list)
        for doing, point in rows:
            found[doing.model, doing.phase is Phase.DECODE, doing.cores].append(point)
        self._points = {kind: _medians(points) for kind, points in found.items()}
        self._nearest: dict[tuple[str, bool, float], list[Point]] = {}

    def of(self, work: Work, cores: float) -> list[Point]:
        """Returns the points of the job's model, or of all models if that was not measured, on the nearest
        number of cores that was measured."""
        asked = work.model, work.phase is Phase.DECODE, cores
        if asked not in self._nearest:
            self._nearest[asked] = self._find(*asked)
        return self._nearest[asked]

    def _find(self, model: str, decode: bool, cores: float) -> list[Point]:
        kinds = [kind for kind in self._points if kind[1] == decode]
        kinds = [kind for kind in kinds if kind[0] == model] or kinds
        near = min((abs(kind[2] - cores) for kind in kinds), default=0.0)
        return _medians(
            point for kind in kinds if abs(kind[2] - cores) == near for point in self._points[kind]
        )


def _medians(points: Iterable[Point]) -> list[Point]:
    found: dict[int, list[float]] = defaultdict(list)
    for x, y in points:
        found[x].append(y)
    return [(x, median(ys)) for x, ys in sorted(found.items())]
