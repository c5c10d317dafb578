"""An engine that does as it is told: what stands behind it is real in the tests that use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.types import ASGIApp

from kvloom.serve.server import HttpServer
from kvloom.types.errors import KvloomError, PromptTooLong, QueueFull
from kvloom.types.load import UnitLoad
from kvloom.types.request import EndEvent, Event, Made, ModelCard, SamplingParams, StartGenerate, TokenEvent
from kvloom.types.service import Service
from kvloom.types.verbs import (
    CacheChanges,
    CachedSince,
    CheckModel,
    Evicted,
    Held,
    Lease,
    LoadAdapter,
    Offer,
    Offered,
    Pin,
    Pinned,
    Prefix,
    Prepared,
    PrepRecv,
    RemoteSend,
    Sent,
    Standing,
    UnloadAdapter,
)

CARD = ModelCard(
    name="echo",
    path="/nowhere",
    context_length=128,
    vocab_size=1000,
    tokenizer="{}",
    chat_template=None,
    special_tokens={},
    eos_token_ids=(1,),
    bos_token_id=None,
    add_bos=False,
    architecture="Scripted",
    parameters=0,
    dtype="float32",
)


class ScriptedEngine:
    """Repeats the prompt up to max_tokens. The first prompt token may ask for more: FULL and LONG are
    refused, FOREVER waits after the first token, BREAK raises an error of ours and CRASH a bug's."""

    FULL, LONG, FOREVER, BREAK, CRASH = range(900, 905)

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.aborted: list[tuple[str, int | None]] = []
        self.closed = asyncio.Event()

    async def models(self) -> list[ModelCard]:
        return [CARD]

    async def load(self) -> UnitLoad:
        return UnitLoad(total_blocks=8, free_blocks=8, block_bytes=4096, policy="adbs", models={})

    async def loads(self) -> dict[str, UnitLoad]:
        return {"unit-0": await self.load()}

    @property
    def choices(self) -> dict[tuple[str, str], int]:
        return {}

    @property
    def services(self) -> dict[str, Service]:
        return {"unit-0": "up"}

    awaited = ()

    @property
    def waiting(self) -> dict[str, int]:
        return {}

    async def prep_recv(self, body: PrepRecv) -> Prepared:
        raise NotImplementedError

    async def remote_send(self, body: RemoteSend) -> Sent:
        raise NotImplementedError

    async def renew(self, request: str) -> Lease:
        return Lease(lease=float(len(request)))

    async def pin(self, body: Pin) -> Pinned:
        return Pinned(tokens=len(body.prompt), lease=body.lease or 3.0)

    async def unpin(self, request: str) -> Held:
        return Held(tokens=len(request) + 1)

    async def hold(self, request: str, sends: Sequence[RemoteSend] = ()) -> Standing:
        return Standing(made=[Made(0, [len(request)])])

    async def resume(self, request: str) -> None:
        pass

    async def offer(self, body: Offer) -> Offered:
        return Offered(request=f"not {body.besides}")

    async def evict(self, body: Prefix) -> Evicted:
        return Evicted(tokens=len(body.prompt) + 2)

    async def load_adapter(self, body: LoadAdapter) -> None:
        pass

    async def unload_adapter(self, body: UnloadAdapter) -> None:
        pass

    async def check_model(self, body: CheckModel) -> None:
        pass

    async def contents(self, body: CachedSince) -> CacheChanges:
        return CacheChanges(life="scripted", version=body.version)

    async def abort(self, request: str, choice: int | None = None) -> None:
        self.aborted.append((request, choice))

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        order = body.prompt[0]
        if order == self.FULL:
            raise QueueFull("echo: 4 requests wait already", retry_after=7)
        if order == self.LONG:
            raise PromptTooLong("prompt: 500 tokens; echo takes 128", param="prompt")
        self.live.add(body.request)
        try:
            yield []
            for index in range(body.sampling.max_tokens):
                yield [TokenEvent(0, index, body.prompt[index % len(body.prompt)])]
                if order == self.FOREVER:
                    await asyncio.Event().wait()
                if order == self.BREAK:
                    raise KvloomError("the device is gone")
                if order == self.CRASH:
                    raise ZeroDivisionError
            yield [EndEvent(0, "length")]
        finally:
            self.live.discard(body.request)
            self.closed.set()


def order(*prompt: int, tokens: int = 3, request: str = "r1") -> StartGenerate:
    sampling = SamplingParams(max_tokens=tokens, seed=0)
    return StartGenerate(model="echo", request=request, prompt=list(prompt), sampling=sampling)


@asynccontextmanager
async def served(app: ASGIApp, path: Path) -> AsyncIterator[str]:
    """`app` on a real socket; the URL of it."""
    ready = asyncio.Event()
    server = HttpServer(app, unix=str(path), grace=1, ready=ready.set)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve())
        await ready.wait()
        try:
            yield f"unix://{path}"
        finally:
            server.end()
