"""The frames of a token stream: 4 bytes of length, big-endian, then as many bytes of msgpack.

A frame holds list[Event]. One whose length has its top bit set holds the WireError that ended the stream.
"""

from __future__ import annotations

import msgspec

from kvloom.core.errors import KvloomError, Unavailable, WireError
from kvloom.core.request import Event

HEAD = 4
ERROR = 1 << 31
MAX_FRAME = 64 << 20


class FrameEncoder:
    """Encodes into one buffer again and again, so an encoder belongs to one thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray(256)

    def events(self, events: list[Event]) -> bytes:
        return self._frame(events, 0)

    def error(self, error: KvloomError) -> bytes:
        return self._frame(error.to_wire(), ERROR)

    def _frame(self, value: list[Event] | WireError, flag: int) -> bytes:
        buffer = self._buffer
        self._encoder.encode_into(value, buffer, HEAD)
        buffer[:HEAD] = (len(buffer) - HEAD | flag).to_bytes(HEAD, "big")
        return bytes(buffer)


class FrameParser:
    """Cuts a stream back into frames, however its bytes were grouped on the way."""

    def __init__(self) -> None:
        self._events = msgspec.msgpack.Decoder(list[Event])
        self._error = msgspec.msgpack.Decoder(WireError)
        self._rest = b""

    @property
    def whole(self) -> bool:
        """True where the bytes so far end at a frame's end."""
        return not self._rest

    def feed(self, data: bytes) -> list[list[Event] | WireError]:
        """The frames that `data` completes. Raises Unavailable where the bytes are no frames."""
        if self._rest:
            data = self._rest + data
        frames: list[list[Event] | WireError] = []
        view, at = memoryview(data), 0
        while len(data) - at >= HEAD:
            length = int.from_bytes(view[at : at + HEAD], "big")
            end = at + HEAD + (length & ~ERROR)
            if end - at > MAX_FRAME:
                raise Unavailable(f"the peer announced a frame of {end - at} bytes; {MAX_FRAME} is the most")
            if end > len(data):
                break
            frames.append(self._decode(view[at + HEAD : end], bool(length & ERROR)))
            at = end
        self._rest = data[at:]
        return frames

    def _decode(self, body: memoryview, error: bool) -> list[Event] | WireError:
        try:
            return self._error.decode(body) if error else self._events.decode(body)
        except msgspec.MsgspecError as problem:
            raise Unavailable(f"the peer sent a frame that cannot be read: {problem}") from problem
