"""What those who run a fleet ask of its units: to serve, come, go or start anew; and each one's verbs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import Receive, Scope, Send

from kvloom.api.errors import NoSuchRoute
from kvloom.api.verbs import verb_routes
from kvloom.api.wire import VERBS, decode, read_body
from kvloom.router.drains import Drains
from kvloom.router.rolling import Rolling
from kvloom.router.roster import Roster
from kvloom.router.units import Units
from kvloom.types.service import Admit, Drain, UnitState
from kvloom.types.spec import EngineSpec

MAX_BODY = 1 << 16


@dataclass(frozen=True, slots=True)
class UnitOrders:
    """seconds: for which what runs at a unit that is to stop is waited for, where an order does not say."""

    units: Units
    drains: Drains
    rolling: Rolling
    roster: Roster
    seconds: float
    _verbs: dict[str, Router] = field(default_factory=dict)

    def routes(self) -> list[BaseRoute]:
        """/admin/placement, /admin/units and what is below it, /verbs/UNIT/VERB."""
        unit = "/admin/units/{unit}"
        orders = {
            "drain": self._drain,
            "admit": self._admit,
            "restart": self._restart,
            "start": self._start,
            "stop": self._stop,
            "remove": self._remove,
        }
        return [
            Route("/admin/placement", self._placement, methods=["GET"]),
            Route("/admin/units", self._units, methods=["GET", "POST"]),
            Route(unit, self._get_unit, methods=["GET"]),
            *(Route(f"{unit}/{name}", order, methods=["POST"]) for name, order in orders.items()),
            Mount(VERBS + "/{unit}", app=self._verb),
        ]

    async def _placement(self, _: Request) -> Response:
        return as_json(self.roster.placement)

    async def _units(self, request: Request) -> Response:
        if request.method == "POST":
            return await self._add(request)
        return as_json([self._named_models(state) for state in self.drains.states])

    async def _get_unit(self, request: Request) -> Response:
        return self._shown(self.drains.state(self._named(request)))

    def _shown(self, state: UnitState) -> Response:
        return as_json(self._named_models(state))

    def _named_models(self, state: UnitState) -> UnitState:
        """With those that the unit is to serve, where it has told of none yet."""
        return state if state.models else replace(state, models=self.roster.models(state.name))

    async def _drain(self, request: Request) -> Response:
        return await self._drained(request, self.drains.drain)

    async def _restart(self, request: Request) -> Response:
        return await self._drained(request, self.drains.restart)

    async def _stop(self, request: Request) -> Response:
        return await self._drained(request, self._stopped)

    async def _stopped(self, unit: str, seconds: float | None) -> UnitState:
        await self.roster.stop(unit, self.seconds if seconds is None else seconds)
        return self.drains.state(unit)

    async def _drained(
        self, request: Request, do: Callable[[str, float | None], Awaitable[UnitState]]
    ) -> Response:
        body = decode(request, await read_body(request, MAX_BODY), Drain)
        unit = self._named(request)
        self.rolling.refuse_while_leaving()
        return self._shown(await do(unit, body.seconds))

    async def _admit(self, request: Request) -> Response:
        return self._shown(await self.drains.admit(await self._ordered(request)))

    async def _start(self, request: Request) -> Response:
        unit = await self._ordered(request)
        await self.roster.start(unit)
        return self._shown(self.drains.state(unit))

    async def _remove(self, request: Request) -> Response:
        unit = await self._ordered(request)
        last = self.drains.state(unit)
        self.roster.remove(unit)
        self._verbs.pop(unit, None)
        return as_json(last)

    async def _add(self, request: Request) -> Response:
        spec = decode(request, await read_body(request, MAX_BODY), EngineSpec)
        self.rolling.refuse_while_leaving()
        await self.roster.add(spec)
        return self._shown(self.drains.state(spec.unit))

    async def _ordered(self, request: Request) -> str:
        """The unit, by an order that has nothing else to say."""
        decode(request, await read_body(request, MAX_BODY), Admit)
        self.rolling.refuse_while_leaving()
        return self._named(request)

    def _named(self, request: Request) -> str:
        return self._known(request.path_params["unit"])

    def _known(self, name: str) -> str:
        if name not in self.units:
            raise NoSuchRoute(f"there is no unit {name!r}; {', '.join(self.units)} are the units")
        return name

    async def _verb(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes it on to the unit."""
        name = self._known(scope["path_params"]["unit"])
        if name not in self._verbs:
            routes = verb_routes(self.units[name].client)
            self._verbs[name] = Router(routes, redirect_slashes=False)
        await self._verbs[name](scope, receive, send)


def as_json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
