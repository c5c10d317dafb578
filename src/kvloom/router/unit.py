"""The router's view of one engine process: the models that it serves, and whether it can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Final

from kvloom.cluster.prefixes import PrefixWatch
from kvloom.cluster.state import Outlook
from kvloom.kv.prefix_index import PrefixIndex
from kvloom.router.replicas import LoadReport, Replica
from kvloom.types.client import EngineClient
from kvloom.types.clock import Clock
from kvloom.types.errors import ConfigError, HostAway, KvloomError, Unavailable
from kvloom.types.load import UnitLoad
from kvloom.types.request import ModelCard
from kvloom.types.service import Service

LATELY: Final = 60.0  # seconds for which a connection that broke may go unnoticed, as nobody reads it
ANSWER_SECONDS: Final = 5.0  # after which an engine that does not answer counts as away
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # between two times that a lost unit is asked
AFTER_FAILURE: Final = 10.0  # seconds for which nobody waits for a unit that has failed to start


class _Stopping(Unavailable):
    """Says that the engine has answered that it was told to end."""


class Unit:
    """The fleet's controller says how it stands (`stand`), and the router finds out whether it answers. If
    there is no controller it stands as one that is here. What a unit has served stays known when it has lost
    its process."""

    def __init__(
        self,
        name: str,
        client: EngineClient,
        clock: Clock,
        *,
        index: PrefixIndex,
        admit: Callable[[Unit, Sequence[ModelCard]], Sequence[ModelCard]],
        lost: Callable[[Unit], None],
        changed: Callable[[Iterable[str]], None],
        emptied: Callable[[], None] = lambda: None,
        managed: bool = False,
        cards: Sequence[ModelCard] = (),
    ) -> None:
        """index: is told what the unit has cached; admit: called with the cards each time that the unit
        tells what it serves; returns those that count, and raises KvloomError if it must stay out; lost:
        called each time that the unit goes down; changed: called with the models for which the unit is up,
        or is not to be waited for any more; emptied: called when the last call there has ended; managed:
        whether there is a controller, which starts what has died again; cards: what the unit serves, as far
        as anyone knows."""
        self.name = name
        self.client = client
        self.replicas = {card.name: Replica(self, card) for card in cards}
        self.up = False
        """Whether it takes requests."""
        self.problem: KvloomError | None = None
        """The reason why it is down."""
        self.outlook: Outlook = "starting" if managed else "here"
        self.drained = False
        """Whether it is to get no requests, though it is here."""
        self.away = False
        """Whether it was lost with its host, as far as anyone knows."""
        self.calls = 0
        """Requests in flight there, of all its models."""
        self.report = LoadReport(self._load_if_up, clock)
        self.prefixes = PrefixWatch(name, client, index, clock, lambda: self.up)
        self._clock = clock
        self._admit = admit
        self._lost = lost
        self._changed = changed
        self._emptied = emptied
        self._managed = managed
        self._life: object = None  # The process that was asked what it serves.
        self._come: object = None  # One that is here, and is to be asked.
        self._to_be_asked = asyncio.Event()
        self._questions = 0  # How often it was asked what it serves.
        self._settled = 0  # The last of these questions that was answered, or failed.
        self._checking = asyncio.Lock()
        self._answered_at = clock.now()
        self._back_at = -LATELY  # since it was away
        self._idle_since = clock.now()
        self._failed_at: float | None = None  # To start.

    @property
    def service(self) -> Service:
        """Returns how the unit stands, for those who run the fleet."""
        match self.outlook:
            case "restarting" | "starting" | "down" | "away":
                return self.outlook
            case "failed":
                return "away"
            case "here" if not self.drained:
                return "up" if self.up else "down"
            case _:
                return "draining" if self.calls else "drained"

    @property
    def lost(self) -> bool:
        """Returns whether the unit is down, and asked until it answers."""
        return self._to_be_asked.is_set() and not isinstance(self.problem, ConfigError)

    @property
    def died(self) -> bool:
        """Returns whether the unit has lost its process, as far as anyone knows, and nobody has ordered
        that: it was not told to end, for a restart or for good."""
        if self.outlook == "here":
            return self.lost and not isinstance(self.problem, _Stopping)
        return self.outlook == "down"

    @property
    def awaited(self) -> bool:
        """Returns whether the unit will take requests again, as far as anyone knows, so that requests may
        wait for it."""
        match self.outlook:
            case "restarting" | "starting" | "down":
                return not self.drained
            case "here":
                return self._managed and self.lost
            case _:
                return self.may_start

    @property
    def may_start(self) -> bool:
        """Returns whether the unit has not failed to start just now."""
        return self._failed_at is None or self._clock.now() >= self._failed_at + AFTER_FAILURE

    @property
    def idle(self) -> float:
        """Returns the seconds since the last call there ended; 0 while there is one."""
        return 0.0 if self.calls else self._clock.now() - self._idle_since

    def stand(self, outlook: Outlook, *, drained: bool, life: object, problem: KvloomError | None) -> bool:
        """Takes in what the controller says. life: names the unit's process. problem: what it died of.
        Returns whether the unit is to be asked (`ask`) what it serves: until then one that has come stands as
        before, so that requests go on waiting for it."""
        waited_for = self.awaited or self.lost
        admitted = self.drained and not drained and outlook == "here"
        self.drained = drained
        if outlook == "here" and life != self._life:
            asked, self._come = self._come == life, life
            if self.outlook == "here" and self._managed and not asked:
                self.outlook = "down"
                self._withdraw()
            return not asked
        self._come = None
        if outlook == "failed" and self.outlook != "failed":
            self._failed_at = self._clock.now()
        elif outlook != "failed":
            self._failed_at = None
        if outlook != "here":
            self._life = None
            self.problem = problem
        self.outlook = outlook
        if self._takes:
            return admitted
        self._withdraw()
        if waited_for and not self.awaited:
            self._changed(self.replicas)
        return False

    @property
    def _takes(self) -> bool:
        """Returns whether the unit gets requests, if it answers."""
        return self.outlook == "here" and not self.drained

    async def watch(self) -> None:
        """Asks the unit whether it answers, while it is lost, ever more slowly."""
        while True:
            await self._to_be_asked.wait()
            pause = FIRST_PAUSE
            while self._to_be_asked.is_set():
                await self._clock.sleep(pause)
                await self.ask()
                pause = min(2 * pause, LONGEST_PAUSE)

    async def ask(self) -> None:
        """Learns what it serves. It is up if it answers, unless it is withdrawn. An answer does not count
        once a later question was answered or has failed, because another process may have given it."""
        life = self._come
        self._questions += 1
        question = self._questions
        failure: Exception | None = None
        cards: Sequence[ModelCard] = ()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                cards = await self.client.models()
            cards = self._admit(self, cards)
        except (KvloomError, TimeoutError) as error:
            failure = error
        if question < self._settled:
            return
        self._settled = question
        self._arrive(life)
        if failure is not None:
            self._lose(failure)
            if not self.awaited:
                self._changed(self.replicas)
            return
        for card in cards:
            known = self.replicas.setdefault(card.name, Replica(self, card))
            known.card = card
        self.keep_only({card.name for card in cards})
        if self.away:
            self.away, self._back_at = False, self._clock.now()
        self.up, self.problem = self._takes, None
        self._to_be_asked.clear()
        self._changed(self.replicas)

    def _arrive(self, life: object) -> None:
        """Notes that the process that was asked is the one that is here now, if its coming was told."""
        if life is not None and life == self._come:
            self._come, self._life, self.outlook = None, life, "here"
            self._idle_since = self._clock.now()
            self._failed_at = None

    async def check(self, error: KvloomError | None = None) -> None:
        """Asks whether it is still alive, because a call has failed there. Callers who fail together ask
        once. A unit whose host does not answer is not asked, unless it has been away lately: then the error
        may be about that."""
        failed_at = self._clock.now()
        if isinstance(error, HostAway) and failed_at >= self._back_at + LATELY:
            if self.up:
                self.away = True
                self._lose(error)
            return
        async with self._checking:
            if not self.up or self._answered_at > failed_at:
                return
            if await self.load():
                self._answered_at = self._clock.now()

    async def load(self) -> UnitLoad | None:
        """Returns None if it does not answer, or is about to end."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                load = await self.client.load()
            if load.draining:
                raise _Stopping(f"{self.name}: the engine is stopping", retry_after=1)
        except (KvloomError, TimeoutError) as error:
            self._lose(error)
            return None
        return load

    async def _load_if_up(self) -> UnitLoad | None:
        return await self.load() if self.up else None

    def begin_call(self) -> None:
        self.calls += 1

    def end_call(self) -> None:
        self.calls -= 1
        if not self.calls:
            self._idle_since = self._clock.now()
            self._emptied()

    def withdraw(self) -> None:
        """Gives it no requests until it is admitted, however well it answers."""
        self.drained = True
        self._withdraw()

    async def admit(self) -> None:
        """Undoes `withdraw`. The unit may be a new process."""
        self.drained = False
        self._lost(self)
        await self.ask()

    def keep_only(self, models: Set[str]) -> None:
        """Lets the unit serve no other models from now on; what runs there goes on."""
        gone = self.replicas.keys() - models
        for model in gone:
            del self.replicas[model]
        self._changed(gone)

    def _withdraw(self) -> None:
        self.up = False
        self._to_be_asked.clear()
        self._lost(self)

    def _lose(self, error: Exception) -> None:
        self.up = False
        self.problem = error if isinstance(error, KvloomError) else None
        self._lost(self)
        if self._takes:
            self._to_be_asked.set()
