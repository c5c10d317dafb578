"""A router program sees one model's replicas: which are up, how much each has to do, and ways to choose."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Final, Protocol

from kvloom.cluster.policies.dispatch import Dispatch, freest, infaas
from kvloom.cluster.policies.moving import MoveCounts, MoveTerms
from kvloom.cluster.prefixes import PrefixCopies, PrefixWatch
from kvloom.engine.freeness import Arrival
from kvloom.kv.prefix_index import CHUNK, PrefixIndex
from kvloom.types.client import EngineClient
from kvloom.types.clock import Clock
from kvloom.types.errors import ConnectionLost, EngineDied, KvloomError, Unavailable
from kvloom.types.load import UnitLoad
from kvloom.types.request import ModelCard, StartGenerate

CALL_TOKENS: Final = 128  # what a call in flight weighs, in prompt tokens
PERIOD: Final = 0.5  # seconds between an answer and the next time the unit is asked
LINGER: Final = 10.0  # seconds for which it is still asked when nobody wanted to know any more


class LoadReport:
    """Keeps a unit's load fresh. The requests that this router has sent there since the unit was asked count
    as running already, though the unit may have told of them: for one period at most. Other routers'
    requests, and those that end, are seen a period late."""

    def __init__(self, ask: Callable[[], Awaitable[UnitLoad | None]], clock: Clock) -> None:
        """`ask` returns the unit's load, and None if the unit does not answer."""
        self._ask = ask
        self._clock = clock
        self._load: UnitLoad | None = None
        self._reported: UnitLoad | None = None
        self._sent: list[Arrival] = []  # since it was asked last
        self._wanted = asyncio.Event()
        self._until = 0.0

    def expected(self) -> UnitLoad | None:
        """Returns the unit's load by now, and None if it is not known. The unit is asked from now on."""
        self._want()
        return self._load

    def reported(self) -> UnitLoad | None:
        """Returns the load as the unit told it, without what was sent since."""
        self._want()
        return self._reported

    def _want(self) -> None:
        self._until = self._clock.now() + LINGER
        self._wanted.set()

    def sent(self, one: Arrival) -> None:
        if self._wanted.is_set():
            self._sent.append(one)
            if self._load is not None:
                self._load = one.placed(self._load)

    def forget(self) -> None:
        """Drops the load, because the unit is gone or another one."""
        self._load = self._reported = None
        self._sent.clear()

    async def watch(self) -> None:
        while True:
            await self._wanted.wait()
            while self._clock.now() < self._until:
                self._sent.clear()
                load = self._reported = await self._ask()
                self._load = load and reduce(lambda had, one: one.placed(had), self._sent, load)
                await self._clock.sleep(PERIOD)
            self._wanted.clear()
            self.forget()


class ReplicaHost(Protocol):
    """The unit of a replica, as the replica and its requests see it."""

    @property
    def name(self) -> str: ...

    @property
    def client(self) -> EngineClient: ...

    @property
    def report(self) -> LoadReport:
        """Returns the unit's last load, which is kept fresh while programs ask for it."""

    @property
    def prefixes(self) -> PrefixWatch:
        """Returns the object that keeps the index fresh while programs ask where prefixes are."""

    @property
    def up(self) -> bool:
        """Returns whether the unit can be asked for something new."""

    @property
    def awaited(self) -> bool:
        """Returns whether the unit will take requests again, so that they may wait for it."""

    @property
    def lost(self) -> bool:
        """Returns whether the unit is down, and is asked until it answers."""

    @property
    def died(self) -> bool:
        """Returns whether the unit has lost its process, as far as anyone knows, and nobody has ordered
        that."""

    @property
    def replicas(self) -> Mapping[str, object]:
        """Returns the models that the unit serves, or is to serve, by name."""

    @property
    def may_start(self) -> bool:
        """Returns whether the unit has not failed to start just now."""

    @property
    def away(self) -> bool:
        """Returns whether the unit was lost with its host, as far as anyone knows."""

    async def check(self, error: KvloomError | None = None) -> None:
        """Asks whether the unit still answers, and takes it for down if it does not. error: what has failed
        there."""

    def begin_call(self) -> None: ...

    def end_call(self) -> None: ...


class Replica:
    """A model on one unit, and what this router has asked of it."""

    def __init__(self, unit: ReplicaHost, card: ModelCard) -> None:
        self.unit = unit
        self.card = card
        self.calls = 0
        """Calls in flight there, each from its first reservation on."""
        self.queue = 0
        """Prompt tokens that the replica is to compute for requests that programs have sent its way.

        The tokens of a request count from its first verb on. They leave the queue together, because engines
        do not tell how far they are: when all has arrived for a replica that sends, and with the first token
        for one that generates. What the replica probably has cached does not count."""
        self.turn = 0
        """A count by which the replica that was chosen longest ago is found among its peers."""

    def __repr__(self) -> str:
        return f"{self.card.name} on {self.name}"

    @property
    def name(self) -> str:
        """Returns the name of the unit."""
        return self.unit.name

    @property
    def client(self) -> EngineClient:
        return self.unit.client

    @property
    def page_tokens(self) -> int:
        """Returns the tokens of a page there, by which the index tells prefixes apart."""
        return self.card.form.tokens_per_block if self.card.form else CHUNK

    @property
    def up(self) -> bool:
        """Returns whether the unit can be asked for something new, and still serves this model."""
        return self.unit.up and self.card.name in self.unit.replicas

    @property
    def awaited(self) -> bool:
        """Returns whether the unit will take requests again, and will still serve this model."""
        return self.unit.awaited and self.card.name in self.unit.replicas

    @property
    def load(self) -> int:
        """Returns the prompt tokens that the replica has to compute."""
        return self.queue + CALL_TOKENS * self.calls

    def begin_call(self) -> None:
        self.calls += 1
        self.unit.begin_call()

    def end_call(self) -> None:
        self.calls -= 1
        self.unit.end_call()

    async def missed(self, error: Unavailable) -> Unavailable:
        """Returns the error with the unit's name, after the unit was asked whether it is still there. It is
        EngineDied if the unit was there when the request reached it, and is not any more."""
        await self.unit.check(error)
        died = isinstance(error, ConnectionLost) and self.unit.died
        return (EngineDied if died else Unavailable)(
            f"{self.name}: {error.message}", retry_after=error.retry_after
        )


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas of one model, of which a program chooses. `among` are some of those that are up; left out,
    all of these are meant."""

    model: str
    replicas: tuple[Replica, ...]
    """All of them, whether they are up or not, in the order of the config."""
    index: PrefixIndex
    arrival: Arrival
    """The request that is to go to one of the replicas."""
    copies: PrefixCopies
    """Keeps copies of the prefixes that many requests begin with."""
    salt: str = ""
    """The salt with which the request's prefixes are cached; the index is asked for no other."""
    choices: MoveCounts = field(default_factory=MoveCounts)
    """Counts what was copied, and what was computed again."""

    @property
    def up(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.up]

    def turn(self, among: Sequence[Replica] | None = None) -> Replica:
        """Returns the replica whose turn it is, round robin."""
        return self._chosen(min(self._candidates(among), key=lambda replica: replica.turn))

    def least_loaded(self, among: Sequence[Replica] | None = None) -> Replica:
        """Returns the replica that has least to do; among equals, the one whose turn it is."""
        candidates = self._candidates(among)
        return self._chosen(min(candidates, key=lambda replica: (replica.load, replica.turn)))

    def freest(self, among: Sequence[Replica] | None = None) -> Replica:
        """Returns the replica whose unit has most freeness with the request, or headroom for its level
        already. Known is the unit's last report and what this router has sent there since; if none has
        reported lately, the least loaded replica is returned."""
        return self._by_reports(freest, among)

    def emptiest(self, among: Sequence[Replica] | None = None) -> Replica:
        """Returns the replica whose unit has least memory in use, what waits there counted; known is what
        `freest` knows."""
        return self._by_reports(infaas, among)

    def _by_reports(self, dispatch: Dispatch[Replica], among: Sequence[Replica] | None) -> Replica:
        candidates = self._candidates(among)
        loads = {replica: load for replica in candidates if (load := replica.unit.report.expected())}
        chosen = dispatch(loads, {replica: replica.turn for replica in loads}, self.arrival)
        return self.least_loaded(candidates) if chosen is None else self._chosen(chosen)

    def nearest(
        self, prompt: Sequence[int], among: Sequence[Replica] | None = None, *, slack: int
    ) -> Replica:
        """Returns the replica that holds the longest prefix of `prompt`, of those that have at most `slack`
        tokens of load more than the least loaded."""
        candidates, held = self._candidates(among), self.matched(prompt)
        least = min(replica.load for replica in candidates)
        near = [replica for replica in candidates if replica.load <= least + slack]
        longest = max(held.get(replica, 0) for replica in near)
        return self.least_loaded([replica for replica in near if held.get(replica, 0) == longest])

    def split(self, prefill: int) -> tuple[list[Replica], list[Replica]]:
        """Returns who prefills, the first `prefill` replicas, and who decodes. If one side is down or
        missing, the other is all there is, and it decodes."""
        first = [replica for replica in self.replicas[:prefill] if replica.up]
        others = [replica for replica in self.replicas[prefill:] if replica.up]
        return (first, others) if first and others else ([], first or others)

    def matched(self, prompt: Sequence[int]) -> dict[Replica, int]:
        """Returns how many tokens of `prompt` each replica that is up probably holds; those that hold none
        are left out. The units are asked what they hold from now on."""
        if len(self.replicas) > 1:
            for replica in self.up:
                replica.unit.prefixes.want()
        return self._matched(prompt)

    def _matched(self, prompt: Sequence[int]) -> dict[Replica, int]:
        if len(self.replicas) == 1:
            return {}
        up = self.up
        held = {
            width: self.index.match(self.model, prompt, self.salt, width=width)
            for width in {replica.page_tokens for replica in up}
        }
        by_replica = {replica: held[replica.page_tokens].get(replica.name, 0) for replica in up}
        return {replica: tokens for replica, tokens in by_replica.items() if tokens}

    def spread(self, prompt: Sequence[int], most: int) -> None:
        """Counts the prompt's use, and lets prefixes that many requests of late begin with be copied to up to
        `most` replicas in all, as `kv/prefix_copies.py` decides; surplus copies of what is not used any more
        are evicted. It goes on for a while after the last call."""
        if len(self.replicas) > 1:
            self.copies.used(self.model, prompt, self.salt, most)

    def copies_sooner(self, source: Replica, target: Replica, tokens: int) -> bool:
        """Returns whether `source` copies so many tokens of context to `target` sooner than that computes
        them again; True if the link or the speed is not known yet. Known is what the units have reported
        lately; they are asked for it from now on."""
        here, there = source.unit.report.reported(), target.unit.report.reported()
        terms = MoveTerms.of(self.model, here, target.name, there)
        return self.choices.judge("context", terms, tokens) != "computing"

    def to_compute(self, prompt: Sequence[int], replica: Replica, begin: int, end: int) -> int:
        """Returns the number of tokens of prompt[begin:end] that `replica` probably has not cached."""
        return max(0, end - max(begin, self._matched(prompt).get(replica, 0)))

    def note(self, prompt: Sequence[int], replica: Replica, end: int | None = None) -> None:
        """Remembers that `replica` holds prompt[:end] now, or soon."""
        if len(self.replicas) > 1:
            width = replica.page_tokens
            self.index.note(self.model, prompt, replica.name, self.salt, end=end, width=width)

    def dropped(self, prompt: Sequence[int], replica: Replica, end: int | None = None) -> None:
        """Remembers that `replica` was asked to drop prompt[:end]."""
        width = replica.page_tokens
        self.index.drop(self.model, prompt, replica.name, self.salt, end=end, width=width)

    def without(self, some: Collection[Replica]) -> Fleet:
        return replace(self, replicas=tuple(one for one in self.replicas if one not in some))

    def _candidates(self, among: Sequence[Replica] | None) -> Sequence[Replica]:
        candidates = self.up if among is None else among
        if not candidates:
            names = ", ".join(
                one.name if one.unit.may_start else f"{one.name}, which failed to start"
                for one in self.replicas
            )
            raise Unavailable(f"no unit that serves {self.model} is up (of {names})", retry_after=1)
        return candidates

    def _chosen(self, replica: Replica) -> Replica:
        replica.turn = 1 + max(one.turn for one in self.replicas)
        return replica


def arriving(body: StartGenerate) -> Arrival:
    """Returns the request as the dispatch policies know it."""
    made = sum(len(one.tokens) for one in body.made)
    return Arrival(body.model, len(body.prompt), len(body.choices), body.priority, made)
