"""Keeps a unit in a loan: asks the lender for one, and again when it is over."""

from __future__ import annotations

import logging
from typing import Protocol

from kvloom.core.clock import Clock
from kvloom.core.errors import KvloomError, OutOfBlocks
from kvloom.core.load import UnitLoad
from kvloom.core.spec import WeaveSpec
from kvloom.core.weaving import Borrow, Loan
from kvloom.engine.weaving import Weaving

_FIRST, _LONGEST = 0.25, 8.0  # seconds until a lender is asked again; each time twice as long
_log = logging.getLogger(__name__)


class Lender(Protocol):
    """The cold unit's engine."""

    async def load(self) -> UnitLoad: ...

    async def lend(self, body: Borrow) -> Loan:
        """Raises KvloomError where there is nothing to lend, or nobody to ask."""


class Borrower:
    """For one model. lender: the client of the unit that spec names."""

    def __init__(self, weaving: Weaving, model: str, spec: WeaveSpec, lender: Lender, clock: Clock) -> None:
        self._weaving = weaving
        self._model = model
        self._spec = spec
        self._lender = lender
        self._clock = clock

    async def run(self) -> None:
        """For ever."""
        told = ""
        while True:
            wait = _FIRST
            while (problem := await self._tried()) is not None:
                if problem != told:
                    _log.warning("%s does not lend to %s: %s", self._spec.cold, self._model, problem)
                told = problem
                await self._clock.sleep(wait)
                wait = min(2 * wait, _LONGEST)
            told = ""
            await self._weaving.over(self._model)
            await self._clock.sleep(_FIRST)  # the lender has to notice that this unit has left

    async def _tried(self) -> str | None:
        """Borrow; why not."""
        try:
            load = await self._lender.load()
            terms = self._weaving.terms(self._model, 1)
            pages = int(load.total_blocks * self._spec.part) // (terms.form.layers * terms.form.kv_heads)
            if not pages:
                raise OutOfBlocks(f"weave: {self._spec.part:g} of {load.total_blocks} blocks hold no page")
            terms = self._weaving.terms(self._model, pages)
            self._weaving.borrow(terms, await self._lender.lend(terms), self._spec.share)
        except KvloomError as error:
            return error.message
        _log.info("%s has borrowed %d pages from %s", self._model, pages, self._spec.cold)
        return None
