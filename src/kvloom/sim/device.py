"""A device whose jobs are watched, told of, and fail now and then."""

from __future__ import annotations

from kvloom.core.job import Job
from kvloom.sim.content import JobFailed
from kvloom.sim.faults import Mishaps
from kvloom.sim.journal import Journal
from kvloom.sim.witness import Witness


class WatchedDevice:
    """Satisfies `Content`: a witness. Where the seed has it, a job fails: at its end, with all written, or,
    if peers wait for its layers, after some of them."""

    def __init__(self, unit: str, witness: Witness, mishaps: Mishaps, journal: Journal) -> None:
        self._unit = unit
        self._witness = witness
        self._mishaps = mishaps
        self._journal = journal
        self._doomed: set[int] = set()  # by id; while they run

    def begin(self, job: Job) -> None:
        self._tell(job, "begins, share", job.share)
        self._journal.count("jobs")
        if self._mishaps.fails():
            self._doomed.add(id(job))
        self._witness.begin(job)

    def write(self, job: Job, layers: range) -> None:
        if id(job) in self._doomed and layers.start > 0:
            self._fail(job)
        self._witness.write(job, layers)

    def draw(self, job: Job, step: int) -> list[int]:
        if id(job) in self._doomed:
            self._fail(job)
        tokens = self._witness.draw(job, step)
        self._tell(job, "ends:", tokens)
        return tokens

    def _fail(self, job: Job) -> None:
        self._doomed.remove(id(job))
        self._tell(job, "fails")
        self._journal.count("jobs failed")
        raise JobFailed("the seed has it so")

    def _tell(self, job: Job, *how: object) -> None:
        if not self._journal.kept:
            return
        plan = job.plan
        batch = [
            f"{sequence}[{start}:{start + new}]"
            for sequence, start, new in zip(plan.sequences, plan.starts, plan.appends, strict=True)
        ]
        self._journal("job", self._unit, job.phase.value, job.model, *batch, *how)
