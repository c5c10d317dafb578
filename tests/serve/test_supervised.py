"""A process that dies comes back, whatever it dies of; one that never worked does not. Real processes."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvloom.serve import supervised as supervised_module
from kvloom.serve.events import Answers, Doing, Event, Failed, Lost
from kvloom.serve.health import answers
from kvloom.serve.orders import GatewayOrder
from kvloom.serve.patience import Patience
from kvloom.serve.supervised import Role, State, Supervised
from kvloom.types.clock import WallClock
from kvloom.types.spec import ProgramSpec
from tests.processes import DEADLINE

ROOT = Path(__file__).resolve().parents[2]
SOON = Patience(first=0.01, check=0.02, answer=0.2)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


@dataclass
class Watched:
    """A supervised process under test, and what it told."""

    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    pids: asyncio.Queue[int] = field(default_factory=asyncio.Queue)

    def log(self, name: str, line: str) -> None:
        assert name == "unit-0"
        word, pid = line.split()
        assert word == "pid"
        self.pids.put_nowait(int(pid))

    async def next(self) -> Event:
        async with asyncio.timeout(DEADLINE):
            return await self.events.get()

    async def signal(self, number: signal.Signals) -> None:
        """To the process of the latest life."""
        async with asyncio.timeout(DEADLINE):
            pid = await self.pids.get()
        while not self.pids.empty():
            pid = self.pids.get_nowait()
        os.kill(pid, number)


@asynccontextmanager
async def supervised(
    folder: Path, *lives: str, patience: Patience = SOON, spare: bool = False
) -> AsyncIterator[tuple[Supervised, Watched]]:
    """Ends it afterwards, which takes it to its last state."""
    path = str(folder / "unit-0.sock")
    order = GatewayOrder(
        engines={"unit-0": path},
        secret="s",
        listener=0,
        api_keys={},
        max_body=0,
        program=ProgramSpec("child", {"lives": list(lives)}),
        folder=str(folder),
        sockets=str(folder),
    )
    role = Role(
        name="unit-0",
        module="tests.serve.child",
        order=lambda: order,
        held="held" in lives,
        spare=spare,
        check=functools.partial(answers, path, "s"),
    )
    watched = Watched()
    process = Supervised(
        role, WallClock(), tell=watched.events.put_nowait, log=watched.log, patience=patience
    )
    async with asyncio.TaskGroup() as group, asyncio.timeout(DEADLINE):
        run = group.create_task(process.run())
        yield process, watched
        process.end()
        await process.ended()
        await run
    assert process.state is State.ENDED


def test_what_dies_comes_back(tmp_path: Path) -> None:
    async def check() -> None:
        async with supervised(tmp_path, "ready", "refuse", "die", "ready") as (process, watched):
            assert await watched.next() == Answers(process)
            assert (process.state, process.chat) == (State.READY, ("chatty",))
            await watched.signal(signal.SIGKILL)
            how = "was killed by SIGKILL, perhaps for want of memory"
            assert await watched.next() == Lost(process, how, 0.01)
            assert await watched.next() == Lost(process, "this is no good", 0.02)
            assert await watched.next() == Lost(process, "ended with exit code 3", 0.04)
            assert await watched.next() == Answers(process, again=True)
            assert await answers(str(tmp_path / "unit-0.sock"), "s")

    asyncio.run(check())


@pytest.mark.parametrize(
    ("life", "how", "refused"),
    [("refuse", "this is no good", True), ("die", "ended with exit code 3", False)],
)
def test_what_never_worked_is_not_tried_again(tmp_path: Path, life: str, how: str, refused: bool) -> None:
    async def check() -> None:
        async with supervised(tmp_path, life) as (process, watched):
            assert await watched.next() == Failed(process, how, refused)
            await process.ended()
            assert watched.events.empty()

    asyncio.run(check())


def test_a_spare_one_is_tried_again_though_it_never_worked(tmp_path: Path) -> None:
    async def check() -> None:
        async with supervised(tmp_path, "die", "refuse", "ready", spare=True) as (process, watched):
            assert await watched.next() == Lost(process, "ended with exit code 3", 0.01)
            assert await watched.next() == Lost(process, "this is no good", 0.02)
            assert await watched.next() == Answers(process)

    asyncio.run(check())


@pytest.mark.parametrize("life", ["ready", "held"])
def test_one_that_retires_ends_by_itself_and_has_no_successor(tmp_path: Path, life: str) -> None:
    """Or is ended, where it does not serve yet."""

    async def check() -> None:
        async with supervised(tmp_path, life, patience=Patience()) as (process, watched):
            await watched.next()
            await process.retire()
            await process.ended()
            assert watched.events.empty()
            assert (tmp_path / "started").read_text() == "x"

    asyncio.run(check())


def test_a_restart_is_at_once(tmp_path: Path) -> None:
    """And told of as what it is, whether the new process answers or dies."""

    async def check() -> None:
        never = Patience(first=1e6, most=1e6)
        lives = ("ready", "ready", "die", "ready")
        async with supervised(tmp_path, *lives, patience=never) as (process, watched):
            assert await watched.next() == Answers(process)
            process.restart()
            assert await watched.next() == Answers(process, renewed=True, again=True)
            process.restart()
            assert await watched.next() == Lost(process, "ended with exit code 3", 1e6, renewed=True)
            process.restart()  # nobody waits for the pause to end
            assert await watched.next() == Answers(process, renewed=True, again=True)
            await watched.signal(signal.SIGKILL)
            how = "was killed by SIGKILL, perhaps for want of memory"
            assert await watched.next() == Lost(process, how, 1e6)

    asyncio.run(check())


def test_a_restart_of_one_that_does_not_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_module, "STOP_SECONDS", 0.01)

    async def check() -> None:
        async with supervised(tmp_path, "ready", patience=Patience()) as (process, watched):
            assert await watched.next() == Answers(process)
            await watched.signal(signal.SIGSTOP)
            process.restart()
            assert await watched.next() == Answers(process, renewed=True, again=True)

    asyncio.run(check())


def test_what_hangs_is_killed_and_comes_back(tmp_path: Path) -> None:
    async def check() -> None:
        async with supervised(tmp_path, "ready") as (process, watched):
            assert await watched.next() == Answers(process)
            await watched.signal(signal.SIGSTOP)
            how = "did not answer any more and was killed"
            assert await watched.next() == Lost(process, how, 0.01)
            assert await watched.next() == Answers(process, again=True)

    asyncio.run(check())


def test_a_held_one_begins_once_it_is_told_and_its_successors_at_once(tmp_path: Path) -> None:
    async def check() -> None:
        async with supervised(tmp_path, "held") as (process, watched):
            assert await watched.next() == Doing(process, "waiting")
            assert process.state is State.STARTING
            await process.begin()
            assert await watched.next() == Answers(process)
            await watched.signal(signal.SIGKILL)
            assert isinstance(await watched.next(), Lost)
            assert await watched.next() == Doing(process, "waiting")
            assert await watched.next() == Answers(process, again=True)

    asyncio.run(check())


def test_it_ends_while_it_waits_to_start_again(tmp_path: Path) -> None:
    async def check() -> None:
        async with supervised(tmp_path, "ready", patience=Patience(first=1e6, most=1e6)) as (
            process,
            watched,
        ):
            await watched.next()
            await watched.signal(signal.SIGKILL)
            assert isinstance(await watched.next(), Lost)
            assert process.state is State.BACKING_OFF

    asyncio.run(check())


def test_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    async def check() -> None:
        async with supervised(tmp_path, "ready", patience=Patience()) as (process, watched):
            await watched.next()
            await watched.signal(signal.SIGSTOP)
            process.end()
            process.kill()

    asyncio.run(check())


def test_pauses_double_until_a_life_was_healthy() -> None:
    patience, pause, pauses = Patience(), 0.0, []
    for lived in (0.0, 5.0, 59.0, 0.0, 0.0, 0.0, 0.0, 0.0, 60.0, 0.0):
        pause = patience.pause(pause, lived)
        pauses.append(pause)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 0.5, 1]


def test_nobody_there_is_not_well(tmp_path: Path) -> None:
    async def check() -> None:
        assert not await answers(str(tmp_path / "nobody.sock"), "s")

        async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with await asyncio.start_unix_server(hang_up, tmp_path / "mute.sock"):
            assert not await answers(str(tmp_path / "mute.sock"), "s")

    asyncio.run(check())
