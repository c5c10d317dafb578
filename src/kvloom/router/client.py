"""An engine in another process, called over HTTP."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Final, Self

import aiohttp
import msgspec

from kvloom.offload.terms import LEND, TAKE_BACK, Borrow, HandBack, Loan
from kvloom.types.client import Frames
from kvloom.types.errors import ConnectionLost, HostAway, KvloomError, Unavailable, WireError
from kvloom.types.request import PROTOCOL, Event, StartGenerate
from kvloom.types.verbs import Answer, Body, FrameParser, RemoteEngine, Verb

UNIX: Final = "unix://"
CONNECT_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5  # until an engine is asked again whose listener was full
_LISTENER_FULL: Final = (errno.EAGAIN, errno.ENOTCONN)  # of a Unix socket, with uvloop and without
LOST_SECONDS: Final = (
    5  # without a sign of the other host, after which what was asked there goes on elsewhere
)
_HOST_AWAY: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
KEEP_ALIVE_SECONDS = 30.0  # The engine's is longer, so that the engine never closes first.


class HttpEngineClient(RemoteEngine):
    """An `EngineClient` over `http://host:port`, `https://host:port` or `unix:///path/of/a/socket`. It is an
    async context manager.

    Each stream has a connection of its own. A stream that is closed early closes its connection, which tells
    the engine.
    """

    def __init__(self, url: str, *, secret: str, tls: ssl.SSLContext | None = None) -> None:
        """tls: the context by which the engine is called, if it is at another host."""
        self._url = url
        self._tls = tls
        self._headers = {
            "authorization": f"Bearer {secret}",
            "kvloom-protocol": PROTOCOL,
            "content-type": "application/msgpack",
            "accept": "application/msgpack",
        }
        self._encode = msgspec.msgpack.Encoder().encode
        self._answers: set[aiohttp.ClientResponse] = set()
        """The answers that come at present."""

    async def __aenter__(self) -> Self:
        return self.open()

    def open(self) -> Self:
        """Makes it usable on the running event loop, until it is closed (`__aexit__`)."""
        connector: aiohttp.BaseConnector
        self._connect_seconds: float | None = CONNECT_SECONDS
        if self._url.startswith(UNIX):
            # Such a connection is made or refused at once; a time would bound only our own busy loop.
            self._connect_seconds = None
            connector = aiohttp.UnixConnector(
                self._url.removeprefix(UNIX), limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS
            )
            base = "http://engine"
        else:
            connector = aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=KEEP_ALIVE_SECONDS,
                ssl=True if self._tls is None else self._tls,
                socket_factory=_watched_socket,
            )
            base = self._url
        self._session = aiohttp.ClientSession(
            base,
            connector=connector,
            headers=self._headers,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def cut(self) -> None:
        """Closes it at once, streams that are under way and all."""
        for answer in self._answers:
            # aiohttp forgets to tell whoever waits for a body when its connection is aborted on this side.
            answer.content.set_exception(_HostLost("its host is lost"))
        if self._session.connector is not None:
            await self._session.connector.close(abort_ssl=True)
        await self._session.close()

    async def call(self, verb: Verb[Body, Answer], body: Body) -> Answer:
        method, encoded = ("GET", None) if verb.reports else ("POST", self._encode(body))
        async with self._open(method, f"/verbs/{verb.name}", encoded, verb.seconds) as response:
            raw = await response.read()
        return _decode(raw, verb.answer)

    async def lend(self, body: Borrow) -> Loan:
        """Asks for blocks. Units that weave ask each other, and nobody else does."""
        return await self.call(LEND, body)

    async def take_back(self, body: HandBack) -> None:
        """Hands blocks of a loan back."""
        await self.call(TAKE_BACK, body)

    def start_generate(self, body: StartGenerate) -> Frames:
        return _FrameStream(self._open("POST", "/verbs/start_generate", self._encode(body), None))

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: bytes | None, seconds: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yields the answer. Raises the engine's error if it is one.

        The connection is closed if the answer is left before its end.
        """
        closed: asyncio.Future[None] | None = None
        try:
            async with await self._begin(method, path, body, seconds) as response:
                self._answers.add(response)
                closed = _closed(response)
                try:
                    if response.status >= 400:
                        raise KvloomError.from_wire(_decode(await response.read(), WireError))
                    yield response
                finally:
                    self._answers.discard(response)
                    if not response.content.at_eof():
                        response.close()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            reason = str(error) or type(error).__name__
            # aiohttp tells of an answer that it is cut short, and only of its connection why.
            why = _why(closed) if closed is not None and closed.done() else None
            if isinstance(error, aiohttp.ConnectionTimeoutError) or _of_host(error) or _of_host(why):
                raise HostAway(f"the engine's host cannot be reached: {reason}") from error
            if isinstance(error, TimeoutError | aiohttp.ClientConnectorError):
                raise Unavailable(f"the engine cannot be reached: {reason}") from error
            raise ConnectionLost(f"the engine cannot be reached any more: {reason}") from error

    async def _begin(
        self, method: str, path: str, body: bytes | None, seconds: float | None
    ) -> aiohttp.ClientResponse:
        """Returns the answer once it has begun. While the engine's listener is full, the call waits."""
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=self._connect_seconds)
        pause = FIRST_PAUSE
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return await self._session.request(method, path, data=body, timeout=timeout)
                except aiohttp.ClientOSError as error:
                    if error.errno not in _LISTENER_FULL:
                        raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)


class _HostLost(aiohttp.ClientConnectionError):
    """Whether this side has broken the connection, because the other host is lost."""


def _closed(response: aiohttp.ClientResponse) -> asyncio.Future[None] | None:
    """Returns the object that tells why the answer's connection is closed; None if all of the answer is here
    already."""
    if response.connection is None or response.connection.protocol is None:
        return None
    closed = response.connection.protocol.closed
    if closed is not None:  # It may outlive this call, and asyncio warns of errors that nobody asks for.
        closed.remove_done_callback(_why)
        closed.add_done_callback(_why)
    return closed


def _why(closed: asyncio.Future[None]) -> BaseException | None:
    return None if closed.cancelled() else closed.exception()


def _of_host(error: BaseException | None) -> bool:
    """Returns whether a connection broke because the other host does not answer, and not because the engine
    has died there."""
    while error is not None:
        if isinstance(error, _HostLost) or getattr(error, "errno", None) in _HOST_AWAY:
            return True
        error = error.__cause__
    return False


class UnitClient(RemoteEngine):
    """An `EngineClient` that calls a unit's process wherever it is by now, and an async context manager."""

    def __init__(self, where: Callable[[], str], make: Callable[[str], HttpEngineClient]) -> None:
        """where: returns the unit's address, which is empty if it has none. make: returns the client of an
        address."""
        self._where = where
        self._make = make
        self._clients: dict[str, HttpEngineClient] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            await client.__aexit__(kind, error, trace)

    async def cut(self) -> None:
        """Breaks the connections to other hosts on which the unit's process is no more: if such a host is cut
        off, nobody else closes them. Requests that were sent there go on elsewhere."""
        here = self._where()
        for url in [url for url in self._clients if url != here and not url.startswith("/")]:
            await self._clients.pop(url).cut()

    def _at(self) -> HttpEngineClient:
        """Returns the client of the unit's present address. Raises Unavailable if it has none."""
        url = self._where()
        if not url:
            raise Unavailable("the engine has no process")
        if url not in self._clients:
            self._clients[url] = self._make(url).open()
        return self._clients[url]

    async def call(self, verb: Verb[Body, Answer], body: Body) -> Answer:
        return await self._at().call(verb, body)

    def start_generate(self, body: StartGenerate) -> Frames:
        return self._at().start_generate(body)


class _FrameStream:
    """The frames of one start_generate, over a connection of its own that is opened with the first step."""

    def __init__(self, opening: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> None:
        self._opening = opening
        self._response: aiohttp.ClientResponse | None = None
        self._parser = FrameParser()
        self._frames: deque[list[Event] | WireError] = deque()  # parsed, and not passed on yet
        self._over = False

    def __aiter__(self) -> _FrameStream:
        return self

    async def __anext__(self) -> list[Event]:
        if self._over:
            raise StopAsyncIteration
        try:
            if self._response is None:
                self._response = await self._opening.__aenter__()
            while not self._frames:
                data = await self._response.content.readany()
                if not data and not self._parser.whole:
                    raise ConnectionLost("the engine's stream ended in the middle of a frame")
                if not data:
                    await self.aclose()
                    raise StopAsyncIteration
                self._frames.extend(self._parser.feed(data))
            frame = self._frames.popleft()
            if isinstance(frame, WireError):
                raise KvloomError.from_wire(frame)
        except BaseException as error:
            await self._close(error)
            raise
        return frame

    async def aclose(self) -> None:
        await self._close(None)

    async def _close(self, error: BaseException | None) -> None:
        """Closes the connection, whose own errors become Unavailable."""
        if not self._over:
            self._over = True
            if self._response is not None:
                await self._opening.__aexit__(type(error) if error else None, error, None)


def _watched_socket(info: aiohttp.AddrInfoType) -> socket.socket:
    """Returns a socket whose connection breaks once its host has not answered for LOST_SECONDS, or has taken
    nothing of what was sent. The kernel asks, so an engine that makes no tokens is not taken for lost."""
    family, kind, protocol, _, _ = info
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, LOST_SECONDS - 3),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 1000 * LOST_SECONDS),
    ):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def _decode(raw: bytes, kind: type[Answer]) -> Answer:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"the engine sent an answer that cannot be read: {error}") from error
