"""What those who run a fleet ask of its gateway: its program, and each unit's verbs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from kvloom.api.verbs import decode, read_body, verb_routes
from kvloom.core.client import EngineClient
from kvloom.core.errors import BadRequest, ConfigError
from kvloom.core.spec import ProgramSpec
from kvloom.router.program import load_program
from kvloom.router.router import Router

MAX_BODY = 1 << 16


def admin_routes(router: Router, engines: Mapping[str, EngineClient]) -> list[BaseRoute]:
    """GET and POST /admin/program; /verbs/UNIT/VERB, as `core.verbs` describes them."""

    def show() -> Response:
        program = router.program
        shown = ProgramSpec(program.name, dict(program.options))
        return Response(msgspec.json.encode(shown), media_type="application/json")

    async def get_program(_: Request) -> Response:
        return show()

    async def set_program(request: Request) -> Response:
        spec = decode(request, await read_body(request, MAX_BODY), ProgramSpec)
        try:
            # somebody's module may take its time to be imported
            router.set_program(await asyncio.to_thread(load_program, spec.name, spec.options))
        except ConfigError as error:
            raise BadRequest(error.message, param="program") from error
        return show()

    return [
        Route("/admin/program", get_program, methods=["GET"]),
        Route("/admin/program", set_program, methods=["POST"]),
        *(Mount(f"/verbs/{unit}", routes=verb_routes(client)) for unit, client in engines.items()),
    ]
