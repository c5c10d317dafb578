"""Virtual time: asyncio as it is, but for the waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.lab.sim.virtual_time import Stalled, run_virtual
from tests.lab.sim.fleets import now, virtually


@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_timers_come_in_order_and_at_their_time(delays: list[float]) -> None:
    seen: list[tuple[float, float]] = []

    async def sleeper(delay: float) -> None:
        await asyncio.sleep(delay)
        seen.append((now(), delay))

    async def main() -> None:
        await asyncio.gather(*(sleeper(delay) for delay in delays))

    run_virtual(main())
    assert [time for time, _ in seen] == [delay for _, delay in seen] == sorted(delays)


def order_of_ties(seed: int | None) -> list[int]:
    seen: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for i in range(20):
            loop.call_at(1.0, seen.append, i)
        await asyncio.sleep(2)

    run_virtual(main(), seed=seed)
    return seen


def test_ties_keep_their_order_or_follow_the_seed() -> None:
    assert order_of_ties(None) == list(range(20))
    assert order_of_ties(1) == order_of_ties(1) != order_of_ties(2)
    assert sorted(order_of_ties(1)) == list(range(20))


@virtually
async def test_what_is_ready_goes_before_timers_of_the_same_moment() -> None:
    seen: list[str] = []
    loop = asyncio.get_running_loop()
    loop.call_later(0, seen.append, "timer")
    loop.call_soon(seen.append, "soon")
    await asyncio.sleep(1)
    assert seen == ["soon", "timer"]


@virtually
async def test_timeouts_groups_queues_and_threads_work() -> None:
    queue: asyncio.Queue[str] = asyncio.Queue()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await queue.get()
    async with asyncio.TaskGroup() as group:
        got = group.create_task(queue.get())
        await asyncio.sleep(1)
        queue.put_nowait("here")
    assert (now(), got.result()) == (6.0, "here")
    assert await asyncio.to_thread(lambda: 3) == 3


@virtually
async def test_a_cancelled_timer_does_not_move_the_clock() -> None:
    asyncio.get_running_loop().call_later(50, print).cancel()
    await asyncio.sleep(1)
    assert now() == 1.0


async def wait_in_vain() -> None:
    await asyncio.Event().wait()


def test_when_nothing_is_left_to_happen_the_report_says_who_waits() -> None:
    async def main() -> None:
        await asyncio.sleep(3)
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_in_vain())

    with pytest.raises(Stalled, match=r"nothing is left to happen at 3\.0+ s.*wait_in_vain at test_loop\.py"):
        run_virtual(main())


def test_standing_time_is_found() -> None:
    async def main() -> None:
        for _ in range(2000):
            await asyncio.sleep(0)

    with pytest.raises(Stalled, match=r"time stands still at 0\.0"):
        run_virtual(main(), most_turns=1000)


def test_an_error_that_nobody_hears_ends_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, lambda: 1 / 0)
        await asyncio.sleep(2)

    with pytest.raises(ZeroDivisionError):
        run_virtual(main())

    async def failing() -> None:
        raise ValueError("lost")

    async def forgetful() -> None:
        task = asyncio.create_task(failing())
        await asyncio.sleep(1)
        del task
        await asyncio.sleep(1)

    with pytest.raises(ValueError, match="lost"):
        run_virtual(forgetful())


@virtually
async def test_dropped_generators_are_closed_in_virtual_time() -> None:
    closed: list[float] = []

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            closed.append(now())

    async for _ in numbers():
        break
    await asyncio.sleep(5)
    assert closed == [1.0]


@virtually
async def test_another_thread_is_refused() -> None:
    loop = asyncio.get_running_loop()
    errors: list[RuntimeError] = []

    def call() -> None:
        try:
            loop.call_soon_threadsafe(print)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "one thread" in str(errors[0])


@virtually
async def test_time_never_goes_back() -> None:
    loop, seen = asyncio.get_running_loop(), list[float]()
    await asyncio.sleep(5)
    for when in (1.0, 7.0, 3.0):
        loop.call_at(when, lambda: seen.append(now()))
    await asyncio.sleep(10)
    assert seen == [5.0, 5.0, 7.0]
