"""A loan in virtual time, as both of its ends know it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvloom.core.address import Ticket
from kvloom.core.job import Job, Phase
from kvloom.core.weaving import Borrow
from kvloom.cost.weaving import Cut
from kvloom.cost.work import Work

if TYPE_CHECKING:
    from kvloom.sim.weaving import ModelledWeaver


_WHOLE = Cut((), 0.0)


@dataclass(slots=True, eq=False)
class WovenStep:
    """A decode step of which some rows are away. seconds: that it takes, as things are; service: of a layer's
    task, ahead: how long that may wait before the step does. lost: why what is away does not count."""

    job: Job
    seconds: float = 0.0
    service: float = 0.0
    ahead: float = 0.0
    lost: str | None = None

    @property
    def rows(self) -> int:
        """That are away, and count."""
        return len(self.job.away.plan.sequences) if self.job.away and self.lost is None else 0


@dataclass(slots=True, eq=False)
class Plan:
    """parts: of each of the lender's operators in order, in jobs of this kind; due: when it is made anew.
    cut: of the last such job, `work`."""

    parts: tuple[int, ...] = ()
    due: float = float("-inf")
    work: Work | None = None
    cut: Cut = _WHOLE


@dataclass(slots=True, eq=False)
class Strand:
    """ended: tells the lender's engine that the loan is over, and why. over: that, once it is; plans: by the
    model and the phase of the lender's jobs."""

    borrow: Borrow
    lender: ModelledWeaver
    ticket: Ticket
    ended: Callable[[str], None]
    borrower: ModelledWeaver | None = None
    over: str | None = None
    step: WovenStep | None = None
    plans: dict[tuple[str, Phase], Plan] = field(default_factory=dict)

    def end(self, why: str) -> None:
        """What is away of a step that runs does not count."""
        self.over = self.over or why
        if self.step is not None:
            self.step.lost = self.over
