"""Offloaded attention in virtual time: loans between modelled devices, and what they do to the jobs at both
ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvloom.lab.sim.executor import ModelledExecutor
from kvloom.lab.sim.links import ModelledTransport
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.offload.queueing import Cut, Exchange, Rule, cut_up, issued, parts_of
from kvloom.offload.terms import Borrow, LentBlocks, Loan
from kvloom.plan.cost.work import Operated, Work
from kvloom.types.errors import BadRequest, ConfigError, Conflict, Unavailable
from kvloom.types.geometry import I32
from kvloom.types.job import Job, PageMove, Phase
from kvloom.types.load import Waits
from kvloom.types.spec import EngineSpec

SIGNAL: Final = 2e-6  # seconds until a word that was written into a peer's memory is seen there
_PROFILED: Final = 1.0  # seconds between two plans of what is split
_NOTICED: Final = 0.05  # seconds until a lender sees that its borrower has left

_WHOLE = Cut((), 0.0)


@dataclass(slots=True, eq=False)
class OffloadedStep:
    """A decode step with offloaded rows."""

    job: Job
    seconds: float = 0.0
    """The time that the step takes, as things are."""
    service: float = 0.0
    """The time that a layer's task takes."""
    ahead: float = 0.0
    """The time that a task may wait before the step does."""
    lost: str | None = None
    """Why the offloaded rows do not count."""

    @property
    def rows(self) -> int:
        """Offloaded rows that count."""
        return len(self.job.offloaded.plan.sequences) if self.job.offloaded and self.lost is None else 0


@dataclass(slots=True, eq=False)
class SplitPlan:
    """A lender's way to split jobs of one kind."""

    parts: tuple[int, ...] = ()
    """The parts of each operator in order."""
    due: float = float("-inf")
    """The time when the plan is made anew."""
    work: Work | None = None
    cut: Cut = _WHOLE
    """The pieces of the last such job, `work`."""


@dataclass(slots=True, eq=False)
class SimulatedLoan:
    """A loan in virtual time, as both of its ends know it."""

    borrow: Borrow
    lender: SimulatedOffloadBackend
    blocks: LentBlocks
    ended: Callable[[str], None]
    """Tells the lender's engine why the loan is over."""
    numbers: I32
    """The lender's blocks, by their numbers in the loan."""
    borrower: SimulatedOffloadBackend | None = None
    over: str | None = None
    """Why the loan is over, once it is."""
    step: OffloadedStep | None = None
    plans: dict[tuple[str, Phase], SplitPlan] = field(default_factory=dict)
    """The plans by the model and the phase of the lender's jobs."""

    def end(self, why: str) -> None:
        """Ends the loan: what is offloaded of a step that runs does not count."""
        self.over = self.over or why
        if self.step is not None:
            self.step.lost = self.over


class SimulatedOffloadBackend:
    """Satisfies `OffloadBackend` to an engine, and `Loans` to its executor. A loan is as the real one but for
    time: q, k and v take the links' time, and a task takes the lender's device when the operator that runs
    there ends."""

    def __init__(
        self,
        backends: Mapping[bytes, SimulatedOffloadBackend],
        executor: ModelledExecutor,
        transport: ModelledTransport,
        cost: Operated,
        bandwidth: float,
    ) -> None:
        """backends: of the fleet, by their endpoint's `where`. bandwidth: of the unit's way out, in bytes a
        second."""
        self._backends = backends
        self.executor = executor
        self.transport = transport
        self.cost = cost
        self.bandwidth = bandwidth
        self._borrowed: dict[str, SimulatedLoan] = {}
        self.lent: SimulatedLoan | None = None
        executor.loans = self
        executor.max_steps = 1  # what steps take of late is reported, and decided by

    # -- what the engine calls --------------------------------------------------------------------------

    def heads(self, model: str) -> int:
        return self.cost.shape(model).heads

    def borrow(self, borrow: Borrow, loan: Loan) -> int:
        lender = self._backends.get(loan.peer.where)
        if lender is None or not lender.reached:
            raise Unavailable(f"{loan.peer.unit} cannot be reached")
        lent = lender.lent
        if lent is None or lent.blocks.ticket != loan.ticket or lent.over:
            raise Unavailable(f"loan: that of {loan.peer.unit} is over")
        if lent.borrow != borrow:
            raise BadRequest(f"loan: that of {loan.peer.unit} is for another model")
        lent.borrower = self
        self._borrowed[borrow.model] = lent
        return loan.pages * borrow.form.layers * borrow.form.kv_heads

    def give_back(self, model: str) -> None:
        loan = self._borrowed.pop(model)
        if loan.over is None:
            loan.end("the borrower has left")
            asyncio.get_running_loop().call_later(_NOTICED, loan.lender.left, loan)

    def lend(self, borrow: Borrow, blocks: I32, ended: Callable[[str], None]) -> Loan:
        if self.lent is not None:
            raise Conflict("weave: this unit lends already; one loan at a time")
        form = borrow.form
        if borrow.heads % form.kv_heads:
            raise BadRequest(f"borrow: {borrow.heads} heads over {form.kv_heads}; want a multiple")
        made = LentBlocks(borrow, blocks, self.transport, b"modelled")
        self.lent = SimulatedLoan(borrow, self, made, ended, blocks)
        return made.loan

    def recall(self) -> bool:
        loan = self.lent
        if loan is None:
            return True
        loan.end("the cold unit has its blocks back")
        self.changed()
        if not loan.blocks.close():
            return False
        self.lent = None
        return True

    def waits(self) -> Waits | None:
        """Returns None: nothing is measured, because what is expected is what comes."""
        return None

    def lent_blocks(self, model: str) -> tuple[SimulatedOffloadBackend, I32] | None:
        """Returns who lends to a model, and the numbers of the blocks there; None if no loan counts."""
        loan = self._borrowed.get(model)
        if loan is None or loan.over or not loan.lender.reached:
            return None
        return loan.lender, loan.numbers

    def die(self) -> None:
        """Ends the loans of a borrower whose process is gone, which its lenders notice."""
        for model in list(self._borrowed):
            self.give_back(model)

    def left(self, loan: SimulatedLoan) -> None:
        if self.lent is loan:
            loan.ended("the borrower has left")

    @property
    def reached(self) -> bool:
        return self.transport.plane.reaches(self.transport)

    # -- what the executor calls --------------------------------------------------------------------------

    def begin(self, job: Job, then: Callable[[], None]) -> None:
        loan = self._borrowed.get(job.model)
        if job.offloaded is None or loan is None:
            then()
            return
        step = loan.step = OffloadedStep(job, lost=loan.over)
        if not loan.lender.reached:
            loan.end("the cold unit is gone")
        self._move(loan, step, deque(job.offloaded.moves), then)

    def _move(
        self, loan: SimulatedLoan, step: OffloadedStep, moves: deque[PageMove], then: Callable[[], None]
    ) -> None:
        """Copies one after the other, over the link of whoever has what is moved, and calls `then`."""
        if step.lost or not moves:
            then()
            return
        move, lender = moves.popleft(), loan.lender
        entry = lender.transport.entry(loan.blocks.ticket)
        entry.copying += 1

        def moved() -> None:
            entry.copying -= 1
            self._move(loan, step, moves, then)

        size = int(np.sum(move.tokens)) * self.cost.shape(step.job.model).kv_bytes
        link = self.transport.link if move.out else lender.transport.link
        link.wait(size, moved)

    def seconds(self, job: Job, work: Work, alone: float) -> float:
        loan = self._borrowed.get(job.model)
        step = loan.step if loan else None
        found = alone
        if loan is not None and step is not None and step.job is job and step.rows:
            found = self._offloaded(loan, step, work, alone)
        lent = self.lent.step if self.lent else None
        if self.lent is not None and lent is not None and lent.rows and lent.seconds:
            found = self._lending(self.lent, lent, work, found)
        if step is not None and step.job is job:
            step.seconds = found
        return found

    def _offloaded(self, loan: SimulatedLoan, step: OffloadedStep, work: Work, alone: float) -> float:
        """Returns the time of a step whose products are for all rows, and whose attention is for those at
        home."""
        assert step.job.offloaded is not None
        shape, away = self.cost.shape(work.model), step.job.offloaded.plan
        home = work.batch - step.rows
        own = self.cost.attention(work.model, shape, home, work.context) if home else 0.0
        counted = self.cost.attention(work.model, shape, work.batch, work.context)
        lender = loan.lender
        step.service = lender.cost.attention(work.model, shape, step.rows, int(away.starts.sum()))
        row = shape.head_dim * shape.itemsize * step.rows
        there = row * (shape.heads + 2 * shape.kv_heads) / self.bandwidth + SIGNAL
        back = row * shape.heads / lender.bandwidth + SIGNAL
        exchange = Exchange(own, step.service, there + back)
        step.ahead = exchange.ahead
        stall = exchange.stall(lender.times(loan))
        return alone + shape.layers * (own - counted + 2 * self.cost.start + stall)

    def times(self, loan: SimulatedLoan) -> list[float]:
        """Returns the times of the operators of what runs here."""
        return [t for work in self.executor.works for t in self._cut(loan, work).times]

    def _cut(self, loan: SimulatedLoan, work: Work) -> Cut:
        """Returns a job in the pieces between which a task is found."""
        plan = loan.plans.setdefault((work.model, work.phase), SplitPlan())
        step, now = loan.step, asyncio.get_running_loop().time()
        due = step is not None and step.seconds > 0 and plan.due <= now
        if plan.work == work and not due:
            return plan.cut
        plan.work = work
        if loan.borrow.control == "iterations":
            plan.cut = issued(work, self.cost)
            return plan.cut
        operators = self.cost.operators(work)
        if step is not None and due:
            terms, layers = loan.borrow, self._layers(loan, step)
            rule = Rule.of(terms.split, terms.waits, step.ahead, step.seconds, layers)
            plan.parts, plan.due = parts_of(operators, *rule) if rule else (), now + _PROFILED
        plan.cut = cut_up(operators, plan.parts, self.cost)
        return plan.cut

    def _lending(self, loan: SimulatedLoan, step: OffloadedStep, work: Work, alone: float) -> float:
        """Returns the time of an own job that looks for tasks, and stands still while one is done."""
        served = self._layers(loan, step) * step.service / step.seconds
        return (alone + self._cut(loan, work).more) / (1.0 - served)

    def _layers(self, loan: SimulatedLoan, step: OffloadedStep) -> int:
        """Returns the tasks of the step."""
        assert loan.borrower is not None
        return loan.borrower.cost.shape(step.job.model).layers

    def changed(self) -> None:
        """Lets all find their pace, because other jobs run here than before: first those who wait for this
        unit, then its own, then those that it waits for."""
        if self.lent is not None and self.lent.borrower is not None:
            self.lent.borrower.executor.pace()
        self.executor.pace()
        for loan in self._borrowed.values():
            loan.lender.executor.pace()

    def over(self, job: Job) -> str | None:
        loan = self._borrowed.get(job.model)
        if job.offloaded is None or loan is None or loan.step is None:
            return None
        if not loan.lender.reached:
            loan.end("the cold unit is gone")
        lost, loan.step = loan.step.lost, None
        return lost


class OffloadingUnits:
    """The units of a fleet that lend and borrow."""

    def __init__(self, specs: Iterable[EngineSpec]) -> None:
        self.backends: dict[bytes, SimulatedOffloadBackend] = {}
        pairs = [(spec.unit, spec.weave.cold) for spec in specs if spec.weave]
        self._units = {name for pair in pairs for name in pair}

    def backend(
        self, unit: SimulatedUnit, executor: ModelledExecutor, transport: ModelledTransport
    ) -> SimulatedOffloadBackend | None:
        """Returns the backend of a unit; None if it takes no part. Raises ConfigError if its costs cannot be
        known."""
        name = unit.spec.unit
        if name not in self._units or not unit.spec.abilities.weaves:
            return None
        if not isinstance(unit.cost, Operated):
            raise ConfigError(
                f"{name}: weave: operators of its device are not known; the roofline knows some"
            )
        made = SimulatedOffloadBackend(self.backends, executor, transport, unit.cost, unit.bandwidth)
        self.backends[transport.endpoint.where] = made
        return made

    def forget(self, transport: ModelledTransport) -> None:
        """Drops the backend of an engine that has ended."""
        self.backends.pop(transport.endpoint.where, None)
