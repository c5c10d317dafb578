"""Bodies and answers of the verbs that move K and V between engines (Microserving, section 3.1).

`prompt` is the whole context in token ids; positions count in it, negative ones from its end, None is its
end. Every verb may be called again with the same body and then answers the same.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from kvloom.types.errors import KvloomError, Unavailable, WireError
from kvloom.types.load import UnitLoad
from kvloom.types.request import Event, Made, Prompt, RequestId, TokenId
from kvloom.types.transfer import Endpoint, KVAddress, KVForm

LONGEST_PIN: Final = 3600  # seconds
LONGEST_DUE: Final = 60  # seconds


class PrepRecv(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Make room for the K and V of prompt[:end], but for what is cached here. `sender`: the form that the
    peer keeps this model's K and V in, refused here where it is another. `due`: seconds until the request is
    expected to begin here, where that is known; a step may wait a little for it."""

    model: str
    request: RequestId
    prompt: Prompt
    end: int | None = None
    sender: KVForm | None = None
    due: Annotated[float, Meta(ge=0, le=LONGEST_DUE)] | None = None


class Prepared(Struct, frozen=True, kw_only=True):
    """prompt[:matched] is here already; address takes [matched, end). The room is kept for `lease` seconds
    from each `renew` on."""

    matched: int
    end: int
    address: KVAddress
    peer: Endpoint
    lease: float


class RemoteSend(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Write K and V of prompt[begin:end] to `address` at `peer`; what is not cached here is computed.
    Answered when every byte has arrived. What a running request of this id has computed so far, its output
    too, counts as cached."""

    model: str
    request: RequestId
    prompt: Prompt
    address: KVAddress
    peer: Endpoint
    begin: int = 0
    end: int | None = None
    priority: int = 0


class Sent(Struct, frozen=True, kw_only=True):
    """Of the tokens sent: those that had K and V here already, and those that were computed for this. What
    comes before them and was not cached is computed too."""

    cached: int
    computed: int


class Pin(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Keep what is cached of `prompt` for `request`, which need not be one that generates here: until `unpin`
    or `abort` of that id, and no longer than `lease` seconds from each `renew` on, the engine's own lease
    where it is left out. A request has one pin: of another prompt it takes the first one's place."""

    model: str
    request: RequestId
    prompt: list[TokenId]
    lease: Annotated[int, Meta(ge=1, le=LONGEST_PIN)] | None = None


class Pinned(Struct, frozen=True, kw_only=True):
    """prompt[:tokens] is kept for `lease` seconds from now. 0 tokens: nothing was cached, nothing is kept."""

    tokens: int
    lease: float


class Unpin(Struct, frozen=True, kw_only=True):
    """Undo the request's pin, if there is one."""

    request: RequestId


class Hold(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Let the request stand still after the step that is under way, so that it can go on elsewhere; each of
    its choices must have a token. It keeps its stream, which tells all its tokens, and what it has computed
    is cached. `sends` are done then, each as far as its tokens have K and V here."""

    request: RequestId
    sends: list[RemoteSend] = []


class Standing(Struct, frozen=True, kw_only=True):
    """Answer to hold, when all that was to be sent has arrived. made: all tokens of the choices that have not
    ended. sent: for each of `sends`, up to which token its target has K and V."""

    made: list[Made]
    sent: list[int] = []


class Resume(Struct, frozen=True, kw_only=True):
    """Let a request that stands still go on here, as it does when nobody has said so in the time of a
    lease."""

    request: RequestId


class Offer(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Name a request, running or waiting, that had better go to a unit of the load `destination`, which it
    leaves with at least `floor` decode steps of freeness. besides: those that are not to be named."""

    destination: UnitLoad
    floor: float = 0.0
    besides: list[RequestId] = []


class Offered(Struct, frozen=True, kw_only=True):
    """None where no request had better go."""

    request: str | None


class Prefix(Struct, frozen=True, kw_only=True):
    """Body of evict."""

    model: str
    prompt: list[TokenId]


class Held(Struct, frozen=True, kw_only=True):
    """Answer to unpin and evict: the tokens it was done to."""

    tokens: int


class Renew(Struct, frozen=True, kw_only=True):
    request: RequestId


class Lease(Struct, frozen=True, kw_only=True):
    """Seconds from now for which what the request has here is kept: its reservation, its pin, the shorter of
    both."""

    lease: float


HEAD = 4
ERROR = 1 << 31
MAX_FRAME = 64 << 20


class FrameEncoder:
    """Writes frames, into one buffer again and again, so that an encoder belongs to one thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray(256)

    def events(self, events: list[Event] | WireError, flag: int = 0) -> bytes:
        buffer = self._buffer
        self._encoder.encode_into(events, buffer, HEAD)
        buffer[:HEAD] = (len(buffer) - HEAD | flag).to_bytes(HEAD, "big")
        return bytes(buffer)

    def error(self, error: KvloomError) -> bytes:
        return self.events(error.to_wire(), ERROR)


class FrameParser:
    """Cuts a stream back into frames, however its bytes were grouped on the way."""

    def __init__(self) -> None:
        self._events = msgspec.msgpack.Decoder(list[Event])
        self._error = msgspec.msgpack.Decoder(WireError)
        self._rest = b""

    @property
    def whole(self) -> bool:
        """True if the bytes so far end at a frame's end."""
        return not self._rest

    def feed(self, data: bytes) -> list[list[Event] | WireError]:
        """Returns the frames that `data` completes. Raises Unavailable if the bytes are no frames."""
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
            body = view[at + HEAD : end]
            try:
                frames.append(self._error.decode(body) if length & ERROR else self._events.decode(body))
            except msgspec.MsgspecError as problem:
                raise Unavailable(f"the peer sent a frame that cannot be read: {problem}") from problem
            at = end
        self._rest = data[at:]
        return frames
