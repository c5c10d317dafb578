"""Asks a router's units what their prefix caches hold, for its index, lets them keep prefixes for longer than
a request, and copies prefixes from one to another."""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Final, Protocol

from kvloom.cluster.policies.moving import MoveCounts, MoveTerms
from kvloom.kv.prefix_copies import CopyPrefix, CopyView, EvictPrefix, PrefixUse, plan_copies
from kvloom.kv.prefix_index import PrefixIndex
from kvloom.types.client import EngineClient
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError
from kvloom.types.request import ModelCard, StartGenerate
from kvloom.types.verbs import LONGEST_PIN, CachedSince, Pin, Prefix, PrepRecv, RemoteSend

PERIOD: Final = 0.5  # seconds between an answer and the next time the unit is asked
LINGER: Final = 10.0  # seconds for which it is still asked when no program wants to know any more
ANSWER_SECONDS: Final = 5.0  # after which an answer is not waited for any more

COPY_PERIOD: Final = 1.0  # seconds between two looks at the copies
WINDOW: Final = 30.0  # seconds of uses that are counted together, and in which copies are kept up
STEP_SECONDS: Final = 30.0  # that a copy or an eviction may take
MOST_COUNTED: Final = 1 << 16  # pages, in one window
MOST_KNOWN: Final = 64  # prefixes

_log = logging.getLogger(__name__)
_NEVER: Final = CachedSince(life="", version=0)


def lasting_pin(body: StartGenerate, end: int, seconds: int) -> Pin:
    """Returns the pin of the first `end` tokens of a request's prompt, for a time that has nothing to do with
    the request's. Its id follows from the model, the tenant, the salt and the tokens, so that another request
    that asks for the same renews it. Raises ValueError for a time that no pin lasts."""
    if not 1 <= seconds <= LONGEST_PIN:
        raise ValueError(f"keep: {seconds} s cannot be; 1 to {LONGEST_PIN} is right")
    prompt, whose = body.prompt[:end], repr((body.model, body.tenant, body.salt))
    content = blake2b(array("i", prompt).tobytes() + whose.encode(), digest_size=16).hexdigest()
    return Pin(
        model=body.model,
        request=f"kept~{content}",
        prompt=prompt,
        lease=seconds,
        salt=body.salt,
        tenant=body.tenant,
    )


class PrefixWatch:
    """Tells the index what one unit holds, for as long as programs ask the index where prefixes are."""

    def __init__(
        self, unit: str, client: EngineClient, index: PrefixIndex, clock: Clock, up: Callable[[], bool]
    ) -> None:
        """up: whether the unit can be asked."""
        self._unit = unit
        self._client = client
        self._index = index
        self._clock = clock
        self._up = up
        self._told = _NEVER
        self._lives = 0  # how often the unit was forgotten
        self._wanted = asyncio.Event()
        self._until = 0.0

    def want(self) -> None:
        """Lets the unit be asked from now on."""
        self._until = self._clock.now() + LINGER
        self._wanted.set()

    def forget(self) -> None:
        """Forgets what the unit holds, because it is gone or another one."""
        self._told = _NEVER
        self._lives += 1
        self._index.forget(self._unit)

    async def watch(self) -> None:
        while True:
            await self._wanted.wait()
            while self._clock.now() < self._until:
                if self._up():
                    await self._ask()
                await self._clock.sleep(PERIOD)
            self._wanted.clear()

    async def _ask(self) -> None:
        """Asks once. A unit that does not answer is found out by whoever sends it requests."""
        life = self._lives
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await self._client.contents(self._told)
        except (KvloomError, TimeoutError):
            return
        if life == self._lives:  # else it is of a unit that was lost meanwhile
            self._index.apply(self._unit, answer)
            self._told = CachedSince(life=answer.life, version=answer.version)


class Holder(Protocol):
    """A replica, as copies are made of it."""

    @property
    def name(self) -> str: ...

    @property
    def card(self) -> ModelCard: ...

    @property
    def client(self) -> EngineClient: ...

    @property
    def up(self) -> bool: ...

    @property
    def load(self) -> int: ...

    @property
    def page_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Known:
    """A prefix that several requests began with."""

    model: str
    salt: str
    tokens: list[int]
    width: int
    copied: set[str]
    """The units to which it was copied."""


class _Uses:
    """Counts uses of late: those of the present window, and half of those of the window before."""

    def __init__(self) -> None:
        self._now: dict[bytes | str, int] = {}
        self._before: dict[bytes | str, int] = {}

    def __getitem__(self, key: bytes | str) -> float:
        return self._now.get(key, 0) + self._before.get(key, 0) / 2

    def count(self, key: bytes | str) -> None:
        """Counts one use, unless too much is counted in this window."""
        if key in self._now or len(self._now) < MOST_COUNTED:
            self._now[key] = self._now.get(key, 0) + 1

    def turn(self) -> None:
        """Begins the next window."""
        self._now, self._before = {}, self._now


class PrefixCopies:
    """Keeps as many copies of prefixes as `plan_copies` wants, for as long as programs ask for it. One step
    is taken after the other. A copy that fails is not tried again before the prefix is used again."""

    def __init__(
        self,
        index: PrefixIndex,
        replicas: Callable[[str], Sequence[Holder]],
        clock: Clock,
        choices: MoveCounts,
    ) -> None:
        """replicas: returns the replicas of a model. choices: counts which prefixes were worth a copy."""
        self.copied = 0
        """Prefixes that were copied, so far."""
        self.evicted = 0
        """Copies that were evicted, so far."""
        self._index = index
        self._replicas = replicas
        self._clock = clock
        self._choices = choices
        self._uses = _Uses()
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._most: dict[str, int] = {}  # copies, by model
        self._wanted = asyncio.Event()
        self._until = self._turn_at = 0.0
        self._names = (f"copy~{secrets.token_hex(8)}~{number}" for number in count())

    def used(self, model: str, prompt: Sequence[int], salt: str, most: int) -> None:
        """Counts a request that begins with the prompt. Of its prefixes that others begin with too, the one
        is kept in mind of which copies save most: its length times its uses."""
        replicas = self._replicas(model)
        if not replicas:
            return
        width = replicas[0].page_tokens
        self._most[model] = most
        self._uses.count(model)
        best, worth = b"", 0.0
        end = 0
        for at, name in enumerate(self._index.names(model, prompt, salt, width=width), 1):
            self._uses.count(name)
            uses = self._uses[name]
            if uses >= 2 and uses * at > worth:
                best, worth, end = name, uses * at, at * width
        if best:
            if best not in self._known:
                self._known[best] = _Known(model, salt, list(prompt[:end]), width, set())
            self._known.move_to_end(best)
            while len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        self._until = self._clock.now() + WINDOW
        self._wanted.set()

    async def watch(self) -> None:
        while True:
            await self._wanted.wait()
            self._turn_at = self._clock.now() + WINDOW
            while self._clock.now() < self._until:
                await self._clock.sleep(COPY_PERIOD)
                if self._clock.now() >= self._turn_at:
                    self._uses.turn()
                    self._turn_at = self._clock.now() + WINDOW
                for model in list(self._most):
                    for step in plan_copies(self._view(model)):
                        await self._take(model, step)
            self._wanted.clear()
            self._known.clear()
            self._most.clear()

    def _view(self, model: str) -> CopyView:
        known = {name: one for name, one in self._known.items() if one.model == model}
        return CopyView(
            prefixes=tuple(
                PrefixUse(name, len(one.tokens), self._uses[name], self._holders(one), frozenset(one.copied))
                for name, one in known.items()
            ),
            requests=self._uses[model],
            loads={replica.name: replica.load for replica in self._replicas(model) if replica.up},
            most=self._most[model],
        )

    def _holders(self, one: _Known) -> frozenset[str]:
        held = self._index.match(one.model, one.tokens, one.salt, width=one.width)
        return frozenset(unit for unit, tokens in held.items() if tokens == len(one.tokens))

    async def _take(self, model: str, step: CopyPrefix | EvictPrefix) -> None:
        known = self._known.get(step.prefix)
        replicas = {replica.name: replica for replica in self._replicas(model)}
        if known is None:
            return
        try:
            async with asyncio.timeout(STEP_SECONDS):
                if isinstance(step, CopyPrefix):
                    source, target = replicas[step.source], replicas[step.target]
                    if await self._pays(known, source, target):
                        await self._copy(known, source, target)
                        self.copied += 1
                    else:
                        self._known.pop(step.prefix, None)
                else:
                    await self._evict(known, replicas[step.unit])
                    self.evicted += 1
        except (KvloomError, TimeoutError, KeyError) as error:  # KeyError: the unit is gone
            _log.info("a prefix of %s stays where it is: %s", model, error)
            self._known.pop(step.prefix, None)

    async def _pays(self, one: _Known, source: Holder, target: Holder) -> bool:
        """Returns whether it takes less time to copy the prefix than to compute it at its destination."""
        here, there = await source.client.load(), await target.client.load()
        terms = MoveTerms.of(one.model, here, target.name, there)
        return self._choices.judge("prefix", terms, len(one.tokens)) != "computing"

    async def _copy(self, one: _Known, source: Holder, target: Holder) -> None:
        name = next(self._names)
        ask = PrepRecv(
            model=one.model, request=name, prompt=one.tokens, sender=source.card.form, salt=one.salt
        )
        try:
            given = await target.client.prep_recv(ask)
            if given.matched < given.end:
                order = RemoteSend(
                    model=one.model,
                    request=name,
                    prompt=one.tokens,
                    address=given.address,
                    peer=given.peer,
                    begin=given.matched,
                    salt=one.salt,
                )
                await source.client.remote_send(order)
            self._index.note(one.model, one.tokens, target.name, one.salt, width=one.width)
            one.copied.add(target.name)
        finally:  # what has arrived stays cached there
            with suppress(KvloomError):
                await target.client.abort(name)

    async def _evict(self, one: _Known, holder: Holder) -> None:
        await holder.client.evict(Prefix(model=one.model, prompt=one.tokens, salt=one.salt))
        one.copied.discard(holder.name)
        self._index.drop(one.model, one.tokens, holder.name, one.salt, width=one.width)
