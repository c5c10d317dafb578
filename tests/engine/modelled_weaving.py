"""Modelled engines that borrow and lend: what is away lies in an arena of its own, and tokens are a hash of
what is read there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvloom.engine.engine import Engine
from kvloom.engine.sequence import Sequence
from kvloom.lab.faults.invariants import EMPTY, InvariantChecker
from kvloom.offload.planner import OffloadingPlanner
from kvloom.offload.terms import Borrow, Loan
from kvloom.types.address import KVAddress, Ticket
from kvloom.types.geometry import I32
from kvloom.types.job import Job, JobResult, OffloadedRows
from tests.modelled import VOCAB, ModelledExecutor, engine_over
from tests.plane import Plane

MODEL = "wide"
PAGE = 4  # tokens, and blocks


class WeavingExecutor(ModelledExecutor):
    """losing: the woven steps, counted from 0, that lose what is away: even ones once all is moved and
    written, odd ones before anything is written there.

    moved: by woven step, the pages that it is over, and those of each move."""

    def __init__(
        self,
        blocks: int,
        lent: int,
        *,
        seed: int = 0,
        losing: frozenset[int] = frozenset(),
        failing: frozenset[int] = frozenset(),
        models: tuple[str, ...] = (MODEL,),
    ) -> None:
        super().__init__(blocks, compute=1, seed=seed, models=models, failing=failing)
        self.losing = losing
        self.woven = 0  # steps
        self.moved: list[
            tuple[int, list[int]]
        ] = []  # by woven step: pages that it is over, pages of each move
        self._away = InvariantChecker(self.geometries, lent, VOCAB)
        self._away.wrong = self.wrong

    def lose_all(self) -> None:
        """What is lent next has other blocks."""
        self._away.arena[:] = EMPTY

    def _write(self, job: Job) -> None:
        if job.offloaded is None:
            super()._write(job)
            return
        home, away = _parts(job, job.offloaded)
        lost = self.woven in self.losing and self.woven % 2 == 1
        for move in job.offloaded.moves:
            if lost and move.out:
                continue
            here = job.plan.page_map[move.home], self.witness.arena
            there = job.offloaded.plan.page_map[move.lent], self._away.arena
            (blocks, source), (others, target) = (here, there) if move.out else (there, here)
            for own, other, tokens in zip(blocks, others, move.tokens, strict=True):
                target[other] = EMPTY
                target[other, :tokens] = source[own, :tokens]
        super()._write(home)
        if not lost:
            self._away.write(away, range(job.plan.page_map.shape[1]))

    def _read(self, job: Job) -> JobResult:
        if job.offloaded is None:
            return super()._read(job)
        step, self.woven = self.woven, self.woven + 1
        home, away = _parts(job, job.offloaded)
        width = self.geometries[MODEL].tokens_per_block
        pages = sum(int(-(-plan.starts // width).sum()) for plan in (home.plan, away.plan))
        self.moved.append((pages, [move.tokens.size for move in job.offloaded.moves]))
        result = super()._read(home)
        if step in self.losing:
            tokens = [0] * len(away.samples)
            return replace(
                result, tokens=[*result.tokens, *tokens], logprobs=[None] * len(job.samples), lost="lost"
            )
        tokens = [*result.tokens, *self._away.draw(away, 0)]
        return replace(result, tokens=tokens, logprobs=[None] * len(tokens))


def _parts(job: Job, away: OffloadedRows) -> tuple[Job, Job]:
    """Its rows at home, and those away."""
    count = len(job.plan.sequences)
    home = replace(
        job, tokens=job.tokens[:count], samples=tuple(s for s in job.samples if s.row < count), offloaded=None
    )
    rest = tuple(replace(s, row=s.row - count) for s in job.samples if s.row >= count)
    return home, replace(job, plan=away.plan, tokens=job.tokens[count:], samples=rest, offloaded=None)


class ModelledBackend:
    """Satisfies OffloadBackend. stuck: how often a recall is answered that the blocks are in use still."""

    def __init__(self, executor: ModelledExecutor, stuck: int = 0) -> None:
        self._executor = executor
        self.stuck = stuck
        self.borrowed: Loan | None = None
        self.ended: Callable[[str], None] | None = None

    def heads(self, model: str) -> int:
        return 4

    def borrow(self, borrow: Borrow, loan: Loan) -> int:
        self.borrowed = loan
        return loan.pages * borrow.form.layers * borrow.form.kv_heads

    def give_back(self, model: str) -> None:
        self.borrowed = None
        if isinstance(self._executor, WeavingExecutor):
            self._executor.lose_all()

    def lend(self, borrow: Borrow, blocks: I32, ended: Callable[[str], None]) -> Loan:
        self.ended = ended
        return loan_of(borrow, blocks)

    def recall(self) -> bool:
        self.stuck -= self.stuck > 0
        return not self.stuck

    def waits(self) -> None:
        """Nothing is known of them."""


def loan_of(borrow: Borrow, blocks: I32) -> Loan:
    form = borrow.form
    runs = KVAddress.compress(blocks.reshape(-1, form.layers, form.kv_heads))
    peer = Plane().join("cold", ModelledExecutor(16)).endpoint
    return Loan(peer=peer, ticket=Ticket(0, 1), pages=borrow.pages, blocks=runs, mailbox=b"")


def hot_unit(
    pages: int,
    lent: int,
    *,
    seed: int = 0,
    losing: frozenset[int] = frozenset(),
    failing: frozenset[int] = frozenset(),
) -> tuple[Engine, WeavingExecutor]:
    """A pool of so many pages, and loans of so many at most. The longest request has 24."""
    executor = WeavingExecutor(pages * PAGE, lent * PAGE, seed=seed, losing=losing, failing=failing)
    return engine_over(executor, offload=ModelledBackend(executor)), executor


def borrow(engine: Engine, share: float, pages: int) -> OffloadingPlanner[Sequence]:
    """A loan from nowhere."""
    terms = engine.borrower.terms(MODEL, pages)
    count = pages * terms.form.layers * terms.form.kv_heads
    engine.borrower.borrow(terms, loan_of(terms, np.arange(count, dtype=np.int32)), share)
    found = engine.borrower.loan(MODEL)
    assert found is not None
    return found
