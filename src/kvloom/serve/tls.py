"""TLS at the gateway's listener: certificates that may change while it serves, and handshakes with bounds."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final

from msgspec.structs import asdict
from uvicorn import Server

from kvloom.config.tls import TlsFiles, server_context
from kvloom.serve.server import HttpServer
from kvloom.types.clock import Clock
from kvloom.types.errors import ConfigError

_AT_ONCE: Final = 64  # connections that are taken before anything else happens
_FULL_SECONDS: Final = 1.0  # until connections are taken again after there was no descriptor for one
_log = logging.getLogger(__name__)

_Seen = tuple[tuple[int, int, int] | None, ...]


class Certificates:
    """The context of new connections. The files are looked at when a connection comes, at most once in
    `LOOK_SECONDS`, and read again if they have changed; open connections keep what they have.

    If what stands there now cannot be used, what was read last stays, and one line of the log says why. A
    copy of it is in the fleet's folder, from which a new gateway starts if it has to.
    """

    LOOK_SECONDS: ClassVar[float] = 1.0

    def __init__(self, files: TlsFiles, folder: Path, clock: Clock) -> None:
        """folder: the fleet's own, which nobody else can enter. Raises ConfigError if neither the files nor
        copies of them can be used."""
        self._files = files
        self._copies = TlsFiles(
            **{name: path and str(folder / f"tls.{name}") for name, path in asdict(files).items()}
        )
        self._clock = clock
        self._looked = clock.now()
        self._seen = self._look()
        try:
            self._context = server_context(files)
        except ValueError as error:
            try:
                self._context = server_context(self._copies)
            except ValueError:
                raise ConfigError(f"tls: {error}") from error
            _log.warning("tls: %s; what was read before stays", error)
        else:
            self._keep()

    def context(self) -> ssl.SSLContext:
        """Returns the context for a connection that comes now."""
        now = self._clock.now()
        if now - self._looked >= self.LOOK_SECONDS:
            self._looked = now
            if (seen := self._look()) != self._seen:
                self._seen = seen
                self._read()
        return self._context

    def _look(self) -> _Seen:
        return tuple(None if path is None else _mark(path) for path in asdict(self._files).values())

    def _read(self) -> None:
        try:
            self._context = server_context(self._files)
        except ValueError as error:
            _log.warning("tls: %s; what was read before stays", error)
        else:
            self._keep()
            _log.warning("tls: %s has been read again", self._files.certificate)

    def _keep(self) -> None:
        """Copies the files. If one changes meanwhile, it is read and copied again at the next look."""
        for path, copy in zip(asdict(self._files).values(), asdict(self._copies).values(), strict=True):
            if path is not None:
                made = Path(f"{copy}.new")
                made.touch(mode=0o600)
                made.write_bytes(Path(path).read_bytes())
                made.replace(copy)


def _mark(path: str) -> tuple[int, int, int] | None:
    """Returns what differs once the file is another one; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class TlsServer(HttpServer):
    """A server whose connections speak TLS. A connection is the application's once its handshake is done.

    At most `MOST_HANDSHAKES` are under way, each for at most `HANDSHAKE_SECONDS`. If there are more, the
    oldest of the address that has the most ends, so that who begins many and ends none only loses their own.
    """

    HANDSHAKE_SECONDS: ClassVar[float] = 10.0
    CLOSE_SECONDS: ClassVar[float] = 5.0
    """Time for a caller to answer that the connection ends."""
    MOST_HANDSHAKES: ClassVar[int] = 512
    MOST_UNREAD: ClassVar[int] = 64 << 10
    """Bytes that wait to be encrypted before no more of an answer is made, as without TLS; asyncio would let
    eight times as many wait. As many again wait behind them, encrypted."""

    def __init__(self, *arguments: Any, certificates: Certificates, **options: Any) -> None:
        """arguments, options: those of `HttpServer`."""
        super().__init__(*arguments, **options)
        self._certificates = certificates
        self._handshakes: dict[asyncio.Task[None], str] = {}  # in the order in which they began
        self._tasks: asyncio.TaskGroup

    @property
    def handshakes(self) -> int:
        """Returns how many handshakes are under way."""
        return len(self._handshakes)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            await super().serve(sockets)
            for handshake in self._handshakes:
                handshake.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        await Server.startup(
            self, []
        )  # without a listener: it would shake hands for a minute, without a bound
        self.servers = [_Listener(one, self._begin) for one in sockets or ()]  # type: ignore[misc]
        if not self.should_exit:
            self._ready()

    def _begin(self, accepted: socket.socket, address: str) -> None:
        """Begins the handshake of a connection that has come."""
        if len(self._handshakes) >= self.MOST_HANDSHAKES:
            most = Counter(self._handshakes.values()).most_common(1)[0][0]
            oldest = next(task for task, where in self._handshakes.items() if where == most)
            del self._handshakes[oldest]
            oldest.cancel()
        task = self._tasks.create_task(self._shake_hands(accepted))
        self._handshakes[task] = address
        task.add_done_callback(lambda _: self._handshakes.pop(task, None))

    async def _shake_hands(self, accepted: socket.socket) -> None:
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                accepted,
                ssl=self._certificates.context(),
                ssl_handshake_timeout=self.HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=self.CLOSE_SECONDS,
            )
        except OSError:  # It spoke no TLS, or an old one, or showed a bad certificate, or was too slow.
            accepted.close()
        else:
            transport.set_write_buffer_limits(high=self.MOST_UNREAD)

    def _protocol(self) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


class _Listener:
    """Takes connections from a listening socket, as a server of asyncio does."""

    def __init__(self, listener: socket.socket, begin: Callable[[socket.socket, str], None]) -> None:
        self._listener = listener
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Does nothing: it is closed at once."""

    def _listen(self) -> None:
        self._again = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # There is no descriptor, or no memory, until a connection ends.
                self._loop.remove_reader(self._listener)
                self._again = self._loop.call_later(_FULL_SECONDS, self._listen)
                _log.warning("no connection can be taken for now: %s", error.strerror)
                return
            accepted.setblocking(False)
            self._begin(accepted, str(address[0]))
