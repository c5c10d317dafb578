"""The verbs of an engine (Microserving, section 3.1): bodies, answers, their table, how they are asked of an
engine elsewhere, and the frames in which token events cross the wire.

`prompt` is the whole context in token ids. Positions count in it, negative ones from its end, and None is its
end. Every verb may be called again with the same body and then answers the same. A frame is 4 bytes of
length, big-endian, and a msgpack body.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import astuple

from kvloom.types.address import Endpoint, KVAddress, KVForm
from kvloom.types.errors import KvloomError, Unavailable, WireError
from kvloom.types.load import UnitLoad
from kvloom.types.request import Event, Int64, Made, ModelCard, Prompt, RequestId, Salt, TokenId
from kvloom.types.spec import ModelSpec

LONGEST_PIN: Final = 3600  # seconds
LONGEST_DUE: Final = 60  # seconds
ANSWER_SECONDS: Final = 30.0
LOADING_SECONDS: Final = 120.0  # for an adapter to be read and proven

Body = TypeVar("Body")
Answer = TypeVar("Answer")


class PrepRecv(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Makes room for the K and V of prompt[:end], except for what is cached here."""

    model: str
    request: RequestId
    prompt: Prompt
    end: Int64 | None = None
    sender: KVForm | None = None  # the form of the peer's K and V; refused if it is not this unit's
    # Seconds until the request is expected to begin here; a decode step may wait a little for it.
    due: Annotated[float, Meta(ge=0, le=LONGEST_DUE)] | None = None
    salt: Salt = ""  # that with which the request's prefixes are cached


class Prepared(Struct, frozen=True, kw_only=True):
    """The answer to prep_recv."""

    matched: int  # prompt[:matched] is here already
    end: int
    address: KVAddress  # takes [matched, end)
    peer: Endpoint
    lease: float  # seconds for which the room is kept, from each `renew` on


class RemoteSend(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Writes K and V of prompt[begin:end] to `address` at `peer`, and computes what is not cached here.

    The answer comes when every byte has arrived. What a running request of this id has computed so far, its
    output included, counts as cached.
    """

    model: str
    request: RequestId
    prompt: Prompt
    address: KVAddress
    peer: Endpoint
    begin: Int64 = 0
    end: Int64 | None = None
    priority: Int64 = 0
    salt: Salt = ""  # that with which the request's prefixes are cached
    tenant: str = ""  # as in StartGenerate


class Sent(Struct, frozen=True, kw_only=True):
    """The answer to remote_send."""

    cached: int  # tokens of those sent that had K and V here already
    computed: int  # tokens of those sent that were computed for this


class Pin(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Keeps what is cached of `prompt` for `request`, which need not generate here.

    The pin ends with `unpin` or `abort` of that id, or `lease` seconds after the last `renew` (the engine's
    own lease if it is left out). A request has one pin: a pin of another prompt replaces it. The pins of one
    tenant, if it is named, keep at most half of what the unit may promise.
    """

    model: str
    request: RequestId
    prompt: list[TokenId]
    lease: Annotated[int, Meta(ge=1, le=LONGEST_PIN)] | None = None
    salt: Salt = ""  # that with which the request's prefixes are cached
    tenant: str = ""  # as in StartGenerate


class Pinned(Struct, frozen=True, kw_only=True):
    """The answer to pin: prompt[:tokens] is kept for `lease` seconds from now; with 0 tokens nothing is."""

    tokens: int
    lease: float


class Unpin(Struct, frozen=True, kw_only=True):
    """Undoes the request's pin, if there is one."""

    request: RequestId


class Hold(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Pauses a request after the step that is under way, so that it can go on elsewhere.

    Each of its choices must have a token. The request keeps its stream, which tells all its tokens, and what
    it has computed is cached. `sends` are done then, each as far as its tokens have K and V here.
    """

    request: RequestId
    sends: list[RemoteSend] = []


class Standing(Struct, frozen=True, kw_only=True):
    """The answer to hold, when all that was to be sent has arrived."""

    made: list[Made]  # all tokens of the choices that have not ended
    sent: list[int] = []  # for each of `sends`, the token up to which its target has K and V


class Resume(Struct, frozen=True, kw_only=True):
    """Lets a paused request go on here, as it also does by itself after the time of a lease."""

    request: RequestId


class Offer(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Names a request, running or waiting, that should move to another unit (Llumnix, section 4.4)."""

    destination: UnitLoad
    floor: float = 0.0  # decode steps of freeness that the destination keeps
    besides: list[RequestId] = []  # requests that are not to be named


class Offered(Struct, frozen=True, kw_only=True):
    """The answer to offer."""

    request: str | None  # None if no request should move


class Prefix(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The body of evict: drops what is cached of the prompt with the salt, as far as nobody uses it. Without
    a salt that is what requests without one share. An empty prompt stands for all that is cached with the
    salt, and without a salt for all that the model has cached with any."""

    model: str
    prompt: list[TokenId]
    salt: Salt = ""


class Held(Struct, frozen=True, kw_only=True):
    """The answer to unpin: the number of tokens that were kept."""

    tokens: int


class Evicted(Struct, frozen=True, kw_only=True):
    """The answer to evict."""

    tokens: int  # that were dropped
    pinned: int = 0  # of those that were asked for, that stay because of pins


class CachedSince(Struct, frozen=True, kw_only=True):
    """Asks which full pages have come into the unit's prefix caches, and which have gone, since the last
    answer to the caller. Who has had none, with an empty `life`, is told all that are there."""

    life: Annotated[str, Meta(max_length=64)]  # of the last answer
    version: Int64  # of the last answer


class CacheChanges(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The answer to contents. A page has a name of 8 bytes (`kv/prefix_feed.py`)."""

    life: str  # of the process that answers
    version: int
    whole: bool = False  # Those that have come are all there are, and what was told before is over.
    come: bytes = b""  # names, each after that of the page before it
    gone: bytes = b""  # names


class Renew(Struct, frozen=True, kw_only=True):
    """Renews the leases of what the request has reserved and pinned here."""

    request: RequestId


class Lease(Struct, frozen=True, kw_only=True):
    """The answer to renew."""

    lease: float  # seconds from now for which both the reservation and the pin of the request are kept


class Abort(Struct, frozen=True):
    """End a request, or the one choice of it that is named, and give back what it has reserved and pinned."""

    request: str
    choice: Int64 | None = None


class LoadAdapter(Struct, frozen=True, kw_only=True):
    """Serves another adapter of the model `base`, as a model of its own name."""

    base: str
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    path: str  # of its folder


class UnloadAdapter(Struct, frozen=True, kw_only=True):
    """Serves no new request of an adapter. Those that are here run to their end."""

    name: str


class CheckModel(Struct, frozen=True, kw_only=True):
    """Reads what a model's files say, all but its weights, and serves nothing of it."""

    model: ModelSpec


class Done(Struct, frozen=True):
    """Answer of a verb that has nothing to say."""

    ok: bool = True


@dataclass(frozen=True, slots=True)
class Verb(Generic[Body, Answer]):
    """A verb that is answered once. Its server, its clients and its description are made from this."""

    name: str  # that of the method of `EngineClient`, too
    summary: str
    body: type[Body]  # NoneType if the verb only reports
    answer: type[Answer]  # `Done` if the method returns None
    spread: bool = False  # The method takes the body's fields, and not the body.
    waits: bool = False  # The verb ends if its caller hangs up.
    seconds: float | None = ANSWER_SECONDS  # A caller waits for so long; for None, as long as it takes.

    @property
    def reports(self) -> bool:
        """Tells whether the verb takes no body and changes nothing."""
        return self.body is NoneType

    async def ask(self, engine: object, body: Body) -> Answer:
        """Calls the method of `engine`, an `EngineClient`, with the body."""
        arguments = () if self.reports else astuple(body) if self.spread else (body,)  # type: ignore[arg-type]
        answer = await getattr(engine, self.name)(*arguments)
        return Done() if answer is None else answer  # type: ignore[return-value]


MODELS: Final = Verb(
    "models", "Tells the cards of the models that the unit serves.", NoneType, list[ModelCard]
)
LOAD: Final = Verb("load", "Tells what the unit reports of itself.", NoneType, UnitLoad)
PREP_RECV: Final = Verb("prep_recv", "Makes room for K and V that a peer will write.", PrepRecv, Prepared)
REMOTE_SEND: Final = Verb(
    "remote_send",
    "Writes K and V into a peer's room; answered when all has arrived.",
    RemoteSend,
    Sent,
    waits=True,
    seconds=None,
)
ABORT: Final = Verb(
    "abort", "Ends a request, and gives back what it has reserved and pinned.", Abort, Done, spread=True
)
RENEW: Final = Verb(
    "renew", "Keeps a request's reservation and pin for another lease.", Renew, Lease, spread=True
)
PIN: Final = Verb("pin", "Keeps what is cached of a prefix, for a request and a time.", Pin, Pinned)
UNPIN: Final = Verb("unpin", "Undoes a request's pin.", Unpin, Held, spread=True)
HOLD: Final = Verb(
    "hold",
    "Lets a running request stand still, to go on elsewhere, and sends it there.",
    Hold,
    Standing,
    spread=True,
    waits=True,
)
RESUME: Final = Verb("resume", "Lets a held request go on here.", Resume, Done, spread=True)
OFFER: Final = Verb(
    "offer", "Names a request, running or waiting, that had better go elsewhere.", Offer, Offered
)
EVICT: Final = Verb("evict", "Drops what is cached of a prefix, and past it.", Prefix, Evicted)
CONTENTS: Final = Verb(
    "contents", "Tells which pages the prefix caches hold, or what has changed.", CachedSince, CacheChanges
)
LOAD_ADAPTER: Final = Verb(
    "load_adapter", "Serves another adapter, once it is proven.", LoadAdapter, Done, seconds=LOADING_SECONDS
)
CHECK_MODEL: Final = Verb(
    "check_model",
    "Tells whether a model's files could be served.",
    CheckModel,
    Done,
    seconds=None,  # they may be downloaded
)
UNLOAD_ADAPTER: Final = Verb("unload_adapter", "Serves no new request of an adapter.", UnloadAdapter, Done)

VERBS: Final[tuple[Verb[Any, Any], ...]] = (
    PREP_RECV,
    REMOTE_SEND,
    ABORT,
    RENEW,
    PIN,
    UNPIN,
    HOLD,
    RESUME,
    OFFER,
    EVICT,
    CONTENTS,
    LOAD,
    MODELS,
    LOAD_ADAPTER,
    UNLOAD_ADAPTER,
    CHECK_MODEL,
)
"""All but `start_generate`, which is answered by a stream, and `lend`, which only units ask of each other."""


class RemoteEngine(ABC):
    """An `EngineClient` but for `start_generate`: all its other verbs go one way, which is `call`."""

    @abstractmethod
    async def call(self, verb: Verb[Body, Answer], body: Body) -> Answer:
        """Asks the engine for the verb. Raises KvloomError: the engine's own, or Unavailable if it cannot be
        reached."""

    async def models(self) -> list[ModelCard]:
        return await self.call(MODELS, None)

    async def load(self) -> UnitLoad:
        return await self.call(LOAD, None)

    async def abort(self, request: str, choice: int | None = None) -> None:
        await self.call(ABORT, Abort(request, choice))

    async def prep_recv(self, body: PrepRecv) -> Prepared:
        return await self.call(PREP_RECV, body)

    async def remote_send(self, body: RemoteSend) -> Sent:
        return await self.call(REMOTE_SEND, body)

    async def renew(self, request: str) -> Lease:
        return await self.call(RENEW, Renew(request=request))

    async def pin(self, body: Pin) -> Pinned:
        return await self.call(PIN, body)

    async def unpin(self, request: str) -> Held:
        return await self.call(UNPIN, Unpin(request=request))

    async def hold(self, request: str, sends: Sequence[RemoteSend] = ()) -> Standing:
        return await self.call(HOLD, Hold(request=request, sends=list(sends)))

    async def resume(self, request: str) -> None:
        await self.call(RESUME, Resume(request=request))

    async def offer(self, body: Offer) -> Offered:
        return await self.call(OFFER, body)

    async def evict(self, body: Prefix) -> Evicted:
        return await self.call(EVICT, body)

    async def contents(self, body: CachedSince) -> CacheChanges:
        return await self.call(CONTENTS, body)

    async def load_adapter(self, body: LoadAdapter) -> None:
        await self.call(LOAD_ADAPTER, body)

    async def unload_adapter(self, body: UnloadAdapter) -> None:
        await self.call(UNLOAD_ADAPTER, body)

    async def check_model(self, body: CheckModel) -> None:
        await self.call(CHECK_MODEL, body)


HEAD = 4
ERROR = 1 << 31
MAX_FRAME = 64 << 20


class FrameEncoder:
    """Encodes frames into one buffer again and again, so an encoder belongs to one thread."""

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
    """Cuts a stream of bytes back into frames, however they were grouped on the way."""

    def __init__(self) -> None:
        self._events = msgspec.msgpack.Decoder(list[Event])
        self._error = msgspec.msgpack.Decoder(WireError)
        self._rest = b""

    @property
    def whole(self) -> bool:
        """Tells whether the bytes so far end at a frame's end."""
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
