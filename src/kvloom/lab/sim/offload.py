"""Offloaded attention in virtual time: loans between modelled devices, and what they do to the jobs at both
ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvloom.lab.sim.executor import ModelledExecutor, Progress
from kvloom.lab.sim.links import ModelledTransport
from kvloom.lab.sim.polling import Pieces, WaitTally, seconds_behind_launches
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.offload.queueing import Cut, Exchange, Rule, cut_up, issued, parts_of
from kvloom.offload.terms import Borrow, LentBlocks, Loan
from kvloom.plan.cost.work import OperatorCostModel, Work
from kvloom.types.errors import BadRequest, ConfigError, Conflict, Unavailable
from kvloom.types.geometry import I32, AnyArray
from kvloom.types.job import Job, PageMove, Phase
from kvloom.types.load import Waits
from kvloom.types.spec import EngineSpec

SIGNAL: Final = 2e-6  # seconds until a word that was written into a peer's memory is seen there
_REPLAN_PERIOD: Final = 1.0  # seconds between two plans of what is split
_LEAVE_NOTICE_DELAY: Final = 0.05  # seconds until a lender sees that its borrower has left

_WHOLE = Pieces(Cut((), 0.0), 0.0)
_NOTHING = Exchange(0.0, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class OffloadedStep:
    """A decode step with offloaded rows."""

    job: Job
    begun: float
    exchange: Exchange = _NOTHING
    """The exchange of each of its layers."""
    lost: str | None = None
    """Why the offloaded rows do not count."""

    @property
    def rows(self) -> int:
        """Returns the number of offloaded rows that count."""
        return len(self.job.offloaded.plan.sequences) if self.job.offloaded and self.lost is None else 0


@dataclass(slots=True, eq=False)
class SplitPlan:
    """A lender's way to split jobs of one kind."""

    parts: tuple[int, ...] = ()
    """The parts of each operator in order."""
    due: float = float("-inf")
    """The time when the plan is made anew."""
    work: Work | None = None
    pieces: Pieces = _WHOLE
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
    end_reason: str | None = None
    """Why the loan is over, once it is."""
    step: OffloadedStep | None = None
    last_step_seconds: float = 0.0
    """Seconds of the borrower's last step with offloaded rows; 0 if there was none."""
    tally: WaitTally = field(default_factory=WaitTally)
    plans: dict[tuple[str, Phase], SplitPlan] = field(default_factory=dict)
    """The plans by the model and the phase of the lender's jobs."""

    def end(self, why: str) -> None:
        """Ends the loan: what is offloaded of a step that runs does not count."""
        self.end_reason = self.end_reason or why
        if self.step is not None:
            self.step.lost = self.end_reason


class SimulatedOffloadBackend:
    """Satisfies `OffloadBackend` to an engine, and `Loans` to its executor. A loan is as the real one but for
    time: q, k and v take the links' time, and a task is an event: it begins when the lender's job looks for
    it, after the piece of an operator that runs when it comes, and holds that job up for as long as it
    takes."""

    def __init__(
        self,
        backends: Mapping[bytes, SimulatedOffloadBackend],
        executor: ModelledExecutor,
        transport: ModelledTransport,
        cost: OperatorCostModel,
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
        if lent is None or lent.blocks.ticket != loan.ticket or lent.end_reason:
            raise Unavailable(f"loan: that of {loan.peer.unit} is over")
        if lent.borrow != borrow:
            raise BadRequest(f"loan: that of {loan.peer.unit} is for another model")
        lent.borrower = self
        self._borrowed[borrow.model] = lent
        return loan.pages * borrow.form.layers * borrow.form.kv_heads

    def give_back(self, model: str) -> None:
        loan = self._borrowed.pop(model)
        if loan.end_reason is None:
            loan.end("the borrower has left")
            asyncio.get_running_loop().call_later(_LEAVE_NOTICE_DELAY, loan.lender.left, loan)

    def lend(self, borrow: Borrow, blocks: I32, ended: Callable[[str], None]) -> Loan:
        if self.lent is not None:
            raise Conflict("weave: this unit lends already; one loan at a time")
        form = borrow.form
        if borrow.heads % form.kv_heads:
            raise BadRequest(f"borrow: {borrow.heads} heads over {form.kv_heads}; want a multiple")
        made = LentBlocks(borrow, blocks, self.transport, b"modelled")
        self.lent = SimulatedLoan(borrow, self, made, ended, blocks.copy())
        return made.loan

    def take_back(self, numbers: AnyArray) -> None:
        assert self.lent is not None
        lent = self.lent.numbers
        # Blocks that went back are pointed at one that is still lent, so that no task can name them.
        gone = np.isin(lent, lent[numbers])
        lent[gone] = lent[~gone][0]

    def recall(self) -> bool:
        loan = self.lent
        if loan is None:
            return True
        loan.end("the cold unit has its blocks back")
        if not loan.blocks.close():
            return False
        self.lent = None
        return True

    def waits(self) -> Waits | None:
        return self.lent.tally.waits() if self.lent is not None else None

    def lent_blocks(self, model: str) -> tuple[SimulatedOffloadBackend, I32] | None:
        """Returns who lends to a model, and the numbers of the blocks there; None if no loan counts."""
        loan = self._borrowed.get(model)
        if loan is None or loan.end_reason or not loan.lender.reached:
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
        step = loan.step = OffloadedStep(job, asyncio.get_running_loop().time(), lost=loan.end_reason)
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
        step, found = self._step(job), alone
        if step is not None and step.rows:
            found = self._offloaded(self._borrowed[job.model], step, work, alone)
        if self.lent is not None and self.lent.last_step_seconds:
            found += self._pieces(self.lent, work).cut.more
        return found

    def _step(self, job: Job) -> OffloadedStep | None:
        loan = self._borrowed.get(job.model)
        return loan.step if loan is not None and loan.step is not None and loan.step.job is job else None

    def _offloaded(self, loan: SimulatedLoan, step: OffloadedStep, work: Work, alone: float) -> float:
        """Returns the time of a step whose products are for all rows, and whose attention is for those at
        home."""
        assert step.job.offloaded is not None
        shape, away = self.cost.shape(work.model), step.job.offloaded.plan
        home = work.batch - step.rows
        own = self.cost.attention(work.model, shape, home, work.context) if home else 0.0
        counted = self.cost.attention(work.model, shape, work.batch, work.context)
        lender = loan.lender
        service = lender.cost.attention(work.model, shape, step.rows, int(away.starts.sum()))
        row = shape.head_dim * shape.itemsize * step.rows
        there = row * (shape.heads + 2 * shape.kv_heads) / self.bandwidth + SIGNAL
        back = row * shape.heads / lender.bandwidth + SIGNAL
        if step.exchange is _NOTHING:
            step.exchange = Exchange(own, service, there + back)
            loan.tally.expect(step.exchange, lender.times(loan))
        return alone + shape.layers * (own - counted + 2 * self.cost.start)

    def times(self, loan: SimulatedLoan) -> list[float]:
        """Returns the times of the pieces of what runs here, with the looks after them."""
        return [t for work in self.executor.works for t in self._pieces(loan, work).times]

    def _pieces(self, loan: SimulatedLoan, work: Work) -> Pieces:
        """Returns a job in the pieces after which a task is found."""
        plan = loan.plans.setdefault((work.model, work.phase), SplitPlan())
        if plan.work == work:
            return plan.pieces
        plan.work = work
        if loan.borrow.control == "iterations":
            plan.pieces = Pieces(issued(work, self.cost), 0.0)
            return plan.pieces
        operators, now = self.cost.operators(work), asyncio.get_running_loop().time()
        step, terms = loan.step, loan.borrow
        if step is not None and loan.last_step_seconds and plan.due <= now:
            rule = Rule.of(
                terms.split,
                terms.waits,
                step.exchange.ahead,
                loan.last_step_seconds,
                self._layers(loan, step),
            )
            plan.parts, plan.due = parts_of(operators, *rule) if rule else (), now + _REPLAN_PERIOD
        plan.pieces = Pieces(cut_up(operators, plan.parts, self.cost), self.cost.poll)
        return plan.pieces

    def _layers(self, loan: SimulatedLoan, step: OffloadedStep) -> int:
        """Returns the tasks of the step."""
        assert loan.borrower is not None
        return loan.borrower.cost.shape(step.job.model).layers

    def exchanges(self, job: Job) -> int:
        step = self._step(job)
        return self.cost.shape(job.model).layers if step is not None and step.rows else 0

    def exchange(self, job: Job) -> float:
        """Posts a layer's task, and lets the lender find it as it is at this moment: what happens there while
        q, k and v are on their way counts as if it had happened before."""
        step = self._step(job)
        if step is None or not step.rows:
            return 0.0
        loan = self._borrowed[job.model]
        if not loan.lender.reached:
            loan.end("the cold unit is gone")
            return 0.0
        wait = loan.lender.serve(loan, step.exchange.service)
        loan.tally.add(wait, step.exchange)
        return max(0.0, wait - step.exchange.ahead)

    def serve(self, loan: SimulatedLoan, seconds: float) -> float:
        """Does a task that takes so many seconds when the first of the own jobs looks for one; they all stand
        still for it. Returns the seconds until it begins."""
        waits = [self._until_found(loan, progress) for progress in self.executor.progress()]
        self.executor.stand_still(seconds)
        return min((wait for wait in waits if wait is not None), default=0.0)

    def _until_found(self, loan: SimulatedLoan, progress: Progress) -> float | None:
        """Returns the seconds until a job finds a task; None if it never does."""
        if loan.borrow.control == "iterations":
            return seconds_behind_launches(self.cost.queued(progress.work), progress)
        return self._pieces(loan, progress.work).seconds_to_poll(progress)

    def finish(self, job: Job) -> str | None:
        loan = self._borrowed.get(job.model)
        if job.offloaded is None or loan is None or loan.step is None:
            return None
        if not loan.lender.reached:
            loan.end("the cold unit is gone")
        step, loan.step = loan.step, None
        if step.rows:
            loan.last_step_seconds = asyncio.get_running_loop().time() - step.begun
        return step.lost


class OffloadingUnits:
    """The units of a fleet that lend and borrow."""

    def __init__(self, specs: Iterable[EngineSpec]) -> None:
        self.backends: dict[bytes, SimulatedOffloadBackend] = {}
        pairs = [(spec.unit, *spec.weave.colds) for spec in specs if spec.weave]
        self._units = {name for pair in pairs for name in pair}

    def backend(
        self, unit: SimulatedUnit, executor: ModelledExecutor, transport: ModelledTransport
    ) -> SimulatedOffloadBackend | None:
        """Returns the backend of a unit; None if it takes no part. Raises ConfigError if its costs cannot be
        known."""
        name = unit.spec.unit
        if name not in self._units or not unit.spec.abilities.weaves:
            return None
        if not isinstance(unit.cost, OperatorCostModel):
            raise ConfigError(
                f"{name}: weave: operators of its device are not known; the roofline knows some"
            )
        made = SimulatedOffloadBackend(self.backends, executor, transport, unit.cost, unit.bandwidth)
        self.backends[transport.endpoint.where] = made
        return made

    def forget(self, transport: ModelledTransport) -> None:
        """Drops the backend of an engine that has ended."""
        self.backends.pop(transport.endpoint.where, None)
