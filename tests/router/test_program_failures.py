"""Programs may raise whatever they like: it ends neither the gateway nor another one's stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from kvloom.router import Call, Fleet, Frames
from kvloom.router.program import Program, ProgramFailed, load_program
from kvloom.types.errors import ConfigError
from kvloom.types.request import Event
from tests.router.fleets import Fleets, ask, ask_well, begin, body, routed

TOKENS = 6


class Odd(BaseException):
    """What nobody foresees."""


ERRORS: tuple[BaseException, ...] = (
    SystemExit(3),
    KeyboardInterrupt(),
    Odd("odd"),
    asyncio.CancelledError(),
    GeneratorExit(),
    StopAsyncIteration(),
    StopIteration(),
    RecursionError(),
    BaseExceptionGroup("several", [SystemExit(1), Odd()]),
)


async def cancels_itself(call: Call, fleet: Fleet) -> Frames:
    lost = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(lost.cancel)
    await lost
    yield []


def raising(error: BaseException, after: int) -> Program:
    """Raises the error after so many frames with tokens."""

    async def wild(call: Call, fleet: Fleet) -> Frames:
        left = after
        if not left:
            raise error
        async for frame in call.start_generate(fleet.up[0]):
            yield frame
            left -= bool(frame)
            if not left:
                raise error

    return Program("wild", wild, {})


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_a_request_that_has_not_begun_is_generated_the_plain_way(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async with routed(2, raising(error, 0)) as fleets:
        with caplog.at_level(logging.ERROR):
            await ask_well(fleets.router, body(20, tokens=TOKENS))
        assert "the program wild failed" in caplog.text
        assert {call.verb for call in fleets.journal} == {"start_generate"}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_one_that_has_begun_ends_with_an_error_and_another_goes_on(error: BaseException) -> None:
    async with routed(1) as fleets:
        beside = await begun_beside(fleets)
        fleets.router.set_program(raising(error, 2))
        with pytest.raises(ProgramFailed, match="the program wild failed with"):
            await ask(fleets.router, body(20, tokens=TOKENS))
        await beside


async def begun_beside(fleets: Fleets) -> asyncio.Task[None]:
    """A request that runs meanwhile, and is answered well."""
    return await begin(ask_well(fleets.router, body(30, tokens=4 * TOKENS)))


async def test_one_that_awaits_what_was_cancelled_has_failed() -> None:
    async with routed(1, Program("cancels_itself", cancels_itself, {})) as fleets:
        await ask_well(fleets.router, body(20, tokens=TOKENS))


async def test_a_request_that_is_cancelled_ends_as_such() -> None:
    entered = asyncio.Event()

    async def waits(call: Call, fleet: Fleet) -> Frames:
        entered.set()
        await asyncio.sleep(60)
        yield []

    async with routed(1, Program("waits", waits, {})) as fleets:
        asking = asyncio.create_task(ask(fleets.router, body(20, tokens=TOKENS)))
        await entered.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert fleets.journal == []
        assert not fleets.router.sessions


@pytest.mark.parametrize("garbage", [None, 7, "text", {}, [None], ["token"], (), [[]]])
async def test_what_is_no_frame_is_not_passed_on(garbage: Any) -> None:
    async def yields(call: Call, fleet: Fleet) -> AsyncGenerator[Any, None]:
        yield garbage

    async with routed(1, Program("yields", yields, {})) as fleets:
        await ask_well(fleets.router, body(20, tokens=TOKENS))


async def test_one_that_goes_on_after_its_end_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    """It catches the GeneratorExit with which it is closed."""

    async def stubborn(call: Call, fleet: Fleet) -> Frames:
        try:
            async for frame in call.start_generate(fleet.up[0]):
                yield frame
        except GeneratorExit:
            yield []

    async with routed(1, Program("stubborn", stubborn, {})) as fleets:
        stream = fleets.router.start_generate(body(20, tokens=TOKENS))
        seen: list[Event] = []
        while not seen:
            seen = await anext(stream)
        await stream.aclose()
        assert "the program stubborn failed" in caplog.text
        assert not fleets.router.sessions


async def test_one_that_does_not_even_begin() -> None:
    def narrow() -> Frames:
        raise AssertionError("nobody can call it with two arguments")

    async with routed(1, Program("narrow", narrow, {})) as fleets:
        await ask_well(fleets.router, body(20, tokens=TOKENS))


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "GeneratorExit", "BaseException()"])
def test_a_module_that_raises_as_it_is_imported(
    error: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raising_programs.py").write_text(f"raise {error}")
    with pytest.raises(ConfigError, match="raising_programs cannot be imported"):
        load_program("raising_programs:mine")
