"""Which gateway serves while another one starts, and what becomes of both. Real processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvloom.serve import gateways as gateways_module
from kvloom.serve.events import Answers, Doing, Event, Failed
from kvloom.serve.gateways import Gateways
from kvloom.serve.orders import GatewayOrder, News, Restarted, Retire
from kvloom.serve.supervised import Role, State, Supervised
from kvloom.types.clock import WallClock
from kvloom.types.spec import ProgramSpec
from tests.processes import DEADLINE

ROOT = Path(__file__).resolve().parents[2]


class Heard(Supervised):
    """Keeps what it was ordered."""

    orders: list[object]

    async def order(self, order: News) -> None:  # type: ignore[override]
        self.orders = [*getattr(self, "orders", []), order]


class Played:
    """Gateways whose supervisor the test is."""

    def __init__(self, folder: Path, *lives: str) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        order = GatewayOrder(
            engines={"unit-0": str(folder / "unit-0.sock")},
            secret="s",
            listener=0,
            api_keys={},
            max_body=0,
            program=ProgramSpec("child", {"lives": list(lives)}),
            folder=str(folder),
            sockets=str(folder),
        )
        role = Role(name="gateway", module="tests.serve.child", order=lambda: order)
        self.gateways = Gateways(role, self._supervise, seconds=60)

    def _supervise(self, role: Role) -> Heard:
        return Heard(role, WallClock(), tell=self.events.put_nowait, log=lambda *_: None)

    async def next(self) -> Event:
        while isinstance(event := await self.events.get(), Doing):
            pass
        return event


@asynccontextmanager
async def played(folder: Path, *lives: str) -> AsyncIterator[tuple[Played, asyncio.TaskGroup]]:
    one = Played(folder, *lives)
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as group:
        group.create_task(one.gateways.current.run())
        assert await one.next() == Answers(one.gateways.current)
        yield one, group
        for gateway in one.gateways.every:
            gateway.end()


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


def test_an_heir_takes_over_and_the_old_one_ends_by_itself(tmp_path: Path) -> None:
    async def test() -> None:
        async with played(tmp_path, "ready") as (one, group):
            gateways, old = one.gateways, one.gateways.current
            group.create_task(gateways.replace())
            assert await one.next() == Answers(heir := gateways.heir)  # type: ignore[arg-type]
            assert gateways.current is old
            await gateways.replace()
            assert "replaced already" in str(old.orders)  # type: ignore[attr-defined]
            left = gateways.hand_over()
            assert (left, gateways.current, gateways.heir) == (old, heir, None)
            assert gateways.has_left(old)
            alone = asyncio.create_task(gateways.alone())
            await asyncio.sleep(0)
            assert not alone.done()
            await gateways.see_off(old)
            await alone
            assert old.state is State.ENDED
            assert old.orders[-1] == Restarted("gateway")  # type: ignore[attr-defined]
            assert gateways.every == [heir]

    asyncio.run(test())


def test_an_heir_that_dies_leaves_the_present_one(tmp_path: Path) -> None:
    async def test() -> None:
        async with played(tmp_path, "ready", "die") as (one, group):
            gateways, old = one.gateways, one.gateways.current
            group.create_task(gateways.replace())
            failed = await one.next()
            assert isinstance(failed, Failed)
            assert failed.process is gateways.heir
            await gateways.lost_heir(failed.how)
            assert gateways.every == [old]
            assert "exit code 3" in str(old.orders[-1])  # type: ignore[attr-defined]

    asyncio.run(test())


def test_an_heir_that_gives_no_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways_module, "START_SECONDS", 0.01)

    async def test() -> None:
        async with played(tmp_path, "ready", "held") as (one, _):
            gateways, old = one.gateways, one.gateways.current
            await gateways.replace()
            assert gateways.every == [old]
            assert "gave no answer" in str(old.orders[-1])  # type: ignore[attr-defined]

    asyncio.run(test())


def test_one_that_has_left_and_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways_module, "MARGIN", -60)

    async def test() -> None:
        async with played(tmp_path, "ready") as (one, group):
            old = one.gateways.current

            async def deaf() -> None:
                old._ending = True

            old.retire = deaf  # type: ignore[method-assign]
            group.create_task(one.gateways.replace())
            await one.next()
            await one.gateways.see_off(one.gateways.hand_over())
            assert old.state is State.ENDED
            assert Retire() not in old.orders  # type: ignore[attr-defined]

    asyncio.run(test())
