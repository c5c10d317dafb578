"""The real client against the real verbs app over a real socket; only the engine behind is scripted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import uvloop
from msgspec.structs import replace

from kvloom.api.verbs import create_verbs
from kvloom.offload.terms import HandBack
from kvloom.router import client as client_module
from kvloom.router.client import HttpEngineClient
from kvloom.serve import server
from kvloom.types.address import Ticket
from kvloom.types.errors import (
    BadRequest,
    ConnectionLost,
    HostAway,
    KvloomError,
    PromptTooLong,
    QueueFull,
    Unauthorized,
    Unavailable,
)
from kvloom.types.load import UnitLoad
from kvloom.types.request import PROTOCOL, EndEvent, Event, TokenEvent
from kvloom.types.verbs import Done, Evicted, Held, Offer, Offered, Pin, Pinned, Prefix
from tests.processes import DEADLINE
from tests.scripted import CARD, ScriptedEngine, order, served

SECRET = "s3cret"
IDLE = UnitLoad(total_blocks=8, free_blocks=8, block_bytes=256, policy="adbs", models={})


@asynccontextmanager
async def pair(path: Path, max_body: int = 1 << 20) -> AsyncIterator[tuple[ScriptedEngine, HttpEngineClient]]:
    engine = ScriptedEngine()
    async with (
        served(create_verbs(engine, secret=SECRET, max_body=max_body), path / "engine.sock") as url,
        HttpEngineClient(url, secret=SECRET) as client,
    ):
        yield engine, client


def run(
    test: Callable[[], Awaitable[None]],
    loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await test()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(bounded())


async def test_a_stream_is_the_engines_own(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, client):
        frames = [frame async for frame in client.start_generate(order(5, 6, tokens=3))]
        events = [event for frame in frames for event in frame]
        assert frames[0] == []
        assert events == [TokenEvent(0, i, t) for i, t in enumerate((5, 6, 5))] + [EndEvent(0, "length")]
        assert not engine.live


async def test_the_other_verbs(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, client):
        assert await client.models() == [CARD]
        assert (await client.load()).total_blocks == 8
        await client.abort("r7")
        await client.abort("r8", 2)
        assert engine.aborted == [("r7", None), ("r8", 2)]


async def test_pins(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_, client):
        body = Pin(model="echo", request="owner", prompt=[1, 2, 3])
        assert await client.pin(body) == Pinned(tokens=3, lease=3.0)
        assert await client.pin(replace(body, lease=60)) == Pinned(tokens=3, lease=60.0)
        assert await client.unpin("owner") == Held(tokens=6)
        assert await client.offer(Offer(destination=IDLE, besides=["r"])) == Offered(request="not ['r']")
        assert await client.evict(Prefix(model="echo", prompt=[1, 2])) == Evicted(tokens=4)
        assert (await client.renew("owner")).lease == 5.0
        for wrong in (replace(body, request=""), replace(body, lease=3601), replace(body, lease=0)):
            with pytest.raises(BadRequest, match="body"):
                await client.pin(wrong)


async def test_admission_errors_keep_their_kind(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_, client):
        with pytest.raises(QueueFull, match="4 requests wait") as full:
            await anext(client.start_generate(order(ScriptedEngine.FULL)))
        assert full.value.retry_after == 7
        with pytest.raises(PromptTooLong) as long:
            await anext(client.start_generate(order(ScriptedEngine.LONG)))
        assert long.value.param == "prompt"


async def test_a_stream_under_way_ends_if_its_client_is_cut(tmp_path: Path) -> None:
    """Also one that waits for its next frame, which never comes from a host that is cut off."""
    async with pair(tmp_path) as (_, client):
        frames = client.start_generate(order(ScriptedEngine.FOREVER))
        assert [await anext(frames), await anext(frames)] == [[], [TokenEvent(0, 0, 902)]]
        waiting = asyncio.ensure_future(anext(frames))
        await asyncio.sleep(0)
        await client.cut()
        async with asyncio.timeout(DEADLINE):
            with pytest.raises(HostAway, match="its host is lost"):
                await waiting


async def test_closing_a_stream_ends_it_at_the_engine(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, client):
        async with aclosing(client.start_generate(order(ScriptedEngine.FOREVER))) as frames:
            assert [await anext(frames), await anext(frames)] == [[], [TokenEvent(0, 0, 902)]]
            assert engine.live == {"r1"}
        await engine.closed.wait()
        assert not engine.live


async def test_a_cancelled_caller_ends_it_too(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, client):
        begun = asyncio.Event()

        async def call() -> None:
            async for _ in client.start_generate(order(ScriptedEngine.FOREVER)):
                begun.set()

        async with asyncio.TaskGroup() as group:
            task = group.create_task(call())
            await begun.wait()
            task.cancel()
        await engine.closed.wait()


@pytest.mark.parametrize(
    ("what", "kind"), [(ScriptedEngine.BREAK, KvloomError), (ScriptedEngine.CRASH, ConnectionLost)]
)
async def test_a_stream_that_cannot_go_on_ends_with_an_error(
    tmp_path: Path, what: int, kind: type[KvloomError]
) -> None:
    async with pair(tmp_path) as (_, client):
        got: list[Event] = []

        async def collect() -> None:
            async for frame in client.start_generate(order(what)):
                got.extend(frame)

        with pytest.raises(kind) as error:
            await collect()
        assert got == [TokenEvent(0, 0, what)]
        assert type(error.value) is kind


async def test_many_streams_at_once(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_, client):

        async def count(i: int) -> int:
            frames = [f async for f in client.start_generate(order(i, request=f"r{i}", tokens=4))]
            return len(frames)

        assert set(await asyncio.gather(*(count(i) for i in range(300)))) == {6}


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_calls_wait_while_the_listener_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    monkeypatch.setattr(server, "BACKLOG", 2)

    async def test() -> None:
        async with pair(tmp_path) as (_, client):
            calls = [asyncio.create_task(client.load()) for _ in range(20)]
            assert len(await asyncio.gather(*calls)) == 20

    run(test, loop)


def test_a_busy_gateway_takes_its_own_delay_for_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CONNECT_SECONDS", 0.01)

    async def test() -> None:
        async with pair(tmp_path) as (_, client):
            asking = asyncio.create_task(client.load())
            await asyncio.sleep(0)
            time.sleep(0.1)  # noqa: ASYNC251 -- the loop is busy
            assert (await asking).total_blocks == 8

    run(test, uvloop.new_event_loop)


async def test_strangers_are_refused(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with served(create_verbs(engine, secret=SECRET), tmp_path / "s") as url:
        async with HttpEngineClient(url, secret="guess") as client:
            with pytest.raises(Unauthorized):
                await client.models()
            with pytest.raises(Unauthorized):
                await anext(client.start_generate(order(1)))
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / "s"))) as session:
            headers = {"authorization": f"Bearer {SECRET}", "kvloom-protocol": "0"}
            async with session.get("http://engine/verbs/health", headers=headers) as response:
                assert response.status == 400
                assert "speaks" in (await response.json())["message"]


async def test_a_part_of_a_loan_goes_back_to_its_lender(tmp_path: Path) -> None:
    """Only a lender has the verb."""
    taken = list[HandBack]()

    async def take_back(body: HandBack) -> Done:
        taken.append(body)
        return Done()

    back = HandBack(model="m", ticket=Ticket(3, 1), blocks=[4, 7])
    lender = create_verbs(ScriptedEngine(), secret=SECRET, take_back=take_back)
    async with served(lender, tmp_path / "a") as url, HttpEngineClient(url, secret=SECRET) as client:
        await client.take_back(back)
    assert taken == [back]
    other = create_verbs(ScriptedEngine(), secret=SECRET)
    async with served(other, tmp_path / "b") as url, HttpEngineClient(url, secret=SECRET) as client:
        with pytest.raises(KvloomError):
            await client.take_back(back)


async def test_bodies_are_bounded_and_checked(tmp_path: Path) -> None:
    async with pair(tmp_path, max_body=1000) as (_, client):
        with pytest.raises(BadRequest, match="more than 1000 bytes"):
            await anext(client.start_generate(order(*range(600))))
        with pytest.raises(BadRequest, match="prompt"):
            await anext(client.start_generate(order(-1)))


async def test_json_for_people(tmp_path: Path) -> None:
    async with pair(tmp_path):
        headers = {"authorization": f"Bearer {SECRET}", "kvloom-protocol": PROTOCOL}
        connector = aiohttp.UnixConnector(str(tmp_path / "engine.sock"))
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            body = {
                "model": "echo",
                "request": "r",
                "prompt": [4],
                "sampling": {"max_tokens": 1, "seed": 1},
            }
            async with session.post("http://engine/verbs/start_generate", json=body) as response:
                assert (
                    await response.text()
                    == '[]\n[["token",0,0,4,null]]\n[["end",0,"length",null,0,"","","",""]]\n'
                )
            async with session.post("http://engine/verbs/start_generate", data=b"x") as response:
                assert response.status == 400
                assert "content-type" in (await response.json())["message"]


async def test_nobody_there(tmp_path: Path) -> None:
    for url in (f"unix://{tmp_path}/none", "http://127.0.0.1:1"):
        async with HttpEngineClient(url, secret=SECRET) as client:
            with pytest.raises(Unavailable, match="cannot be reached"):
                await client.load()
            with pytest.raises(Unavailable, match="cannot be reached"):
                await anext(client.start_generate(order(1)))
