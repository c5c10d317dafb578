"""Cores that threads share: when queued work is done. All times are worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvloom.lab.sim.hosting import Cores, Thread
from kvloom.lab.sim.virtual_time import run_virtual


def when(
    count: float, act: Callable[[Cores, Callable[[str], Callable[[], None]]], Awaitable[None]]
) -> dict[str, float]:
    """By name, when what was noted happened."""
    found: dict[str, float] = {}

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def note(name: str) -> Callable[[], None]:
            return lambda: found.__setitem__(name, loop.time())

        await act(Cores(count), note)
        await asyncio.sleep(100)

    run_virtual(main())
    return found


def test_work_is_done_in_turn() -> None:
    async def act(cores: Cores, note: Callable[[str], Callable[[], None]]) -> None:
        thread = cores.thread()
        thread.after(0.0, note("nothing"))
        thread.after(2.0, note("first"))
        thread.charge(1.0)
        thread.after(0.0, note("behind it"))
        await asyncio.sleep(1.0)
        thread.after(4.0, note("second"))
        await thread.passed(1.0)
        note("passed")()
        assert not thread.busy

    assert when(2, act) == {"nothing": 0.0, "first": 2.0, "behind it": 3.0, "second": 7.0, "passed": 8.0}


def test_more_threads_than_cores_have_equal_parts() -> None:
    async def act(cores: Cores, note: Callable[[str], Callable[[], None]]) -> None:
        one, two = cores.thread(), cores.thread()
        one.after(1.0, note("one"))
        await asyncio.sleep(0.5)
        two.after(1.0, note("two"))  # half a core each for one second, the half that is left alone

    assert when(1, act) == {"one": 1.5, "two": 2.0}


def test_jobs_take_cores_and_are_told() -> None:
    told: list[float] = []

    async def act(cores: Cores, note: Callable[[str], Callable[[], None]]) -> None:
        cores.join(lambda: 3.0, lambda: told.append(cores.over))
        cores.thread().after(1.0, note("thread"))

    assert when(2, act) == {"thread": pytest.approx(2.0)}
    assert told == [2.0, 1.0]


def test_who_waits_may_give_up_and_may_ask_for_more() -> None:
    async def act(cores: Cores, note: Callable[[str], Callable[[], None]]) -> None:
        thread: Thread = cores.thread()
        waiting = asyncio.ensure_future(thread.passed(1.0))
        thread.after(1.0, lambda: thread.after(3.0, note("more")))
        await asyncio.sleep(0.5)
        waiting.cancel()

    assert when(1, act) == {"more": 5.0}


def test_who_leaves_takes_nothing_any_more() -> None:
    async def act(cores: Cores, note: Callable[[str], Callable[[], None]]) -> None:
        staying, going = cores.thread(), cores.thread()
        told = list[float]()

        def wish() -> float:
            return 1.0

        cores.join(wish, lambda: told.append(asyncio.get_running_loop().time()))
        assert cores.over == 0.0
        staying.after(1.0, note("staying"))  # at half a core, with the device's wish beside it
        going.charge(9.0)
        await asyncio.sleep(0.9)
        cores.leave(going, wish)
        assert cores.over == 0.0
        told.clear()
        await asyncio.sleep(1.0)
        assert not told

    assert when(1, act) == {"staying": pytest.approx(0.9 + 0.7)}
