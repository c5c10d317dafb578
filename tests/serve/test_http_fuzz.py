"""Whatever bytes a connection brings, in whatever pieces: no answer is a 5xx, the server serves on, and what
it holds stays bounded."""

from __future__ import annotations

import asyncio
import json
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp

from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from tests.api.scripted import ScriptedEngine, card, tokens
from tests.examples import examples
from tests.serve.test_connection import CHUNKED, HEAD, run, served

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
KEY = "right"
WELL = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
ASK = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 1}).encode()
NAMES = st.sampled_from(
    [b"host", b"authorization", b"content-length", b"transfer-encoding", b"expect", b"connection", b"te",
     b"trailer", b"upgrade", b"content-type", b"x-\xff"]
)  # fmt: skip
VALUES = st.sampled_from(
    [b"x", b"", b"0", b"-1", b"5", b"99999999999999999999", b"chunked", b"chunked, chunked", b"identity",
     b"Bearer right", b"100-continue", b"close", b"keep-alive", b"websocket", b"\x00", b" \t", b"a\x0bb"]
)  # fmt: skip
LINES = st.builds(lambda name, value: name + b": " + value + b"\r\n", NAMES, VALUES)
HEADS = st.builds(
    lambda first, lines: first + b"".join(lines) + b"\r\n",
    st.sampled_from(
        [b"GET /health HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\n", b"GET /v1/models HTTP/1.0\r\n",
         b"OPTIONS * HTTP/1.1\r\n", b"CONNECT a:1 HTTP/1.1\r\n", b"GET //%2e%2e HTTP/1.1\r\n", b"\r\n\r\n",
         b"PRI * HTTP/2.0\r\n", b"GET http://[ HTTP/1.1\r\n", b"GET /\xff?\xfe HTTP/1.1\r\n"]
    ),
    st.lists(LINES, max_size=5),
)  # fmt: skip
CHUNKS = st.builds(
    lambda pieces, trailers: b"".join(pieces) + b"0\r\n" + b"".join(trailers) + b"\r\n",
    st.lists(
        st.sampled_from([b"2\r\n{}\r\n", b"1;x=y\r\n[\r\n", b"0000000001\r\n \r\n", b"-1\r\n",
                         b"ffffffffffffffff\r\n",
                         b"%x\r\n%b\r\n" % (len(ASK), ASK)]),
        max_size=4,
    ),
    st.lists(LINES, max_size=4),
)  # fmt: skip
STREAMS = st.lists(HEADS | CHUNKS | st.binary(max_size=40), min_size=1, max_size=5).map(b"".join)


def app() -> ASGIApp:
    return create_app(ScriptedEngine(lambda *_: tokens("a"), [card()]), keys=Keys({KEY: None}))


async def answered(path: str, *pieces: bytes, patience: float | None = None) -> bytes:
    """Returns what is answered until the connection ends, or nothing has come for `patience` seconds."""
    reader, writer = await asyncio.open_unix_connection(path)
    said = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        while True:
            async with asyncio.timeout(patience):
                if not (piece := await reader.read(1 << 16)):
                    return said
            said += piece
    except (ConnectionError, TimeoutError):
        return said
    finally:
        writer.close()


@settings(max_examples=examples(10), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(STREAMS, st.integers(1, 60)), min_size=25, max_size=50))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, sent: list[tuple[bytes, int]]) -> None:
    """Many connections at once. An answer that came too late for this test is not looked at."""

    async def play() -> None:
        async with served(tmp_path_factory.getbasetemp(), app()) as path:
            answers = await asyncio.gather(
                *(answered(path, stream[:cut], stream[cut:], patience=0.1) for stream, cut in sent)
            )
            for stream, said in zip(sent, answers, strict=True):
                assert all(int(status) < 500 for status in STATUS.findall(said)), (stream, said)
            assert b" 200 " in await answered(path, WELL)

    run(play)


def test_a_key_in_a_trailer_opens_nothing(tmp_path: Path) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n"
    body = b"%x\r\n%b\r\n0\r\n" % (len(ASK), ASK)
    key = b"authorization: Bearer right\r\n"

    async def play() -> None:
        async with served(tmp_path, app()) as path:
            assert b" 401 " in await answered(path, head + b"\r\n" + body + key + b"\r\n")
            assert b" 401 " in await answered(
                path, head + b"trailer: authorization\r\n\r\n" + body, key, b"\r\n"
            )
            assert b" 200 " in await answered(path, head + key + b"\r\n" + body + b"\r\n")

    run(play)


@pytest.mark.parametrize(
    "framing", [b"content-length: 1000000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"]
)
def test_the_answer_to_an_unread_body_ends_the_connection(tmp_path: Path, framing: bytes) -> None:
    """A wrong key is answered before the body has come, and nothing of it is taken after that."""

    async def play() -> None:
        async with served(tmp_path, app()) as path:
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + framing)
            said = await reader.read()  # until the server's end
            assert said.startswith(b"HTTP/1.1 401 ")
            assert b"connection: close" in said
            writer.close()

    run(play)


@pytest.mark.parametrize(
    ("beginning", "piece"),
    [
        (HEAD, b"x-y: " + b"z" * 1000 + b"\r\n"),
        (CHUNKED + b"1\r\n{\r\n0\r\n", b"x-y: " + b"z" * 1000 + b"\r\n"),
        (CHUNKED, b"1;" + b"z" * 1000 + b"\r\n \r\n"),
        (HEAD.replace(b"/", b"/" + b"z" * 1000), b"z" * 1000),
    ],
)
def test_what_is_held_of_an_endless_request_is_bounded(
    tmp_path: Path, beginning: bytes, piece: bytes
) -> None:
    most = 16 << 20

    async def play() -> None:
        async with served(tmp_path, app()) as path:
            reader, writer = await asyncio.open_unix_connection(path)
            tracemalloc.start()
            sent = 0
            try:
                writer.write(beginning)
                while sent < most and not reader.at_eof():
                    writer.write(piece * 64)
                    await writer.drain()
                    sent += 64 * len(piece)
            except ConnectionError:
                pass
            held = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            writer.close()
            assert sent < most
            assert held < 4 << 20

    run(play)
