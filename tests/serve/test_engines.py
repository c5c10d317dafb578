"""Engines that come and go: each unit has one process at most, whatever is asked for meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvloom.serve.engines import Engines
from kvloom.serve.events import Answers, Event, Failed
from kvloom.serve.orders import GatewayOrder
from kvloom.serve.supervised import Role, State, Supervised
from kvloom.types.clock import WallClock
from kvloom.types.spec import EngineSpec, ProgramSpec
from tests.processes import DEADLINE
from tests.router.roster import spec

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


@asynccontextmanager
async def engines(folder: Path, life: str = "ready") -> AsyncIterator[tuple[Engines, asyncio.Queue[Event]]]:
    """Of unit-0, which has no process yet; all end afterwards."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    order = GatewayOrder(
        engines={"unit-0": str(folder / "unit-0.sock")},
        secret="s",
        listener=0,
        api_keys={},
        max_body=0,
        program=ProgramSpec("child", {"lives": [life]}),
        folder=str(folder),
        sockets=str(folder),
    )

    def role(spec: EngineSpec) -> Role:
        return Role(name=spec.unit, module="tests.serve.child", order=lambda: order)

    def supervise(role: Role) -> Supervised:
        return Supervised(role, WallClock(), tell=events.put_nowait, log=lambda *_: None)

    made = Engines([spec("unit-0")], [], role, supervise)
    async with asyncio.timeout(DEADLINE):
        yield made, events
        for unit in list(made.running):
            await made.stop(unit)
        assert not made.every


def test_it_comes_and_goes_and_comes_again(tmp_path: Path) -> None:
    async def check() -> None:
        async with engines(tmp_path) as (made, events):
            assert made.away == {"unit-0"}
            assert not made.every
            running = asyncio.create_task(made.start(spec("unit-0")))
            assert isinstance(await events.get(), Answers)
            [first] = made.every
            assert made.away == frozenset()
            stopping = asyncio.create_task(made.stop("unit-0"))
            await asyncio.sleep(0)
            assert made.away == {"unit-0"}
            again = asyncio.create_task(made.start(spec("unit-0")))  # it waits for the other's end
            assert isinstance(await events.get(), Answers)
            assert first.state is State.ENDED
            assert [one.state for one in made.every] == [State.READY]
            await asyncio.gather(stopping, running)
            await made.stop("unit-0")
            await again
            await made.stop("unit-0")
            assert made.away == {"unit-0"}
            made.forget("unit-0")
            assert not made.specs

    asyncio.run(check())


def test_one_that_cannot_be_started_has_no_process(tmp_path: Path) -> None:
    async def check() -> None:
        async with engines(tmp_path, "die") as (made, events):
            await made.start(spec("unit-0"))
            assert isinstance(await events.get(), Failed)
            assert made.away == {"unit-0"}
            assert not made.every

    asyncio.run(check())
