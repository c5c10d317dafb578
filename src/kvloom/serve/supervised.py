"""A process that is kept alive: started, watched, and started again when it has died."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvloom.serve.component import Component, Spawn, execute
from kvloom.serve.events import Answers, Asks, Doing, Event, Failed, Lost
from kvloom.serve.orders import (
    Begin,
    Forget,
    Order,
    Progress,
    Ready,
    Refused,
    Restart,
    Retire,
    Run,
    Standing,
    Stop,
)
from kvloom.serve.patience import Patience
from kvloom.types.clock import Clock


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing off"
    ENDED = "ended"


NEXT: Final = {
    State.STARTING: {State.STARTING, State.READY, State.BACKING_OFF, State.ENDED},
    State.READY: {State.STARTING, State.BACKING_OFF, State.ENDED},
    State.BACKING_OFF: {State.STARTING, State.ENDED},
    State.ENDED: set[State](),
}


STOP_SECONDS: Final = 4.0  # for a process to end by itself


@dataclass(frozen=True, slots=True)
class Role:
    """What a process is there for. order: what each new one is told. held: it serves only from `begin` on.
    spare: the others do well without it, so that even its first start is tried again. check: asks whether it
    is well."""

    name: str
    module: str
    order: Callable[[], Order]
    inherit: Sequence[int] = ()
    held: bool = False
    spare: bool = False
    check: Callable[[], Awaitable[bool]] | None = None


class Supervised:
    """`run` keeps it alive until `end`, and `tell` hears what happens. What did not work at the first start
    is not tried again: a person is there to read why."""

    def __init__(
        self,
        role: Role,
        clock: Clock,
        *,
        tell: Callable[[Event], None],
        log: Callable[[str, str], None],
        patience: Patience | None = None,
        spawn: Spawn = execute,
    ) -> None:
        self.name = role.name
        self.state = State.STARTING
        self.chat: tuple[str, ...] = ()
        self.begun = not role.held
        self._role = role
        self._clock = clock
        self._tell = tell
        self._log = log
        self._patience = patience or Patience()
        self._spawn = spawn
        self._component: Component | None = None
        self._since: float | None = None  # when the last one that answered began to
        self._ending = False
        self._told = asyncio.Event()  # to end, or to make way for a new one
        self._renewed = False  # and that has been told of by no event yet
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Until `end`, and then until the process has ended."""
        pause = 0.0
        try:
            while True:
                how, refused = await self._live()
                if self._ending:
                    return
                if self._since is None and not self._role.spare:
                    self._tell(Failed(self, how, refused))
                    return
                if not self._told.is_set():
                    pause = self._patience.pause(pause, self._lived())
                    await self._back_off(how, pause)
                    if self._ending:
                        return
                self._renewed = self._renewed or self._told.is_set()
                self._told.clear()
                self._turn(State.STARTING)
        finally:
            self._turn(State.ENDED)
            self._ended.set()

    async def begin(self) -> None:
        """Let it serve, and its successors as soon as they can."""
        self.begun = True
        if self._component is not None:
            await self._component.order(Begin())

    async def order(self, order: Order) -> None:
        """An order to the process, if it answers; its successors are not told."""
        if self._component is not None and self.state is State.READY:
            await self._component.order(order)

    def restart(self) -> None:
        """A new process in place of this one, without delay."""
        self._told.set()

    async def retire(self) -> None:
        """It ends when it has nothing left to do, and no other takes its place."""
        self._ending = True
        if self._component is not None and self.state is State.READY:
            await self._component.order(Retire())
        else:
            self._told.set()

    def end(self) -> None:
        self._ending = True
        self._told.set()

    def kill(self) -> None:
        self.end()
        if self._component is not None:
            self._component.kill()

    async def ended(self) -> None:
        await self._ended.wait()

    async def _live(self) -> tuple[str, bool]:
        """One process from its start to its end: how that came, and whether it refused its order."""
        try:
            component = await Component.start(self.name, self._role.module, self._role.inherit, self._spawn)
        except OSError as error:
            return f"cannot be started: {error.strerror}", False
        self._component = component
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._show(component))
                return await self._follow(component, group)
        finally:
            self._component = None
            component.kill()

    async def _follow(self, component: Component, group: asyncio.TaskGroup) -> tuple[str, bool]:
        stop = group.create_task(self._stop(component))
        begins = (Begin(),) if self._role.held and self.begun else ()
        await component.order(self._role.order(), *begins)
        watch: asyncio.Task[None] | None = None
        refusal: str | None = None
        async for report in component.reports():
            match report:
                case Progress(text):
                    self._tell(Doing(self, text))
                case Refused(message):
                    refusal = message
                case Standing() | Restart() | Run() | Stop() | Forget():
                    self._tell(Asks(self, report))
                case Ready(chat):
                    again = self._since is not None
                    self.chat, self._since = chat, self._clock.now()
                    self._turn(State.READY)
                    self._tell(Answers(self, self._was_renewed(), again))
                    if self._role.check is not None:
                        watch = group.create_task(self._watch(component, self._role.check))
        how = await component.ended()
        stop.cancel()
        hung = watch is not None and watch.done()
        if watch is not None:
            watch.cancel()
        return refusal or ("did not answer any more and was killed" if hung else how), refusal is not None

    async def _stop(self, component: Component) -> None:
        await self._told.wait()
        component.terminate()
        await self._clock.sleep(STOP_SECONDS)
        component.kill()

    async def _watch(self, component: Component, check: Callable[[], Awaitable[bool]]) -> None:
        """Kill it once it hangs."""
        missed = 0
        while missed < self._patience.misses:
            await self._clock.sleep(self._patience.check)
            missed = 0 if await self._is_well(check) else missed + 1
        component.kill()

    async def _is_well(self, check: Callable[[], Awaitable[bool]]) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience.answer):
                return await check()
        return False

    async def _back_off(self, how: str, pause: float) -> None:
        self._turn(State.BACKING_OFF)
        self._tell(Lost(self, how, pause, self._was_renewed()))
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._told.wait()

    def _lived(self) -> float:
        """Seconds since it began to answer; none where it does not."""
        if self._since is None or self.state is not State.READY:
            return 0.0
        return self._clock.now() - self._since

    def _was_renewed(self) -> bool:
        renewed, self._renewed = self._renewed, False
        return renewed

    async def _show(self, component: Component) -> None:
        async for line in component.logs():
            self._log(self.name, line)

    def _turn(self, state: State) -> None:
        assert state in NEXT[self.state], f"{self.name}: from {self.state} to {state}"
        self.state = state
