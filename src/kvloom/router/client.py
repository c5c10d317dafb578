"""An engine in another process, called over HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final, Self, TypeVar

import aiohttp
import msgspec

from kvloom.types.errors import KvloomError, Unavailable, WireError
from kvloom.types.load import UnitLoad
from kvloom.types.offload import Borrow, Loan
from kvloom.types.request import PROTOCOL, Event, ModelCard, StartGenerate
from kvloom.types.verbs import (
    FrameParser,
    Held,
    Hold,
    Lease,
    Offer,
    Offered,
    Pin,
    Pinned,
    Prefix,
    Prepared,
    PrepRecv,
    RemoteSend,
    Renew,
    Resume,
    Sent,
    Standing,
    Unpin,
)

UNIX: Final = "unix://"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
KEEP_ALIVE_SECONDS = 30.0  # shorter than the engine's, so that it is never the engine that closes first

Answer = TypeVar("Answer")


class HttpEngineClient:
    """EngineClient over `http://host:port` or `unix:///path/of/a/socket`. An async context manager.

    One connection a stream, any number of them: closing a stream early closes its connection, by which
    the engine knows.
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
        return self.open()

    def open(self) -> Self:
        """Makes it usable on the running event loop, until it is closed (`__aexit__`)."""
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

    async def models(self) -> list[ModelCard]:
        return await self._call("GET", "/verbs/models", list[ModelCard])

    async def load(self) -> UnitLoad:
        return await self._call("GET", "/verbs/load", UnitLoad)

    async def abort(self, request: str, choice: int | None = None) -> None:
        body = self._encode({"request": request, "choice": choice})
        await self._call("POST", "/verbs/abort", dict[str, bool], body)

    async def prep_recv(self, body: PrepRecv) -> Prepared:
        return await self._call("POST", "/verbs/prep_recv", Prepared, self._encode(body))

    async def remote_send(self, body: RemoteSend) -> Sent:
        """As long as it takes; who waits for it no longer cancels."""
        return await self._call("POST", "/verbs/remote_send", Sent, self._encode(body), None)

    async def renew(self, request: str) -> Lease:
        return await self._call("POST", "/verbs/renew", Lease, self._encode(Renew(request=request)))

    async def pin(self, body: Pin) -> Pinned:
        return await self._call("POST", "/verbs/pin", Pinned, self._encode(body))

    async def unpin(self, request: str) -> Held:
        return await self._call("POST", "/verbs/unpin", Held, self._encode(Unpin(request=request)))

    async def hold(self, request: str, sends: Sequence[RemoteSend] = ()) -> Standing:
        body = self._encode(Hold(request=request, sends=list(sends)))
        return await self._call("POST", "/verbs/hold", Standing, body)

    async def resume(self, request: str) -> None:
        await self._call("POST", "/verbs/resume", dict[str, bool], self._encode(Resume(request=request)))

    async def offer(self, body: Offer) -> Offered:
        return await self._call("POST", "/verbs/offer", Offered, self._encode(body))

    async def lend(self, body: Borrow) -> Loan:
        """For units that weave, among themselves."""
        return await self._call("POST", "/verbs/lend", Loan, self._encode(body))

    async def evict(self, body: Prefix) -> Held:
        return await self._call("POST", "/verbs/evict", Held, self._encode(body))

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

    async def _call(
        self,
        method: str,
        path: str,
        kind: type[Answer],
        body: bytes | None = None,
        seconds: float | None = ANSWER_SECONDS,
    ) -> Answer:
        async with self._open(method, path, body, seconds) as response:
            raw = await response.read()
        return _decode(raw, kind)

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: bytes | None, seconds: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer, if it is one. Left before its end, the connection is closed."""
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
