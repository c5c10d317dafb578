"""What the first rank and the others say to each other, beside what they exchange while they compute."""

from __future__ import annotations

import socket
import struct
from typing import Final

import msgspec
from msgspec import Struct

from kvloom.core.job import Phase
from kvloom.core.spec import EngineSpec

_LENGTH: Final = struct.Struct("<I")


class Begin(Struct, frozen=True, kw_only=True, tag="begin"):
    """Load the unit's models and take an arena. store: file by which the ranks find each other."""

    rank: int
    store: str
    spec: EngineSpec

    @property
    def size(self) -> int:
        return self.spec.tensor_parallel

    @property
    def threads(self) -> int:
        """Cores of each rank."""
        return self.spec.threads // self.size

    @property
    def slots(self) -> int:
        """Jobs that may run at the same time. One on GPUs: exchanges of two that met on one device in another
        order than on the next would wait for each other."""
        return self.threads if self.spec.device == "cpu" else 1


class Go(Struct, frozen=True, tag="go"):
    """All ranks are where the one is that waits for this."""


class Step(Struct, frozen=True, kw_only=True, tag="step"):
    """One forward. Arrays are their little-endian bytes, in the forms that `Plan` gives: int32 are tables,
    slot_page, slot_offset, pages and blocks, int64 the others. kept: rows whose logits are wanted.

    pages [n], blocks [n, layers, heads]: rows of the page map that have changed since the last step.
    copies: source, target and tokens of each.
    """

    slot: int
    model: str
    phase: Phase
    share: int
    tokens: bytearray
    kept: bytearray
    appends: bytearray
    starts: bytearray
    tables: bytearray
    positions: bytearray
    slot_page: bytearray
    slot_offset: bytearray
    pages: bytearray
    blocks: bytearray
    copies: list[tuple[int, int, int]] = []


class Here(Struct, frozen=True, tag="here"):
    """The rank waits for `Go`."""


class Refused(Struct, frozen=True, tag="refused"):
    """The rank ends, because what it was given cannot be used."""

    message: str


Order = Begin | Go | Step
Report = Here | Refused


class Wire:
    """One end of a stream socket. A message is the length of its msgpack, as 4 bytes, and that.

    seconds: for which a message that the peer does not take is kept up; None for ever.
    """

    def __init__(self, end: socket.socket, seconds: int | None = None) -> None:
        self._end = end
        if seconds is not None:
            timeout = struct.pack("ll", seconds, 0)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def send(self, message: Order | Report) -> None:
        """Raises OSError where the peer is gone, or takes nothing."""
        body = msgspec.msgpack.encode(message)
        self._end.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> bytearray | None:
        """The next message's msgpack, or None where the peer is gone."""
        head = self._read(_LENGTH.size)
        return None if head is None else self._read(*_LENGTH.unpack(head))

    def close(self) -> None:
        self._end.close()

    def _read(self, count: int) -> bytearray | None:
        body = bytearray(count)
        left = memoryview(body)
        while left:
            try:
                got = self._end.recv_into(left)
            except OSError:
                return None
            if not got:
                return None
            left = left[got:]
        return body
