"""The loans of a unit: `Lender` accounts for what it lends, `Borrower` for what its models have borrowed, and
`LoanKeeper` keeps a model in a loan."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final, Generic, Protocol

from msgspec import structs

from kvloom.journal.records import Lent, Recorder, Returned, nobody, short
from kvloom.kv.cache import ModelCache
from kvloom.kv.pool import Pool
from kvloom.offload.planner import DecodePlanner, OffloadingPlanner
from kvloom.offload.policy import Observation, S, Share, Slowdown, adapted
from kvloom.offload.terms import Borrow, Loan, OffloadBackend
from kvloom.types.address import KVForm
from kvloom.types.clock import Clock
from kvloom.types.errors import BadRequest, Conflict, KvloomError, OutOfBlocks
from kvloom.types.geometry import I32
from kvloom.types.load import UnitLoad, Waits
from kvloom.types.request import ModelCard
from kvloom.types.spec import WeaveSpec

SHORT: Final = 16  # jobs for which own models wait for lent blocks before the loan ends
_AGAIN = 0.02  # seconds until a loan that its borrower copies into is recalled again
_QUIET = 10.0  # seconds for which a unit lends nothing once own models have needed its blocks
_PERIOD = 0.5  # seconds between two looks at what the share does
_FIRST, _LONGEST = 0.25, 8.0  # seconds until a lender is asked again; each time twice as long
_log = logging.getLogger(__name__)

Lacks = Callable[[int], bool]
"""Answers whether the batching policy would do something else, were there so many blocks more."""


class Queue(Protocol[S]):
    """The part of a model's queue in the engine that a loan needs."""

    card: ModelCard
    form: KVForm
    cache: ModelCache
    max_running: int
    running: list[S]
    planner: DecodePlanner[S]

    @property
    def decoding(self) -> bool:
        """A decode job of the model is under way."""

    def changed(self) -> None:
        """Tells that what the policy is to see of the queue has changed."""

    def put_back(self, sequence: S, jobs: int, reason: str) -> None:
        """Lets a running sequence wait again, without K and V. jobs: how many the unit has started."""


class Budget(Protocol):
    """The unit's budget of promised blocks."""

    lent: int

    def within(self, more: int = 0) -> bool:
        """Returns whether `more` blocks may be promised too."""

    def refusal(self, verb: str, more: int = 0) -> OutOfBlocks:
        """Returns the error that says why they may not."""


class Lender(Generic[S]):
    """Lends blocks of this unit to one other unit. Its own models come first."""

    def __init__(
        self,
        queue: Queue[S],
        pool: Pool,
        promises: Budget,
        backend: OffloadBackend | None,
        clock: Clock,
        *,
        wake: Callable[[], None],
        record: Recorder = nobody,
    ) -> None:
        """queue: of any model of the unit. wake: called when there is something to decide. record: takes
        loans to the journal."""
        self._record = record
        self._why = ""  # the loan ends, or is to
        self._queue = queue
        self._pool = pool
        self._promises = promises
        self._backend = backend
        self._clock = clock
        self._wake = wake
        self._lent: I32 | None = None
        self._terms: tuple[Borrow, Loan] | None = None  # of what is lent
        self.due: float | None = None  # when a recall is tried again
        self._quiet = 0.0  # until when nothing is lent
        self._lacking = False
        self._lacked = (0, -SHORT)  # since when own models lack blocks, and did last, counted in jobs

    @property
    def watching(self) -> bool:
        """Own models are short of what is lent, so each step counts."""
        return self._lacking

    def review(self, lacks: Lacks, jobs: int) -> None:
        """Ends the loan if own models have waited for its blocks for a few jobs. A brief shortage does not
        end it. jobs: how many the unit has started."""
        self._lacking = self._lent is not None and self.due is None and lacks(self._promises.lent)
        if self._lacking:
            first, last = self._lacked
            first = first if jobs - last <= SHORT // 2 else jobs  # while a job runs, nobody seems to wait
            self._lacked = first, jobs
            if jobs - first >= SHORT:
                self.give_way()

    def give_way(self) -> None:
        """Ends the loan if own models are short of it: they have waited, or nothing runs for whose end they
        could."""
        if self._lacking:
            _log.info("own models need the blocks that are lent: they come back")
            self._lacking, self._quiet = False, self._clock.now() + _QUIET
            self._why = f"own models have needed the {self._promises.lent} blocks"
            self.recall()

    def lend(self, borrow: Borrow) -> Loan:
        """Lends blocks to another unit's model, which count as promised. The same request gets the same
        answer again. Raises OutOfBlocks if too many would be promised, or own models have needed them of
        late, Conflict if something is lent, BadRequest if `borrow` makes no sense."""
        form, own = borrow.form, self._queue.form
        home = self._queue.cache.geometry
        geometry = replace(home, layers=form.layers, kv_heads=form.kv_heads, head_dim=form.head_dim, ranks=1)
        KVForm.of(geometry, own.dtype).refuse_unlike(form, model=borrow.model)
        if self.due is not None:
            raise Conflict("weave: the last loan is not back yet; ask again in a moment")
        if self._terms is not None and self._terms[0] == borrow:
            return self._terms[1]
        if self._lent is not None:
            raise Conflict("weave: this unit lends already; one loan at a time")
        if (rest := self._quiet - self._clock.now()) > 0:
            raise OutOfBlocks(f"lend: own models have needed the blocks; ask again in {rest:.0f} s")
        count = borrow.pages * geometry.blocks_per_page
        if not self._promises.within(count):
            raise self._promises.refusal("lend", count)
        blocks = self._pool.lend(count)
        try:
            loan = _able(self._backend).lend(borrow, blocks, self._ended)
        except BaseException:
            self._pool.take_back(blocks)
            raise
        self._lent, self._terms = blocks, (borrow, loan)
        self._promises.lent = count
        why = f"asked for; {self._pool.available} blocks of {self._pool.total} are still available"
        self._record(Lent(model=borrow.model, blocks=count, reason=why))
        return loan

    def waits(self) -> Waits | None:
        """Returns how long tasks of the borrower have waited here."""
        return self._backend.waits() if self._backend is not None and self._lent is not None else None

    def recall(self) -> None:
        """Takes back what is lent, now or in a moment."""
        if self._lent is None:
            return
        if _able(self._backend).recall():
            self._pool.take_back(self._lent)
            if self._terms is not None:
                model, why = self._terms[0].model, self._why or "the unit stops"
                self._record(Returned(model=model, blocks=len(self._lent), reason=why))
            self._why = ""
            self._lent, self._promises.lent, self.due = None, 0, None
            self._terms = None
        else:
            self.due = self._clock.now() + _AGAIN
        self._wake()

    def expire(self) -> None:
        """Tries a recall that is due again."""
        if self.due is not None and self.due <= self._clock.now():
            self.recall()

    def _ended(self, why: str) -> None:
        _log.info("what this unit lent comes back: %s", why)
        self._why = self._why or short(why)
        self.recall()


class Borrower(Generic[S]):
    """Accounts for the loans to this unit's models, each of which has one at most."""

    def __init__(
        self,
        queues: Mapping[str, Queue[S]],
        total: int,
        backend: OffloadBackend | None,
        *,
        wake: Callable[[], None],
    ) -> None:
        """total: blocks of the unit's pool. wake: called when there is something to decide."""
        self._queues = queues
        self._total = total
        self._backend = backend
        self._wake = wake
        self._ends = asyncio.Event()  # of a loan
        self._loans: dict[str, OffloadingPlanner[S]] = {}  # by model, whose planner it is

    def review(self, lacks: Lacks, jobs: int) -> None:
        """Notes whether the models are short of blocks, and ends loans that lenders have withdrawn.
        jobs: how many the unit has started."""
        for model, loan in list(self._loans.items()):
            if loan.withdrawn and not self._queues[model].decoding:
                self.give_back(model, jobs)
                self._ends.set()
            elif not loan.short:
                loan.short = lacks(self._total)

    def loan(self, model: str) -> OffloadingPlanner[S] | None:
        """Returns what the model has borrowed."""
        return self._loans.get(model)

    def terms(self, model: str, pages: int) -> Borrow:
        """Returns what `model` asks a lender for. Raises BadRequest if it cannot be offloaded."""
        queue = self._queues[model]
        return Borrow(
            model=model,
            pid=os.getpid(),
            form=queue.form,
            heads=_able(self._backend).heads(model),
            rows=queue.max_running,
            width=queue.cache.geometry.pages(queue.card.context_length),
            pages=pages,
        )

    def borrow(self, borrow: Borrow, loan: Loan, share: float) -> None:
        """Offloads `share` of the model's sequences from here on. Raises BadRequest if the loan is not what
        was asked for, Conflict if the model has one, Unavailable if the lender is gone."""
        queue = self._queues[borrow.model]
        if self.loan(borrow.model) is not None:
            raise Conflict(f"weave: {borrow.model} has a loan already")
        blocks = _able(self._backend).borrow(borrow, loan)
        queue.planner = self._loans[borrow.model] = OffloadingPlanner[S](
            queue.cache,
            blocks,
            share,
            rows=borrow.rows,
            max_tokens=queue.card.context_length,
            ended=lambda why: self._over(borrow.model, why),
            tokens_total=queue.planner.tokens_total,
        )
        queue.changed()

    def set_share(self, model: str, share: float) -> None:
        """Sets the share of the sequences, from 0 to 1; the next steps move those that it concerns."""
        loan = self.loan(model)
        if loan is None:
            raise BadRequest(f"weave: {model} has no loan")
        loan.share = share
        self._wake()

    def withdraw(self, model: str) -> None:
        """Ends the loan between two steps: the lender says that it has its blocks back."""
        loan = self.loan(model)
        if loan is not None:
            loan.withdrawn = True
            self._wake()

    def give_back(self, model: str, jobs: int = 0) -> None:
        """Ends the loan while no sequence is in a decode step. Offloaded sequences are computed again. jobs:
        how many the unit has started."""
        queue = self._queues[model]
        if self.loan(model) is not None:
            for sequence in [s for s in queue.running if not queue.planner.is_home(s)]:
                queue.put_back(sequence, jobs, "the loan that has its K and V is over")
            self._drop(model)

    def give_back_all(self) -> None:
        """Ends all loans once nothing runs any more."""
        for model in list(self._loans):
            self.give_back(model)

    async def over(self, model: str) -> None:
        """Waits until the model has no loan."""
        while self.loan(model) is not None:
            self._ends.clear()
            await self._ends.wait()

    def _over(self, model: str, why: str) -> None:
        _log.warning("the loan of %s is over: %s; what was offloaded is computed again", model, why)
        self._drop(model)
        self._ends.set()

    def _drop(self, model: str) -> None:
        queue = self._queues[model]
        queue.planner = DecodePlanner(queue.cache, self._loans.pop(model).tokens_total)
        queue.changed()
        _able(self._backend).give_back(model)


def _able(backend: OffloadBackend | None) -> OffloadBackend:
    if backend is None:
        raise BadRequest(
            "weave: this unit cannot; CPU units over shared memory can, and GPU units of one rank"
        )
    return backend


class LenderClient(Protocol):
    """The lender's engine, as the borrower calls it."""

    async def load(self) -> UnitLoad: ...

    async def lend(self, body: Borrow) -> Loan:
        """Raises KvloomError if there is nothing to lend, or nobody to ask."""


class LoanKeeper(Generic[S]):
    """Keeps a model in a loan: asks the lender for one, adapts its share, and asks again when it is over."""

    def __init__(
        self, borrower: Borrower[S], model: str, spec: WeaveSpec, lender: LenderClient, clock: Clock
    ) -> None:
        """lender: the client of the unit that `spec` names."""
        self._borrower = borrower
        self._model = model
        self._spec = spec
        self._lender = lender
        self._clock = clock
        self._share = Share()
        self._slowdown = Slowdown()

    async def run(self) -> None:
        """Runs for ever. If the two units can never be woven it says so and ends."""
        while True:
            wait, told = _FIRST, ""
            while (problem := await self._tried()) is not None:
                if problem.code != told:
                    _log.warning("%s does not lend to %s: %s", self._spec.cold, self._model, problem.message)
                if isinstance(problem, BadRequest):
                    return
                told = problem.code  # what differs in a number is not said again
                await self._clock.sleep(wait)
                wait = min(2 * wait, _LONGEST)
            await self._watch()
            await self._clock.sleep(_FIRST)  # the lender has to notice that this unit has left

    async def _tried(self) -> KvloomError | None:
        """Borrows; returns why not."""
        spec = self._spec
        try:
            load = await self._lender.load()
            form = self._borrower.terms(self._model, 1).form
            pages = int(load.total_blocks * spec.part) // (form.layers * form.kv_heads)
            if not pages:
                raise BadRequest(f"weave: {spec.part:g} of {load.total_blocks} blocks hold no page")
            terms = self._borrower.terms(self._model, pages)
            terms = structs.replace(terms, control=spec.control, split=spec.split, waits=spec.waits)
            share = 0.0 if spec.share == "auto" else spec.share
            self._borrower.borrow(terms, await self._lender.lend(terms), share)
        except KvloomError as error:
            return error
        _log.info("%s has borrowed %d pages from %s", self._model, pages, spec.cold)
        return None

    async def _watch(self) -> None:
        """Asks the lender for its load once a period, until the loan is over."""
        self._share, silent = replace(self._share, value=0.0), False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD):
                    await self._borrower.over(self._model)
                    return
            try:
                load = await self._lender.load()
                silent = False
            except KvloomError as error:
                if not silent:
                    _log.warning("%s does not tell its load: %s", self._spec.cold, error.message)
                load, silent = None, True
            self._observe(load)

    def _observe(self, load: UnitLoad | None) -> None:
        """Adapts the share to what a period has shown. load: the lender's; None if it does not answer, and
        nobody knows how it fares."""
        loan = self._borrower.loan(self._model)
        if loan is None:
            return
        pressed = load is not None and not load.lent_blocks  # or it is another process, which knows no loan
        if pressed:
            self._borrower.withdraw(self._model)
        if self._spec.share != "auto":
            return
        short, loan.short = loan.short and loan.policy.roomy, False
        offloaded = loan.count > 0 or loan.share > 0
        slowdown = self._slowdown.seen(load, offloaded=offloaded) if load else None
        seen = Observation(short, slowdown, pressed=pressed, needless=loan.needless and not short)
        self._share = adapted(self._share, seen, self._spec.bound)
        if self._share.value != loan.share:
            self._borrower.set_share(self._model, self._share.value)
