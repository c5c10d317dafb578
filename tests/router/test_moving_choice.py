"""Requests and contexts that are copied to another unit, or computed there again: law 2 either way."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from kvloom.types.errors import Unavailable
from kvloom.types.load import LinkLoad, UnitLoad
from kvloom.types.verbs import RemoteSend, Sent
from tests.modelled import turns
from tests.modelled_units import MODEL, generate, prompt
from tests.processes import DEADLINE
from tests.router.worlds import World, world

FAST, SLOW = 1e12, 1.0  # bytes a second
QUICK, LAZY = 1e6, 1.0  # tokens a second


def tell(w: World, rate: float, speed: float) -> None:
    """Lets all units report that the way to each other has this rate, and that they prefill with this
    speed."""
    for one in w.units:
        load = one.engine.load

        async def told(load=load) -> UnitLoad:  # type: ignore[no-untyped-def]
            found: UnitLoad = await load()
            fast = {name: replace(model, prefill_speed=speed) for name, model in found.models.items()}
            links = {f"unit-{i}": LinkLoad("tcp", rate) for i in range(len(w.units))}
            return replace(found, models=fast, links=links)

        one.engine.load = told  # type: ignore[method-assign]


def count_sends(w: World) -> list[RemoteSend]:
    """Returns the list to which every send of unit-0 is added."""
    sends: list[RemoteSend] = []
    real = w.units[0].engine.remote_send

    async def noted(order: RemoteSend) -> Sent:
        sends.append(order)
        return await real(order)

    w.units[0].engine.remote_send = noted  # type: ignore[method-assign,assignment]
    return sends


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("rate", "speed", "reason"),
    [(FAST, QUICK, "copying"), (SLOW, QUICK, "computing"), (0.0, QUICK, "unmeasured")],
)
async def test_a_request_goes_over_with_its_context_or_by_its_tokens(
    rate: float, speed: float, reason: str, n: int
) -> None:
    async with world(2) as w:
        tell(w, rate, speed)
        sends = count_sends(w)
        body = replace(generate(prompt(37), temperature=1.0, max_tokens=55), n=n)
        task = w.ask(body)
        await w.until("r", 1)
        await w.router.move("r", "unit-1")
        await task
        w.check(body)
        assert bool(sends) == (reason != "computing")
        assert (w.computed > 37 + n * 54) == (reason == "computing")
        assert w.router.choices == {("request", reason): 1}


async def test_a_request_stays_if_neither_is_good_enough() -> None:
    async with world(2) as w:
        tell(w, SLOW, LAZY)
        body = generate(prompt(37), temperature=1.0, max_tokens=40)
        task = w.ask(body)
        await w.until("r", 3)
        with pytest.raises(Unavailable, match=r"request r stays: .* to unit-1 too slowly"):
            await w.router.move("r", "unit-1")
        await task
        w.check(body)
        assert w.units[1].computed == 0
        assert w.router.choices == {("request", "neither"): 1}


async def test_a_unit_that_is_to_be_emptied_is_emptied_however_long_that_takes() -> None:
    async with world(2) as w:
        tell(w, SLOW, LAZY)
        body = generate(prompt(37), temperature=1.0, max_tokens=40)
        task = w.ask(body)
        await w.until("r", 3)
        w.router.units["unit-0"].withdraw()
        await w.router.move("r", "unit-1")
        await task
        w.check(body)
        assert w.units[1].computed > 0


async def test_a_request_that_has_not_begun_has_nothing_to_decide() -> None:
    async with world(2) as w:
        tell(w, SLOW, LAZY)
        body = generate(prompt(37), max_tokens=4)
        task = w.ask(body)
        async with asyncio.timeout(DEADLINE):
            while "r" not in w.router.sessions or w.router.sessions["r"].running is None:
                await turns(1)
        assert not w.router.sessions["r"].progress.begun
        await w.router.move("r", "unit-1")
        assert w.router.choices == {}
        await task
        w.check(body)


@pytest.mark.parametrize(("rate", "reason"), [(FAST, "copying"), (SLOW, "computing"), (0.0, "unmeasured")])
async def test_a_context_is_copied_where_that_is_sooner(rate: float, reason: str) -> None:
    async with world(2, program="migrate_context") as w:
        tell(w, rate, QUICK)
        first, second = w.replica(0), w.replica(1)
        sends = count_sends(w)
        body = generate(prompt(40), request="a", max_tokens=4)
        await w.ask(body)
        holder = max((0, 1), key=lambda i: w.units[i].computed)
        assert holder == 0
        for replica in (first, second):
            replica.unit.report.reported()  # it is asked for from now on
        async with asyncio.timeout(DEADLINE):
            while first.unit.report.reported() is None or second.unit.report.reported() is None:
                await turns(1)
        first.queue += 1000  # it has too much to do
        again = generate(prompt(40), request="b", max_tokens=4)
        await w.ask(again)
        first.queue -= 1000
        w.check(again)
        assert bool(sends) == (reason != "computing")
        assert w.router.choices == {("context", reason): 1}
        assert w.router.units["unit-1"].replicas[MODEL] is second
