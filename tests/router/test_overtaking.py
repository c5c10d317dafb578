"""Requests that end while something is on its way to an engine, or that the engine itself has lost."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.api.verbs import create_verbs
from kvloom.router import Call, Fleet, Frames, held
from kvloom.router.client import HttpEngineClient
from kvloom.router.program import Program, load_program
from kvloom.router.router import Router
from kvloom.types.errors import KvloomError, Unavailable
from kvloom.types.request import EndEvent, Event, StartGenerate, TokenEvent
from tests.router.fleets import ManualClock, ask, ask_well, body, routed, run, turns
from tests.router.ledger import LedgerEngine, World
from tests.scripted import served

SECRET = "s"


class SlowWire:
    """Holds prep_recv and pin back, each after its body has left the caller, until `open`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.open = asyncio.Event()
        self.held = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in ("/verbs/prep_recv", "/verbs/pin"):
            self.held.set()
            await self.open.wait()
        await self._app(scope, receive, send)


async def reserving(call: Call, fleet: Fleet) -> Frames:
    await call.prep_recv(fleet.turn(), end=-1)
    async for frame in call.start_generate(fleet.turn()):
        yield frame


async def pinning(call: Call, fleet: Fleet) -> Frames:
    await call.pin(fleet.turn())
    async for frame in call.start_generate(fleet.turn()):
        yield frame


@asynccontextmanager
async def over_http(folder: Path, program: Program) -> AsyncIterator[tuple[Router, LedgerEngine, SlowWire]]:
    engine = World().engine("a")
    wire = SlowWire(create_verbs(engine, secret=SECRET))
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(wire, folder / "a.sock"))
        client = await stack.enter_async_context(HttpEngineClient(url, secret=SECRET))
        router = await stack.enter_async_context(Router({"a": client}, program, ManualClock()))
        yield router, engine, wire


@pytest.mark.parametrize("function", [reserving, pinning])
async def test_an_abort_does_not_overtake_what_it_is_to_undo(tmp_path: Path, function: object) -> None:
    """The request is cancelled while its reservation is on the wire. Nothing is held afterwards, long before
    any lease has run out."""
    async with over_http(tmp_path, Program("p", function, {})) as (router, engine, wire):  # type: ignore[arg-type]
        engine.cached.append(body(40).prompt)
        request = body(40)
        asking = asyncio.create_task(ask(router, request))
        await wire.held.wait()
        asking.cancel()
        await turns()
        assert not engine.aborts  # it waits for its turn
        wire.open.set()
        with suppress(asyncio.CancelledError):
            await asking
        assert engine.aborts == [(request.request, None)]
        assert not engine.rooms
        assert not engine.pins
        assert router.units["a"].calls == 0
        await ask_well(router, body(40))


async def test_what_never_comes_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "RELEASE_SECONDS", 0.01)
    async with over_http(tmp_path, Program("p", reserving, {})) as (router, engine, wire):
        asking = asyncio.create_task(ask(router, body(40)))
        await wire.held.wait()
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        assert router.units["a"].calls == 0
        wire.open.set()
        engine.rooms.clear()  # as its lease would


def test_a_refusal_that_nobody_waits_for_is_no_error(tmp_path: Path) -> None:
    """asyncio would log it as an exception that was never retrieved."""
    told: list[dict[str, Any]] = []

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        async with over_http(tmp_path, Program("p", reserving, {})) as (router, engine, wire):
            engine.free = 0
            asking = asyncio.create_task(ask(router, body(40)))
            await wire.held.wait()
            asking.cancel()
            await turns()
            wire.open.set()
            with suppress(asyncio.CancelledError):
                await asking
            assert len(engine.aborts) == 1

    run(test)
    gc.collect()
    assert not told


async def failing(call: Call, fleet: Fleet) -> Frames:
    """Leaves room behind."""
    await call.prep_recv(fleet.turn(), end=-1)
    raise Unavailable("the sender is gone")
    yield []


async def test_a_late_abort_of_one_attempt_spares_the_next() -> None:
    """On the wire it may arrive twice, or after the caller has stopped waiting for it."""
    async with routed(1, Program("p", failing, {})) as fleets:
        [engine], request = fleets.engines, body(20)
        engine.gate.clear()
        asking = asyncio.create_task(ask_well(fleets.router, request))
        while not engine.streams:
            await turns(1)
        assert engine.aborts == [(request.request, None)]
        await engine.abort(request.request)
        engine.gate.set()
        await asking


def loses(engine: LedgerEngine, *before: Event, n: int = 1) -> None:
    """It lets requests in and ends them with an error, after the events `before`."""
    real = engine.start_generate

    async def losing(request: StartGenerate) -> AsyncIterator[list[Event]]:
        frames = real(request)
        yield await anext(frames)
        if before:
            yield list(before)
        yield [EndEvent(choice, "error", message="the engine is stopping") for choice in range(n)]
        await frames.aclose()

    engine.start_generate = losing  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("program", ["data_parallel", "disaggregate"])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_request_that_is_lost_before_its_first_token_goes_elsewhere(program: str, n: int) -> None:
    async with routed(3, program) as fleets:
        loses(fleets.engines[0], n=n)
        loses(fleets.engines[1], n=n)
        for _ in range(3):
            await ask_well(fleets.router, body(20, n=n))


async def test_where_nobody_is_left_the_client_learns_why() -> None:
    async with routed(2) as fleets:
        for engine in fleets.engines:
            loses(engine)
        with pytest.raises(KvloomError, match=r"^[ab]: the engine is stopping$") as error:
            await ask(fleets.router, body())
        assert error.value.status == 500
        assert sorted(call.unit for call in fleets.journal) == ["a", "b"]


async def test_where_some_choices_go_on_the_lost_one_has_ended() -> None:
    async with routed(2, load_program("data_parallel")) as fleets:
        broken = EndEvent(0, "error", message="its guide broke")
        rest: list[Event] = [TokenEvent(1, 0, 8), EndEvent(1, "length")]

        async def one_breaks(request: StartGenerate) -> AsyncIterator[list[Event]]:
            yield []
            yield [TokenEvent(0, 0, 7), broken]
            yield rest

        fleets.engines[0].start_generate = one_breaks  # type: ignore[method-assign,assignment]
        answer = await ask(fleets.router, body(20, n=2))
        assert answer.tokens == {0: [7], 1: [8]}
        assert answer.ends == {0: broken, 1: EndEvent(1, "length")}
