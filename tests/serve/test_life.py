"""The life of a request, from a real gateway's application over the router to a real engine and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from starlette.applications import Starlette
from starlette.types import Message

from kvloom.api.app import create_app
from kvloom.api.metrics import Metrics
from kvloom.api.verbs import create_verbs
from kvloom.journal.lives import Life
from kvloom.router.client import HttpEngineClient
from kvloom.router.program import load_program
from kvloom.router.router import Router
from kvloom.types.clock import WallClock
from kvloom.types.job import Job, JobResult
from tests.api.scripted import byte_level, card
from tests.modelled import ModelledExecutor, engine_over, modelled
from tests.plane import Plane
from tests.scripted import served
from tests.weaving import until

MODEL, TOKENS = "wide", 12
SECRET = "tell nobody of this"


def looped(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test on an event loop of its own."""

    @wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**given), 60))

    return run


@dataclass
class Gateway:
    app: Starlette
    metrics: Metrics
    router: Router
    executors: dict[str, ModelledExecutor]

    def life(self, name: str) -> Life:
        story = self.metrics.lives.find(name)
        assert story is not None
        return story.life()


@asynccontextmanager
async def gateway(folder: Path, units: int = 1) -> AsyncIterator[Gateway]:
    metrics, executors, clients = Metrics(), {}, {}
    async with AsyncExitStack() as stack:
        for name in "ab"[:units]:
            executor = executors[name] = ModelledExecutor(160)
            executor.cards[MODEL] = structs.replace(
                executor.cards[MODEL],
                tokenizer=byte_level().to_str(),
                chat_template=card().chat_template,
                special_tokens=card().special_tokens,
            )
            engine = engine_over(executor, Plane(0).join(name, executor))
            await stack.enter_async_context(modelled(engine, executor))
            verbs = create_verbs(engine, secret="s")
            url = await stack.enter_async_context(served(verbs, folder / f"{name}.sock"))
            clients[name] = await stack.enter_async_context(HttpEngineClient(url, secret="s"))
        router = Router(clients, load_program("data_parallel"), WallClock(), tell=metrics.lives.tell)
        await stack.enter_async_context(router)
        yield Gateway(create_app(router, metrics=metrics), metrics, router, executors)


@dataclass
class Client:
    """Asks once."""

    name: str
    stream: bool = True
    body: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    said: bytes = b""
    first: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, app: Starlette) -> None:
        asked = {
            "model": MODEL,
            "messages": [{"role": "user", "content": SECRET}],
            "max_tokens": TOKENS,
            "seed": 7,
            "ignore_eos": True,
            "stream": self.stream,
        }
        body = json.dumps(asked | self.body).encode()
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            for message in messages:
                return message
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.status = message.get("status", self.status)
            self.said += message.get("body", b"")
            if self.said:
                self.first.set()

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"x-request-id", self.name.encode())],
        }
        await app(scope, receive, send)

    @property
    def api_id(self) -> str:
        said = self.said.partition(b"\n")[0].removeprefix(b"data: ")
        return str(json.loads(said)["id"])


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.modelled.VOCAB", byte_level().get_vocab_size())


@pytest.mark.parametrize("stream", [False, True])
@looped
async def test_a_request_is_queued_admitted_begun_and_ended(tmp_path: Path, stream: bool) -> None:
    async with gateway(tmp_path) as here:
        client = Client("mine", stream)
        await client.ask(here.app)
        life = here.life("mine")
        assert here.life(client.api_id) == life
    assert [step.what for step in life.steps] == ["came", "queued", "admitted", "first_token", "ended"]
    assert [step.unit for step in life.steps] == ["", "a", "a", "a", ""]
    assert sorted(step.at for step in life.steps) == [step.at for step in life.steps]
    assert (life.id, life.api_id, life.model, life.state) == ("mine", client.api_id, MODEL, "ended")
    assert life.prompt_tokens > 0
    assert life.output_tokens == TOKENS
    assert SECRET not in str(life)


@looped
async def test_a_long_prompt_is_told_to_be_read_while_it_is(tmp_path: Path) -> None:
    async with gateway(tmp_path) as here, asyncio.TaskGroup() as tasks:
        executor, goes_on = here.executors["a"], asyncio.Event()
        launch, loop = executor.launch, asyncio.get_running_loop()

        def held(job: Job) -> asyncio.Future[JobResult]:
            """A job that begins once it may."""
            future: asyncio.Future[JobResult] = loop.create_future()

            async def run() -> None:
                await goes_on.wait()
                future.set_result(await launch(job))

            tasks.create_task(run())
            return future

        executor.launch = held  # type: ignore[method-assign]
        asking = tasks.create_task(Client("mine").ask(here.app))
        await until(lambda: here.metrics.lives.find("mine") is not None)
        await until(lambda: here.life("mine").state != "queued")
        during = here.life("mine")
        goes_on.set()
        await asking
        life = here.life("mine")
    assert during.state == "prefill"
    assert [step.what for step in during.steps] == ["came", "queued", "admitted"]
    assert [step.what for step in life.steps] == ["came", "queued", "admitted", "first_token", "ended"]
    assert life.steps[:3] == during.steps


@looped
async def test_a_request_that_is_refused_has_failed_and_holds_no_words(tmp_path: Path) -> None:
    async with gateway(tmp_path) as here:
        await Client("long", body={"max_tokens": 1 << 20}).ask(here.app)
        await Client("other", body={"model": SECRET}).ask(here.app)
        lives = [here.life("long"), here.life("other")]
    assert [life.state for life in lives] == ["failed", "failed"]
    assert lives[0].steps[-1].reason == "context_length_exceeded"
    assert lives[1].steps[-1].reason == "model_not_found"
    assert SECRET not in str(lives)


@looped
async def test_a_client_that_hangs_up_has_cancelled(tmp_path: Path) -> None:
    async with gateway(tmp_path) as here, asyncio.TaskGroup() as tasks:
        client = Client("mine", body={"max_tokens": 40})
        asking = tasks.create_task(client.ask(here.app))
        await client.first.wait()
        during = here.life("mine")
        client.gone.set()
        await asking
        life = here.life("mine")
    assert during.state == "decode"
    assert during.output_tokens >= 1
    assert life.state == life.steps[-1].what == "cancelled"
