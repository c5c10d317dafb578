"""TLS at the gateway's listener: certificates that may change while it serves, and handshakes with bounds."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

from msgspec.structs import asdict
from uvicorn import Server

from kvloom.api.access.proxies import network_of
from kvloom.config.tls import TlsFiles, server_context
from kvloom.serve.server import Connection, HttpServer
from kvloom.types.clock import Clock
from kvloom.types.errors import ConfigError
from kvloom.types.files import FileWatch, replacing

_AT_ONCE: Final = 64  # connections that are taken before anything else happens
_FULL_SECONDS: Final = 1.0  # until connections are taken again after there was no descriptor for one
_log = logging.getLogger(__name__)

_Handshake = Callable[[socket.socket], Coroutine[Any, Any, None]]


class Certificates:
    """The context of new connections. The files are looked at when a connection comes, at most once in
    `LOOK_SECONDS`, and read again if they have changed; open connections keep what they have. A thread does
    so, for which that connection waits, and no other one.

    If what stands there now cannot be used, what was read last stays, and one line of the log says why. A
    copy of it is in the fleet's folder, from which a new gateway starts if it has to.
    """

    LOOK_SECONDS: ClassVar[float] = 1.0

    def __init__(self, files: TlsFiles, folder: Path, clock: Clock) -> None:
        """folder: the fleet's own, which nobody else can enter. Raises ConfigError if neither the files nor
        copies of them can be used."""
        self._files = files
        self._kept = {name: (path, folder / f"tls.{name}") for name, path in asdict(files).items() if path}
        self._clock = clock
        self._looked = clock.now()  # infinity while a look is under way
        self._watch = FileWatch(*(Path(path) for path, _ in self._kept.values()))
        try:
            self._context = server_context(files)
        except ValueError as error:
            try:
                copies = {name: str(copy) for name, (_, copy) in self._kept.items()}
                self._context = server_context(TlsFiles(**copies))
            except ValueError:
                raise ConfigError(f"tls: {error}") from error
            _log.warning("tls: %s; what was read before stays", error)
        else:
            self._keep()

    async def context(self) -> ssl.SSLContext:
        """Returns the context for a connection that comes now."""
        if self._clock.now() - self._looked >= self.LOOK_SECONDS:
            self._looked = math.inf
            await asyncio.shield(self._look())  # The connection may be given up meanwhile.
        return self._context

    async def _look(self) -> None:
        try:
            await asyncio.to_thread(self._read)
        finally:
            self._looked = self._clock.now()

    def _read(self) -> None:
        if not self._watch.changed():
            return
        try:
            self._context = server_context(self._files)
        except ValueError as error:
            _log.warning("tls: %s; what was read before stays", error)
        else:
            self._keep()
            _log.warning("tls: %s has been read again", self._files.certificate)

    def _keep(self) -> None:
        """Copies the files. If one changes meanwhile, it is read and copied again at the next look."""
        for path, copy in self._kept.values():
            try:
                with replacing(copy) as made:
                    made.write(Path(path).read_bytes())
            except OSError as error:
                _log.warning("tls: %s is not kept for another gateway: %s", path, error.strerror)


class Contexts(Protocol):
    """Gives each new connection its context."""

    async def context(self) -> ssl.SSLContext: ...


@dataclass(frozen=True, slots=True)
class FixedCertificate:
    """Satisfies `Contexts` with one that never changes."""

    fixed: ssl.SSLContext

    async def context(self) -> ssl.SSLContext:
        return self.fixed


@dataclass(frozen=True, slots=True)
class FleetDoor:
    """A listening socket for the fleet's own processes of other hosts. Their connections are not counted."""

    listener: socket.socket
    contexts: Contexts


class TlsServer(HttpServer):
    """A server whose connections speak TLS, but for those to a Unix socket, which no stranger can see. A
    connection is the application's once its handshake is done.

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

    def __init__(
        self, *arguments: Any, certificates: Contexts | None, fleet: FleetDoor | None = None, **options: Any
    ) -> None:
        """arguments, options: those of `HttpServer`; certificates: None if callers are spoken to in plain
        HTTP; fleet: the address that the fleet's own processes of other hosts call, if there are any."""
        super().__init__(*arguments, **options)
        self._certificates = certificates
        self._fleet = fleet
        self._handshakes: dict[asyncio.Task[None], str] = {}  # of which network, in the order of beginning
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
        plain, doors = list(sockets or ()), list[_Listener]()
        if (certificates := self._certificates) is not None:
            outside = [one for one in plain if one.family != socket.AF_UNIX]
            plain = [one for one in plain if one.family == socket.AF_UNIX]
            make = partial(self._shake_hands, certificates, self._protocol)
            doors += [_Listener(one, partial(self._begin, make)) for one in outside]
        if (fleet := self._fleet) is not None:
            make = partial(self._shake_hands, fleet.contexts, partial(self._protocol, Connection))
            doors.append(_Listener(fleet.listener, partial(self._begin, make)))
        # without those that speak TLS: it would shake hands for a minute, without a bound
        await Server.startup(self, plain)
        self.servers += doors  # type: ignore[arg-type]
        if not self.should_exit:
            self._ready()

    def _begin(self, shake: _Handshake, accepted: socket.socket, address: str) -> None:
        """Begins the handshake of a connection that has come."""
        if len(self._handshakes) >= self.MOST_HANDSHAKES:
            most = Counter(self._handshakes.values()).most_common(1)[0][0]
            oldest = next(task for task, where in self._handshakes.items() if where == most)
            del self._handshakes[oldest]
            oldest.cancel()
        task = self._tasks.create_task(shake(accepted))
        self._handshakes[task] = network_of(address)
        task.add_done_callback(lambda _: self._handshakes.pop(task, None))

    async def _shake_hands(
        self, contexts: Contexts, make: Callable[[], asyncio.Protocol], accepted: socket.socket
    ) -> None:
        try:
            async with asyncio.timeout(self.HANDSHAKE_SECONDS):
                context = await contexts.context()
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                make,
                accepted,
                ssl=context,
                ssl_handshake_timeout=self.HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=self.CLOSE_SECONDS,
            )
            transport.set_write_buffer_limits(high=self.MOST_UNREAD)
        except (OSError, ValueError, RuntimeError):
            # It spoke no TLS, showed a certificate that is bad or cannot be read, or was too slow.
            accepted.close()
        except asyncio.CancelledError:
            accepted.close()
            raise

    def _protocol(self, kind: type[asyncio.Protocol] | None = None) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = kind or self.config.http_protocol_class
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
