"""A forked process is as good as a new interpreter, and whatever dies costs nothing else. Real processes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from benchmarks.procfs import command_line, descendants

from kvloom.serve.processes import forkserver
from kvloom.serve.processes.child import ChildProcess
from kvloom.serve.processes.forkserver import IMPORT_SECONDS, STEP_SECONDS, ForkServer
from kvloom.serve.processes.messages import ChildReport, OrderRefused, StartProgress
from kvloom.serve.processes.prefork import NAME, launch
from kvloom.types.clock import Clock, WallClock
from tests.processes import DEADLINE, outlived

ROOT = Path(__file__).resolve().parents[2]
FORKED = "tests.serve.forked"
BARE = "tests.serve.bare_forkserver"
WALL = WallClock()


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(forkserver, "TOLD_SECONDS", DEADLINE)  # no busy machine makes it too late


@dataclass
class Log:
    """What a fork server has said of itself."""

    lines: asyncio.Queue[tuple[str, str]] = field(default_factory=asyncio.Queue)

    async def until(self, name: str, words: str) -> None:
        said = await self.lines.get()
        while said[0] != name or words not in said[1]:
            said = await self.lines.get()


@asynccontextmanager
async def forking(pause: float = 0.5, clock: Clock = WALL) -> AsyncIterator[tuple[ForkServer, Log]]:
    log = Log()
    forks = ForkServer(
        [FORKED], clock, lambda *said: log.lines.put_nowait(said), pause, launch=lambda: launch(BARE)
    )
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as group:
        run = group.create_task(forks.run())
        await asyncio.sleep(0)
        yield forks, log
        run.cancel()


async def start(forks: ForkServer, does: str) -> tuple[ChildProcess, dict[str, Any]]:
    """A process that does so, and what it says that it is."""
    component = await forks.start(does, FORKED)
    async for report in component.reports():
        assert isinstance(report, StartProgress)
        return component, json.loads(report.text)
    raise AssertionError(await component.ended())


async def rest(component: ChildProcess) -> tuple[list[str], list[ChildReport], str]:
    """What it prints, what it reports, and how it ends."""
    lines = [line async for line in component.logs()]
    return lines, [report async for report in component.reports()], await component.ended()


def test_a_forked_process_is_as_one_that_was_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for its parent."""
    monkeypatch.setenv("WORD", "here")

    async def check() -> None:
        async with forking() as (forks, _):
            forked, what = await start(forks, "wait")
            other, unlike = await start(forks, "wait")
            executed = await ChildProcess.start("wait", FORKED)
            async for report in executed.reports():
                assert isinstance(report, StartProgress)
                wanted = json.loads(report.text)
                break
            assert command_line(forked.pid).split()[1:] == ["-P", "-m", FORKED, *what["arguments"]]
            assert what["parent"] == forks.pid
            assert wanted["parent"] == os.getpid()
            assert (what["group"], wanted["group"]) == (forked.pid, executed.pid)
            assert len({*what["draws"], *unlike["draws"], *wanted["draws"]}) == 6
            assert len(what["open"]) == len(wanted["open"])
            same = "environment", "collects", "handler"
            assert [what[key] for key in same] == [wanted[key] for key in same] == ["here", True, True]
            assert what["arguments"][1:] == wanted["arguments"][1:] == ["wait"]
            for component in (forked, other, executed):
                component.kill()
                lines, reports, how = await rest(component)
                assert lines == ["this is wait"]
                assert reports == []
                assert how.startswith("was killed by SIGKILL")

    asyncio.run(check())


@pytest.mark.parametrize(
    ("does", "reports", "how"),
    [
        ("return", [], "ended with exit code 0"),
        ("refuse", [OrderRefused("this is no good")], "ended with exit code 2"),
        ("raise", [], "ended with exit code 1"),
    ],
)
def test_how_a_forked_process_ends_is_known(does: str, reports: list[ChildReport], how: str) -> None:
    async def check() -> None:
        async with forking() as (forks, _):
            component, _ = await start(forks, does)
            lines, reported, ended = await rest(component)
            assert (reported, ended) == (reports, how)
            assert ("RuntimeError: a defect" in lines) == (does == "raise")
            component.kill()  # nobody else has its process id
            component.terminate()

    asyncio.run(check())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_forked_process_is_ended_by_its_process_id(number: signal.Signals) -> None:
    async def check() -> None:
        async with forking() as (forks, _):
            component, _ = await start(forks, "wait")
            os.kill(component.pid, number)
            assert number.name in await component.ended()

    asyncio.run(check())


def test_nobody_is_lost_with_the_fork_server() -> None:
    """What it has forked lives on, and its end is seen; what starts meanwhile starts without it."""

    async def check() -> None:
        async with forking(1e6) as (forks, log):
            (dies, _), (listens, _) = await start(forks, "wait"), await start(forks, "wait")
            ended, _ = await start(forks, "return")
            assert await ended.ended() == "ended with exit code 0"
            assert forks.pid is not None
            os.kill(forks.pid, signal.SIGKILL)
            await log.until(NAME, "was killed by SIGKILL")
            os.kill(dies.pid, signal.SIGKILL)
            assert await dies.ended() == "has ended"
            listens.terminate()
            assert await listens.ended() == "has ended"
            later, what = await start(forks, "return")
            assert what["parent"] == os.getpid()
            assert await later.ended() == "ended with exit code 0"

    asyncio.run(check())


def test_a_fork_server_that_has_died_comes_back() -> None:
    async def check() -> None:
        async with forking(0.01) as (forks, log):
            _, what = await start(forks, "return")
            os.kill(what["parent"], signal.SIGKILL)
            await log.until(NAME, "it starts again in 0.01 s")
            after = {"parent": os.getpid()}
            while after["parent"] == os.getpid():
                component, after = await start(forks, "return")
                assert await component.ended() == "ended with exit code 0"
            assert after["parent"] == forks.pid != what["parent"]

    asyncio.run(check())


def test_a_fork_server_with_two_threads_forks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THREAD", "1")

    async def check() -> None:
        async with forking() as (forks, log):
            component, what = await start(forks, "return")
            assert what["parent"] == os.getpid()
            assert await component.ended() == "ended with exit code 0"
            await log.until("return", "starts without the fork server: it has 2 threads")

    asyncio.run(check())


def test_a_stray_fork_shares_no_pipe_with_the_process_that_starts_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fork server dies between the fork and its answer."""
    monkeypatch.setenv("DIES", "1")

    async def check() -> None:
        async with forking(1e6) as (forks, _):
            component, what = await start(forks, "return")
            assert what["parent"] == os.getpid()
            assert await rest(component) == (["this is return"], [], "ended with exit code 0")

    asyncio.run(check())


class Later(WallClock):
    """A clock that goes ahead at once."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


def test_a_fork_server_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has more time for its first answer, because it imports."""
    monkeypatch.setattr(forkserver, "FORK_SECONDS", 0.1)

    async def check() -> None:
        clock = Later()
        async with forking(0.01, clock) as (forks, log):
            hangs = forks.pid
            assert hangs is not None
            os.kill(hangs, signal.SIGSTOP)
            early = asyncio.create_task(start(forks, "return"))
            await asyncio.sleep(0.3)
            assert not early.done()
            clock.ahead = IMPORT_SECONDS
            _, what = await start(forks, "return")
            assert what["parent"] == os.getpid()
            await log.until("return", "starts without the fork server: it gave no answer in 0.1 s")
            await log.until(NAME, "was killed by SIGKILL")
            assert (await early)[1]["parent"] == os.getpid()
            while what["parent"] == os.getpid():
                _, what = await start(forks, "return")
            assert what["parent"] == forks.pid != hangs

    asyncio.run(check())


def test_a_fork_server_that_works_ahead_is_not_taken_for_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though that takes longer than an answer may; when it takes too long it does hang."""
    monkeypatch.setattr(forkserver, "FORK_SECONDS", 0.1)
    ahead = tmp_path / "ahead"
    monkeypatch.setenv("AHEAD", str(ahead))

    async def check() -> None:
        clock = Later()
        async with forking(0.01, clock) as (forks, log):
            clock.ahead = IMPORT_SECONDS
            works = forks.pid
            while not ahead.exists():  # noqa: ASYNC110 -- another process makes it
                await asyncio.sleep(0.01)
            _, what = await start(forks, "return")
            assert (what["parent"], forks.pid) == (os.getpid(), works)
            await log.until("return", "starts without the fork server: it does something else ahead of time")
            ahead.unlink()
            clock.ahead = 0.0  # it has all the time again that its first answer may take
            while what["parent"] == os.getpid():
                _, what = await start(forks, "return")
            assert what["parent"] == works

    asyncio.run(check())


def test_a_fork_server_that_works_ahead_for_too_long_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver, "FORK_SECONDS", 0.1)
    ahead = tmp_path / "ahead"
    monkeypatch.setenv("AHEAD", str(ahead))

    async def check() -> None:
        clock = Later()
        async with forking(1e6, clock) as (forks, log):
            clock.ahead = IMPORT_SECONDS
            while not ahead.exists():  # noqa: ASYNC110 -- another process makes it
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # until it is heard of
            clock.ahead += STEP_SECONDS
            _, what = await start(forks, "return")
            assert what["parent"] == os.getpid()
            await log.until("return", "starts without the fork server: it gave no answer in 0.1 s")
            await log.until(NAME, "was killed by SIGKILL")

    asyncio.run(check())


def test_a_fork_server_that_cannot_be_launched_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with forking(0.01) as (forks, log):

            def fail(*_: object) -> Any:
                raise OSError(errno.EMFILE, "Too many open files")

            with monkeypatch.context() as patched:
                patched.setattr(socket, "socketpair", fail)
                assert forks.pid is not None
                os.kill(forks.pid, signal.SIGKILL)
                await log.until(NAME, "cannot be started: Too many open files; it starts again in")
            after = {"parent": os.getpid()}
            while after["parent"] == os.getpid():
                _, after = await start(forks, "return")

    asyncio.run(check())


def test_nothing_is_started_once_it_ends() -> None:
    """Nor is what is asked for already waited for."""

    async def check() -> None:
        async with forking() as (forks, _):
            await (await start(forks, "return"))[0].ended()
            assert forks.pid is not None
            os.kill(forks.pid, signal.SIGSTOP)
            starting = asyncio.create_task(forks.start("wait", FORKED))
            await asyncio.sleep(0)
        with pytest.raises(OSError, match="the fleet ends"):
            await starting
        with pytest.raises(OSError, match="the fleet ends"):
            await start(forks, "return")

    asyncio.run(check())


def test_one_that_nobody_waits_for_is_ended() -> None:
    async def check() -> None:
        async with forking() as (forks, _):
            await (await start(forks, "return"))[0].ended()
            assert forks.pid is not None
            os.kill(forks.pid, signal.SIGSTOP)
            starting = asyncio.create_task(forks.start("wait", FORKED))
            await asyncio.sleep(0)
            starting.cancel()
            os.kill(forks.pid, signal.SIGCONT)
            component, what = await start(forks, "return")  # answers come in order
            assert await component.ended() == "ended with exit code 0"
            while descendants(what["parent"]):  # noqa: ASYNC110 -- nobody tells of the end
                await asyncio.sleep(0.01)

    asyncio.run(check())


SUPERVISOR = f"""
import asyncio
from benchmarks.procfs import command_line, descendants
from kvloom.types.clock import WallClock
from kvloom.serve.processes.forkserver import ForkServer
from kvloom.serve.processes.prefork import launch

async def main():
    forks = ForkServer(["{FORKED}"], WallClock(), print, launch=lambda: launch("{BARE}"))
    run = asyncio.create_task(forks.run())
    await asyncio.sleep(0)
    component = await forks.start("wait", "{FORKED}")
    async for report in component.reports():
        print("pids", forks.pid, component.pid, flush=True)
    await run

asyncio.run(main())
"""


def test_nothing_is_left_of_a_supervisor_that_was_killed() -> None:
    async def check() -> None:
        python = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SUPERVISOR, stdout=asyncio.subprocess.PIPE
        )
        assert python.stdout is not None
        async with asyncio.timeout(DEADLINE):
            word, *pids = (await python.stdout.readline()).split()
            assert word == b"pids"
            with outlived([int(pid) for pid in pids]):
                python.kill()
                await python.wait()

    asyncio.run(check())
