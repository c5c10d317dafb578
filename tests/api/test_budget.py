"""What requests hold of the gateway's memory, and of its event loop, is shared out between tenants."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest

from kvloom.api import bodies
from kvloom.api.access.keyring import KeyRing
from kvloom.api.access.turns import LARGE, REST
from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from kvloom.config.keys import make_key
from tests.api.scripted import ScriptedEngine, says, serving
from tests.processes import DEADLINE

MANY = 24  # requests that do nothing, which fit
BODY = {"model": "tiny", "prompt": [5], "ignore_eos": True}


@contextmanager
def clients(engine: ScriptedEngine) -> Iterator[dict[str, httpx.Client]]:
    """Gives a client for each of three keys."""
    texts, keys = {}, {}
    for name in "abc":
        texts[name], keys[name] = make_key(name)
    with serving(create_app(engine, keys=Keys(ring=KeyRing(keys)))) as address, ExitStack() as stack:
        yield {
            name: stack.enter_context(
                httpx.Client(
                    base_url=address,
                    headers={"authorization": f"Bearer {text}"},
                    timeout=DEADLINE,
                    limits=httpx.Limits(max_connections=None),
                )
            )
            for name, text in texts.items()
        }


def test_who_fills_its_share_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that stand still after their first token hold their share until they are left."""
    monkeypatch.setattr(bodies, "MAX_HELD", MANY * bodies.OPEN_BYTES)
    engine = ScriptedEngine(says("hello world"), hold=3)
    with clients(engine) as named, ExitStack() as streams:

        def fill(name: str) -> tuple[int, httpx.Response]:
            """Opens streams for as long as they are let in."""
            for count in range(MANY):
                sent = named[name].build_request(
                    "POST", "/v1/completions", json=BODY | {"stream": True, "max_tokens": 9}
                )
                answer = named[name].send(sent, stream=True)
                streams.callback(answer.close)
                if answer.status_code != 200:
                    return count, answer
            raise AssertionError("one tenant has all of it")

        middling = BODY | {"max_tokens": 1, "user": "x" * (bodies.OPEN_BYTES // 6)}
        first, refused = fill("a")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert MANY // 2 <= first <= MANY * 2 // 3
        assert named["b"].post("/v1/completions", json=middling).status_code == 200
        second, _ = fill("b")
        assert 1 < second < first
        assert named["a"].post("/v1/completions", json=middling).status_code == 503
        assert named["c"].post("/v1/completions", json=BODY | {"max_tokens": 1}).status_code == 200


def test_large_bodies_are_read_one_at_a_time_with_a_rest_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[float, float]] = []  # when each large body was begun, and ended

    def timed(schema: Any, raw: bytes) -> Any:
        begun = time.monotonic()
        try:
            return bodies.parse(schema, raw)
        finally:
            if len(raw) >= LARGE:
                read.append((begun, time.monotonic()))

    monkeypatch.setattr("kvloom.api.openai.completions.parse", timed)
    properties = {f"p{at}": {"type": "string"} for at in range(LARGE // 20)}
    large = json.dumps(BODY | {"max_tokens": 1, "guided_json": {"properties": properties}})

    async def whole() -> list[int]:
        transport = httpx.ASGITransport(create_app(ScriptedEngine(says("hi"))))
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=DEADLINE) as http:
            headers = {"content-type": "application/json"}
            sent = [
                http.post("/v1/completions", content=one, headers=headers)
                for one in (*[large] * 6, large[:-1])
            ]
            answers = await asyncio.gather(*sent)
            return [answer.status_code for answer in answers]

    assert asyncio.run(whole()) == [*[200] * 6, 400]
    assert len(read) == 7
    for (begun, ended), (after, _) in pairwise(read):
        assert after - ended >= REST * (ended - begun)
