"""A fleet's controller and the keepers of its hosts exchange these messages, over TCP with the fleet's
certificate."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Struct

from kvloom.cluster.launcher import Answered, Ended, FoundProcess, Missed, Started
from kvloom.journal.records import Noted
from kvloom.serve.processes.messages import GatewayNews, GatewaySpec, Said, StartProgress
from kvloom.types.errors import Unavailable
from kvloom.types.spec import EngineSpec

VERSION: Final = 3
"""The version of these messages. Both ends must have the same."""
LONGEST: Final = 1 << 26  # bytes of a message
CONNECT_SECONDS: Final = 5.0
_LENGTH: Final = struct.Struct(">I")


class Begin(Struct, frozen=True, kw_only=True, tag="begin"):
    """A controller's first words to a keeper."""

    version: int
    life: int
    """Counts the fleet's controllers. A keeper listens to the latest one alone."""
    lease: float
    """Seconds for which a lease holds."""


class StartOrder(Struct, frozen=True, tag="start"):
    """Starts a process of a unit. engine: the specification that it is to serve."""

    component: str
    generation: int
    engine: EngineSpec


class StartGateway(Struct, frozen=True, tag="start_gateway"):
    """Starts a gateway. gateway: its specification, but for the part that the host knows."""

    component: str
    generation: int
    gateway: GatewaySpec


class Tell(Struct, frozen=True, tag="tell"):
    """Passes the controller's news on to a gateway."""

    component: str
    news: GatewayNews


class ForgetOrder(Struct, frozen=True, tag="forget"):
    """Forgets a gateway that has no process. With the last gateway of the host, its address is closed."""

    component: str


class StopOrder(Struct, frozen=True, tag="stop"):
    component: str


class KillOrder(Struct, frozen=True, tag="kill"):
    component: str


class Granted(Struct, frozen=True, tag="granted"):
    """Answers `LeaseAsked`: the host has a lease, from when it had asked."""

    asked: float


class EndOrder(Struct, frozen=True, tag="end"):
    """Ends all processes of the host, and the keeper."""


class NodeHere(Struct, frozen=True, kw_only=True, tag="here"):
    """A keeper's answer to `Begin`: what the host has, and what runs there."""

    cores: int
    memory: int
    """Bytes that were free when the keeper began."""
    gpus: int
    running: tuple[FoundProcess, ...]


class Refused(Struct, frozen=True, tag="refused"):
    """A keeper's answer to a controller that it does not listen to."""

    why: str


class LeaseAsked(Struct, frozen=True, tag="lease"):
    """Asks for a lease. asked: by the host's `leased_time`."""

    asked: float


class Leaving(Struct, frozen=True, tag="leaving"):
    """A keeper ends by itself, and nothing that it has started runs any more."""


class HeardAt(Struct, frozen=True, tag="heard"):
    """Passes on a report about a component's process, or a message from it."""

    component: str
    heard: Started | Answered | Ended | Missed | StartProgress | Said | Noted


class Logged(Struct, frozen=True, tag="logged"):
    """Passes on a line that a process has printed."""

    name: str
    line: str


FromController = (
    Begin | StartOrder | StartGateway | Tell | ForgetOrder | StopOrder | KillOrder | Granted | EndOrder
)
FromKeeper = NodeHere | Refused | LeaseAsked | Leaving | HeardAt | Logged

Message = TypeVar("Message")


class Wire(Generic[Message]):
    """One end of a connection."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        kind: object,
    ) -> None:
        """kind: the type of the other end's messages."""
        self._reader = reader
        self._writer = writer
        self._decode: Callable[[bytes], Message] = msgspec.msgpack.Decoder(kind).decode
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, message: Struct) -> None:
        """Sends a message, unless the connection is closed. It never waits."""
        if not self._writer.is_closing():
            data = self._encode(message)
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def messages(self) -> AsyncIterator[Message]:
        """Yields the messages that come, until the connection ends. Raises Unavailable for bytes that are no
        message."""
        while True:
            try:
                [length] = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if length > LONGEST:
                    raise Unavailable(f"a message of {length} bytes; at most {LONGEST} are right")
                data = await self._reader.readexactly(length)
            except (OSError, EOFError):
                return
            try:
                yield self._decode(data)
            except msgspec.MsgspecError as error:
                raise Unavailable(f"a message that cannot be read: {error}") from error

    @property
    def unread(self) -> int:
        """Returns the bytes that were sent and are still here, because the other end does not read."""
        return self._writer.transport.get_write_buffer_size()

    def close(self) -> None:
        self._writer.transport.abort()

    async def end(self) -> None:
        """Closes it once all that was sent is on its way, or the other end is gone."""
        with suppress(OSError):
            self._writer.close()
            await self._writer.wait_closed()


async def connect(address: str, context: ssl.SSLContext) -> Wire[FromKeeper]:
    """Connects to the keeper at `host:port`. Raises Unavailable."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    except (OSError, TimeoutError) as error:
        reason = str(error) or f"no answer in {CONNECT_SECONDS:g} s"
        raise Unavailable(f"{address} cannot be reached: {reason}") from error
    return Wire(reader, writer, FromKeeper)
