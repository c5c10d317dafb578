"""What those who run a fleet ask of its gateway: its program, its restart, its units."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from kvloom.api.admin_units import UnitOrders, as_json
from kvloom.api.wire import decode, read_body
from kvloom.cluster.orders import FleetOrders
from kvloom.cluster.scheduler import FleetControl
from kvloom.router.program import load_program
from kvloom.router.router import Router as Routing
from kvloom.types.errors import BadRequest, ConfigError
from kvloom.types.service import Drain, Pairs, Steps
from kvloom.types.spec import ProgramSpec

MAX_BODY = 1 << 16


@dataclass(frozen=True, slots=True)
class Admin:
    router: Routing
    orders: FleetOrders
    fleet: FleetControl
    """What the fleet scheduler speaks to."""

    @property
    def units(self) -> list[str]:
        return list(self.router.units)

    def routes(self) -> list[BaseRoute]:
        """/admin/program; /admin/restart, of all; for the fleet scheduler /admin/fleet, /admin/pairs and
        /admin/scale; those of `UnitOrders`."""
        return [
            Route("/admin/program", self._program, methods=["GET", "POST"]),
            Route("/admin/restart", self._roll, methods=["POST"]),
            Route("/admin/fleet", self._state, methods=["GET"]),
            Route("/admin/pairs", self._pair, methods=["POST"]),
            Route("/admin/scale", self._scale, methods=["POST"]),
            *UnitOrders(self.router.units, self.orders).routes(),
        ]

    async def _program(self, request: Request) -> Response:
        if request.method == "POST":
            await self._set_program(request)
        program = self.router.program
        return as_json(ProgramSpec(program.name, dict(program.options)))

    async def _set_program(self, request: Request) -> None:
        spec = decode(request, await read_body(request, MAX_BODY), ProgramSpec)
        try:
            # somebody's module may take its time to be imported
            program = await asyncio.to_thread(load_program, spec.name, spec.options)
        except ConfigError as error:
            raise BadRequest(error.message, param="program") from error
        await self.orders.set_program(spec)
        self.router.set_program(program)

    async def _roll(self, request: Request) -> Response:
        body = decode(request, await read_body(request, MAX_BODY), Drain)
        await self.orders.roll(body.seconds)
        return StreamingResponse(self._rolled(), media_type="application/x-ndjson")

    async def _rolled(self) -> AsyncIterator[bytes]:
        async with aclosing(self.orders.steps()) as steps:
            async for step in steps:
                yield msgspec.json.encode(step) + b"\n"

    async def _state(self, _: Request) -> Response:
        return as_json(await self.fleet.state())

    async def _pair(self, request: Request) -> Response:
        pairs = decode(request, await read_body(request, MAX_BODY), Pairs)
        await self.fleet.pair(pairs)
        return as_json(pairs)

    async def _scale(self, request: Request) -> Response:
        steps = decode(request, await read_body(request, MAX_BODY), Steps)
        await self.fleet.scale(steps)
        return as_json(steps)
