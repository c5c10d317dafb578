"""The loans of a unit: `Lender` accounts for what it lends, and `Borrower` for what its models have
borrowed."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, Generic, Protocol

import numpy as np

from kvloom.journal.records import Lent, Recorder, Returned, nobody, short
from kvloom.kv.cache import ModelCache
from kvloom.kv.pool import Pool
from kvloom.offload.planner import DecodePlanner, OffloadingPlanner
from kvloom.offload.policy import S
from kvloom.offload.terms import Borrow, HandBack, Loan, OffloadBackend, ReturnsParts
from kvloom.types.address import KVForm
from kvloom.types.clock import Clock
from kvloom.types.errors import BadRequest, Conflict, OutOfBlocks
from kvloom.types.geometry import I32
from kvloom.types.load import Waits
from kvloom.types.request import ModelCard

SHORT: Final = 16  # jobs for which own models wait for lent blocks before the loan ends
_AGAIN = 0.02  # seconds until a loan that its borrower copies into is recalled again
_QUIET = 10.0  # seconds for which a unit lends nothing once own models have needed its blocks
PATIENCE: Final = 0.75  # seconds in which a borrower hands a part of a loan back; it looks twice a second
_QUARTERS = 4  # of a loan; so many parts of it may be enough
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
        """Notes that the policy is to see a changed view of the queue."""

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
        self._here = np.zeros(0, np.bool_)  # of each block of it, whether it has come back already
        self._terms: tuple[Borrow, Loan] | None = None  # of what is lent
        self._retry: float | None = None  # when a recall is tried again
        self.recalled = 0
        """Blocks of the loan that the borrower is asked to hand back."""
        self._until: float | None = None  # when it has to have done so
        self._deaf = False  # the borrower has not handed over what it was asked for
        self._quiet = 0.0  # until when nothing is lent
        self._lacking = False
        self._part = 0  # of what is lent, that would be enough
        self._lacked = (0, -SHORT)  # since when own models lack blocks, and did last, counted in jobs

    @property
    def due(self) -> float | None:
        """The time at which a recall is tried again, or the borrower has had its time to hand a part of the
        loan back."""
        return self._until if self._retry is None else self._retry

    @property
    def watching(self) -> bool:
        """Whether own models are short of the lent blocks, so that each step counts."""
        return self._lacking

    def review(self, lacks: Lacks, jobs: int) -> None:
        """Ends the loan if own models have waited for its blocks for a few jobs. A brief shortage does not
        end it. jobs: how many the unit has started."""
        self._lacking = self._lent is not None and self._retry is None and lacks(self._promises.lent)
        self._part = self._enough(lacks) if self._lacking else 0
        if self._lacking:
            first, last = self._lacked
            first = first if jobs - last <= SHORT // 2 else jobs  # while a job runs, nobody seems to wait
            self._lacked = first, jobs
            if jobs - first >= SHORT:
                self.give_way()

    def _enough(self, lacks: Lacks) -> int:
        """Returns how many blocks of the loan would be enough for now, in quarters of it; 0 if nothing less
        than all of them is, or the device can only have all of them back."""
        if not isinstance(self._backend, ReturnsParts):
            return 0
        quarter = -(-self._promises.lent // _QUARTERS)
        parts = (n * quarter for n in range(1, _QUARTERS) if n * quarter < self._promises.lent)
        return next(filter(lacks, parts), 0)

    def give_way(self) -> None:
        """Takes lent blocks back if own models are short of them: they have waited, or nothing runs for whose
        end they could wait. If a part of the loan is enough, the borrower is asked for it, and has some time;
        or else the loan ends."""
        if self._lacking and self._until is None and self._part and not self._deaf:
            self.recalled, self._until = self._part, self._clock.now() + PATIENCE
        elif self._lacking and self._until is None:
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
        if self._retry is not None:
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
        self._here, self._deaf = np.zeros(count, np.bool_), False
        self._promises.lent = count
        why = f"asked for; {self._pool.available} blocks of {self._pool.total} are still available"
        self._record(Lent(model=borrow.model, blocks=count, reason=why))
        return loan

    def take_back(self, body: HandBack) -> None:
        """Takes back blocks of the loan that the borrower says it does not use any more. Raises Conflict if
        the loan is over or about to be, or the device takes back no part of it; BadRequest if these are no
        blocks of it, or all of them."""
        if self._lent is None or self._terms is None or self._terms[1].ticket != body.ticket:
            raise Conflict("take_back: this loan is over")
        if self._retry is not None:
            raise Conflict("take_back: all of this loan is on its way back")
        backend = self._backend
        if not isinstance(backend, ReturnsParts):
            raise Conflict("take_back: this unit's device takes a loan back as a whole")
        numbers = np.unique(np.array(body.blocks, np.int64))
        if numbers.size and not 0 <= numbers[0] <= numbers[-1] < len(self._lent):
            raise BadRequest(f"take_back: a block beyond the {len(self._lent)} that are lent")
        numbers = numbers[~self._here[numbers]]
        if numbers.size >= self._promises.lent:
            raise BadRequest("take_back: these are all blocks of the loan; the borrower ends it by leaving")
        backend.take_back(numbers)
        self._here[numbers] = True
        self._pool.take_back(self._lent[numbers])
        self._promises.lent -= numbers.size
        self.recalled = max(0, self.recalled - numbers.size)
        if not self.recalled:
            self._until = None
        why = f"own models have needed them; {self._promises.lent} blocks are still lent"
        self._record(Returned(model=self._terms[0].model, blocks=numbers.size, reason=why))
        self._wake()

    def waits(self) -> Waits | None:
        """Returns how long tasks of the borrower have waited here."""
        return self._backend.waits() if self._backend is not None and self._lent is not None else None

    def recall(self) -> None:
        """Takes back what is lent, now or in a moment."""
        if self._lent is None:
            return
        self.recalled, self._until = 0, None
        if _able(self._backend).recall():
            self._pool.take_back(self._lent[~self._here])
            if self._terms is not None:
                model, why = self._terms[0].model, self._why or "the unit stops"
                self._record(Returned(model=model, blocks=self._promises.lent, reason=why))
            self._why = ""
            self._lent, self._promises.lent, self._retry = None, 0, None
            self._terms = None
        else:
            self._retry = self._clock.now() + _AGAIN
        self._wake()

    def expire(self) -> None:
        """Tries a recall that is due again. A borrower that has let its time pass is asked for all next
        time."""
        if self._retry is not None and self._retry <= self._clock.now():
            self.recall()
        elif self._until is not None and self._until <= self._clock.now():
            self.recalled, self._until, self._deaf = 0, None, True

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
        self._terms: dict[str, Loan] = {}
        self._shedding: dict[str, tuple[int, asyncio.Future[I32 | None]]] = {}
        """The blocks that are to be handed back, by model, with the future that waits for their numbers."""

    def review(self, lacks: Lacks, jobs: int) -> None:
        """Notes whether the models are short of blocks, and ends loans that lenders have withdrawn.
        jobs: how many the unit has started."""
        for model, loan in list(self._loans.items()):
            if loan.withdrawn and not self._queues[model].decoding:
                self.give_back(model, jobs)
                self._ends.set()
            elif not loan.short:
                loan.short = lacks(self._total)
        for model, (count, numbers) in list(self._shedding.items()):
            if not self._queues[model].decoding:
                del self._shedding[model]
                if not numbers.done():
                    numbers.set_result(self._free(model, count, jobs))

    async def shed(self, model: str, count: int) -> HandBack | None:
        """Returns so many blocks of the model's loan, or more, that nobody uses any more and nobody gets
        again; None if the loan is over. For their sake the least urgent of the offloaded sequences are
        computed again, between two steps."""
        numbers: asyncio.Future[I32 | None] = asyncio.get_running_loop().create_future()
        self._shedding[model] = count, numbers
        self._wake()
        found, terms = await numbers, self._terms.get(model)
        if found is None or terms is None:
            return None
        return HandBack(model=model, ticket=terms.ticket, blocks=found.tolist())

    def _free(self, model: str, count: int, jobs: int) -> I32 | None:
        loan, queue = self.loan(model), self._queues[model]
        if loan is None:
            return None
        page = loan.cache.geometry.blocks_per_page
        pages = min(-(-count // page), (loan.pool.total - loan.pool.lent) // page - 1)
        for sequence in loan.policy.least_urgent():
            if loan.cache.pages.available >= pages:
                break
            queue.put_back(sequence, jobs, "the lender needs a part of what it has lent")
        return loan.pool.lend(pages * page)

    def loan(self, model: str) -> OffloadingPlanner[S] | None:
        """Returns the loan that the model has; None if it has none."""
        return self._loans.get(model)

    def terms(self, model: str, pages: int) -> Borrow:
        """Returns the message by which `model` asks a lender for a loan. Raises BadRequest if it cannot be
        offloaded."""
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
        """Offloads `share` of the model's sequences from here on. Raises BadRequest if the loan differs from
        what was asked for, Conflict if the model has a loan already, Unavailable if the lender is gone."""
        queue = self._queues[borrow.model]
        if self.loan(borrow.model) is not None:
            raise Conflict(f"weave: {borrow.model} has a loan already")
        blocks = _able(self._backend).borrow(borrow, loan)
        self._terms[borrow.model] = loan
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
        """Sets the share of the sequences that is to be offloaded, from 0 to 1; the next steps move sequences
        accordingly."""
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
        del self._terms[model]
        if model in self._shedding:
            _, numbers = self._shedding.pop(model)
            if not numbers.done():
                numbers.set_result(None)
        queue.changed()
        _able(self._backend).give_back(model)


def _able(backend: OffloadBackend | None) -> OffloadBackend:
    if backend is None:
        raise BadRequest(
            "weave: this unit cannot; CPU units over shared memory can, and GPU units of one rank"
        )
    return backend
