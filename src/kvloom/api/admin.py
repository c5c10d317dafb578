"""What those who run a fleet ask of its gateway: its program, its units, and each unit's verbs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route, Router

from kvloom.api.errors import NoSuchRoute
from kvloom.api.verbs import verb_routes
from kvloom.api.wire import VERBS, decode, read_body
from kvloom.core.client import EngineClient
from kvloom.core.errors import BadRequest, ConfigError
from kvloom.core.replicas import Steps
from kvloom.core.rescheduling import Pairs
from kvloom.core.service import Admit, Drain, UnitState
from kvloom.core.spec import ProgramSpec
from kvloom.fleet.scheduler import Fleet
from kvloom.router.drains import Drains
from kvloom.router.program import load_program
from kvloom.router.rolling import Rolling
from kvloom.router.router import Router as Routing

MAX_BODY = 1 << 16


@dataclass(frozen=True, slots=True)
class Admin:
    """engines: by unit. fleet: what the fleet scheduler speaks to. chosen: called with each program that is
    set."""

    router: Routing
    engines: Mapping[str, EngineClient]
    drains: Drains
    rolling: Rolling
    fleet: Fleet
    chosen: Callable[[ProgramSpec], None]

    @property
    def units(self) -> list[str]:
        return list(self.engines)

    def routes(self) -> list[BaseRoute]:
        """/admin/program; /admin/restart, of all; /admin/units and what is below it; for the fleet scheduler
        /admin/fleet, /admin/pairs and /admin/scale; /verbs/UNIT/VERB, as `core.verbs` describes them."""
        verbs = {
            unit: Router(verb_routes(client), redirect_slashes=False) for unit, client in self.engines.items()
        }
        return [
            Route("/admin/program", self._program, methods=["GET", "POST"]),
            Route("/admin/restart", self._roll, methods=["POST"]),
            Route("/admin/fleet", self._state, methods=["GET"]),
            Route("/admin/pairs", self._pair, methods=["POST"]),
            Route("/admin/scale", self._scale, methods=["POST"]),
            Route("/admin/units", self._get_units, methods=["GET"]),
            Route("/admin/units/{unit}", self._get_unit, methods=["GET"]),
            Route("/admin/units/{unit}/drain", self._drain, methods=["POST"]),
            Route("/admin/units/{unit}/admit", self._admit, methods=["POST"]),
            Route("/admin/units/{unit}/restart", self._restart, methods=["POST"]),
            *(Mount(f"{VERBS}/{unit}", app=app) for unit, app in verbs.items()),
            Route(VERBS + "/{unit}/{verb:path}", self._no_unit, methods=["GET", "POST"]),
        ]

    async def _program(self, request: Request) -> Response:
        if request.method == "POST":
            await self._set_program(request)
        program = self.router.program
        return _json(ProgramSpec(program.name, dict(program.options)))

    async def _set_program(self, request: Request) -> None:
        self.rolling.refuse_while_leaving()
        spec = decode(request, await read_body(request, MAX_BODY), ProgramSpec)
        try:
            # somebody's module may take its time to be imported
            program = await asyncio.to_thread(load_program, spec.name, spec.options)
        except ConfigError as error:
            raise BadRequest(error.message, param="program") from error
        self.router.set_program(program)
        self.chosen(spec)

    async def _roll(self, request: Request) -> Response:
        body = decode(request, await read_body(request, MAX_BODY), Drain)
        self.rolling.begin(body.seconds)
        return StreamingResponse(self._rolled(), media_type="application/x-ndjson")

    async def _rolled(self) -> AsyncIterator[bytes]:
        async with aclosing(self.rolling.steps()) as steps:
            async for step in steps:
                yield msgspec.json.encode(step) + b"\n"

    async def _state(self, _: Request) -> Response:
        return _json(await self.fleet.state())

    async def _pair(self, request: Request) -> Response:
        pairs = decode(request, await read_body(request, MAX_BODY), Pairs)
        await self.fleet.pair(pairs)
        return _json(pairs)

    async def _scale(self, request: Request) -> Response:
        steps = decode(request, await read_body(request, MAX_BODY), Steps)
        await self.fleet.scale(steps)
        return _json(steps)

    async def _get_units(self, _: Request) -> Response:
        return _json(self.drains.states)

    async def _get_unit(self, request: Request) -> Response:
        return _json(self.drains.state(self._unit(request)))

    async def _drain(self, request: Request) -> Response:
        return await self._drained(request, self.drains.drain)

    async def _restart(self, request: Request) -> Response:
        return await self._drained(request, self.drains.restart)

    async def _drained(
        self, request: Request, do: Callable[[str, float | None], Awaitable[UnitState]]
    ) -> Response:
        self.rolling.refuse_while_leaving()
        unit = self._unit(request)
        body = decode(request, await read_body(request, MAX_BODY), Drain)
        return _json(await do(unit, body.seconds))

    async def _admit(self, request: Request) -> Response:
        self.rolling.refuse_while_leaving()
        unit = self._unit(request)
        decode(request, await read_body(request, MAX_BODY), Admit)
        return _json(await self.drains.admit(unit))

    def _unit(self, request: Request) -> str:
        name: str = request.path_params["unit"]
        if name not in self.engines:
            raise self._unknown(name)
        return name

    def _unknown(self, name: str) -> NoSuchRoute:
        return NoSuchRoute(f"there is no unit {name!r}; {', '.join(self.engines)} are the units")

    async def _no_unit(self, request: Request) -> Response:
        raise self._unknown(request.path_params["unit"])


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
