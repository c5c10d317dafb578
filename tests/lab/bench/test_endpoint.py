"""The client against an endpoint that answers well, oddly, or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from kvloom.lab.bench.endpoint import Asking, Endpoint, ServerError
from kvloom.lab.workload.request import Prompts, RequestResult, WorkloadRequest
from kvloom.types.clock import WallClock
from kvloom.types.errors import ConfigError
from tests.lab.bench.server import Answer, chunks, event, serving, stream, whole

ASK = WorkloadRequest(at=0.0, model="a", prompt=6, output=4, priority=-1)
ASKING = Asking(Prompts(99), {"a": "remote-a"}, "tokens", exact=True)


async def asked(
    answer: Answer, asking: Asking = ASKING, seconds: float = 30.0
) -> tuple[RequestResult, dict[str, Any]]:
    """What became of ASK, and the body that came."""
    async with serving(answer) as seen:
        clock = WallClock()
        async with Endpoint(seen.url, "secret", seconds, asking, clock) as endpoint:
            outcome = await endpoint.ask(ASK, endpoint.body(7, ASK), clock.now())
        assert seen.keys == ["Bearer secret"]
        return outcome, seen.bodies[0]


def streaming(*pieces: bytes, pause: float = 0.0) -> Answer:
    """An answer of these pieces."""

    async def answer(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, *pieces, pause=pause)

    return answer


def test_a_whole_answer() -> None:
    outcome, body = asyncio.run(asked(whole))
    assert (outcome.tokens, outcome.cached, outcome.error) == (4, 1, "")
    assert outcome.first is not None
    assert outcome.end is not None
    assert 0 < outcome.first <= outcome.end
    assert body == {
        "model": "remote-a",
        "prompt": Prompts(99)(7, ASK),
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "priority": -1,
    }


def test_text_prompts_and_openais_own_parameters() -> None:
    _, body = asyncio.run(asked(whole, Asking(Prompts(99), {}, "text", exact=False)))
    assert body["model"] == "a"
    assert len(body["prompt"].split()) == 6
    assert "ignore_eos" not in body


@pytest.mark.parametrize("cut", [1, 3, 7, 50])
def test_events_may_be_cut_anywhere(cut: int) -> None:
    data = b": ping\n\n" + b"".join(chunks(4)).replace(b"\n", b"\r\n")
    outcome, _ = asyncio.run(asked(streaming(*(data[i : i + cut] for i in range(0, len(data), cut)))))
    assert (outcome.tokens, outcome.error) == (4, "")


def test_without_usage_chunks_are_counted() -> None:
    outcome, _ = asyncio.run(asked(streaming(*chunks(4)[:4], b"data:[DONE]\n\n")))
    assert (outcome.tokens, outcome.cached, outcome.error) == (4, 0, "")


def test_the_first_token_is_not_the_last() -> None:
    first, *rest = chunks(4)
    outcome, _ = asyncio.run(asked(streaming(first, b"".join(rest), pause=0.2)))
    assert outcome.first is not None
    assert outcome.end is not None
    assert outcome.end - outcome.first > 0.1


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        (chunks(3), "fewer tokens than were asked for"),
        (chunks(4)[:-1], "the stream ended before its [DONE]"),
        ([], "the stream ended before its [DONE]"),
        ([*chunks(4)[:2], event(error={"message": "the engine\n died", "code": "x"})], "the engine died"),
        ([event(error="no")], "no"),
        ([event(object="error", message="as vLLM says it")], "as vLLM says it"),
        ([b"data: {nonsense\n\n"], "an unreadable event: "),
    ],
)
def test_streams_that_go_wrong(pieces: list[bytes], said: str) -> None:
    outcome, _ = asyncio.run(asked(streaming(*pieces)))
    assert outcome.error.startswith(said)
    assert "\n" not in outcome.error


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (
            400,
            '{"error": {"message": "prompt: token 7 is\\nnot there"}}',
            "status 400: prompt: token 7 is not there",
        ),
        (429, '{"error": {"message": "full"}}', "status 429: full"),
        (500, "<html>", "status 500"),
        (503, "", "status 503"),
    ],
)
def test_refusals(status: int, text: str, said: str) -> None:
    async def answer(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, text=text)

    outcome, _ = asyncio.run(asked(answer))
    assert (outcome.error, outcome.first, outcome.end, outcome.tokens) == (said, None, None, 0)


def test_a_server_that_does_not_end_its_answer() -> None:
    outcome, _ = asyncio.run(asked(streaming(chunks(4)[0], pause=5), seconds=0.3))
    assert outcome.error == "took too long"


def test_a_server_that_hangs_up() -> None:
    async def answer(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = await stream(request, chunks(4)[0])
        assert request.transport is not None
        request.transport.abort()
        return response

    outcome, _ = asyncio.run(asked(answer))
    assert outcome.error
    assert "\n" not in outcome.error


async def served(models: tuple[str, ...] | None, suffix: str = "") -> list[str] | None:
    async with (
        serving(models=models) as seen,
        Endpoint(seen.url + suffix, None, 5.0, ASKING, WallClock()) as endpoint,
    ):
        return await endpoint.served()


def test_what_is_served() -> None:
    assert asyncio.run(served(("a", "b"))) == ["a", "b"]
    assert asyncio.run(served(("a",), "/v1/")) == ["a"]
    assert asyncio.run(served(None)) is None


def test_nobody_is_there() -> None:
    async def ask() -> RequestResult:
        async with Endpoint("http://127.0.0.1:9", None, 5.0, ASKING, WallClock()) as endpoint:
            with pytest.raises(
                ServerError, match=r"127\.0\.0\.1:9: cannot be reached: Connection refused; .*--url"
            ):
                await endpoint.served()
            return await endpoint.ask(ASK, endpoint.body(0, ASK), 0.0)

    assert asyncio.run(ask()).error == "cannot be reached: Connection refused"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h", "http://", "http://h:port", ""])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT is right"):
        Endpoint(url, None, 5.0, ASKING, WallClock())
