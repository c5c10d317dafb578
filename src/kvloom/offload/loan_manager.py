"""`LoanManager` keeps a model in a loan: it borrows, adapts the share, and hands back what the lender
needs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final, Generic, Protocol

from msgspec import structs

from kvloom.offload.loans import Borrower
from kvloom.offload.policy import Observation, S, Share, Slowdown, adapted
from kvloom.offload.terms import Borrow, HandBack, Loan
from kvloom.types.clock import Clock
from kvloom.types.errors import BadRequest, KvloomError, Unavailable
from kvloom.types.load import UnitLoad
from kvloom.types.spec import WeaveSpec

_PERIOD: Final = 0.5  # seconds between two looks at how the lender fares
_FIRST, _LONGEST = 0.25, 8.0  # seconds until a lender is asked again; each time twice as long
_log = logging.getLogger(__name__)


class LenderClient(Protocol):
    """The lender's engine, as the borrower calls it."""

    async def load(self) -> UnitLoad: ...

    async def lend(self, body: Borrow) -> Loan:
        """Raises KvloomError if there is nothing to lend, or nobody to ask."""

    async def take_back(self, body: HandBack) -> None:
        """Raises KvloomError if the loan is over, or nobody is there to ask."""


class LoanManager(Generic[S]):
    """Keeps a model in a loan: asks the freest lender for one, adapts its share, and asks again when the loan
    is over."""

    def __init__(
        self,
        borrower: Borrower[S],
        model: str,
        spec: WeaveSpec,
        lenders: Mapping[str, LenderClient],
        clock: Clock,
        freeness: Callable[[UnitLoad], float],
    ) -> None:
        """lenders: the clients of the units that `spec` names, by their names."""
        self._borrower = borrower
        self._model = model
        self._spec = spec
        self._lenders = dict(lenders)
        """The lenders that may still lend some day, as far as is known."""
        self._clock = clock
        self._freeness = freeness
        self._share = Share()
        self._slowdowns = {name: Slowdown() for name in lenders}
        self._cold = spec.cold  # the lender of the loan
        self._last_refusal: dict[str, str] = {}  # the code of each lender's last refusal

    async def run(self) -> None:
        """Runs for ever. If the unit can be woven with none of the lenders it says so and ends."""
        while True:
            wait = _FIRST
            self._last_refusal.clear()
            while not await self._borrow_from_any():
                if not self._lenders:
                    return
                await self._clock.sleep(wait)
                wait = min(2 * wait, _LONGEST)
            await self._watch()
            await self._clock.sleep(_FIRST)  # the lender has to notice that this unit has left

    async def _borrow_from_any(self) -> bool:
        """Asks the lenders, the freest first, until one lends. Returns whether one does. A lender that lends
        to this unit already, because its answer was lost, comes first; a unit lends to one borrower alone."""
        loads = dict[str, UnitLoad]()
        for name, lender in list(self._lenders.items()):
            try:
                loads[name] = await lender.load()
            except KvloomError as error:
                self._refused(name, error)
        order = {name: (load.lent_blocks > 0, self._freeness(load)) for name, load in loads.items()}
        for name in sorted(loads, key=order.__getitem__, reverse=True):
            problem = await self._borrow_from(name, loads[name])
            if problem is None:
                return True
            self._refused(name, problem)
            if isinstance(problem, Unavailable) and await self._may_have_lent(name):
                return False
        return False

    async def _may_have_lent(self, name: str) -> bool:
        """Returns whether a lender lends although nothing was borrowed from it, or does not tell whether it
        lends."""
        try:
            return (await self._lenders[name].load()).lent_blocks > 0
        except KvloomError:
            return True

    def _refused(self, name: str, problem: KvloomError) -> None:
        """Logs why a lender refuses, unless it refused for the same reason before. One whose refusal is a
        BadRequest can never lend, and is not asked again."""
        if problem.code != self._last_refusal.get(name):
            _log.warning("%s does not lend to %s: %s", name, self._model, problem.message)
        self._last_refusal[name] = problem.code
        if isinstance(problem, BadRequest):
            del self._lenders[name]

    async def _borrow_from(self, name: str, load: UnitLoad) -> KvloomError | None:
        """Borrows from one lender. Returns its refusal, or None if it lends."""
        spec = self._spec
        try:
            form = self._borrower.terms(self._model, 1).form
            pages = int(load.total_blocks * spec.part) // (form.layers * form.kv_heads)
            if not pages:
                raise BadRequest(f"weave: {spec.part:g} of {load.total_blocks} blocks hold no page")
            terms = self._borrower.terms(self._model, pages)
            terms = structs.replace(terms, control=spec.control, split=spec.split, waits=spec.waits)
            share = 0.0 if spec.share == "auto" else spec.share
            self._borrower.borrow(terms, await self._lenders[name].lend(terms), share)
        except KvloomError as error:
            return error
        self._cold = name
        _log.info("%s has borrowed %d pages from %s", self._model, pages, name)
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
                load = await self._lenders[self._cold].load()
                silent = False
            except KvloomError as error:
                if not silent:
                    _log.warning("%s does not tell its load: %s", self._cold, error.message)
                load, silent = None, True
            self._observe(load)
            if load is not None and load.recalled_blocks:
                await self._hand_back(load.recalled_blocks)

    async def _hand_back(self, count: int) -> None:
        """Hands back as many blocks as the lender needs. If the lender cannot be reached, it soon takes the
        whole loan back."""
        blocks = await self._borrower.shed(self._model, count)
        if blocks is None:
            return
        try:
            await self._lenders[self._cold].take_back(blocks)
            _log.info("%s has handed back %d blocks to %s", self._model, len(blocks.blocks), self._cold)
        except KvloomError as error:
            _log.warning("%s does not take blocks back: %s", self._cold, error.message)

    def _observe(self, load: UnitLoad | None) -> None:
        """Adapts the share to what a period has shown. load: the lender's load; None if it does not
        answer."""
        loan = self._borrower.loan(self._model)
        if loan is None:
            return
        # 0 lent blocks: the lender wants all of them back, or it was restarted and knows of no loan.
        pressed = load is not None and not load.lent_blocks
        if pressed:
            self._borrower.withdraw(self._model)
        if self._spec.share != "auto":
            return
        short, loan.short = loan.short and loan.policy.roomy, False
        offloaded = loan.count > 0 or loan.share > 0
        slowdown = self._slowdowns[self._cold].seen(load, offloaded=offloaded) if load else None
        seen = Observation(short, slowdown, pressed=pressed, needless=loan.needless and not short)
        self._share = adapted(self._share, seen, self._spec.bound)
        if self._share.value != loan.share:
            self._borrower.set_share(self._model, self._share.value)
