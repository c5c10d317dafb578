"""A gateway with two units to administer, behind which engines say what they are told to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette

from kvloom.api.admin import Admin
from kvloom.api.admin_units import UnitOrders
from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from kvloom.router.drains import Drains
from kvloom.router.program import load_program
from kvloom.router.rolling import Rolling
from kvloom.router.roster import Roster
from kvloom.router.router import Router
from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket
from kvloom.types.client import RemoteEngine
from kvloom.types.clock import WallClock
from kvloom.types.load import UnitLoad
from kvloom.types.request import EndEvent, Event, ModelCard, StartGenerate
from kvloom.types.service import FleetState, Pairs, Steps
from kvloom.types.spec import EngineSpec, ProgramSpec
from kvloom.types.verbs import (
    Abort,
    Answer,
    Body,
    Done,
    Held,
    Lease,
    Offered,
    Pinned,
    Prepared,
    Sent,
    Standing,
    Verb,
)
from tests.api.scripted import ScriptedEngine, card, says
from tests.router.roster import spec

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
    "evict": Held(tokens=1),
}


@dataclass
class Curt(RemoteEngine):
    """An engine that answers every verb at once, or raises what `fails` makes of its name."""

    fails: Callable[[str], Exception | None] = lambda _: None
    aborted: list[tuple[str, int | None]] = field(default_factory=list)

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
        if error := self.fails(verb):
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


class Processes:
    """Those of units that come and go: `dies` has what new ones die of."""

    def __init__(self, dies: list[Exception]) -> None:
        self._dies = dies

    async def connect(self, unit: str) -> Curt:
        return Curt()

    async def start(self, spec: EngineSpec) -> None:
        if self._dies:
            raise self._dies.pop()

    async def stop(self, unit: str, cards: Sequence[ModelCard]) -> None:
        pass

    def forget(self, unit: str) -> None:
        pass


@dataclass
class Administered:
    """chosen, drained, restarted and paired: what was told of them. dies: what new processes die of."""

    app: Starlette
    chosen: list[ProgramSpec]
    drained: list[frozenset[str]]
    restarted: list[str]
    dies: list[Exception]
    paired: list[Pairs]


def administered(*, keys: Keys | None = None, engine: Curt | None = None, **options: Any) -> Administered:
    """Units unit-0 and unit-1. options: of `create_app`."""
    chosen: list[ProgramSpec] = []
    drained: list[frozenset[str]] = []
    restarted: list[str] = []
    dies: list[Exception] = []

    async def restart(unit: str) -> None:
        restarted.append(unit)
        if dies:
            raise dies.pop()

    engines = {"unit-0": engine or Curt(), "unit-1": Curt()}
    router = Router(engines, load_program("data_parallel"), WallClock())
    drains = Drains(router, seconds=0.01, restart=restart, changed=drained.append)
    rolling = Rolling(drains, WallClock(), restart=restart, beside=("scheduler", "gateway"))
    fleet = Told()
    processes = Processes(dies)
    roster = Roster(
        router,
        specs=[spec("unit-0"), spec("unit-1")],
        groups={},
        processes=processes,
        connect=processes.connect,
        changed=lambda _: None,
        memory=1 << 30,
        cores=2,
    )
    orders = UnitOrders(drains, rolling, roster, seconds=0.01)
    admin = Admin(router, orders, rolling, fleet, chosen.append)
    scripted = ScriptedEngine(says("hello world", "the quick fox"), cards=[card(), card("plain", None)])
    app = create_app(scripted, keys=keys, admin=admin, **options)
    return Administered(app, chosen, drained, restarted, dies, fleet.pairs)
