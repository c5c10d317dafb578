"""Processes of this host under a controller: what dies comes back, whatever it dies of; one that never worked
does not. Real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvloom.cluster.controller import Controller
from kvloom.cluster.edits import Edit, UnitEdit
from kvloom.cluster.launcher import Answered, Ended, Missed, Started
from kvloom.cluster.reconcile import Timing
from kvloom.cluster.state import ComponentStatus, FleetSpec, Phase, UnitSpec, is_gateway
from kvloom.serve.local import Heard, LocalLauncher, Role
from kvloom.serve.processes.messages import GatewayOrder, StartProgress
from kvloom.types.clock import WallClock
from kvloom.types.spec import EngineSpec, ProgramSpec
from tests.processes import DEADLINE
from tests.router.managed import spec

ROOT = Path(__file__).resolve().parents[2]
SOON = Timing(first=0.01)
LOOKED_AT = replace(SOON, check=0.5)  # three times, before a process is taken to hang
NEVER = Timing(first=1e6, most=1e6)
KILLED = "was killed by SIGKILL, perhaps for want of memory"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


@dataclass
class Watched:
    """A controller's processes under test. phases: of unit-0, or of the gateways, as they follow."""

    folder: Path
    lives: list[str]
    controller: Controller
    launcher: LocalLauncher
    phases: asyncio.Queue[tuple[str, ComponentStatus]] = field(default_factory=asyncio.Queue)

    async def until(self, phase: Phase, component: str = "unit-0") -> ComponentStatus:
        """The component comes to this phase."""
        while True:
            name, process = await self.phases.get()
            if name == component and process.phase == phase:
                return process

    def edit(self, **changes: object) -> None:
        self.controller.edit(Edit(units={"unit-0": UnitEdit(**changes)}))  # type: ignore[arg-type]

    def signal(self, number: signal.Signals, component: str = "unit-0") -> None:
        pid = self.controller.status.processes[component].pid
        assert pid is not None
        os.kill(pid, number)

    @property
    def starts(self) -> int:
        return len((self.folder / "started").read_text())


@asynccontextmanager
async def watched(
    folder: Path, *lives: str, timing: Timing = SOON, fleet: FleetSpec | None = None
) -> AsyncIterator[Watched]:
    """unit-0, and no gateway that would be watched; all end afterwards."""

    def role(component: str, engine: EngineSpec | None) -> Role:
        beside = fleet is None and engine is None
        order = GatewayOrder(
            secret="s",
            listeners=(),
            api_keys={},
            max_body=0,
            max_connections=1,
            program=ProgramSpec("child", {"lives": ["ready"] if beside else list(lives)}),
            folder=str(folder / "beside" if beside else folder),
            sockets=str(folder),
        )
        name = "gateway" if is_gateway(component) else component
        path = str(folder / f"{name}.sock") if engine is not None else ""
        return Role(name, "tests.serve.launched", order, socket=path)

    def hear(component: str, heard: Heard) -> None:
        if isinstance(heard, Started | Answered | Ended | Missed):
            made.controller.hear(heard)
        else:
            assert isinstance(heard, StartProgress)

    (folder / "beside").mkdir()
    first = fleet or FleetSpec(units={"unit-0": UnitSpec(engine=spec("unit-0"))})
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as group:
        clock = WallClock()
        launcher = LocalLauncher(role, group, clock, hear=hear, log=lambda *_: None, timing=timing)
        phases: asyncio.Queue[tuple[str, ComponentStatus]] = asyncio.Queue()
        controller = Controller(
            first,
            launcher,
            clock,
            timing=timing,
            watch=lambda name, _, process: phases.put_nowait((name, process)),
        )
        made = Watched(folder, list(lives), controller, launcher, phases)
        running = group.create_task(controller.run())
        yield made
        running.cancel()
        await asyncio.wait([running])
        await launcher.end(10.0)
    assert not launcher.running()


def test_what_dies_comes_back(tmp_path: Path) -> None:
    async def check() -> None:
        async with watched(tmp_path, "ready", "refuse", "die", "ready") as one:
            assert (await one.until("ready")).routes == {"chatty": "chat/completions"}
            one.signal(signal.SIGKILL)
            for how, pause in ((KILLED, 0.01), ("this is no good", 0.02), ("ended with exit code 3", 0.04)):
                process = await one.until("waiting")
                assert (process.problem, process.pause) == (how, pause)
            assert (await one.until("ready")).problem == ""

    asyncio.run(check())


@pytest.mark.parametrize(("life", "how"), [("refuse", "this is no good"), ("die", "ended with exit code 3")])
def test_what_never_worked_is_not_tried_again_until_it_is_specified_anew(
    tmp_path: Path, life: str, how: str
) -> None:
    async def check() -> None:
        async with watched(tmp_path, life, "ready") as one:
            assert (await one.until("failed")).problem == how
            assert one.starts == 1
            one.edit(restart=True)
            await one.until("ready")
            assert one.starts == 2

    asyncio.run(check())


def test_the_scheduler_is_tried_again_though_it_never_worked(tmp_path: Path) -> None:
    async def check() -> None:
        async with watched(tmp_path, "die", "refuse", "ready", fleet=FleetSpec(scheduler=1)) as one:
            await one.until("waiting", "scheduler")
            await one.until("ready", "scheduler")

    asyncio.run(check())


def test_a_restart_is_at_once(tmp_path: Path) -> None:
    """Though its last process has died and another one would have to wait."""

    async def check() -> None:
        async with watched(tmp_path, "ready", "ready", "die", "ready", timing=NEVER) as one:
            await one.until("ready")
            one.edit(restart=True, seconds=0.0)
            assert (await one.until("starting")).replaces
            await one.until("ready")
            one.edit(restart=True, seconds=0.0)
            assert (await one.until("waiting")).problem == "ended with exit code 3"
            one.edit(restart=True)
            await one.until("ready")
            assert one.starts == 4

    asyncio.run(check())


def test_one_that_does_not_listen_is_killed_and_replaced(tmp_path: Path) -> None:
    async def check() -> None:
        async with watched(tmp_path, "ready", timing=Timing(stop=0.01)) as one:
            await one.until("ready")
            one.signal(signal.SIGSTOP)
            one.edit(restart=True, seconds=0.0)
            await one.until("ending")
            await one.until("ready")

    asyncio.run(check())


FLEETS = {
    "unit-0": FleetSpec(units={"unit-0": UnitSpec(engine=spec("unit-0"))}, gateway=0),
    "gateway/1": FleetSpec(),
    "scheduler": FleetSpec(gateway=0, scheduler=1),
}
"""Fleets of one component each."""


@pytest.mark.parametrize("component", FLEETS)
def test_what_hangs_is_killed_and_comes_back(tmp_path: Path, component: str) -> None:
    """Whether the whole process stands still, or only its event loop."""

    async def check() -> None:
        async with watched(
            tmp_path, "ready", "stuck", "ready", timing=LOOKED_AT, fleet=FLEETS[component]
        ) as one:
            await one.until("ready", component)
            one.signal(signal.SIGSTOP, component)
            for _ in range(2):
                hangs = await one.until("waiting", component)
                assert hangs.problem == "did not answer any more and was killed"
                await one.until("ready", component)
            assert one.starts == 3

    asyncio.run(check())


class HandClock:
    """A clock on which a test puts its hand: a sleep is over when `pass_by` says how late that is."""

    def __init__(self) -> None:
        self._time = 0.0
        self._sleeps: asyncio.Queue[tuple[float, asyncio.Future[None]]] = asyncio.Queue()
        self._present: tuple[float, asyncio.Future[None]] | None = None

    def now(self) -> float:
        return self._time

    async def sleep(self, seconds: float) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeps.put_nowait((seconds, over))
        await over

    async def pass_by(self, late: float = 0.0) -> None:
        """Lets a sleep end, and returns when another one begins."""
        seconds, over = self._present or await self._sleeps.get()
        self._time += seconds + late
        over.set_result(None)
        self._present = await self._sleeps.get()


def test_a_look_that_comes_late_does_not_count(tmp_path: Path) -> None:
    """The launcher's own process was stopped meanwhile, as the whole machine may have been."""

    async def check() -> None:
        clock, heard = HandClock(), asyncio.Queue[Heard]()
        order = GatewayOrder(
            secret="s",
            listeners=(),
            api_keys={},
            max_body=0,
            max_connections=1,
            program=ProgramSpec("child", {"lives": ["mute"]}),
            folder=str(tmp_path),
            sockets=str(tmp_path),
        )
        role = Role("gateway", "tests.serve.launched", order)
        async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as group:
            launcher = LocalLauncher(
                lambda *_: role,
                group,
                clock,
                hear=lambda _, said: heard.put_nowait(said),
                log=lambda *_: None,
            )
            launcher.start("gateway/1", 1, None)
            while not isinstance(await heard.get(), Answered):
                pass
            for late in (60.0, 0.0, 3600.0, 0.1, 60.0):
                await clock.pass_by(late)
            assert [await heard.get(), await heard.get()] == [Missed("gateway/1", n) for n in (1, 2)]
            assert heard.empty()
            launcher.kill("gateway/1")

    asyncio.run(check())


def test_what_loads_for_too_long_is_ended_and_says_so(tmp_path: Path) -> None:
    async def check() -> None:
        async with watched(tmp_path, "load", timing=replace(SOON, load=0.1)) as one:
            ended = await one.until("failed")
            assert ended.problem == "did not load its models in 0.1 s (`load_timeout`) and was killed"

    asyncio.run(check())


def test_it_goes_and_comes_again_and_has_one_process_at_most(tmp_path: Path) -> None:
    async def check() -> None:
        async with watched(tmp_path, "ready") as one:
            await one.until("ready")
            one.edit(wanted=False, seconds=0.0)
            await one.until("ending")
            one.edit(wanted=True)  # it waits for the other's end
            await one.until("absent")
            await one.until("ready")
            one.edit(wanted=False, seconds=0.0)
            await one.until("absent")
            assert [found.component for found in one.launcher.running()] == ["gateway/1"]
            assert one.starts == 2

    asyncio.run(check())


def test_all_end_while_one_waits_to_start_again_and_one_does_not_listen(tmp_path: Path) -> None:
    async def check() -> None:
        async with watched(tmp_path, "ready", timing=NEVER) as one:
            there = one.controller.status.processes
            while [process.phase for process in there.values()] != ["ready", "ready"]:
                await one.phases.get()
            one.signal(signal.SIGKILL)
            await one.until("waiting")
            one.signal(signal.SIGSTOP, "gateway/1")
            await one.launcher.end(0.01)

    asyncio.run(check())


def test_a_successor_takes_over_and_the_old_gateway_ends_by_itself(tmp_path: Path) -> None:
    async def check() -> None:
        async with watched(tmp_path, "ready", "held", fleet=FleetSpec()) as one:
            await one.until("ready", "gateway/1")
            one.controller.edit(Edit(gateway=True))
            await one.until("ready", "gateway/2")
            await one.until("retiring", "gateway/1")
            await one.until("absent", "gateway/1")
            assert [found.component for found in one.launcher.running()] == ["gateway/2"]
            one.signal(signal.SIGKILL, "gateway/2")
            await one.until("waiting", "gateway/2")
            await one.until("ready", "gateway/2")

    asyncio.run(check())


def test_a_successor_that_dies_leaves_the_present_gateway(tmp_path: Path) -> None:
    async def check() -> None:
        async with watched(tmp_path, "ready", "die", "ready", fleet=FleetSpec()) as one:
            await one.until("ready", "gateway/1")
            one.controller.edit(Edit(gateway=True))
            assert (await one.until("failed", "gateway/2")).problem == "ended with exit code 3"
            assert one.controller.status.processes["gateway/1"].phase == "ready"
            one.controller.edit(Edit(gateway=True))
            await one.until("ready", "gateway/3")
            await one.until("absent", "gateway/1")

    asyncio.run(check())
