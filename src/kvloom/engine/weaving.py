"""Loans of a unit: what its models have borrowed, and what it lends."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from typing import Final

from kvloom.engine.leases import Promises
from kvloom.engine.model_queue import ModelQueue
from kvloom.engine.woven import Woven
from kvloom.kv.pool import Pool
from kvloom.types.clock import Clock
from kvloom.types.errors import BadRequest, Conflict, OutOfBlocks
from kvloom.types.geometry import I32, Geometry
from kvloom.types.job import Phase
from kvloom.types.load import Waits
from kvloom.types.offload import Borrow, Loan, Weaver
from kvloom.types.transfer import KVForm

_log = logging.getLogger(__name__)
_AGAIN = 0.02  # seconds until a loan that its borrower copies into is recalled again
_QUIET = 10.0  # seconds without a loan, once own models have needed its blocks
SHORT: Final = 16  # jobs for which they wait for them, before it ends


class Weaving:
    """wake: tells the loop that there is something to decide."""

    def __init__(
        self,
        queues: Mapping[str, ModelQueue],
        pool: Pool,
        promises: Promises,
        weaver: Weaver | None,
        clock: Clock,
        *,
        wake: Callable[[], None],
    ) -> None:
        self._queues = queues
        self._pool = pool
        self._promises = promises
        self._weaver = weaver
        self._clock = clock
        self._wake = wake
        self._lent: I32 | None = None
        self._terms: tuple[Borrow, Loan] | None = None  # of what is lent
        self._ends = asyncio.Event()  # of a loan to an own model
        self.due: float | None = None  # when a recall is tried again
        self._quiet = 0.0  # until when nothing is lent
        self._lacking = False  # own models are short of what is lent
        self._lacked = (0, -SHORT)  # since when they are, and were last, counted in jobs

    def look(self, lacks: Callable[[int], bool], now: int) -> None:
        """Before every decision. lacks: whether an own model waits for so many blocks more. Where that lasts
        for a few jobs, those that are lent come back; what soon passes costs nobody a loan. And who has
        borrowed knows that it is short. now: jobs that the unit has started."""
        self._lacking = self._lent is not None and self.due is None and lacks(self._promises.lent)
        if self._lacking:
            first, last = self._lacked
            first = first if now - last <= SHORT // 2 else now  # while a job runs, nobody seems to wait
            self._lacked = first, now
            if now - first >= SHORT:
                self.give_way()
        for model, queue in self._queues.items():
            woven = queue.woven
            if woven is None:
                continue
            if woven.withdrawn and not queue.tally.active[Phase.DECODE]:
                self.give_back(model, now)
                self._ends.set()
            elif not woven.short:
                woven.short = lacks(self._pool.total)

    @property
    def watching(self) -> bool:
        """Own models are short of what is lent: each step counts."""
        return self._lacking

    def give_way(self) -> None:
        """Where own models are short of what is lent, it comes back: they have waited, or nothing runs, for
        whose end they could."""
        if self._lacking:
            _log.info("own models need the blocks that are lent: they come back")
            self._lacking, self._quiet = False, self._clock.now() + _QUIET
            self.recall()

    # -- borrowing ------------------------------------------------------------------------------------

    def terms(self, model: str, pages: int) -> Borrow:
        """What `model` asks a lender for. Raises BadRequest where it cannot be woven."""
        queue = self._queues[model]
        return Borrow(
            model=model,
            pid=os.getpid(),
            form=queue.form,
            heads=self._able.heads(model),
            rows=queue.max_running,
            width=queue.cache.geometry.pages(queue.card.context_length),
            pages=pages,
        )

    def borrow(self, borrow: Borrow, loan: Loan, share: float) -> None:
        """Decode steps of the model are away by `share` from here on. Raises BadRequest where the loan is not
        what was asked for, Conflict where the model has one, Unavailable where the lender is gone."""
        queue = self._queues[borrow.model]
        if queue.woven is not None:
            raise Conflict(f"weave: {borrow.model} has a loan already")
        blocks = self._able.borrow(borrow, loan)
        queue.woven = Woven(
            queue.cache,
            blocks,
            share,
            rows=borrow.rows,
            max_tokens=queue.card.context_length,
            ended=lambda why: self._over(borrow.model, why),
        )

    def loan(self, model: str) -> Woven | None:
        """What it has borrowed."""
        return self._queues[model].woven

    def set_share(self, model: str, share: float) -> None:
        """Of the sequences, from 0 to 1; the next step moves those that it concerns."""
        woven = self.loan(model)
        if woven is None:
            raise BadRequest(f"weave: {model} has no loan")
        woven.share = share
        self._wake()

    def withdrawn(self, model: str) -> None:
        """The lender says that it has its blocks back: between two steps, the loan is over here too."""
        woven = self.loan(model)
        if woven is not None:
            woven.withdrawn = True
            self._wake()

    def give_back(self, model: str, now: int = 0) -> None:
        """No sequence of it is in a decode step. What is away is computed again. now: jobs that the unit has
        started."""
        queue = self._queues[model]
        woven = queue.woven
        if woven is not None:
            for sequence in [s for s in queue.running if woven.has(s)]:
                queue.put_back(sequence, now)
            queue.woven = None
            self._able.give_back(model)

    def give_back_all(self) -> None:
        """The engine has stopped: nothing runs."""
        for model in self._queues:
            self.give_back(model)

    def _over(self, model: str, why: str) -> None:
        _log.warning("the loan of %s is over: %s; what was away is computed again", model, why)
        self._queues[model].woven = None
        self._able.give_back(model)
        self._ends.set()

    async def over(self, model: str) -> None:
        """Wait until it has no loan."""
        while self._queues[model].woven is not None:
            self._ends.clear()
            await self._ends.wait()

    # -- lending --------------------------------------------------------------------------------------

    def lend(self, borrow: Borrow) -> Loan:
        """Blocks for another unit's model, which count as promised; asked again, the same. Raises
        OutOfBlocks where too many would be, or own models have needed them of late, Conflict where something
        is lent, BadRequest where `borrow` makes no sense."""
        form, queue = borrow.form, next(iter(self._queues.values()))
        itemsize, own = queue.cache.geometry.itemsize, queue.form
        geometry = Geometry(form.layers, form.kv_heads, form.head_dim, itemsize, own.block_bytes)
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
            loan = self._able.lend(borrow, blocks, self._ended)
        except BaseException:
            self._pool.take_back(blocks)
            raise
        self._lent, self._terms = blocks, (borrow, loan)
        self._promises.lent = count
        return loan

    def waits(self) -> Waits | None:
        """Of what this unit does for who has borrowed of it."""
        return self._weaver.waits() if self._weaver is not None and self._lent is not None else None

    def recall(self) -> None:
        """Have back what is lent, now or in a moment."""
        if self._lent is None:
            return
        if self._able.recall():
            self._pool.take_back(self._lent)
            self._lent, self._promises.lent, self.due = None, 0, None
            self._terms = None
        else:
            self.due = self._clock.now() + _AGAIN
        self._wake()

    def expire(self) -> None:
        """Try again what is due."""
        if self.due is not None and self.due <= self._clock.now():
            self.recall()

    def _ended(self, why: str) -> None:
        _log.info("what this unit lent comes back: %s", why)
        self.recall()

    @property
    def _able(self) -> Weaver:
        if self._weaver is None:
            raise BadRequest(
                "weave: this unit cannot; CPU units over shared memory can, and GPU units of one rank"
            )
        return self._weaver
