"""Owns a fleet's specification, hears its status, and makes the status agree with the specification."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from msgspec.structs import replace

from kvloom.cluster import lifecycle
from kvloom.cluster.actions import (
    Action,
    BeginServing,
    DrainUnit,
    EndTurn,
    Forget,
    ForgetNode,
    Kill,
    LoseNode,
    MoveUnit,
    PassOver,
    ProveProgram,
    RaiseGeneration,
    ReadmitUnit,
    RetireGateway,
    RevertProgram,
    StartProcess,
    StopProcess,
    TellLack,
    Wait,
)
from kvloom.cluster.edits import Edit, edited, restarting, reverted, with_turn, without_turn
from kvloom.cluster.launcher import (
    Change,
    Counted,
    Edited,
    Ended,
    FoundProcess,
    Launcher,
    NodeJoined,
    NodeLost,
    NodeReport,
    Report,
    Snapshot,
)
from kvloom.cluster.lifecycle import Deed
from kvloom.cluster.reconcile import TIMING, Timing, reconcile
from kvloom.cluster.state import (
    ABSENT,
    ComponentStatus,
    FleetSpec,
    FleetStatus,
    NodeSpec,
    NodeStatus,
    UnitSpec,
    is_counted,
    is_gateway,
    program_name,
)
from kvloom.cluster.store import SpecStore
from kvloom.journal.log import Journal
from kvloom.journal.records import Killed
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError, Unavailable
from kvloom.types.service import RestartStep

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
        journal: Journal | None = None,
    ) -> None:
        """spec: the specification of the fleet if `store` keeps none yet. Raises ConfigError if the store's
        content cannot be used; then nothing is started or ended. journal: takes the events of the fleet."""
        kept = store.load() if store is not None else None
        self.spec, life = kept or (spec, 0)
        self._life = life + 1
        self._launcher = launcher
        self._clock = clock
        self._store = store
        self._timing = timing
        self._watch = watch
        self._journal = journal or Journal(clock)
        self._wake = asyncio.Event()
        self._seq = self._life * _LIFE
        self._counts: dict[str, Counted] = {}  # What each gateway has said last.
        self._asked: dict[str, int] = {}  # The change with which each unit was taken out of service.
        self._fresh = Change(seq=0)  # What no gateway was told yet.
        self._adopted: set[str] = set()  # Gateways that are to be told the whole fleet.
        self._began: dict[str, float] = {}  # When each step of a rolling restart did.
        self.status = FleetStatus()
        self._begin_probation()
        try:
            self._save(self.spec)
        except OSError as error:  # What was kept before is what it goes on with.
            _log.warning("the fleet's file cannot be written: %s", error.strerror or error)
        for name, node in lifecycle.unheard(self.spec, clock.now(), timing).items():
            self._put_node(name, node)
        for one in launcher.running():
            self.adopt(one)
        for unit in self.spec.units:
            self._ask(unit)

    def adopt(self, found: FoundProcess) -> None:
        """Takes in a process that an earlier controller has started."""
        name = found.component
        serial = self.status.processes.get(name, ABSENT).serial + 1
        made = lifecycle.adopted(found, self.spec, self._clock.now(), self._timing, serial=serial)
        self._put(name, made)
        if is_gateway(name):
            self.status = replace(self.status, opened=True)
            self._adopted.add(name)

    def _tell_adopted(self) -> None:
        """Tells gateways that were taken over what the fleet is. It is first done when the controller works:
        until then nodes may be yet to tell what they have, which gateways would take for gone."""
        adopted, self._adopted = self._adopted, set()
        for name in sorted(adopted):
            if self.status.processes.get(name, ABSENT).begun:
                self._launcher.tell(name, self.snapshot)

    @property
    def snapshot(self) -> Snapshot:
        """Returns the whole fleet as it is now. The status changes while the snapshot waits to be sent."""
        return Snapshot(seq=self._seq, spec=self.spec, status=self.status.copy())

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
        """Does as `edit` does, and then tells the gateway that has asked for it, after the changes."""
        self._launcher.tell(gateway, self.edit(edit))

    def hear(self, report: Report | NodeReport) -> None:
        """Takes in what has happened to a component's process, or to a node. A component that is not known is
        passed over: it was forgotten. So is the end of a process whose component has another one."""
        self._wake.set()
        if isinstance(report, NodeReport):
            self._hear_node(report)
            return
        name = report.component
        if isinstance(report, Ended) and (node := self.status.nodes.get(report.node)) and name in node.stale:
            left = tuple(one for one in node.stale if one != name)
            self._put_node(report.node, replace(node, stale=left))
            return
        before = self.status.processes.get(name)
        if before is None or (isinstance(report, Ended) and report.node not in ("", before.node)):
            return
        self._put(name, lifecycle.heard(report, before, self.spec, self._clock.now(), self._timing))
        if isinstance(report, Ended) and is_gateway(name):
            self._recount(self._asked)

    def _hear_node(self, report: NodeReport) -> None:
        """Takes in what has happened to a node. Of one that is lost, or has left, only that it has joined
        counts."""
        name, now = report.node, self._clock.now()
        before = self.status.nodes.get(name)
        there = before is not None and before.phase in ("there", "silent")
        if not there and not isinstance(report, NodeJoined):
            return
        self._put_node(name, lifecycle.heard_node(report, before, now))
        if isinstance(report, NodeJoined):
            if name not in self.spec.nodes:
                self._become(replace(self.spec, nodes=self.spec.nodes | {name: NodeSpec()}))
            self._take_in(report, now)
        gone = lifecycle.bereaved(report, self.spec, self.status, now, self._timing)
        for one, process in gone.items():
            self._put(one, process)
        self._recount(self._asked)

    def _take_in(self, report: NodeJoined, now: float) -> None:
        """Takes over what runs on a node, but for what runs elsewhere as well."""
        known, adopt, discard = lifecycle.taken_in(report, self.spec, self.status, now, self._timing)
        for name, process in known.items():
            self._put(name, process)
        for found in adopt:
            self.adopt(found)
        self._put_node(report.node, replace(self.status.nodes[report.node], stale=tuple(discard)))
        for name in discard:
            self._launcher.discard(report.node, name)
        kept = (one.component for one in report.processes if one.component not in discard)
        self._adopted.update(name for name in kept if is_gateway(name))

    def count(self, gateway: str, said: Counted) -> None:
        """Takes in how many requests a gateway has at the units that get no new ones."""
        self._counts[gateway] = said
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
        self._tell_adopted()
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
                self._become(without_turn(self.spec, component))
            case EndTurn(component, problem):
                self._end_turn(component, problem)
            case RevertProgram(problem):
                self._revert(problem)
            case ProveProgram():
                self._become(replace(self.spec, proven=self.spec.program))
            case MoveUnit(name):
                node = self.spec.nodes[self.status.processes[name].node]
                self._become(restarting(self.spec, name, node.seconds))
            case LoseNode(node):
                self._hear_node(NodeLost(node, "it did not answer until its lease was over"))
            case ForgetNode(node):
                self._put_node(node, None)
                nodes = {name: one for name, one in self.spec.nodes.items() if name != node}
                self._become(replace(self.spec, nodes=nodes))
            case Wait():
                pass
            case _:
                name = action.component
                before = self.status.processes.get(name, ABSENT)
                if isinstance(action, BeginServing):
                    self._flush()
                self._put(name, lifecycle.after(action, before, self.spec, now, self._timing))
                self._order(action)

    def _order(self, action: Deed) -> None:
        launcher, name = self._launcher, action.component
        match action:
            case StartProcess(generation=generation, node=node, device=device):
                unit = self.spec.units.get(name)
                engine = replace(unit.engine, device=device or unit.engine.device) if unit else None
                launcher.start(name, generation, engine, node)
            case DrainUnit() | ReadmitUnit() | TellLack():
                pass  # The gateways see it.
            case RetireGateway():
                launcher.retire(name)
            case BeginServing():
                self.status = replace(self.status, opened=True)
                self._counts.pop(name, None)  # An earlier process of the same name has said it.
                launcher.tell(name, self.snapshot)
                self._recount(self._asked)
            case StopProcess():
                launcher.stop(name)
            case Kill():
                why = lifecycle.why_killed(self.status.processes[name], self._timing)
                self._journal.add(name, Killed(reason=why))
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
        self._become(reverted(self.spec, problem, beside=lifecycle.has_gateway(self.status)))
        _log.warning(
            "the gateway %s less than a minute after the program %s was set: %s runs again",
            problem,
            program_name(failed),
            program_name(self.spec.program),
        )

    # -- rolling restarts -------------------------------------------------------------------------------

    def _raise_generation(self, component: str) -> None:
        self._began[component] = self._clock.now()
        self._tell_step(RestartStep(component=component, state="restarting"))
        self._become(with_turn(self.spec, component))

    def _end_turn(self, component: str, problem: str) -> None:
        if problem:
            self._tell_step(lifecycle.failed_turn(component, problem))
            self._become(replace(self.spec, rolling=None))
            return
        now = self._clock.now()
        seconds = round(now - self._began.pop(component, now), 3)
        self._tell_step(RestartStep(component=component, state="restarted", seconds=seconds))
        self._become(without_turn(self.spec, component))

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
        for component, event in lifecycle.told_of_edit(before, spec):
            self._journal.add(component, event)
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
            now = self._clock.now()
            self._journal.add(name, lifecycle.told(name, before, process or ABSENT, self.spec, now))
            self._watch(name, before, process or ABSENT)

    def _put_node(self, name: str, node: NodeStatus | None) -> None:
        self._journal.add(name, lifecycle.told_of_node(self.status.nodes.get(name), node))
        if node is None:
            self.status.nodes.pop(name, None)
        else:
            self.status.nodes[name] = node
        self._fresh.nodes[name] = node

    def _ask(self, name: str) -> None:
        """Has the gateways count their requests at a unit once they give it no more."""
        process = self.status.processes.get(name, ABSENT)
        asked = is_counted(self.spec.units.get(name), process)
        if asked and name not in self._asked:
            self._asked[name] = self._seq + 1
            self._recount([name])
        elif not asked and self._asked.pop(name, None) is not None:
            self._count_at(name, None)

    def _recount(self, names: Iterable[str]) -> None:
        begun = [name for name, one in self.status.processes.items() if is_gateway(name) and one.begun]
        for name in names:
            said = [self._counts.get(gateway) for gateway in begun]
            self._count_at(name, lifecycle.counted(name, said, self._asked[name]))

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
            if is_gateway(name) and process.begun and name not in self._adopted:
                self._launcher.tell(name, change)
