"""What those who run a fleet ask of its gateway: its program, its restart, its units and their verbs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Router
from starlette.types import Receive, Scope, Send

from kvloom.api.admin_units import UnitOrders
from kvloom.api.bodies import decode, read_body
from kvloom.api.errors import JSON, VERBS_PATH, NoSuchRoute
from kvloom.api.routes import ADMIN, LINES, Handler, Row, asgi_routes
from kvloom.api.verbs import verb_routes
from kvloom.cluster.scheduler import FleetControl
from kvloom.router.program import load_program
from kvloom.router.rolling import Rolling
from kvloom.router.router import Router as Routing
from kvloom.types.errors import BadRequest, ConfigError
from kvloom.types.service import Admit, Drain, Pairs, Placement, Steps, UnitState
from kvloom.types.spec import EngineSpec, ProgramSpec

MAX_BODY: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Admin:
    """Answers the rows of `ADMIN`.

    A handler takes the unit, if the row's path names one, and the body, if the row has one.
    """

    router: Routing
    orders: UnitOrders
    rolling: Rolling
    fleet: FleetControl
    """What the fleet scheduler speaks to."""
    chosen: Callable[[ProgramSpec], None]
    """Called with each program that is set."""
    _verbs: dict[str, Router] = field(default_factory=dict)

    @property
    def units(self) -> list[str]:
        return list(self.router.units)

    def routes(self) -> list[BaseRoute]:
        """Returns the routes of /admin, and those of the units' verbs."""
        handlers: dict[str, Callable[..., Awaitable[object]]] = {
            "program": self._program,
            "set_program": self._set_program,
            "restart_all": self._restart_all,
            "fleet": self.fleet.state,
            "pair": self._pair,
            "scale": self._scale,
            "placement": self._placement,
            "units": self._units,
            "add": self._add,
            "unit": self._unit,
            "drain": self._drain,
            "admit": self._admit,
            "restart": self._restart,
            "start": self._start,
            "stop": self._stop,
            "remove": self._remove,
        }
        served = {row.name: self._serve(row, handlers[row.name]) for row in ADMIN}
        return [*asgi_routes(ADMIN, served), Mount(VERBS_PATH + "/{unit}", app=self._verb)]

    def _serve(self, row: Row, handler: Callable[..., Awaitable[object]]) -> Handler:
        async def endpoint(request: Request) -> Response:
            given: list[object] = []
            if row.body is not None:
                given.append(decode(request, await read_body(request, MAX_BODY), row.body))
            if "unit" in request.path_params:
                given.insert(0, self._known(request.path_params["unit"]))
            answer = await handler(*given)
            if isinstance(answer, Response):
                return answer
            return Response(msgspec.json.encode(answer), media_type=JSON)

        return endpoint

    def _known(self, unit: str) -> str:
        if unit not in self.router.units:
            raise NoSuchRoute(f"there is no unit {unit!r}; {', '.join(self.router.units)} are the units")
        return unit

    # -- the fleet --------------------------------------------------------------------------------------

    async def _program(self) -> ProgramSpec:
        program = self.router.program
        return ProgramSpec(program.name, dict(program.options))

    async def _set_program(self, spec: ProgramSpec) -> ProgramSpec:
        try:
            # A module of somebody's may take its time to be imported.
            program = await asyncio.to_thread(load_program, spec.name, spec.options)
        except ConfigError as error:
            raise BadRequest(error.message, param="program") from error
        self.rolling.refuse_while_leaving()  # The gateway may have begun to leave while the body came.
        self.router.set_program(program)
        self.chosen(spec)
        return await self._program()

    async def _restart_all(self, body: Drain) -> Response:
        self.rolling.begin(body.seconds)
        return StreamingResponse(self._steps(), media_type=LINES)

    async def _steps(self) -> AsyncIterator[bytes]:
        async with aclosing(self.rolling.steps()) as steps:
            async for step in steps:
                yield msgspec.json.encode(step) + b"\n"

    async def _pair(self, pairs: Pairs) -> Pairs:
        await self.fleet.pair(pairs)
        return pairs

    async def _scale(self, steps: Steps) -> Steps:
        self.rolling.refuse_while_leaving()
        await self.fleet.scale(steps)
        return steps

    # -- its units --------------------------------------------------------------------------------------

    async def _placement(self) -> Placement:
        return self.orders.placement

    async def _units(self) -> list[UnitState]:
        return self.orders.states

    async def _add(self, spec: EngineSpec) -> UnitState:
        return await self.orders.add(spec)

    async def _unit(self, unit: str) -> UnitState:
        return self.orders.state(unit)

    async def _drain(self, unit: str, body: Drain) -> UnitState:
        return await self.orders.drain(unit, body.seconds)

    async def _admit(self, unit: str, _: Admit) -> UnitState:
        return await self.orders.admit(unit)

    async def _restart(self, unit: str, body: Drain) -> UnitState:
        return await self.orders.restart(unit, body.seconds)

    async def _start(self, unit: str, _: Admit) -> UnitState:
        return await self.orders.start(unit)

    async def _stop(self, unit: str, body: Drain) -> UnitState:
        return await self.orders.stop(unit, body.seconds)

    async def _remove(self, unit: str, _: Admit) -> UnitState:
        last = await self.orders.remove(unit)
        self._verbs.pop(unit, None)
        return last

    async def _verb(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a verb on to its unit."""
        unit = self._known(scope["path_params"]["unit"])
        if unit not in self._verbs:
            routes = verb_routes(self.router.units[unit].client)
            self._verbs[unit] = Router(routes, redirect_slashes=False)
        await self._verbs[unit](scope, receive, send)
