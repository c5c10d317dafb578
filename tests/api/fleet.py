"""A gateway with two units to administer, behind which engines say what they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from kvloom.api.access.audit import Audit
from kvloom.api.admin import Admin
from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from kvloom.api.live.samples import LiveSamples
from kvloom.cluster.controller import Controller
from kvloom.cluster.mirror import Mirror
from kvloom.cluster.orders import FleetOrders
from kvloom.cluster.reconcile import Timing
from kvloom.cluster.state import FleetSpec, UnitSpec, gateway_name
from kvloom.journal.log import RecordLog
from kvloom.router.program import load_program
from kvloom.router.router import Router
from kvloom.router.units import FleetLink
from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket
from kvloom.types.clock import WallClock
from kvloom.types.load import UnitLoad
from kvloom.types.request import EndEvent, Event, StartGenerate
from kvloom.types.service import FleetState, Pairs, Steps
from kvloom.types.spec import ProgramSpec
from kvloom.types.verbs import (
    Abort,
    Answer,
    Body,
    CacheChanges,
    Done,
    Evicted,
    Held,
    Lease,
    Offered,
    Pinned,
    Prepared,
    RemoteEngine,
    Sent,
    Standing,
    Verb,
)
from tests.api.scripted import ScriptedEngine, card, says
from tests.cluster.histories import Memory
from tests.router.ledger import World
from tests.router.managed import Processes, spec

FORM = KVForm(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_bytes=256, tokens_per_block=4)
ADDRESS = KVAddress(model="tiny", form=FORM, begin=0, end=1, blocks=b"", ticket=Ticket(slot=0, generation=1))
PEER = Endpoint(unit="unit-0", kind="modelled", where=b"")


LOAD = UnitLoad(total_blocks=8, free_blocks=8, block_bytes=256, policy="adbs", models={})
ANSWERS: dict[str, Any] = {
    "models": [card()],
    "load": LOAD,
    "abort": Done(),
    "prep_recv": Prepared(matched=0, end=1, address=ADDRESS, peer=PEER, lease=3.0),
    "remote_send": Sent(cached=0, computed=1),
    "renew": Lease(lease=3.0),
    "pin": Pinned(tokens=1, lease=3.0),
    "unpin": Held(tokens=1),
    "hold": Standing(made=[]),
    "resume": Done(),
    "offer": Offered(request=None),
    "evict": Evicted(tokens=1),
    "contents": CacheChanges(life="a", version=1),
    "load_adapter": Done(),
    "unload_adapter": Done(),
    "check_model": Done(),
}


@dataclass
class Curt(RemoteEngine):
    """An engine that answers every verb at once, or raises what `fails` makes of its name."""

    fails: Callable[[str], Exception | None] = lambda _: None
    aborted: list[tuple[str, int | None]] = field(default_factory=list)
    well: bool = False
    """Whether it fails of nothing for now."""

    async def call(self, verb: Verb[Body, Answer], body: Body) -> Answer:
        self._may(verb.name)
        if isinstance(body, Abort):
            self.aborted.append((body.request, body.choice))
        answer: Answer = ANSWERS[verb.name]
        return answer

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        self._may("start_generate")
        yield []
        yield [EndEvent(choice, "length") for choice in range(body.n)]

    def _may(self, verb: str) -> None:
        if not self.well and (error := self.fails(verb)):
            raise error


@dataclass
class Told:
    """A `Fleet` of one unit, and what it was told."""

    pairs: list[Pairs] = field(default_factory=list)
    steps: list[Steps] = field(default_factory=list)

    async def state(self) -> FleetState:
        return FleetState(loads={"unit-0": LOAD})

    async def pair(self, pairs: Pairs) -> None:
        self.pairs.append(pairs)

    async def scale(self, steps: Steps) -> None:
        self.steps.append(steps)


class Anew:
    """An ASGI application that lives for one request, over what a fleet keeps: test clients have an event
    loop for each."""

    def __init__(
        self,
        engines: dict[str, Curt],
        told: Told,
        keys: Keys | None,
        audit: Audit,
        options: dict[str, Any],
    ) -> None:
        self.processes = Processes(World())
        self.processes.starts.set()
        self.store = Memory()
        self._engines = engines
        self._told = told
        self._keys = keys
        self._audit = audit
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            async with self._serving() as app:
                await app(scope, receive, send)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[Starlette]:
        units = {name: UnitSpec(engine=spec(name)) for name in ("unit-0", "unit-1")}
        fleet, processes, clock = FleetSpec(units=units, scheduler=1, drain=0.1), self.processes, WallClock()
        kept = self.store.load()
        gateway = gateway_name(kept[0].gateway if kept else 1)
        processes.beside = [gateway, "scheduler", *self._engines]
        controller = processes.controller = Controller(
            fleet, processes, clock, store=self.store, timing=Timing(margin=0.1)
        )
        mirror = Mirror(controller.snapshot, processes.send_from(gateway))
        processes.mirrors = {gateway: mirror}
        link = FleetLink(mirror, lambda unit: self._engines.setdefault(unit, Curt()))
        running = asyncio.get_running_loop().create_task(controller.run())
        for one in self._engines.values():
            one.well = True  # while the router asks what it serves
        given = controller.spec.program or ProgramSpec("data_parallel")
        async with Router(link, load_program(given.name, given.options), clock) as router:
            orders = FleetOrders(mirror, router.units, seconds=0.01, memory=1 << 30, cores=2)
            engine = ScriptedEngine(says("hello world", "the quick fox"), cards=[card(), card("plain", None)])
            journal = RecordLog()
            journal.close()  # a test client waits for an answer's end
            samples = LiveSamples()
            samples.close()
            admin = Admin(router, orders, self._told, self._audit, journal, samples)
            for one in self._engines.values():
                one.well = False
            yield create_app(engine, keys=self._keys, admin=admin, **self._options)
        running.cancel()
        await asyncio.wait([running])
        await processes.close()


@dataclass
class Administered:
    """problems: what new processes die of, by component. done: what was asked of processes. paired: what was
    told of pairs."""

    app: Anew
    problems: dict[str, str]
    done: list[str]
    paired: list[Pairs]

    @property
    def kept(self) -> FleetSpec:
        """What the fleet is to be, as its controller has kept it."""
        found = self.app.store.load()
        assert found is not None
        return found[0]


def administered(
    *, keys: Keys | None = None, engine: Curt | None = None, audit: Audit | None = None, **options: Any
) -> Administered:
    """Units unit-0 and unit-1. options: of `create_app`."""
    told = Told()
    app = Anew({"unit-0": engine or Curt(), "unit-1": Curt()}, told, keys, audit or Audit(), options)
    return Administered(app, app.processes.problems, app.processes.done, told.pairs)
