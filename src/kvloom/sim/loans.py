"""What an executor in virtual time asks of weaving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvloom.core.job import Job
from kvloom.cost.work import Work


class Loans(Protocol):
    """What weaving does to jobs."""

    def begin(self, job: Job, then: Callable[[], None]) -> None:
        """Do what comes before the job, and call `then`."""

    def seconds(self, job: Job, work: Work, alone: float) -> float:
        """Of a job that would take `alone` without weaving, as things are."""

    def over(self, job: Job) -> str | None:
        """The job has ended; why what was away of it does not count."""

    def changed(self) -> None:
        """Other jobs run here than before: let all whom it concerns find their pace."""
