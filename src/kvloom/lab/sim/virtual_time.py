"""Virtual time: an asyncio event loop whose clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, Final, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MOST_TURNS: Final = 10_000_000  # callbacks at one moment, after which time counts as standing still
_SHOWN: Final = 12  # waiting tasks in a report
_YOUNG: Final = 100_000  # objects more, after which Python looks for cycles that are garbage


class Stalled(RuntimeError):
    """Says that nothing is left to happen, or time stands still, before what was to be run has ended."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs what asyncio runs, on one thread, without waiting and without sockets.

    What is ready runs first, in the order in which it became ready; then the earliest timer. Timers of one
    moment run in the order in which they were set; with a `seed`, in an order drawn from it, so that code
    which relies on the order is found. Work for a thread is done at once. A callback that raises ends the
    run with that error.
    """

    _stopping: bool  # asyncio's own

    def __init__(self, seed: int | None = None, most_turns: int = MOST_TURNS) -> None:
        super().__init__()
        self._now = 0.0
        self._most_turns = most_turns
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self._ties = None if seed is None else random.Random(seed)
        self._thread = threading.get_ident()
        self._failure: BaseException | None = None
        self.watch: Callable[[float], None] | None = None
        """Called with the next moment, while it is still the last one. It changes nothing."""

    # -- time -------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Calls from a signal handler. Raises RuntimeError on any other thread."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("virtual time has one thread; another has called in")
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedules the callback; a time in the past counts as now."""
        handle = asyncio.TimerHandle(max(when, self._now), callback, args, self, context)
        tie = 0.0 if self._ties is None else self._ties.random()
        heapq.heappush(self._timers, (handle.when(), tie, next(self._order), handle))
        return handle

    # -- running ----------------------------------------------------------------------------------------

    def _run_once(self) -> None:
        """Runs all that is ready, after the clock's next jump if nothing is. asyncio calls this until the
        loop is stopped."""
        ready, turns = self._ready, 0
        if not ready:
            self._advance()
        while ready:
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()
                turns += 1
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                if self._stopping:
                    break
                if turns > self._most_turns:
                    raise Stalled(f"time stands still at {self._now:.6f} s: {self._report()}")

    def _advance(self) -> None:
        timers = self._timers
        while timers:
            when, _, _, handle = heapq.heappop(timers)
            if not handle.cancelled():
                if self.watch is not None:
                    self.watch(when)
                self._now = when
                self._ready.append(handle)
                return
        raise Stalled(f"nothing is left to happen at {self._now:.6f} s: {self._report()}")

    def _report(self) -> str:
        """Tells which tasks wait, and at which lines."""
        waiting = sorted(_whereabouts(task) for task in asyncio.all_tasks(self) if not task.done())
        more = f", and {len(waiting) - _SHOWN} more" if len(waiting) > _SHOWN else ""
        return f"{len(waiting)} tasks wait: {', '.join(waiting[:_SHOWN])}{more}"

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Does the work at once, because there are no threads."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the caller's, as from a thread
            future.set_exception(error)
        return future

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: the handle is passed over when its moment comes."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ends the run with an error that nobody else hears of."""
        self._failure = context.get("exception") or RuntimeError(context["message"])


def _whereabouts(task: asyncio.Task[Any]) -> str:
    stack = task.get_stack(limit=1)
    where = f"{stack[-1].f_code.co_filename.rsplit('/', 1)[-1]}:{stack[-1].f_lineno}" if stack else "nowhere"
    coroutine: Any = task.get_coro()
    return f"{getattr(coroutine, '__qualname__', coroutine)} at {where}"


def run_virtual(main: Coroutine[Any, Any, T], *, seed: int | None = None, most_turns: int = MOST_TURNS) -> T:
    """Runs `main` in virtual time, from 0 on. Raises Stalled if it can never end."""
    with _rare_collections(), asyncio.Runner(loop_factory=lambda: VirtualLoop(seed, most_turns)) as runner:
        return runner.run(main)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Lets Python look for cycles rarely meanwhile: a run makes many objects and few cycles."""
    before = gc.get_threshold()
    gc.set_threshold(_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class LoopClock:
    """Satisfies `Clock`: the time of an event loop, virtual or not."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = loop.time

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
