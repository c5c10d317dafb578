"""Keeps a unit in a loan: asks the lender for one, and again when it is over."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from msgspec import structs

from kvloom.engine.share import Look, Share, Slowdown, adapted
from kvloom.engine.weaving import Weaving
from kvloom.types.clock import Clock
from kvloom.types.errors import BadRequest, KvloomError
from kvloom.types.load import UnitLoad
from kvloom.types.offload import Borrow, Loan
from kvloom.types.spec import WeaveSpec

_PERIOD = 0.5  # seconds between two looks at what the share does
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
        self._share = Share()
        self._slowdown = Slowdown()

    async def run(self) -> None:
        """For ever, unless the two cannot be woven: then it is said, and not tried again."""
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
        """Borrow; why not."""
        try:
            load = await self._lender.load()
            terms = self._weaving.terms(self._model, 1)
            pages = int(load.total_blocks * self._spec.part) // (terms.form.layers * terms.form.kv_heads)
            if not pages:
                raise BadRequest(f"weave: {self._spec.part:g} of {load.total_blocks} blocks hold no page")
            terms = self._terms(pages)
            share = 0.0 if self._spec.share == "auto" else self._spec.share
            self._weaving.borrow(terms, await self._lender.lend(terms), share)
        except KvloomError as error:
            return error
        _log.info("%s has borrowed %d pages from %s", self._model, pages, self._spec.cold)
        return None

    def _terms(self, pages: int) -> Borrow:
        spec = self._spec
        terms = self._weaving.terms(self._model, pages)
        return structs.replace(terms, control=spec.control, split=spec.split, waits=spec.waits)

    async def _watch(self) -> None:
        """Ask the lender how it fares once a period, until the loan is over."""
        self._share, silent = replace(self._share, value=0.0), False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD):
                    await self._weaving.over(self._model)
                    return
            try:
                load = await self._lender.load()
                silent = False
            except KvloomError as error:
                if not silent:
                    _log.warning("%s does not tell its load: %s", self._spec.cold, error.message)
                load, silent = None, True
            self._look(load)

    def _look(self, load: UnitLoad | None) -> None:
        """load: the lender's; None where it does not answer, and nobody knows how it fares."""
        woven = self._weaving.loan(self._model)
        if woven is None:
            return
        pressed = load is not None and not load.lent_blocks  # or it is another process, which knows no loan
        if pressed:
            self._weaving.withdrawn(self._model)
        if self._spec.share != "auto":
            return
        short, woven.short = woven.short and woven.places.roomy, False
        away = woven.away > 0 or woven.share > 0
        slowdown = self._slowdown.seen(load, away=away) if load else None
        look = Look(short, slowdown, pressed=pressed)
        self._share = adapted(self._share, look, self._spec.bound)
        if self._share.value != woven.share:
            self._weaving.set_share(self._model, self._share.value)
