"""Owns what a fleet is to be, hears what there is of it, and makes the one the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from msgspec.structs import replace

from kvloom.cluster.edits import Edit, edited
from kvloom.cluster.launcher import Change, Counted, Edited, Ended, FoundProcess, Launcher, Report, Snapshot
from kvloom.cluster.lifecycle import Deed, adopted, after, heard
from kvloom.cluster.reconcile import (
    TIMING,
    Action,
    BeginServing,
    DrainUnit,
    EndTurn,
    Forget,
    Kill,
    PassOver,
    ProveProgram,
    RaiseGeneration,
    ReadmitUnit,
    RetireGateway,
    RevertProgram,
    StartProcess,
    StopProcess,
    Timing,
    Wait,
    reconcile,
)
from kvloom.cluster.state import (
    ABSENT,
    GATEWAY,
    ComponentStatus,
    FleetSpec,
    FleetStatus,
    UnitSpec,
    is_counted,
    is_gateway,
)
from kvloom.cluster.store import SpecStore
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError, Unavailable
from kvloom.types.service import RestartStep, RevertedProgram
from kvloom.types.spec import ProgramSpec

_LIFE: Final = 1 << 32  # Changes that a controller can number.

_log = logging.getLogger(__name__)

Watch = Callable[[str, ComponentStatus, ComponentStatus], None]


class Controller:
    """Keeps a fleet's specification and status, and carries out what `reconcile` finds due. Everything but
    `run` is done at once, so that edits, reports and actions never overlap.

    watch: called with a component's name and its status before and after, each time that its phase changes.
    """

    def __init__(
        self,
        spec: FleetSpec,
        launcher: Launcher,
        clock: Clock,
        *,
        store: SpecStore | None = None,
        timing: Timing = TIMING,
        watch: Watch = lambda *_: None,
    ) -> None:
        """`spec` is what the fleet is to be if `store` keeps nothing yet. Raises ConfigError if the store's
        content cannot be used; then nothing is started or ended."""
        kept = store.load() if store is not None else None
        self.spec, life = kept or (spec, 0)
        self._life = life + 1
        self._launcher = launcher
        self._clock = clock
        self._store = store
        self._timing = timing
        self._watch = watch
        self._wake = asyncio.Event()
        self._seq = self._life * _LIFE
        self._counts: dict[str, Counted] = {}  # What each gateway has said last.
        self._asked: dict[str, int] = {}  # The change with which each unit was taken out of service.
        self._fresh = Change(seq=0)  # What no gateway was told yet.
        self._began: dict[str, float] = {}  # When each step of a rolling restart did.
        self.status = FleetStatus()
        self._begin_probation()
        self._save(self.spec)
        self._adopt()

    def adopt(self, found: FoundProcess) -> None:
        """Takes in a process that an earlier controller has started."""
        name = found.component
        self._put(name, adopted(found, self.spec, self._clock.now(), self._timing))
        if is_gateway(name):
            self.status = replace(self.status, opened=True)

    def _adopt(self) -> None:
        found = self._launcher.running()
        for one in found:
            self.adopt(one)
        for name in self.spec.units:
            self._ask(name)
        for one in found:
            if is_gateway(one.component):
                self._launcher.tell(one.component, self.snapshot)

    @property
    def snapshot(self) -> Snapshot:
        """Returns the whole fleet as it is now. The status changes while the snapshot waits to be sent."""
        status = self.status.copy()
        return Snapshot(seq=self._seq, spec=self.spec, status=status)

    # -- what is said to it -----------------------------------------------------------------------------

    def edit(self, edit: Edit) -> Edited:
        """Changes the specification, which is kept before anything follows from it. An edit that is refused
        says why."""
        try:
            spec, overrode = edited(self.spec, edit)
            self._save(spec)
        except KvloomError as error:
            return Edited(edit.number, refused=error.to_wire())
        except OSError as error:
            problem = Unavailable(f"the fleet's file cannot be written: {error.strerror or error}")
            return Edited(edit.number, refused=problem.to_wire())
        self._take_over(spec)
        self._flush()
        self._wake.set()
        return Edited(edit.number, overrode)

    def answer(self, gateway: str, edit: Edit) -> None:
        """Does as `edit` does, and tells the gateway that has asked for it, after what has changed."""
        self._launcher.tell(gateway, self.edit(edit))

    def hear(self, report: Report) -> None:
        """Takes in what has happened to a component's process. A component that is not known is passed over:
        it was forgotten."""
        name = report.component
        before = self.status.processes.get(name)
        if before is None:
            return
        self._put(name, heard(report, before, self.spec, self._clock.now(), self._timing))
        if isinstance(report, Ended) and is_gateway(name):
            self._counts.pop(name, None)
            self._recount(self._asked)
        self._wake.set()

    def count(self, gateway: str, counted: Counted) -> None:
        """Takes in how many requests a gateway has at the units that get no new ones."""
        self._counts[gateway] = counted
        self._recount(self._asked)
        self._wake.set()

    # -- what it does -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Works until it is cancelled."""
        timer: asyncio.Task[None] | None = None
        try:
            while True:
                self._wake.clear()
                due = self.step()
                if timer is not None:
                    timer.cancel()
                timer = asyncio.create_task(self._ring(due)) if due is not None else None
                await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _ring(self, due: float) -> None:
        await self._clock.sleep(max(0.0, due - self._clock.now()))
        self._wake.set()

    def step(self) -> float | None:
        """Does all that is due, and returns when something is due again; None if that is open."""
        while True:
            now = self._clock.now()
            actions = reconcile(self.spec, self.status, now, self._timing)
            due = None
            for action in actions:
                if isinstance(action, Wait):
                    due = action.until
                else:
                    self._carry_out(action, now)
            self._flush()
            if all(isinstance(action, Wait) for action in actions):  # nothing was done, so nothing new is due
                return due

    def _carry_out(self, action: Action, now: float) -> None:
        match action:
            case RaiseGeneration(component):
                self._raise_generation(component)
            case PassOver(component):
                self._roll_on(component)
            case EndTurn(component, problem):
                self._end_turn(component, problem)
            case RevertProgram(problem):
                self._revert(problem)
            case ProveProgram():
                self._become(replace(self.spec, proven=self.spec.program))
            case Wait():
                pass
            case _:
                name = action.component
                before = self.status.processes.get(name, ABSENT)
                if isinstance(action, BeginServing):
                    self._flush()
                self._put(name, after(action, before, self.spec, now, self._timing))
                self._order(action)

    def _order(self, action: Deed) -> None:
        launcher, name = self._launcher, action.component
        match action:
            case StartProcess(generation=generation):
                unit = self.spec.units.get(name)
                launcher.start(name, generation, unit.engine if unit is not None else None)
            case DrainUnit() | ReadmitUnit():
                pass  # The gateways see it.
            case RetireGateway():
                launcher.retire(name)
            case BeginServing():
                self.status = replace(self.status, opened=True)
                launcher.tell(name, self.snapshot)
                self._recount(self._asked)
            case StopProcess():
                launcher.stop(name)
            case Kill():
                launcher.kill(name)
            case Forget():
                if (unit := self.spec.units.get(name)) is not None and unit.removed:
                    units = {one: spec for one, spec in self.spec.units.items() if one != name}
                    self._become(replace(self.spec, units=units))
                launcher.forget(name)

    # -- a program on probation -------------------------------------------------------------------------

    def _begin_probation(self) -> None:
        """Notes when the program's probation begins, if it has to pass one."""
        proven = self.spec.program == self.spec.proven
        self.status = replace(self.status, probation=None if proven else self._clock.now())

    def _revert(self, problem: str) -> None:
        """Goes back to the last program that has passed its probation. A gateway that serves with the other
        one all the same, because it was about to take the dead one's place, is replaced."""
        failed = self.spec.program
        gateways = [one for name, one in self.status.processes.items() if is_gateway(name)]
        beside = any(one.begun and one.phase in ("starting", "ready") for one in gateways)
        spec, _ = edited(self.spec, Edit(program=self.spec.proven, gateway=beside))
        self._become(replace(spec, reverted=RevertedProgram(failed, problem)))
        _log.warning(
            "the gateway %s less than a minute after the program %s was set: %s runs again",
            problem,
            _named(failed),
            _named(self.spec.program),
        )

    # -- rolling restarts -------------------------------------------------------------------------------

    def _raise_generation(self, component: str) -> None:
        spec, rolling = self.spec, self.spec.rolling
        assert rolling is not None
        rolling = replace(
            rolling,
            left=tuple(one for one in rolling.left if one != component),
            active=(*rolling.active, component),
        )
        match component:
            case "gateway":
                spec = replace(spec, gateway=spec.gateway + 1)
            case "scheduler":
                spec = replace(spec, scheduler=spec.scheduler + 1)
            case _:
                unit = spec.units[component]
                unit = replace(unit, generation=unit.generation + 1, seconds=rolling.seconds)
                spec = replace(spec, units=spec.units | {component: unit})
        self._began[component] = self._clock.now()
        self._tell_step(RestartStep(component=component, state="restarting"))
        self._become(replace(spec, rolling=rolling))

    def _roll_on(self, component: str) -> None:
        """Takes a component out of the rolling restart, which is over for it."""
        rolling = self.spec.rolling
        assert rolling is not None
        left = tuple(one for one in rolling.left if one != component)
        active = tuple(one for one in rolling.active if one != component)
        rolling = replace(rolling, left=left, active=active) if left or active else None
        self._become(replace(self.spec, rolling=rolling))

    def _end_turn(self, component: str, problem: str) -> None:
        if problem:
            told = problem if problem.startswith(component) else f"{component} {problem}"
            if component == GATEWAY:
                told = f"the new gateway {problem} as it started; the present one serves on"
            self._tell_step(RestartStep(component=component, state="failed", problem=told))
            self._become(replace(self.spec, rolling=None))
            return
        now = self._clock.now()
        seconds = round(now - self._began.pop(component, now), 3)
        self._tell_step(RestartStep(component=component, state="restarted", seconds=seconds))
        self._roll_on(component)

    def _tell_step(self, step: RestartStep) -> None:
        self.status.steps.append(step)
        self._fresh.steps.append(step)

    # -- what it keeps ----------------------------------------------------------------------------------

    def _become(self, spec: FleetSpec) -> None:
        """Takes over a specification that nobody has edited."""
        made = replace(spec, revision=spec.revision + 1)
        try:
            self._save(made)
        except OSError as error:
            _log.error("the fleet's file cannot be written: %s; it is older than the fleet", error)
        self._take_over(made)

    def _take_over(self, spec: FleetSpec) -> None:
        before, self.spec = self.spec, spec
        if spec.units is not before.units:
            changed: dict[str, UnitSpec | None] = {
                name: unit for name, unit in spec.units.items() if before.units.get(name) is not unit
            }
            changed |= dict.fromkeys(name for name in before.units if name not in spec.units)
            self._fresh.units.update(changed)
            for name in changed:
                self._ask(name)
        if spec.rolling is not None and before.rolling is None:
            self.status = replace(self.status, steps=[])
            self._fresh = replace(self._fresh, rolls=True, steps=[])
        if spec.program != before.program or spec.proven != before.proven:
            self._begin_probation()
        self._fresh = replace(self._fresh, spec=replace(self.spec, units={}))

    def _put(self, name: str, process: ComponentStatus | None) -> None:
        processes = self.status.processes
        before = processes.get(name, ABSENT)
        if process is None:
            processes.pop(name, None)
        else:
            processes[name] = process
        if process is None or process != before:
            self._fresh.processes[name] = process
        if (process or ABSENT).phase != before.phase:
            self._ask(name)
            self._watch(name, before, process or ABSENT)

    def _ask(self, name: str) -> None:
        """Has the gateways count their requests at a unit once they give it no more."""
        process = self.status.processes.get(name, ABSENT)
        counted = is_counted(self.spec.units.get(name), process)
        if counted and name not in self._asked:
            self._asked[name] = self._seq + 1
            self._recount([name])
        elif not counted and self._asked.pop(name, None) is not None:
            self._count_at(name, None)

    def _recount(self, names: Iterable[str]) -> None:
        begun = [name for name, one in self.status.processes.items() if is_gateway(name) and one.begun]
        for name in names:
            asked = self._asked[name]
            said = [self._counts.get(gateway) for gateway in begun]
            if all(one is not None and one.seq >= asked for one in said):
                self._count_at(name, sum(one.calls.get(name, 0) for one in said if one is not None))
            else:
                self._count_at(name, None)

    def _count_at(self, name: str, calls: int | None) -> None:
        process = self.status.processes.get(name)
        if process is not None and process.calls != calls:
            self._put(name, replace(process, calls=calls))

    def _save(self, spec: FleetSpec) -> None:
        """Raises OSError, and what was kept before stays."""
        if self._store is not None:
            self._store.save(spec, self._life)

    def _flush(self) -> None:
        """Tells gateways what has changed."""
        if self._fresh == Change(seq=0):
            return
        self._seq += 1
        change = replace(self._fresh, seq=self._seq)
        self._fresh = Change(seq=0)
        for name, process in self.status.processes.items():
            if is_gateway(name) and process.begun:
                self._launcher.tell(name, change)


def _named(program: ProgramSpec | None) -> str:
    return program.name if program is not None else "the config's"
