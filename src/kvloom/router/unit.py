"""One engine process as the router knows it: what it serves, and whether it can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

from kvloom.router.replicas import Replica
from kvloom.router.report import Report
from kvloom.types.client import EngineClient
from kvloom.types.clock import Clock
from kvloom.types.errors import ConfigError, KvloomError, Unavailable
from kvloom.types.load import UnitLoad
from kvloom.types.request import ModelCard
from kvloom.types.service import Service

ANSWER_SECONDS: Final = 5.0  # after which an engine that does not answer counts as away
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # between two times that a lost unit is asked
AFTER_FAILURE: Final = 10.0  # seconds for which nobody waits for a unit that has failed to start

Presence = Literal["here", "leaving", "ending", "away", "starting", "removed"]


class Unit:
    """admit: called with the cards whenever the unit comes up, and raises KvloomError where it must stay out.
    lost: called whenever it goes down; changed: when it is up, or is not to be waited for any more. `problem`
    says why it is down. withdrawn: it is, or starts so. restarting: it is about to be another process.
    presence: whether it has a process at all; leaving: it is to lose it once nothing runs there; ending: it
    does. away: it has none, and serves these as far as anyone knows. What a unit has served stays known when
    it has lost its process."""

    def __init__(
        self,
        name: str,
        client: EngineClient,
        clock: Clock,
        *,
        admit: Callable[[Unit, Sequence[ModelCard]], None],
        lost: Callable[[Unit], None],
        changed: Callable[[], None],
        withdrawn: bool = False,
        away: Sequence[ModelCard] | None = None,
    ) -> None:
        self.name = name
        self.client = client
        self.replicas = {card.name: Replica(self, card) for card in away or ()}
        self.up = False
        self.problem: KvloomError | None = None
        self.withdrawn = withdrawn or away is not None
        self.restarting = False
        self.presence: Presence = "here" if away is None else "away"
        self.calls = 0  # in flight there, of all its models
        self.report = Report(self._load_if_up, clock)
        self._waits: set[asyncio.Future[bool]] = set()  # for it to be empty
        self._clock = clock
        self._admit = admit
        self._lost = lost
        self._changed = changed
        self._to_be_asked = asyncio.Event()
        self._checking = asyncio.Lock()
        self._answered_at = clock.now()
        self._idle_since = clock.now()
        self._failed_at: float | None = None  # to start

    @property
    def service(self) -> Service:
        if self.restarting:
            return "restarting"
        if self.presence in ("away", "starting"):
            return self.presence
        if self.withdrawn:
            return "draining" if self.calls else "drained"
        return "up" if self.up else "down"

    @property
    def lost(self) -> bool:
        """Down, and asked until it answers."""
        return self._to_be_asked.is_set() and not isinstance(self.problem, ConfigError)

    @property
    def awaited(self) -> bool:
        """It will be up again without having died, and requests may wait for that."""
        coming = self.presence not in ("here", "removed")
        return self.restarting or (coming and self.may_start)

    @property
    def may_start(self) -> bool:
        """It has not failed to do so just now."""
        return self._failed_at is None or self._clock.now() >= self._failed_at + AFTER_FAILURE

    @property
    def idle(self) -> float:
        """Seconds since the last call there ended; 0 while there is one."""
        return 0.0 if self.calls else self._clock.now() - self._idle_since

    async def watch(self) -> None:
        """Asks the unit while it is lost, ever more slowly."""
        while True:
            await self._to_be_asked.wait()
            pause = FIRST_PAUSE
            while self._to_be_asked.is_set():
                await self._clock.sleep(pause)
                await self.ask()
                pause = min(2 * pause, LONGEST_PAUSE)

    async def ask(self) -> None:
        """Learn what it serves. It is up where it answers, unless it is withdrawn."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                cards = await self.client.models()
            self._admit(self, cards)
        except (KvloomError, TimeoutError) as error:
            self._lose(error)
            return
        for card in cards:
            known = self.replicas.setdefault(card.name, Replica(self, card))
            known.card = card
        for gone in self.replicas.keys() - {card.name for card in cards}:
            del self.replicas[gone]
        self.up, self.problem = not self.withdrawn, None
        self._to_be_asked.clear()
        self._changed()

    async def check(self) -> None:
        """A call has failed there: is it still alive? Callers who fail together ask once."""
        failed_at = self._clock.now()
        async with self._checking:
            if not self.up or self._answered_at > failed_at:
                return
            if await self.load():
                self._answered_at = self._clock.now()

    async def load(self) -> UnitLoad | None:
        """None where it does not answer, or is about to end."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                load = await self.client.load()
            if load.draining:
                raise Unavailable(f"{self.name}: the engine is stopping", retry_after=1)
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
            self._end_waits(emptied=True)

    async def emptied(self) -> bool:
        """Until no call is in flight there; False where it is admitted before that."""
        if not self.calls:
            return True
        wait: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waits.add(wait)
        try:
            return await wait
        finally:
            self._waits.discard(wait)

    def withdraw(self) -> None:
        """Down until it is admitted, however well it answers."""
        self.withdrawn = True
        self.up = False
        self._to_be_asked.clear()
        self._lost(self)

    async def admit(self) -> None:
        """Undoes `withdraw`. The unit may be a new process."""
        self.withdrawn = False
        self._end_waits(emptied=False)
        self._lost(self)
        await self.ask()

    @contextmanager
    def restarts(self) -> Iterator[None]:
        """While in it the unit is restarting, and requests that nobody else can answer wait for it."""
        self.restarting = True
        try:
            yield
        finally:
            self.restarting = False
            self._changed()

    def leave(self) -> None:
        """Give it no new request: once it is empty it is to lose its process."""
        self.presence = "leaving"
        self.withdraw()
        self._changed()

    def gone(self, presence: Presence = "away") -> None:
        """It has no process any more. removed: nor will it."""
        self.presence = presence
        self.problem = None
        self.up = False
        self._to_be_asked.clear()
        self._changed()

    def failed(self, problem: KvloomError) -> None:
        """It could not get one."""
        self._failed_at = self._clock.now()
        self.gone()
        self.problem = problem

    def come(self) -> None:
        """It is about to have a process."""
        self.presence = "starting"

    async def arrive(self) -> None:
        """It has one, or stays."""
        self.presence = "here"
        self._idle_since = self._clock.now()
        self._failed_at = None
        await self.admit()
        self._changed()

    def _end_waits(self, *, emptied: bool) -> None:
        for wait in self._waits:
            if not wait.done():
                wait.set_result(emptied)

    def _lose(self, error: Exception) -> None:
        self.up = False
        if self.presence != "ending":
            self.problem = error if isinstance(error, KvloomError) else None
        self._lost(self)
        if not self.withdrawn:
            self._to_be_asked.set()
