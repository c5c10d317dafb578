"""The walk of a token, from the end of its batch in the engine to the client's socket."""

from __future__ import annotations

import asyncio
import dis
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from msgspec import structs
from starlette.types import Message

from kvloom.api.app import create_app
from kvloom.api.generation.pieces import Generation
from kvloom.api.verbs import GenerateVerb, create_verbs
from kvloom.engine.inflight import OutputProcessor
from kvloom.engine.requests import Requests
from kvloom.engine.scheduler import Scheduler
from kvloom.router.client import HttpEngineClient
from kvloom.router.program import load_program
from kvloom.router.router import Router
from kvloom.types.clock import WallClock
from tests.api.scripted import byte_level, card
from tests.modelled import ModelledExecutor, engine_over, modelled
from tests.plane import Plane
from tests.scripted import served

MODEL, TOKENS = "wide", 40
MOST_FUNCTIONS, MOST_GENERATORS = 26, 3
# Where a batch ends, and the loops over a stream: in the engine's process, and in the gateway's.
ENDS = (Scheduler.process_outputs.__code__, OutputProcessor.process.__code__)
LOOPS = (inspect.getfile(GenerateVerb), inspect.getfile(Generation))
TOKEN = Requests.append.__code__


class Walk:
    """Our functions that run for a token, each with how often. A coroutine counts where it begins, and where
    it loops over the stream: one that only waits for another has nothing to do with a token."""

    def __init__(self) -> None:
        self.counts: Counter[CodeType] = Counter()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or "/kvloom/" not in code.co_filename or code.co_name.startswith("<"):
            return
        begins = frame.f_lasti <= _start(code) or code.co_flags & inspect.CO_ASYNC_GENERATOR
        if code in ENDS or (begins and self._is_for_a_token(frame)) or _loops(code):
            self.counts[code] += 1

    @staticmethod
    def _is_for_a_token(frame: FrameType) -> bool:
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is TOKEN or at.f_code.co_filename in LOOPS:
                return True
            at = at.f_back
        return False

    def steady(self, tokens: int) -> dict[str, CodeType]:
        """Returns those that run for every token."""
        often = [code for code, count in self.counts.items() if count >= tokens]
        return {f"{Path(code.co_filename).stem}: {code.co_qualname}": code for code in often}


@cache
def _start(code: CodeType) -> int:
    return next(one.offset for one in dis.get_instructions(code) if one.opname == "RESUME")


def _loops(code: CodeType) -> bool:
    return code in (Generation.run.__code__, GenerateVerb.stream.__code__)


def test_a_token_passes_few_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.modelled.VOCAB", byte_level().get_vocab_size())
    walk = Walk()
    told: list[bytes] = []

    async def test() -> None:
        executor = ModelledExecutor(160)
        executor.cards[MODEL] = structs.replace(
            executor.cards[MODEL],
            tokenizer=byte_level().to_str(),
            chat_template=card().chat_template,
            special_tokens=card().special_tokens,
        )
        engine = engine_over(executor, Plane(0).join("a", executor))
        async with AsyncExitStack() as stack:
            enter: Callable[..., Any] = stack.enter_async_context
            await enter(modelled(engine, executor))
            url = await enter(served(create_verbs(engine, secret="s"), tmp_path / "a.sock"))
            client = await enter(HttpEngineClient(url, secret="s"))
            router = await enter(Router({"a": client}, load_program("data_parallel"), WallClock()))
            app = create_app(router)

            async def ignore(_: Message) -> None:
                """Takes the first answer, which spells all tokens of the second."""

            async def send(message: Message) -> None:
                told.append(message.get("body", b""))
                if len(told) == 10:  # what happens once has happened
                    sys.setprofile(walk.note)
                if len(told) == 20:
                    sys.setprofile(None)

            await app(scope(), receive(), ignore)
            await app(scope(), receive(), send)

    asyncio.run(asyncio.wait_for(test(), 60))
    assert told[-1] == b"data: [DONE]\n\n"
    functions = walk.steady(8)
    generators = [name for name, code in functions.items() if code.co_flags & inspect.CO_ASYNC_GENERATOR]
    assert len(generators) <= MOST_GENERATORS, generators
    assert len(functions) <= MOST_FUNCTIONS, "\n".join(functions)
    assert {"requests: Requests.append", "chat: ChatWriter.chunk"} <= functions.keys()  # it saw both ends


def scope() -> dict[str, object]:
    return {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }


def receive() -> Callable[[], Any]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": TOKENS,
        "seed": 7,
        "stream": True,
    }
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

    async def receiving() -> Message:
        for message in messages:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    return receiving
