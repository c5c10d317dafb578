"""Virtual time: an asyncio event loop whose clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import sys
import threading
import weakref
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextvars import Context, copy_context
from typing import Any, Final, TypeVar, TypeVarTuple


class VirtualHandle(asyncio.TimerHandle):
    """Only a `VirtualLoop` makes one."""

    __slots__ = ("args", "callback", "gone", "virtual_context")

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:
        self._when = when
        self._loop = loop
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.virtual_context = context or copy_context()
        self.gone = False

    def __repr__(self) -> str:
        return f"<{getattr(self.callback, '__qualname__', self.callback)} at {self._when:.6f}>"

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self.gone, self.callback, self.args = True, None, ()

    def cancelled(self) -> bool:
        return self.gone


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MOST_TURNS: Final = 10_000_000  # callbacks at one moment, after which time counts as standing still
_SHOWN: Final = 12  # waiting tasks in a report


class Stalled(RuntimeError):
    """Says that nothing is left to happen, or time stands still, before what was to be run has ended."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs what asyncio runs, on one thread, without waiting and without sockets.

    What is ready runs first, in the order in which it became ready; then the earliest timer. Timers of one
    moment run in the order in which they were set; with a `seed`, in an order drawn from it, so that code
    which relies on the order is found. Work for a thread is done at once. A callback that raises ends the
    run with that error.
    """

    def __init__(self, seed: int | None = None, most_turns: int = MOST_TURNS) -> None:
        self._now = 0.0
        self._most_turns = most_turns
        self._ready: deque[VirtualHandle] = deque()
        self._timers: list[tuple[float, float, int, VirtualHandle]] = []
        self._order = itertools.count()
        self._ties = None if seed is None else random.Random(seed)
        self._running = self._stopping = self._closed = False
        self._thread = threading.get_ident()
        self._failure: BaseException | None = None
        self._asyncgens: weakref.WeakSet[AsyncGenerator[Any, Any]] = weakref.WeakSet()
        self.turns = 0  # callbacks run so far

    # -- time -------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = VirtualHandle(self._now, callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Calls from a signal handler. Raises RuntimeError on any other thread."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("virtual time has one thread; another has called in")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """A moment that has passed is now."""
        handle = VirtualHandle(max(when, self._now), callback, args, self, context)
        tie = 0.0 if self._ties is None else self._ties.random()
        heapq.heappush(self._timers, (handle.when(), tie, next(self._order), handle))
        return handle

    # -- running ----------------------------------------------------------------------------------------

    def run_forever(self) -> None:
        """Runs until `stop`. Raises Stalled if nothing is left to happen before that."""
        self._check()
        hooks, before = sys.get_asyncgen_hooks(), events._get_running_loop()
        if self._running or before is not None:
            raise RuntimeError("an event loop is running already")
        sys.set_asyncgen_hooks(self._asyncgens.add, self._finalize)
        self._thread = threading.get_ident()
        self._running = True
        events._set_running_loop(self)
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._running = self._stopping = False
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _turn(self) -> None:
        """Runs all that is ready, after the clock's next jump if nothing is."""
        ready, turns = self._ready, 0
        if not ready:
            self._advance()
        while ready:
            handle = ready.popleft()
            if not handle.gone:
                assert handle.callback is not None
                handle.virtual_context.run(handle.callback, *handle.args)
                turns += 1
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                if self._stopping:
                    break
                if turns > self._most_turns:
                    raise Stalled(f"time stands still at {self._now:.6f} s: {self._report()}")
        self.turns += turns

    def _advance(self) -> None:
        timers = self._timers
        while timers:
            when, _, _, handle = heapq.heappop(timers)
            if not handle.gone:
                self._now = when
                self._ready.append(handle)
                return
        raise Stalled(f"nothing is left to happen at {self._now:.6f} s: {self._report()}")

    def _report(self) -> str:
        """Tells which tasks wait, and at which lines."""
        waiting = sorted(_whereabouts(task) for task in asyncio.all_tasks(self) if not task.done())
        more = f", and {len(waiting) - _SHOWN} more" if len(waiting) > _SHOWN else ""
        return f"{len(waiting)} tasks wait: {', '.join(waiting[:_SHOWN])}{more}"

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)

        def done(_: object) -> None:
            self.stop()

        task.add_done_callback(done)
        try:
            self.run_forever()
        except BaseException:
            if task.done() and not task.cancelled():
                task.exception()  # it is told, or told of already
            raise
        finally:
            task.remove_done_callback(done)
        return task.result()

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._ready.clear()
        self._timers.clear()
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("the event loop is closed")

    # -- what else asyncio asks of a loop -----------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, T] | Generator[Any, None, T], *, name: Any = None, context: Any = None
    ) -> asyncio.Task[T]:
        self._check()
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Does the work at once, because there are no threads."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the caller's, as from a thread
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ends the run with an error that nobody else hears of."""
        self._failure = context.get("exception") or RuntimeError(context["message"])

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: the handle is passed over when its moment comes."""

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._asyncgens.discard(generator)
        if not self._closed:
            self.call_soon(self.create_task, generator.aclose())

    async def shutdown_asyncgens(self) -> None:
        for generator in list(self._asyncgens):
            await generator.aclose()

    async def shutdown_default_executor(self) -> None:
        """There is none."""


def _whereabouts(task: asyncio.Task[Any]) -> str:
    stack = task.get_stack(limit=1)
    where = f"{stack[-1].f_code.co_filename.rsplit('/', 1)[-1]}:{stack[-1].f_lineno}" if stack else "nowhere"
    coroutine: Any = task.get_coro()
    return f"{getattr(coroutine, '__qualname__', coroutine)} at {where}"


def _loop(seed: int | None, most_turns: int) -> asyncio.AbstractEventLoop:
    return VirtualLoop(seed, most_turns)  # type: ignore[abstract]  # sockets, pipes and signals are not of this world


def run_virtual(main: Coroutine[Any, Any, T], *, seed: int | None = None, most_turns: int = MOST_TURNS) -> T:
    """Runs `main` in virtual time, from 0 on. Raises Stalled if it can never end."""
    with asyncio.Runner(loop_factory=lambda: _loop(seed, most_turns)) as runner:
        return runner.run(main)


class LoopClock:
    """Satisfies `Clock`: the time of an event loop, virtual or not."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
