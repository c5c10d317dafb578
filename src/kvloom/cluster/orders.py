"""Carries out the orders of those who run a fleet: each edits the specification, and waits until the status
agrees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from typing import Protocol

from msgspec.structs import replace

from kvloom.cluster.adapters import AdapterOrders, Reaching, told_of
from kvloom.cluster.edits import NodeEdit, UnitEdit
from kvloom.cluster.mirror import Mirror
from kvloom.cluster.models import (
    AddModel,
    Applied,
    Apply,
    ModelState,
    differences,
    node_states,
    refuse_drafting,
    units_that_serve,
    units_to_serve,
    without_units,
)
from kvloom.cluster.state import GATEWAY, SCHEDULER, Rolling
from kvloom.types.errors import Conflict, KvloomError, Unavailable
from kvloom.types.service import NodeState, Placement, RestartStep, Steps, UnitState
from kvloom.types.spec import EngineSpec, ModelSpec, ProgramSpec
from kvloom.types.verbs import CheckModel

_HERE = ("here", "down", "restarting")
_GONE = ("away", "failed")
_AGAIN, _BEFORE = "it is tried again", "it serves what it served before"


class Seeing(Reaching, Protocol):
    """Asks the units what they serve: the units of the gateway's router do."""

    def state(self, unit: str) -> UnitState:
        """Returns how a unit stands. Raises KeyError for one that is not known."""

    async def settled(self, unit: str) -> None:
        """Waits until a unit that is to be asked was asked."""


class FleetOrders:
    """Carries out orders at one gateway. An order goes on if nobody waits for it any more, and the mirror of
    another gateway shows the same."""

    def __init__(
        self, mirror: Mirror, seeing: Seeing, *, seconds: float, memory: int = 0, cores: int = 0
    ) -> None:
        """seconds: the time that requests have to end at a unit, if an order gives none; memory, cores: what
        the fleet's machine has for it."""
        self.mirror = mirror
        self.adapters = AdapterOrders(mirror, seeing)
        self._seeing = seeing
        self._seconds = seconds
        self._memory = memory
        self._cores = cores

    @property
    def states(self) -> list[UnitState]:
        return [self._seeing.state(name) for name in self.mirror.spec.units]

    def state(self, name: str) -> UnitState:
        return self._seeing.state(name)

    @property
    def placement(self) -> Placement:
        """Returns the units that there are and may be."""
        specs = {name: unit.engine for name, unit in self.mirror.spec.units.items()}
        away = [name for name in specs if self.mirror.outlook(name) in _GONE]
        return Placement(
            units=tuple(engine for name, engine in specs.items() if name not in away),
            away=tuple(specs[name] for name in away),
            scaled=tuple(self._scaled),
            memory=self._memory,
            cores=self._cores,
        )

    # -- units in and out of service --------------------------------------------------------------------

    async def drain(self, name: str, seconds: float | None = None) -> UnitState:
        """Gives the unit no new request, and waits for what runs there; what runs for longer goes on. Raises
        Conflict while it is being restarted, or has no process, and if it is admitted before the wait is
        over."""
        self._refuse_busy(name)
        await self.mirror.edit({name: UnitEdit(drained=True)})
        mark = self._drained_at(name)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._time(seconds)):
                await self.mirror.until(
                    lambda: self._drained_at(name) != mark or self.mirror.process(name).calls == 0
                )
        if self._drained_at(name) != mark:
            raise Conflict(
                f"{name} was admitted while its drain waited; drain it again to take it out of service"
            )
        return self.state(name)

    async def admit(self, name: str) -> UnitState:
        """Undoes `drain`; one that waits ends. A unit that does not answer takes requests as soon as it does.
        Raises Conflict while it is being restarted, after which it is admitted anyhow, and if it has no
        process."""
        self._refuse_busy(name)
        if self.mirror.spec.units[name].drained:
            await self.mirror.edit({name: UnitEdit(drained=False)})
            await self._seeing.settled(name)
        return self.state(name)

    async def restart(self, name: str, seconds: float | None = None) -> UnitState:
        """Drains the unit, puts a new process in its place, and admits that; a second order joins the first.
        Raises the error of which the new process died: it is tried again, and takes requests once it answers.
        Raises Conflict if the unit has no process."""
        self._refuse_absent(name)
        if self.mirror.outlook(name) != "restarting":
            await self.mirror.edit({name: UnitEdit(restart=True, drained=False, seconds=self._time(seconds))})
        await self._come(name)
        return self.state(name)

    def _drained_at(self, name: str) -> int | None:
        """Returns the revision at which somebody has drained the unit; None if it is not drained."""
        unit = self.mirror.spec.units.get(name)
        return unit.changed.get("drained") if unit is not None and unit.drained else None

    # -- units that come and go -------------------------------------------------------------------------

    async def start(self, name: str) -> UnitState:
        """Gives the unit a process, and waits until it takes requests; one that is to lose its own keeps it.
        Raises the error of which the process died; then the unit has none."""
        if self.mirror.outlook(name) not in _HERE:
            await self.mirror.edit({name: self._starting(name)})
            await self._come(name)
        return self.state(name)

    async def stop(self, name: str, seconds: float | None = None) -> UnitState:
        """Gives the unit no new request, and ends its process once nothing runs there, or after the time:
        what still runs then goes on elsewhere, if it can. Raises Conflict while it is being started or
        restarted, and if it is started again meanwhile."""
        stands = self.mirror.outlook(name)
        if stands in ("starting", "restarting"):
            raise Conflict(f"{name} is being started; stop it once it serves")
        if stands != "away":
            serial = self.mirror.process(name).serial
            await self.mirror.edit({name: UnitEdit(wanted=False, drained=False, seconds=self._time(seconds))})
            await self._go(name, serial)
        return self.state(name)

    async def scale(self, steps: Steps) -> None:
        """Lets units come and go, and does not wait for it. Unknown units, and those for which something else
        is under way, are passed over."""
        known = self.mirror.spec.units
        edits = {
            name: self._starting(name)
            for name in steps.start
            if name in known and not known[name].removed
            if self.mirror.outlook(name) not in (*_HERE, "starting")
        }
        edits |= {
            name: UnitEdit(wanted=False, drained=False, seconds=None)
            for name in steps.stop
            if name in known and self.mirror.outlook(name) in ("here", "down")
        }
        if edits:
            await self.mirror.edit(edits)

    async def add(self, engine: EngineSpec) -> UnitState:
        """Adds a unit, and waits until it takes requests. Raises what its process died of, BadRequest for
        what is no name, and Conflict for one that is taken and for a unit that serves something else under a
        name that another unit serves: then it is not there."""
        name = engine.unit
        await self.mirror.edit({name: UnitEdit(engine=engine, add=True)})
        try:
            await self._come(name, "it is removed again")
            if problem := self.mirror.process(name).problem:
                raise Conflict(problem)
        except (Conflict, Unavailable):
            await self.mirror.edit({name: UnitEdit(remove=True, seconds=0.0)})
            await self._forgotten([name])
            raise
        return self.state(name)

    async def remove(self, name: str) -> UnitState:
        """Lets a unit that has no process be no unit any more, and returns what it was. Raises Conflict if it
        has one, or comes and goes by itself."""
        if name in self._scaled:
            raise Conflict(f"{name} comes and goes by itself; the config's `replicas` say so")
        last = self.state(name)
        if self.mirror.outlook(name) not in _GONE or last.calls:
            raise Conflict(f"{name} is {last.state}; a unit that is away can be removed")
        await self.mirror.edit({name: UnitEdit(remove=True)})
        await self._forgotten([name])
        return last

    def _starting(self, name: str) -> UnitEdit:
        """Returns the edit that starts the unit; a unit that could not be started is tried anew."""
        return UnitEdit(wanted=True, restart=self.mirror.outlook(name) == "failed")

    @property
    def _scaled(self) -> Iterable[str]:
        return (name for group in self.mirror.spec.groups.values() for name in group.units)

    # -- nodes ------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[NodeState]:
        """Returns the state of each node that has joined."""
        return node_states(self.mirror.spec, self.mirror.status)

    def node(self, name: str) -> NodeState:
        """Raises Conflict if there is no such node any more."""
        for one in self.nodes:
            if one.name == name:
                return one
        raise Conflict(f"there is no node {name} any more")

    async def drain_node(self, name: str, seconds: float | None = None) -> NodeState:
        """Lets nothing start on the node, has its units start anew elsewhere, replicas one after the other,
        and waits until nothing runs there. A unit that no other node has room for waits, as the state tells.
        Raises Conflict if no gateway would be left, and if the node is admitted before it is empty."""
        await self.mirror.edit(nodes={name: NodeEdit(drained=True, seconds=self._time(seconds))})
        await self.mirror.until(lambda: self._is_over(name))
        state = self.node(name)
        if state.state == "there":
            raise Conflict(f"{name} was admitted while its drain waited; drain it again to empty it")
        return state

    async def admit_node(self, name: str) -> NodeState:
        """Undoes `drain_node`. Units that wait for room start; those that have moved stay where they are."""
        await self.mirror.edit(nodes={name: NodeEdit(drained=False)})
        return self.node(name)

    def _is_over(self, name: str) -> bool:
        """Returns whether a drain of the node has nothing to wait for any more."""
        return not any(one.name == name and one.state in ("draining", "silent") for one in self.nodes)

    # -- models -----------------------------------------------------------------------------------------

    @property
    def models(self) -> list[ModelState]:
        """Returns the models that are served, or are to be, by name."""
        found: dict[str, ModelState] = {}
        for name, unit in self.mirror.spec.units.items():
            for model in () if unit.removed else unit.engine.models:
                known = found.setdefault(model.name, ModelState(name=model.name, path=model.path, units={}))
                known.units[name] = self.state(name).state
        return [found[name] for name in sorted(found)]

    async def add_model(self, asked: AddModel) -> ModelState:
        """Lets a unit serve another model, with a new process, and waits until it does. Replicas that come
        and go follow one after the other; if all are away one is started, so that the model is known. Raises
        Conflict for a name that is taken, and BadRequest if a unit that is here refuses the model's files:
        none is touched before. If the unit cannot be started with the model, it serves what it served before,
        and what its process died of is raised."""
        known, units = False, units_to_serve(self.mirror.spec, asked)
        for name in units:
            if self.mirror.outlook(name) == "here":
                with told_of(name):
                    await self._seeing.client(name).check_model(CheckModel(model=asked.model))
        for name in units:
            models = self._models_of(name)
            if not models or asked.model.name in [model.name for model in models]:
                continue
            edit = self._serving(name, (*models, asked.model), self._seconds)
            if name in self._scaled and not known:
                edit = replace(edit, wanted=True)
            try:
                if await self._serve(name, edit, _BEFORE):
                    known = True
                    if problem := self.mirror.process(name).problem:
                        raise Conflict(problem)
            except (Conflict, Unavailable):
                if left := self._models_of(name, without=asked.model.name):
                    await self.mirror.edit({name: self._serving(name, left, 0.0)})
                raise
        for model in self.models:
            if model.name == asked.model.name:
                return model
        raise Conflict(f"{asked.model.name} was removed again, or its units were, before it was served")

    def _models_of(self, name: str, *, without: str | None = None) -> tuple[ModelSpec, ...]:
        """Returns what a unit is to serve now, whatever others have ordered meanwhile: nothing if it is
        gone."""
        unit = self.mirror.spec.units.get(name)
        models = () if unit is None or unit.removed else unit.engine.models
        return tuple(model for model in models if model.name != without)

    def _serving(self, name: str, models: tuple[ModelSpec, ...], seconds: float) -> UnitEdit:
        """Returns the edit by which a unit serves these models instead."""
        return UnitEdit(engine=replace(self.mirror.spec.units[name].engine, models=models), seconds=seconds)

    async def _serve(self, name: str, edit: UnitEdit, then: str = _AGAIN) -> bool:
        """Edits what a unit serves, and waits until it does. Returns False if it is to have no process."""
        await self.mirror.edit({name: edit})
        if not self.mirror.spec.units[name].wanted:
            return False
        await self._come(name, then)
        return True

    async def remove_model(self, model: str, seconds: float | None = None) -> ModelState:
        """Lets no unit serve the model any more, once what runs of it has ended or the time is over, and
        returns what it was. A unit that would serve nothing is removed. Raises UnknownModel, and Conflict if
        the model drafts for another one."""
        serving = units_that_serve(self.mirror.spec, model)
        refuse_drafting(self.mirror.spec, model)
        last = next(one for one in self.models if one.name == model)
        drain = self._time(seconds)
        for name in serving:
            if left := self._models_of(name, without=model):
                try:
                    await self._serve(name, self._serving(name, left, drain))
                except (Conflict, Unavailable):
                    if self._models_of(name):
                        raise  # Else somebody removed the whole unit meanwhile, and the model with it.
        gone = {
            name: UnitEdit(remove=True, drained=False, seconds=drain)
            for name in serving
            if model in [one.name for one in self._models_of(name)]
        }
        if gone:
            await self.mirror.edit(gone, groups=without_units(self.mirror.spec.groups, gone))
            await self._forgotten(gone)
        return last

    async def apply(self, asked: Apply) -> Applied:
        """Makes the fleet what a config describes. Units are added first, then adapters come and go, then
        units that differ otherwise start anew one after the other, and at last those go that the config does
        not have. The answer names units that cannot be started and adapters that cannot be loaded; the others
        go on."""
        found = differences(self.mirror.spec, asked.wanted, self._seconds)
        if not asked.really or not found.lines:
            return Applied(changes=found.lines)
        overrode = list(await self.mirror.edit(found.added))
        problems = await self._all_come(found.added)
        try:
            overrode += await self.adapters.change({n: edit.adapters for n, edit in found.adapted.items()})
        except KvloomError as error:
            problems.append(error.message)
        for name, edit in found.otherwise.items():
            overrode += await self.mirror.edit({name: edit})
            problems += await self._all_come([name])
        overrode += await self.mirror.edit(found.removed, groups=found.groups, program=found.program)
        await self._forgotten(found.removed)
        return Applied(changes=found.lines, problems=tuple(problems), overrode=tuple(overrode))

    async def _all_come(self, names: Iterable[str]) -> list[str]:
        """Waits for the units, and returns what those died of that did."""
        problems = []
        for name in names:
            unit = self.mirror.spec.units.get(name)
            if unit is not None and unit.wanted:
                try:
                    await self._come(name)
                    if problem := self.mirror.process(name).problem:
                        problems.append(f"{name}: {problem}")
                except Unavailable as error:
                    problems.append(error.message)
        return problems

    # -- the whole fleet --------------------------------------------------------------------------------

    async def set_program(self, program: ProgramSpec) -> None:
        """Keeps the router program for gateways to come."""
        await self.mirror.edit(program=program)

    async def roll(self, seconds: float | None = None) -> None:
        """Begins to restart all components, one after the other. Raises Conflict while one is under way."""
        beside = (SCHEDULER, GATEWAY) if self.mirror.spec.scheduler else (GATEWAY,)
        rolling = Rolling(left=(*self.mirror.spec.units, *beside), seconds=self._time(seconds))
        await self.mirror.edit(rolling=rolling)

    async def steps(self) -> AsyncGenerator[RestartStep, None]:
        """Yields what a rolling restart does, from its first step on, until it is over."""
        told = 0
        while told <= len(self.mirror.status.steps):
            over = self.mirror.spec.rolling is None
            for step in self.mirror.status.steps[told:]:
                told += 1
                yield step
            if over:
                return
            seen = self.mirror.seq
            await self.mirror.until(lambda seen=seen: self.mirror.seq != seen)  # type: ignore[misc]

    # -- all of them ------------------------------------------------------------------------------------

    async def _come(self, name: str, then: str = _AGAIN) -> None:
        """Waits until the process that is wanted takes requests. Raises what it died of, and what is done
        then."""
        generation = self.mirror.spec.units[name].generation

        def known() -> bool:
            unit, process = self.mirror.spec.units.get(name), self.mirror.process(name)
            if unit is None or not unit.wanted or process.lack:
                return True
            if process.generation < generation:
                return False
            return process.phase in ("waiting", "failed") or (process.phase == "ready" and process.seen)

        await self.mirror.until(known)
        now, process = self.mirror.spec.units.get(name), self.mirror.process(name)
        if now is None or not now.wanted:
            raise Unavailable(f"{name} was stopped meanwhile")
        if process.lack:
            raise Unavailable(f"{name} {process.lack}; it starts as soon as there is room")
        if process.phase in ("waiting", "failed"):
            told = f"; {then}" if process.phase == "waiting" else ""
            raise Unavailable(f"{name} {process.problem} as it started{told}")
        await self._seeing.settled(name)

    async def _go(self, name: str, serial: int) -> None:
        """Waits until the process of this number has ended. Raises Conflict if it is called back."""

        def called_back() -> bool:
            unit, process = self.mirror.spec.units.get(name), self.mirror.process(name)
            wanted = unit is not None and unit.wanted
            return wanted and process.phase == "ready" and process.serial == serial

        def gone() -> bool:
            process = self.mirror.process(name)
            return process.serial != serial or process.phase == "absent"

        await self.mirror.until(lambda: gone() or called_back())
        if not gone():
            raise Conflict(f"{name} was started again while it was to stop; stop it again")

    async def _forgotten(self, names: Iterable[str]) -> None:
        """Waits until the units are there no more. Raises Conflict if one was started again meanwhile."""

        def left() -> list[str]:
            return [name for name in names if name in self.mirror.spec.units]

        def kept() -> list[str]:
            return [name for name in left() if not self.mirror.spec.units[name].removed]

        await self.mirror.until(lambda: not left() or bool(kept()))
        if kept():
            raise Conflict(f"{kept()[0]} was started again while it was to be removed; remove it again")

    def _time(self, seconds: float | None) -> float:
        return self._seconds if seconds is None else seconds

    def _refuse_busy(self, name: str) -> None:
        self._refuse_absent(name)
        if self.mirror.outlook(name) == "restarting":
            raise Conflict(f"{name} is being restarted; it takes requests once it has")

    def _refuse_absent(self, name: str) -> None:
        if self.mirror.outlook(name) not in _HERE:
            raise Conflict(f"{name} has no process, or is about to lose it; start it first")
