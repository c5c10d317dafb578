"""Processes that a gateway has asked its supervisor for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvloom.serve.orders import Asked, Back, Forget, Restart, Restarted, Run, Stop, Stopped
from kvloom.serve.shelf import Shelf
from kvloom.types.errors import Conflict, Unavailable
from kvloom.types.request import ModelCard
from kvloom.types.spec import EngineSpec


class Restarts:
    """Satisfies `Processes`. ask: hands the supervisor what it is asked."""

    def __init__(self, ask: Callable[[Asked], None], shelf: Shelf) -> None:
        self._ask = ask
        self._shelf = shelf
        self._restarts: dict[str, asyncio.Future[None]] = {}
        self._starts: dict[str, asyncio.Future[None]] = {}
        self._stops: dict[str, asyncio.Future[None]] = {}

    async def __call__(self, component: str) -> None:
        """Until its new process answers. Raises Unavailable where that dies instead, or is stopped meanwhile,
        and Conflict where it is being restarted."""
        await _done(self._restarts, component, lambda: self._ask(Restart(component)))

    async def start(self, spec: EngineSpec) -> None:
        """Until the unit answers. Raises Unavailable where it dies instead, and Conflict where it is being
        started."""
        await _done(self._starts, spec.unit, lambda: self._ask(Run(spec)))

    async def stop(self, unit: str, cards: Sequence[ModelCard]) -> None:
        """Until its process has ended. Raises Conflict where it is about to already."""
        self._shelf.keep(unit, cards)
        await _done(self._stops, unit, lambda: self._ask(Stop(unit)))

    def forget(self, unit: str) -> None:
        self._ask(Forget(unit))

    def heed(self, news: Restarted | Stopped | Back) -> None:
        match news:
            case Stopped(unit):
                _end(self._stops, unit, None)
                _end(self._restarts, unit, f"{unit} was stopped meanwhile")
            case Back(unit):  # it had a process already, which died before it was asked for
                _end(self._starts, unit, None)
            case Restarted(component, problem):
                _end(self._restarts, component, problem)
                _end(self._starts, component, problem)


async def _done(orders: dict[str, asyncio.Future[None]], component: str, ask: Callable[[], None]) -> None:
    if component in orders:
        raise Conflict(f"{component} gets or loses its process already; ask again once it has")
    order = orders[component] = asyncio.get_running_loop().create_future()
    try:
        ask()
        await order
    finally:
        del orders[component]


def _end(orders: dict[str, asyncio.Future[None]], component: str, problem: str | None) -> None:
    order = orders.get(component)
    if order is None or order.done():
        return
    if problem is None:
        order.set_result(None)
    else:
        order.set_exception(Unavailable(problem))
