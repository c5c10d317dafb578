"""Weaving in virtual time: loans between modelled devices, and what they do to the jobs at both ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvloom.engine.engine import Engine
from kvloom.lab.sim.executor import ModelledExecutor
from kvloom.lab.sim.links import ModelledTransport
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.plan.cost.work import Cut, Exchange, Operated, Work, cut_up, issued, parts_of
from kvloom.types.clock import Clock
from kvloom.types.errors import BadRequest, ConfigError, Conflict, Unavailable
from kvloom.types.geometry import I32
from kvloom.types.job import Job, Phase
from kvloom.types.load import UnitLoad, Waits
from kvloom.types.offload import Borrow, Loan, Move, Rule
from kvloom.types.spec import EngineSpec
from kvloom.types.transfer import KVAddress, Ticket, digest_of

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


SIGNAL: Final = 2e-6  # seconds until a word that was written into a peer's memory is seen there
_PROFILED: Final = 1.0  # seconds between two plans of what is split
_NOTICED: Final = 0.05  # seconds until a lender sees that its borrower has left


class ModelledWeaver:
    """Satisfies `Weaver` to an engine, and `Loans` to its executor. A loan is the real one's, but for time:
    q, k and v take the links', a task the lender's device when the operator that runs there ends."""

    def __init__(
        self,
        weavers: Mapping[bytes, ModelledWeaver],
        executor: ModelledExecutor,
        transport: ModelledTransport,
        cost: Operated,
        bandwidth: float,
    ) -> None:
        """weavers: of the fleet, by their endpoint's `where`. bandwidth: of the unit's way out, in bytes a
        second."""
        self._weavers = weavers
        self.executor = executor
        self.transport = transport
        self.cost = cost
        self.bandwidth = bandwidth
        self._borrowed: dict[str, Strand] = {}
        self.lent: Strand | None = None
        executor.loans = self
        executor.stride = 1  # what steps take of late is reported, and decided by

    # -- what the engine calls --------------------------------------------------------------------------

    def heads(self, model: str) -> int:
        return self.cost.shape(model).heads

    def borrow(self, borrow: Borrow, loan: Loan) -> int:
        lender = self._weavers.get(loan.peer.where)
        if lender is None or not lender.reached:
            raise Unavailable(f"{loan.peer.unit} cannot be reached")
        strand = lender.lent
        if strand is None or strand.ticket != loan.ticket or strand.over:
            raise Unavailable(f"loan: that of {loan.peer.unit} is over")
        if strand.borrow != borrow:
            raise BadRequest(f"loan: that of {loan.peer.unit} is for another model")
        strand.borrower = self
        self._borrowed[borrow.model] = strand
        return loan.pages * borrow.form.layers * borrow.form.kv_heads

    def give_back(self, model: str) -> None:
        strand = self._borrowed.pop(model)
        if strand.over is None:
            strand.end("the borrower has left")
            asyncio.get_running_loop().call_later(_NOTICED, strand.lender.left, strand)

    def lend(self, borrow: Borrow, blocks: I32, ended: Callable[[str], None]) -> Loan:
        if self.lent is not None:
            raise Conflict("weave: this unit lends already; one loan at a time")
        form = borrow.form
        if borrow.heads % form.kv_heads:
            raise BadRequest(f"borrow: {borrow.heads} heads over {form.kv_heads}; want a multiple")
        pages = len(blocks) // (form.layers * form.kv_heads)
        runs = KVAddress.compress(blocks.reshape(pages, form.layers, form.kv_heads))
        peer = self.transport.endpoint
        digest = digest_of(
            model=borrow.model, form=form, begin=0, end=0, blocks=runs, where=peer.where, prompt=()
        )
        ticket = self.transport.open(0, digest)
        self.lent = Strand(borrow, self, ticket, ended)
        return Loan(peer=peer, ticket=ticket, pages=pages, blocks=runs, mailbox=b"modelled")

    def recall(self) -> bool:
        strand = self.lent
        if strand is None:
            return True
        strand.end("the cold unit has its blocks back")
        self.changed()
        if not self.transport.close(strand.ticket):
            return False
        self.lent = None
        return True

    def waits(self) -> Waits | None:
        """Nothing is measured: what is expected is what comes."""
        return None

    def left(self, strand: Strand) -> None:
        if self.lent is strand:
            strand.ended("the borrower has left")

    @property
    def reached(self) -> bool:
        return self.transport.plane.reaches(self.transport)

    # -- what the executor calls --------------------------------------------------------------------------

    def begin(self, job: Job, then: Callable[[], None]) -> None:
        strand = self._borrowed.get(job.model)
        if job.away is None or strand is None:
            then()
            return
        step = strand.step = WovenStep(job, lost=strand.over)
        if not strand.lender.reached:
            strand.end("the cold unit is gone")
        self._move(strand, step, deque(job.away.moves), then)

    def _move(self, strand: Strand, step: WovenStep, moves: deque[Move], then: Callable[[], None]) -> None:
        """One after the other, over the link of whoever has what is moved."""
        if step.lost or not moves:
            then()
            return
        move, lender = moves.popleft(), strand.lender
        entry = lender.transport.entry(strand.ticket)
        entry.copying += 1

        def moved() -> None:
            entry.copying -= 1
            self._move(strand, step, moves, then)

        size = int(np.sum(move.tokens)) * self.cost.shape(step.job.model).kv_bytes
        link = self.transport.link if move.out else lender.transport.link
        link.wait(size, moved)

    def seconds(self, job: Job, work: Work, alone: float) -> float:
        strand = self._borrowed.get(job.model)
        step = strand.step if strand else None
        found = alone
        if strand is not None and step is not None and step.job is job and step.rows:
            found = self._woven(strand, step, work, alone)
        lent = self.lent.step if self.lent else None
        if self.lent is not None and lent is not None and lent.rows and lent.seconds:
            found = self._burdened(self.lent, lent, work, found)
        if step is not None and step.job is job:
            step.seconds = found
        return found

    def _woven(self, strand: Strand, step: WovenStep, work: Work, alone: float) -> float:
        """A step whose products are for all rows, and whose attention is for those at home."""
        assert step.job.away is not None
        shape, away = self.cost.shape(work.model), step.job.away.plan
        home = work.batch - step.rows
        own = self.cost.attention(work.model, shape, home, work.context) if home else 0.0
        counted = self.cost.attention(work.model, shape, work.batch, work.context)
        lender = strand.lender
        step.service = lender.cost.attention(work.model, shape, step.rows, int(away.starts.sum()))
        row = shape.head_dim * shape.itemsize * step.rows
        there = row * (shape.heads + 2 * shape.kv_heads) / self.bandwidth + SIGNAL
        back = row * shape.heads / lender.bandwidth + SIGNAL
        exchange = Exchange(own, step.service, there + back)
        step.ahead = exchange.ahead
        stall = exchange.stall(lender.times(strand))
        return alone + shape.layers * (own - counted + 2 * self.cost.start + stall)

    def times(self, strand: Strand) -> list[float]:
        """Of what runs here."""
        return [t for work in self.executor.works for t in self._cut(strand, work).times]

    def _cut(self, strand: Strand, work: Work) -> Cut:
        """In the pieces between which a task is found."""
        plan = strand.plans.setdefault((work.model, work.phase), Plan())
        step, now = strand.step, asyncio.get_running_loop().time()
        due = step is not None and step.seconds > 0 and plan.due <= now
        if plan.work == work and not due:
            return plan.cut
        plan.work = work
        if strand.borrow.control == "iterations":
            plan.cut = issued(work, self.cost)
            return plan.cut
        operators = self.cost.operators(work)
        if step is not None and due:
            terms, layers = strand.borrow, self._layers(strand, step)
            rule = Rule.of(terms.split, terms.waits, step.ahead, step.seconds, layers)
            plan.parts, plan.due = parts_of(operators, *rule) if rule else (), now + _PROFILED
        plan.cut = cut_up(operators, plan.parts, self.cost)
        return plan.cut

    def _burdened(self, strand: Strand, step: WovenStep, work: Work, alone: float) -> float:
        """An own job that looks for tasks, and stands still while one is done."""
        served = self._layers(strand, step) * step.service / step.seconds
        return (alone + self._cut(strand, work).more) / (1.0 - served)

    def _layers(self, strand: Strand, step: WovenStep) -> int:
        """Tasks of the step."""
        assert strand.borrower is not None
        return strand.borrower.cost.shape(step.job.model).layers

    def changed(self) -> None:
        """Other jobs run here than before, and so the pace of others has changed: first of those who wait for
        this unit, then its own, then of those that it waits for."""
        if self.lent is not None and self.lent.borrower is not None:
            self.lent.borrower.executor.pace()
        self.executor.pace()
        for strand in self._borrowed.values():
            strand.lender.executor.pace()

    def over(self, job: Job) -> str | None:
        strand = self._borrowed.get(job.model)
        if job.away is None or strand is None or strand.step is None:
            return None
        if not strand.lender.reached:
            strand.end("the cold unit is gone")
        lost, strand.step = strand.step.lost, None
        return lost


class Loom:
    """A fleet's units that weave. weavers: of engines, by their endpoint's `where`."""

    def __init__(self, specs: Iterable[EngineSpec]) -> None:
        self.weavers: dict[bytes, ModelledWeaver] = {}
        pairs = [(spec.unit, spec.weave.cold) for spec in specs if spec.weave]
        self._units = {name for pair in pairs for name in pair}

    def weaver(
        self, unit: SimulatedUnit, executor: ModelledExecutor, transport: ModelledTransport
    ) -> ModelledWeaver | None:
        """None where the unit takes no part. Raises ConfigError where it cannot be known what it costs."""
        name = unit.spec.unit
        if name not in self._units:
            return None
        if not isinstance(unit.cost, Operated):
            raise ConfigError(
                f"{name}: weave: operators of its device are not known; the roofline knows some"
            )
        made = ModelledWeaver(self.weavers, executor, transport, unit.cost, unit.bandwidth)
        self.weavers[transport.endpoint.where] = made
        return made

    def forget(self, transport: ModelledTransport) -> None:
        """Its engine has ended."""
        self.weavers.pop(transport.endpoint.where, None)


class LenderWire:
    """What a unit that borrows asks another. reach: that one's engine; raises Unavailable where it has none.
    delay: seconds of one way."""

    def __init__(self, reach: Callable[[], Engine], clock: Clock, delay: float) -> None:
        self._reach = reach
        self._clock = clock
        self._delay = delay

    async def load(self) -> UnitLoad:
        await self._clock.sleep(self._delay)
        load = await self._reach().load()
        await self._clock.sleep(self._delay)
        return load

    async def lend(self, body: Borrow) -> Loan:
        await self._clock.sleep(self._delay)
        loan = await self._reach().lend(body)
        await self._clock.sleep(self._delay)
        return loan
