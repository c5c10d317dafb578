"""Engines that keep books instead of K and V: what was reserved, has arrived, is cached, was computed.

They refuse what real ones refuse. Every verb gives way to the event loop before and after it has acted, so
that a test can cancel it at either point. What a position holds is the token that belongs there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket, resolve
from kvloom.types.errors import (
    BadRequest,
    ConnectionLost,
    KvloomError,
    OutOfBlocks,
    Unavailable,
    UnknownModel,
)
from kvloom.types.load import ModelLoad, UnitLoad
from kvloom.types.request import (
    EndEvent,
    Event,
    Level,
    ModelCard,
    PromptEvent,
    StartGenerate,
    TokenEvent,
    TokenLogprob,
)
from kvloom.types.verbs import (
    CacheChanges,
    CachedSince,
    CheckModel,
    Evicted,
    Held,
    Lease,
    LoadAdapter,
    Offer,
    Offered,
    Pin,
    Pinned,
    Prefix,
    Prepared,
    PrepRecv,
    RemoteSend,
    Sent,
    Standing,
    UnloadAdapter,
)

PAGE = 4  # tokens
LEASE = 3.0
FORM = KVForm(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_bytes=256, tokens_per_block=PAGE)


def card(name: str = "m", **changes: object) -> ModelCard:
    fields: dict[str, object] = {
        "name": name,
        "path": "/nowhere",
        "context_length": 512,
        "vocab_size": 1000,
        "tokenizer": "{}",
        "chat_template": None,
        "special_tokens": {},
        "eos_token_ids": (1,),
        "bos_token_id": None,
        "add_bos": False,
        "architecture": "Ledger",
        "parameters": 0,
        "dtype": "float32",
        "form": FORM,
    }
    return ModelCard(**(fields | changes))  # type: ignore[arg-type]


def said(prompt: list[int], choice: int, index: int) -> int:
    """The token that every engine says."""
    return (
        int.from_bytes(blake2b(repr((prompt, choice, index)).encode(), digest_size=2).digest(), "big") % 1000
    )


@dataclass(frozen=True)
class Called:
    """A verb that reached an engine, with its positions as they were given."""

    unit: str
    verb: str
    begin: int | None = None
    end: int | None = None


@dataclass
class World:
    """What the engines of one test share. The verb number `fault_at` (renewals do not count) fails with
    `fault`, before or after it has acted."""

    engines: dict[str, LedgerEngine] = field(default_factory=dict)
    journal: list[Called] = field(default_factory=list)
    fault: KvloomError | None = None
    fault_at: int = -1
    fault_after: bool = False

    def engine(self, name: str, *cards: ModelCard) -> LedgerEngine:
        made = self.engines[name] = LedgerEngine(name, self, cards or (card(),))
        return made

    @property
    def held(self) -> list[str]:
        """What anybody has of any request."""
        return [
            f"{engine.name}: {what} {request}"
            for engine in self.engines.values()
            for what, some in (
                ("room", engine.rooms),
                ("send", engine.sending),
                ("stream", engine.streams),
                ("pin", engine.pins),
            )
            for request in some
        ]


@dataclass
class Room:
    body: PrepRecv
    answer: Prepared
    arrived: dict[int, int] = field(default_factory=dict)

    @property
    def received(self) -> int:
        """Up to where everything is here."""
        at = self.answer.matched
        while at in self.arrived:
            at += 1
        return at


class LedgerEngine:
    """An `EngineClient`. down: cannot be reached. free: tokens that may be reserved together. pins: tokens by
    request. pace: turns of the event loop that a send takes. gate: streams wait for it after each token;
    answering: before the first; answers: `models` does."""

    def __init__(self, name: str, world: World, cards: tuple[ModelCard, ...]) -> None:
        self.name = name
        self.cards = cards
        self.refuses = ""
        """Why it loads no adapter."""
        self.down = False
        self.free = 1 << 20
        self.pace = 1
        self.gate = asyncio.Event()
        self.gate.set()
        self.answering = asyncio.Event()
        self.answering.set()
        self.refusing = asyncio.Event()
        self.refusing.set()
        self.answers = asyncio.Event()
        self.answers.set()
        self.refusal: KvloomError | None = None
        self.rooms: dict[str, Room] = {}
        self.pins: dict[str, int] = {}
        self.sending: set[str] = set()
        self.streams: dict[str, set[int]] = {}  # and the choices that have been aborted
        self.cached: list[list[int]] = []
        self.computed = 0
        self.renewals = 0
        self.priorities: list[int] = []  # of its sends
        self.load_models: dict[str, ModelLoad] = {}
        self.total_blocks = 8
        self.levels: tuple[Level, ...] = ()
        self.draining = False
        self.aborts: list[tuple[str, int | None]] = []
        self._world = world
        self._tickets = 0
        self._stopped: set[str] = set()

    def restart(self) -> None:
        """A new process in the old one's place: all gone."""
        self.rooms.clear()
        self.pins.clear()
        self.sending.clear()
        self.streams.clear()
        self.cached.clear()

    async def models(self) -> list[ModelCard]:
        await self.answers.wait()
        self._reach()
        return list(self.cards)

    async def load(self) -> UnitLoad:
        await asyncio.sleep(0)
        self._reach()
        return UnitLoad(
            total_blocks=self.total_blocks,
            free_blocks=8,
            block_bytes=256,
            policy="adbs",
            models=self.load_models,
            draining=self.draining,
            priorities=self.levels,
        )

    async def prep_recv(self, body: PrepRecv) -> Prepared:
        late = await self._enter("prep_recv", end=body.end)
        self._serves(body.model)
        if body.sender is not None:
            FORM.refuse_unlike(body.sender, model=body.model)
        known = self.rooms.get(body.request)
        if known is not None and known.body != body:
            raise BadRequest(f"request {body.request} has another reservation here")
        if known is None:
            end = resolve(body.end, len(body.prompt), "end")
            matched = self._matched(body.prompt, end)
            if end - matched > self.free - sum(
                one.answer.end - one.answer.matched for one in self.rooms.values()
            ):
                raise OutOfBlocks(f"{self.name}: no room for {end - matched} tokens")
            known = self.rooms[body.request] = Room(body, self._prepared(body.model, matched, end))
        await asyncio.sleep(0)
        self._fail(late)
        return known.answer

    def _prepared(self, model: str, matched: int, end: int) -> Prepared:
        self._tickets += 1
        address = KVAddress(
            model=model,
            form=FORM,
            begin=matched,
            end=end,
            blocks=b"",
            ticket=Ticket(slot=0, generation=self._tickets),
        )
        where = Endpoint(unit=self.name, kind="modelled", where=b"")
        return Prepared(matched=matched, end=end, address=address, peer=where, lease=LEASE)

    async def remote_send(self, body: RemoteSend) -> Sent:
        late = await self._enter("remote_send", body.begin, body.end)
        self._serves(body.model)
        begin, end = body.begin, resolve(body.end, len(body.prompt), "end")
        if not body.address.begin <= begin < end <= body.address.end:
            raise BadRequest(f"[{begin}, {end}) is not in the address")
        peer = self._world.engines[body.peer.unit]
        self.sending.add(body.request)
        self.priorities.append(body.priority)
        try:
            for _ in range(self.pace):
                await asyncio.sleep(0)
                if body.request in self._stopped:
                    raise BadRequest(f"request {body.request} was aborted")
            self._fail(late)
            self._connected()
            peer._receive(body, begin, end)
        finally:
            self.sending.discard(body.request)
        cached = max(self._matched(body.prompt, end) - begin, 0)
        self._compute(body.prompt[:end], begin + cached)
        return Sent(cached=cached, computed=end - begin - cached)

    def _receive(self, body: RemoteSend, begin: int, end: int) -> None:
        if self.down:
            raise Unavailable(f"the peer {self.name} is gone")
        room = self.rooms.get(body.request)
        if room is None or room.answer.address.ticket != body.address.ticket:
            raise BadRequest("the peer's reservation is gone")
        if any(at in room.arrived for at in range(begin, end)):
            raise BadRequest("another send has claimed these tokens")
        room.arrived |= dict(zip(range(begin, end), body.prompt[begin:end], strict=True))

    async def renew(self, request: str) -> Lease:
        self._reach()
        self.renewals += 1
        if request not in self.rooms and request not in self.pins:
            raise BadRequest(f"nothing is reserved for request {request}")
        return Lease(lease=LEASE)

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        late = await self._enter("start_generate", body.begin)
        self._serves(body.model)
        if self.refusal is not None:
            await self.refusing.wait()
            raise self.refusal
        if body.request in self.streams:
            raise BadRequest(f"request id {body.request} is in use")
        self._take(body)
        aborted = self.streams[body.request] = set()
        try:
            yield []
            await self.answering.wait()
            await asyncio.sleep(0)
            self._fail(late)
            yield []
            if body.sampling.prompt_logprobs is not None and not body.begin:
                yield [PromptEvent([TokenLogprob(-1.0) for _ in body.prompt[1:]])]
            made = {one.choice: len(one.tokens) for one in body.choices}
            for index in range(min(made.values()), body.sampling.max_tokens):
                await asyncio.sleep(0)
                self._connected()
                live = [choice for choice, begin in made.items() if begin <= index and choice not in aborted]
                if live:
                    yield [TokenEvent(choice, index, said(body.prompt, choice, index)) for choice in live]
                await self.gate.wait()
            yield [EndEvent(c, "abort" if c in aborted else "length") for c in made]
        finally:
            self.streams.pop(body.request, None)

    def _take(self, body: StartGenerate) -> None:
        begin = resolve(body.begin, len(body.prompt), "begin")
        room = self.rooms.get(body.request)
        if room is None and begin:
            raise BadRequest(f"nothing is reserved for request {body.request}")
        if room is not None:
            if begin > room.received:
                raise BadRequest(f"begin: {begin} is past the {room.received} tokens received")
            assert all(body.prompt[at] == token for at, token in room.arrived.items())
            del self.rooms[body.request]
        self._compute(body.prompt, max(begin, self._matched(body.prompt, len(body.prompt) - 1)))

    async def abort(self, request: str, choice: int | None = None) -> None:
        self._reach()
        await asyncio.sleep(0)
        self.aborts.append((request, choice))
        if choice is not None:
            self.streams.get(request, set()).add(choice)
            return
        self.rooms.pop(request, None)
        self.pins.pop(request, None)
        self._stopped.add(request)
        self.streams.get(request, set()).update(range(128))

    async def pin(self, body: Pin) -> Pinned:
        late = await self._enter("pin", end=len(body.prompt))
        self._serves(body.model)
        tokens = self._matched(body.prompt, len(body.prompt))
        if tokens:
            self.pins[body.request] = tokens
        else:
            self.pins.pop(body.request, None)
        await asyncio.sleep(0)
        self._fail(late)
        return Pinned(tokens=tokens, lease=LEASE)

    async def unpin(self, request: str) -> Held:
        return Held(tokens=self.pins.pop(request, 0))

    async def hold(self, request: str, sends: Sequence[RemoteSend] = ()) -> Standing:
        raise NotImplementedError

    async def resume(self, request: str) -> None:
        raise NotImplementedError

    async def offer(self, body: Offer) -> Offered:
        raise NotImplementedError

    async def evict(self, body: Prefix) -> Evicted:
        return Evicted(tokens=0)

    async def load_adapter(self, body: LoadAdapter) -> None:
        self._reach()
        if self.refuses:
            raise BadRequest(self.refuses, param="lora_path")
        if body.name not in [one.name for one in self.cards]:
            self.cards = (*self.cards, card(body.name, path=body.path, parent=body.base))

    async def unload_adapter(self, body: UnloadAdapter) -> None:
        self._reach()
        if body.name not in [one.name for one in self.cards]:
            raise UnknownModel(f"no adapter {body.name}")
        self.cards = tuple(one for one in self.cards if one.name != body.name)

    async def check_model(self, body: CheckModel) -> None:
        self._reach()
        if self.refuses:
            raise BadRequest(self.refuses, param="model")

    async def contents(self, body: CachedSince) -> CacheChanges:
        self._reach()
        return CacheChanges(life=self.name, version=0)

    # -- the books --------------------------------------------------------------------------------------

    async def _enter(self, verb: str, begin: int | None = None, end: int | None = None) -> KvloomError | None:
        """The fault that is due once the verb has acted; one that is due before is raised."""
        await asyncio.sleep(0)
        self._reach()
        due = self._world.fault if len(self._world.journal) == self._world.fault_at else None
        self._world.journal.append(Called(self.name, verb, begin, end))
        if not self._world.fault_after:
            self._fail(due)
            return None
        return due

    def _fail(self, due: KvloomError | None) -> None:
        if due is not None:
            raise due

    def _reach(self) -> None:
        if self.down:
            raise Unavailable("the engine cannot be reached")

    def _connected(self) -> None:
        if self.down:
            raise ConnectionLost("the connection to the engine broke")

    def _serves(self, model: str) -> None:
        if model not in {one.name for one in self.cards}:
            raise UnknownModel(f"the model `{model}` is not served here")

    def _matched(self, prompt: list[int], end: int) -> int:
        """Whole pages of prompt[:end] that are cached."""
        longest = 0
        for context in self.cached:
            same = next((at for at, (a, b) in enumerate(zip(context, prompt, strict=False)) if a != b), None)
            longest = max(longest, min(len(context), len(prompt)) if same is None else same)
        return min(longest, end) // PAGE * PAGE

    def _compute(self, context: list[int], begin: int) -> None:
        self.computed += len(context) - begin
        self.cached.append(context)
