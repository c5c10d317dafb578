"""Guides in the engine: one that breaks, and one that comes too late."""

from __future__ import annotations

import asyncio
import threading

import pytest
from msgspec.structs import replace

from kvloom.engine.guide import GuideCompiler
from kvloom.types.errors import Unavailable
from kvloom.types.request import Guide
from tests.engine.plays import order, serve
from tests.modelled import ModelledExecutor, ask, engine_over, expected, modelled, turns


class _NoToken:
    """A grammar that has nothing to say."""

    done = False

    def mask(self) -> None:
        return None

    def accepts(self, token: int) -> bool:
        return False

    def copy(self) -> _NoToken:
        return self


class _Unguided(_NoToken):
    def accepts(self, token: int) -> bool:
        return True


def test_a_guide_that_refuses_its_token_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuideCompiler, "start", lambda self, guide: _NoToken())
    executor = ModelledExecutor(100)
    engine = engine_over(executor)

    async def play() -> None:
        guided = order("guided", "wide", 9, guide=Guide("json"))
        plain = order("plain", "wide", 12)
        ended, answer = await asyncio.gather(ask(engine, guided), ask(engine, plain))
        assert ended.ends[0].reason == "error"
        assert not ended.tokens
        assert answer.tokens == expected(executor, plain)

    serve(play(), engine, executor)


def test_a_guide_ready_after_the_stop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = threading.Event()

    def slow(compiler: GuideCompiler, guide: Guide) -> _NoToken:
        assert ready.wait(10)
        return _NoToken()

    monkeypatch.setattr(GuideCompiler, "start", slow)
    executor = ModelledExecutor(100)
    engine = engine_over(executor)

    async def play() -> None:
        asking = asyncio.create_task(ask(engine, order("guided", "wide", 9, guide=Guide("json"))))
        await turns()
        await engine.stop()
        await turns()
        ready.set()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(asking, 10)

    async def whole() -> None:
        async with modelled(engine, executor):
            await play()

    asyncio.run(whole())


@pytest.mark.parametrize("hurry", [True, False], ids=["compiling", "in the queue to compile"])
def test_an_abort_while_a_guide_compiles_ends_the_request(
    monkeypatch: pytest.MonkeyPatch, hurry: bool
) -> None:
    """All of it or one choice; its id is free at once, and what nobody wants any more is not compiled."""
    ready, compiled, loop = threading.Event(), list[str](), threading.get_ident()

    def slow(compiler: GuideCompiler, guide: Guide) -> _Unguided:
        if threading.get_ident() != loop:  # The oracle, which compares on the loop, compiles too.
            compiled.append(guide.text)
            assert ready.wait(10)
        return _Unguided()

    monkeypatch.setattr(GuideCompiler, "start", slow)
    executor = ModelledExecutor(100)
    engine = engine_over(executor)

    async def play() -> None:
        gone, part = order("gone", "wide", 9, guide=Guide("regex", "a")), order("part", "wide", 9, n=3)
        part = replace(part, sampling=replace(part.sampling, guide=Guide("regex", "b")))
        orders = [gone, part] if hurry else [part, gone]
        asking = {body.request: asyncio.create_task(ask(engine, body)) for body in orders}
        await turns()
        await engine.abort("gone")
        await engine.abort("part", 0)
        await engine.abort("part", 2)
        again = order("gone", "wide", 12)
        assert (await ask(engine, again)).tokens == expected(executor, again)
        assert not any(task.done() for task in asking.values())
        jobs = len(executor.jobs)
        ready.set()
        answer = await asking["gone"]
        assert answer.ends[0].reason == "abort"
        assert not answer.tokens
        answer = await asking["part"]
        assert [answer.ends[choice].reason for choice in range(3)] == ["abort", "length", "abort"]
        assert answer.tokens == {1: expected(executor, part)[1]}
        assert len(executor.jobs) > jobs
        assert compiled == (["a", "b"] if hurry else ["b"])

    async def whole() -> None:
        async with modelled(engine, executor):
            await play()

    asyncio.run(whole())
