"""What those who run a fleet ask of its units: to serve, come, go or start anew; and each one's verbs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import Receive, Scope, Send

from kvloom.api.errors import NoSuchRoute
from kvloom.api.verbs import verb_routes
from kvloom.api.wire import VERBS, decode, read_body
from kvloom.cluster.models import AddModel, Apply
from kvloom.cluster.orders import FleetOrders
from kvloom.router.units import Units
from kvloom.types.service import Admit, Drain, UnitState
from kvloom.types.spec import EngineSpec

MAX_BODY = 1 << 16
MAX_CONFIG = 1 << 22


@dataclass(frozen=True, slots=True)
class UnitOrders:
    units: Units
    orders: FleetOrders
    _verbs: dict[str, Router] = field(default_factory=dict)

    def routes(self) -> list[BaseRoute]:
        """/admin/placement, /admin/units and what is below it, /admin/models, /admin/config,
        /verbs/UNIT/VERB."""
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
            Route("/admin/models", self._models, methods=["GET", "POST"]),
            Route("/admin/models/{name:path}/remove", self._remove_model, methods=["POST"]),
            Route("/admin/config", self._apply, methods=["POST"]),
            Mount(VERBS + "/{unit}", app=self._verb),
        ]

    async def _placement(self, _: Request) -> Response:
        return as_json(self.orders.placement)

    async def _units(self, request: Request) -> Response:
        if request.method == "POST":
            spec = decode(request, await read_body(request, MAX_BODY), EngineSpec)
            return as_json(await self.orders.add(spec))
        return as_json(self.orders.states)

    async def _get_unit(self, request: Request) -> Response:
        return as_json(self.orders.state(self._named(request)))

    async def _drain(self, request: Request) -> Response:
        return await self._drained(request, self.orders.drain)

    async def _restart(self, request: Request) -> Response:
        return await self._drained(request, self.orders.restart)

    async def _stop(self, request: Request) -> Response:
        return await self._drained(request, self.orders.stop)

    async def _drained(
        self, request: Request, do: Callable[[str, float | None], Awaitable[UnitState]]
    ) -> Response:
        body = decode(request, await read_body(request, MAX_BODY), Drain)
        return as_json(await do(self._named(request), body.seconds))

    async def _admit(self, request: Request) -> Response:
        return as_json(await self.orders.admit(await self._ordered(request)))

    async def _start(self, request: Request) -> Response:
        return as_json(await self.orders.start(await self._ordered(request)))

    async def _remove(self, request: Request) -> Response:
        unit = await self._ordered(request)
        last = await self.orders.remove(unit)
        self._verbs.pop(unit, None)
        return as_json(last)

    async def _models(self, request: Request) -> Response:
        if request.method == "POST":
            asked = decode(request, await read_body(request, MAX_BODY), AddModel)
            return as_json(await self.orders.add_model(asked))
        return as_json(self.orders.models)

    async def _remove_model(self, request: Request) -> Response:
        body = decode(request, await read_body(request, MAX_BODY), Drain)
        return as_json(await self.orders.remove_model(request.path_params["name"], body.seconds))

    async def _apply(self, request: Request) -> Response:
        asked = decode(request, await read_body(request, MAX_CONFIG), Apply)
        return as_json(await self.orders.apply(asked))

    async def _ordered(self, request: Request) -> str:
        """The unit, by an order that has nothing else to say."""
        decode(request, await read_body(request, MAX_BODY), Admit)
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
