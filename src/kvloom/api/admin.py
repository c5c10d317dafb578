"""Answers those who run a fleet: its program, its models, its restart, its units and their verbs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Final

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Router
from starlette.types import Message, Receive, Scope, Send

from kvloom.api.access.audit import FLEET, Audit, note
from kvloom.api.access.tenants import access_of
from kvloom.api.admin_routes import ADMIN
from kvloom.api.bodies import decode, read_body
from kvloom.api.errors import JSON, VERBS_PATH, NoSuchRoute
from kvloom.api.live.samples import LiveSamples, SampleStream
from kvloom.api.routes import LINES, TEXT, Handler, RouteRow, asgi_routes
from kvloom.api.stream import JournalStream
from kvloom.api.verbs import verb_routes
from kvloom.cluster.models import Applied, Apply
from kvloom.cluster.orders import FleetOrders
from kvloom.cluster.scheduler import FleetControl
from kvloom.config.models import check_name
from kvloom.journal.lives import KEPT, Life, Lives
from kvloom.journal.log import RecordLog
from kvloom.journal.traffic import TrafficHour, encode_hours
from kvloom.journal.traffic_log import TrafficKeeper
from kvloom.router.program import Program, load_program
from kvloom.router.router import Router as Routing
from kvloom.types.errors import BadRequest, ConfigError, Unavailable
from kvloom.types.request import ModelCard
from kvloom.types.service import Admit, Drain, LoadLora, Pairs, ProgramState, Steps, UnitState, UnloadLora
from kvloom.types.spec import ProgramSpec

MOST_NAME: Final = 200  # characters of a name that an error repeats


@dataclass(frozen=True, slots=True)
class Admin:
    """Answers the rows of `ADMIN`.

    A handler takes the unit, the node or the model, if the row's path names one, and the body, if the row has
    one. It returns the answer, or awaits it.
    """

    router: Routing
    orders: FleetOrders
    fleet: FleetControl
    """The fleet as its scheduler reads and controls it."""
    audit: Audit = field(default_factory=Audit)
    journal: RecordLog = field(default_factory=RecordLog)
    """A copy of the fleet's specification and status."""
    samples: LiveSamples = field(default_factory=LiveSamples)
    lives: Lives = field(default_factory=Lives)
    """The counts of this gateway's requests."""
    traffic: TrafficKeeper | None = None
    """The counts of traffic; None if nobody counts."""
    _verbs: dict[str, Router] = field(default_factory=dict)

    @property
    def units(self) -> list[str]:
        return list(self.router.units)

    def routes(self) -> list[BaseRoute]:
        """Returns the routes of /admin, and those of the units' verbs."""
        fleet, orders = self.fleet, self.orders
        handlers: dict[str, Callable[..., object]] = {
            "program": self._program,
            "set_program": self._set_program,
            "restart_all": self._restart_all,
            "fleet": fleet.state,
            "pair": self._pair,
            "scale": self._scale,
            "requests": self.lives.last,
            "traffic": lambda: _traffic(self.traffic.everywhere if self.traffic else None),
            "host_traffic": lambda: _traffic(self.traffic.here if self.traffic else None),
            "request": self._request,
            "placement": lambda: orders.placement,
            "units": lambda: orders.states,
            "add": orders.add,
            "unit": orders.state,
            "cards": self._cards,
            "drain": lambda unit, body: orders.drain(unit, body.seconds),
            "admit": lambda unit, _: orders.admit(unit),
            "restart": lambda unit, body: orders.restart(unit, body.seconds),
            "start": lambda unit, _: orders.start(unit),
            "stop": lambda unit, body: orders.stop(unit, body.seconds),
            "remove": self._remove,
            "nodes": lambda: orders.nodes,
            "drain_node": lambda node, body: orders.drain_node(node, body.seconds),
            "admit_node": lambda node, _: orders.admit_node(node),
            "admin_models": lambda: orders.models,
            "add_model": orders.add_model,
            "remove_model": lambda name, body: orders.remove_model(name, body.seconds),
            "apply": self._apply,
            "load_lora_adapter": self._load_lora,
            "unload_lora_adapter": self._unload_lora,
        }
        served = {row.name: self._serve(row, handlers[row.name]) for row in ADMIN if row.name in handlers}
        served |= {"events": self._events, "live": self._live}
        return [*asgi_routes(ADMIN, served), Mount(VERBS_PATH + "/{unit}", app=self._verb)]

    def _serve(self, row: RouteRow, handler: Callable[..., object]) -> Handler:
        async def endpoint(request: Request) -> Response:
            given: list[object] = []
            if row.body is not None:
                given.append(decode(request, await read_body(request, row.most), row.body))
            for key, value in request.path_params.items():
                check = {"unit": self._known, "node": self._known_node}.get(key, str)
                given.insert(0, check(value))
            with self._audited(request.scope, row, given):
                answer = handler(*given)
                if isawaitable(answer):
                    answer = await answer
            if isinstance(answer, Response):
                return answer
            return Response(msgspec.json.encode(answer), media_type=JSON)

        return endpoint

    def _audited(self, scope: Scope, row: RouteRow, given: list[object]) -> AbstractContextManager[object]:
        """Returns what writes of an order, if it is one. A pairing is the scheduler's, twice a second, and
        changes no specification."""
        pairs = row.name == "pair" and access_of(scope).admin == FLEET
        if row.method == "GET" or pairs or not getattr(given[-1], "really", True):
            return nullcontext()
        note(scope, given[-1])
        return self.audit.action(scope, lambda: self.orders.mirror.spec)

    def _known(self, unit: str) -> str:
        if unit not in self.router.units:
            units = ", ".join(self.router.units) or "none"
            raise NoSuchRoute(f"there is no unit {unit!r}; the units: {units}")
        return unit

    def _known_node(self, node: str) -> str:
        if node not in self.orders.mirror.spec.nodes:
            nodes = ", ".join(self.orders.mirror.spec.nodes) or "none"
            raise NoSuchRoute(f"there is no node {node!r}; the nodes: {nodes}")
        return node

    def _program(self) -> ProgramState:
        program, spec = self.router.program, self.orders.mirror.spec
        return ProgramState(
            name=program.name,
            options=dict(program.options),
            probation=spec.program != spec.proven,
            reverted=spec.reverted,
        )

    async def _set_program(self, spec: ProgramSpec) -> ProgramState:
        program = await _load(spec)
        await self.orders.set_program(spec)
        self.router.set_program(program)
        return self._program()

    async def _restart_all(self, body: Drain) -> Response:
        await self.orders.roll(body.seconds)
        return StreamingResponse(self._steps(), media_type=LINES)

    async def _steps(self) -> AsyncIterator[bytes]:
        async with aclosing(self.orders.steps()) as steps:
            async for step in steps:
                yield msgspec.json.encode(step) + b"\n"

    async def _pair(self, pairs: Pairs) -> Pairs:
        await self.fleet.pair(pairs)
        return pairs

    async def _scale(self, steps: Steps) -> Steps:
        await self.fleet.scale(steps)
        return steps

    async def _events(self, request: Request) -> Response:
        return JournalStream(self.journal, request.headers.get("last-event-id", ""))

    async def _live(self, request: Request) -> Response:
        return SampleStream(self.samples, request.headers.get("last-event-id", ""))

    def _request(self, name: str) -> Life:
        story = self.lives.find(name)
        if story is None:
            raise NoSuchRoute(
                f"no request {name[:MOST_NAME]!r} is kept; the last {KEPT} of this gateway are, by their "
                "x-request-id or the id of their answer"
            )
        return story.life(self.journal.since(self.journal.first))

    def _cards(self, unit: str) -> list[ModelCard]:
        return [replica.card for replica in self.router.units[unit].replicas.values()]

    async def _remove(self, unit: str, _: Admit) -> UnitState:
        last = await self.orders.remove(unit)
        self._verbs.pop(unit, None)
        return last

    async def _apply(self, body: Apply) -> Applied:
        program = None if body.wanted.program is None else await _load(body.wanted.program)
        now = self.router.program
        if program is not None and (program.name, program.options) == (now.name, now.options):
            program, body = None, replace(body, wanted=replace(body.wanted, program=None))
        applied = await self.orders.apply(body)
        if program is not None and body.really:
            self.router.set_program(program)
        return applied

    async def _load_lora(self, body: LoadLora) -> Response:
        name, path = body.lora_name, body.lora_path
        if not name or not path:
            raise BadRequest("Both 'lora_name' and 'lora_path' must be provided.")
        try:
            check_name(name)
        except ValueError as error:
            raise BadRequest(f"lora_name: {error}", param="lora_name") from error
        if not path.startswith("/") or "\0" in path:
            raise BadRequest(
                f"lora_path: {path[:200]!r}; the path of a folder from the root on is right",
                param="lora_path",
            )
        if body.load_inplace:
            raise BadRequest(
                "load_inplace: no adapter takes another's place; to unload that one first is right",
                param="load_inplace",
            )
        await self.orders.adapters.load(name, path, body.base_model_name or "")
        return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type=TEXT)

    async def _unload_lora(self, body: UnloadLora) -> Response:
        name = body.lora_name
        if not name:
            raise BadRequest("'lora_name' needs to be provided to unload a LoRA adapter.")
        await self.orders.adapters.unload(name)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type=TEXT)

    async def _verb(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a verb on to its unit."""
        unit = self._known(scope["path_params"]["unit"])
        if unit not in self._verbs:
            routes = verb_routes(self.router.units[unit].client)
            self._verbs[unit] = Router(routes, redirect_slashes=False)
        with self.audit.action(scope, lambda: None) as look:

            async def answer(message: Message) -> None:
                look(message)
                await send(message)

            await self._verbs[unit](scope, receive, answer)


async def _traffic(told: Callable[[], Awaitable[Sequence[TrafficHour]]] | None) -> Response:
    try:
        hours = [] if told is None else await told()
    except OSError as error:
        raise Unavailable(f"the traffic log cannot be read: {error.strerror}") from error
    return Response(await asyncio.to_thread(encode_hours, hours), media_type=LINES)


async def _load(spec: ProgramSpec) -> Program:
    """Loads a program in a thread, because a module of somebody's may take its time to be imported. Raises
    BadRequest."""
    try:
        return await asyncio.to_thread(load_program, spec.name, spec.options)
    except ConfigError as error:
        raise BadRequest(error.message, param="program") from error
