"""An engine in another process, called over HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final, Self

import aiohttp
import msgspec

from kvloom.offload.terms import Borrow, Loan
from kvloom.types.client import RemoteEngine
from kvloom.types.errors import KvloomError, Unavailable, WireError
from kvloom.types.request import PROTOCOL, Event, StartGenerate
from kvloom.types.verbs import Answer, Body, FrameParser, Verb

UNIX: Final = "unix://"
LEND: Final = Verb("lend", "Lends blocks to a model, and attends over them.", Borrow, Loan)
CONNECT_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 30.0  # The engine's is longer, so that the engine never closes first.


class HttpEngineClient(RemoteEngine):
    """An `EngineClient` over `http://host:port` or `unix:///path/of/a/socket`, and an async context manager.

    Each stream has a connection of its own. A stream that is closed early closes its connection, which tells
    the engine.
    """

    def __init__(self, url: str, *, secret: str) -> None:
        self._url = url
        self._headers = {
            "authorization": f"Bearer {secret}",
            "kvloom-protocol": PROTOCOL,
            "content-type": "application/msgpack",
            "accept": "application/msgpack",
        }
        self._encode = msgspec.msgpack.Encoder().encode

    async def __aenter__(self) -> Self:
        connector: aiohttp.BaseConnector
        if self._url.startswith(UNIX):
            connector = aiohttp.UnixConnector(
                self._url.removeprefix(UNIX), limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS
            )
            base = "http://engine"
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
            base = self._url
        self._session = aiohttp.ClientSession(
            base,
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def call(self, verb: Verb[Body, Answer], body: Body) -> Answer:
        method, encoded = ("GET", None) if verb.reports else ("POST", self._encode(body))
        async with self._open(method, f"/verbs/{verb.name}", encoded, verb.seconds) as response:
            raw = await response.read()
        return _decode(raw, verb.answer)

    async def lend(self, body: Borrow) -> Loan:
        """Asks for blocks. Units that weave ask each other, and nobody else does."""
        return await self.call(LEND, body)

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        parser = FrameParser()
        async with self._open("POST", "/verbs/start_generate", self._encode(body), None) as response:
            while data := await response.content.readany():
                for frame in parser.feed(data):
                    if isinstance(frame, WireError):
                        raise KvloomError.from_wire(frame)
                    yield frame
            if not parser.whole:
                raise Unavailable("the engine's stream ended in the middle of a frame")

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: bytes | None, seconds: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yields the answer. Raises the engine's error if it is one.

        The connection is closed if the answer is left before its end.
        """
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.request(method, path, data=body, timeout=timeout) as response:
                try:
                    if response.status >= 400:
                        raise KvloomError.from_wire(_decode(await response.read(), WireError))
                    yield response
                finally:
                    if not response.content.at_eof():
                        response.close()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(f"the engine cannot be reached: {reason}") from error


def _decode(raw: bytes, kind: type[Answer]) -> Answer:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"the engine sent an answer that cannot be read: {error}") from error
