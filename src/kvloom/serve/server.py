"""uvicorn's server, as gateways and engines run it, with bounds on a request's head and on the time that a
caller may take.

No setting of uvicorn bounds either with httptools, and a middleware is called only after the head has come.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Final

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvloom.api.errors import error_response
from kvloom.serve.connections import OpenConnections
from kvloom.types.errors import Unavailable

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
_RDN: Final = {
    "commonName": "CN",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
}
LINGER_SECONDS = 1.0  # By then, whatever was sent to a server that retires has been read.


class Connection(HttpToolsProtocol):
    """A connection that takes one request at a time, whose head is bounded.

    uvicorn stops reading while a second request waits, and so would not notice that the caller hangs up. Here
    what comes before the answer is complete is thrown away, and the connection ends with the answer.
    """

    HEAD_SECONDS: ClassVar[float] = 20.0
    """Time for a head, from its first byte on; for the first head, from the connection's beginning on."""
    MAX_HEAD: ClassVar[int] = 64 << 10
    """Bytes of a head. A longer one is refused. A body may have as many that are no part of it, in its
    chunks' heads and in trailers, and `FRAMING` times its own besides."""
    FRAMING: ClassVar[int] = 16
    """A chunk of one byte takes six, and more if its length begins with zeros."""

    _head_bytes = 0
    _spare = 0  # bytes that may still come and be no part of the body
    _head_due: asyncio.TimerHandle | None = None  # runs while a head is on its way
    _early = False  # Data came before the last answer was complete.
    _certificate = ""  # the subject of the caller's certificate, if one has been verified

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._certificate = _subject(transport.get_extra_info("peercert") or {})
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._early:
            return
        self._head_bytes += len(data)
        self._spare -= len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_due is not None and self._head_bytes > self.MAX_HEAD:
            self._give_up(f"The request's head is larger than {self.MAX_HEAD} bytes.")
        elif self._in_body and self._spare < 0:
            self.transport.abort()

    @property
    def _in_body(self) -> bool:
        return self._head_due is None and self.cycle is not None and self.cycle.more_body

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self.cycle is not None and not self.cycle.response_complete:
            self._early = True
            self.cycle.keep_alive = False
        elif self._head_due is None:
            self._await_head()
            self._head_bytes = 1

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_due is not None:  # a trailer comes after the head, and is dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._early:
            return
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.MAX_HEAD:
            self._give_up(f"The request's head is larger than {self.MAX_HEAD} bytes.")
            self._early = True
            return
        self._has_head()
        self._spare = self.MAX_HEAD
        if self._certificate:  # as ASGI's extension for TLS has it
            self.scope["extensions"] = {"tls": {"client_cert_name": self._certificate}}
        super().on_headers_complete()
        if self.cycle is not None:
            # What is still to come after an answer would be read, and thrown away, for as long as the caller
            # likes; so the answer to a body that has not come ends the connection.
            self.cycle.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]

    def on_body(self, body: bytes) -> None:
        self._spare += (1 + self.FRAMING) * len(body)
        if not self._early:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._early:
            if self.cycle is not None:
                self.cycle.default_headers = self.server_state.default_headers
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if not self._early:  # The caller would take it for a part of the answer that is on its way.
            super().send_400_response(msg)

    def _await_head(self) -> None:
        self._head_bytes = 0
        late = f"The request's head took more than {self.HEAD_SECONDS:g} s to come."
        self._head_due = self.loop.call_later(self.HEAD_SECONDS, self._give_up, late)

    def _has_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _give_up(self, why: str) -> None:
        self._has_head()
        if self._head_bytes:
            self.send_400_response(why)
        else:  # Nothing was asked.
            self.transport.close()


def _subject(certificate: Mapping[str, Any]) -> str:
    """Returns the subject of a certificate as `getpeercert` tells it, in the form of RFC 4514, like
    `CN=ops,O=Example`. The empty text stands for no certificate, or one that has not been verified."""
    parts = [
        f"{_RDN.get(kind, kind)}={value}" for rdn in certificate.get("subject", ()) for kind, value in rdn
    ]
    return ",".join(reversed(parts)) or ("unnamed" if certificate else "")


class ClientConnection(Connection):
    """A connection to a stranger, who must read the answer as well, or is cut off, which ends the request.

    Between gateway and engine there is no such bound: a stream that is stuck there is one whose client reads
    slowly enough.
    """

    READ_SECONDS: ClassVar[float] = 60.0
    LEAST_READ: ClassVar[int] = 16 << 10
    """Bytes of a stuck answer that the caller must take in each READ_SECONDS."""

    _read_due: asyncio.TimerHandle | None = None  # runs while an answer is stuck
    _address: str | None = None  # under which it is counted; a Unix socket's connections have none

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        counted = self.server_state
        if self.client is None or not isinstance(counted, OpenConnections):
            return
        why = counted.enter(self.client[0])
        if why is None:
            self._address = self.client[0]
        else:
            self._refuse(why)

    def _refuse(self, why: str) -> None:
        self._has_head()
        self._early = True
        body = why.encode()
        transport = self.transport
        transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n"
            b"connection: close\r\nretry-after: 1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reads()
        if self._address is not None and isinstance(self.server_state, OpenConnections):
            self.server_state.leave(self._address)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._reads()
        super().resume_writing()

    def _await_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._read_due = self.loop.call_later(self.READ_SECONDS, self._check_reader, unread)

    def _check_reader(self, unread: int) -> None:
        if unread - self.transport.get_write_buffer_size() < self.LEAST_READ:
            self.transport.abort()
        else:
            self._await_reader()

    def _reads(self) -> None:
        if self._read_due is not None:
            self._read_due.cancel()
            self._read_due = None


class _TellsEnd:
    """An ASGI middleware that tells callers who have no answer yet when the server ends, as it ends what is
    still under way by cancelling it. uvicorn would call that an internal error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            stopping = Unavailable("the server is stopping", retry_after=1)
            with suppress(RuntimeError):  # An answer has begun.
                await error_response(scope, stopping)(scope, receive, send)
            raise


class HttpServer(uvicorn.Server):
    """A server that calls `ready` when it answers, and leaves signals to its process."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        connection: type[Connection] = Connection,
        unix: str | None = None,
        connections: OpenConnections | None = None,
        grace: int,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """connections: counts them, and bounds their number; None if nobody does."""
        super().__init__(
            uvicorn.Config(
                _TellsEnd(app),
                uds=unix,
                http=connection,
                ws="none",
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=grace,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
            )
        )
        if connections is not None:
            self.server_state = connections
        self._ready = ready
        self._grace = grace
        self._retiring = False
        self._over = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._ready()

    async def main_loop(self) -> None:
        """Waits for the end, for which uvicorn's own loop would look ten times a second."""
        await self.on_tick(0)
        await self._over.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Stops accepting, lets running answers finish for up to `grace` seconds, and then ends `serve`."""
        self.config.timeout_graceful_shutdown = self._grace
        self._leave()
        if self._retiring:
            asyncio.get_running_loop().call_later(self._grace, self._cut_off)

    def retire(self, seconds: float) -> None:
        """Leaves new connections to another process, and ends each open one with its next answer.

        `serve` ends once no answer is under way, or after `seconds`; no request is lost.
        """
        for server in self.servers:
            server.close()
        self._retiring = True
        self.config.encoded_headers.append((b"connection", b"close"))
        self.server_state.default_headers = self.config.encoded_headers
        self.config.timeout_graceful_shutdown = math.ceil(seconds)
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self._leave)

    def _leave(self) -> None:
        self.should_exit = True
        self._over.set()

    def _cut_off(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()
