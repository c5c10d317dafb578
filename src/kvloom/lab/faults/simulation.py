"""The simulation of a fleet in which things go wrong: who is there, and what befalls them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from kvloom.cluster.controller import Controller
from kvloom.cluster.edits import Edit, UnitEdit
from kvloom.cluster.launcher import News, NodeReport, Report, Snapshot
from kvloom.cluster.mirror import Said
from kvloom.cluster.state import ABSENT, FleetSpec, Rolling, gateway_name
from kvloom.journal.log import Journal as FleetJournal
from kvloom.journal.samples import ModelTotals, Sample
from kvloom.lab.faults.faults import (
    ControllerLoss,
    Death,
    Fault,
    FaultScenario,
    FaultSource,
    FleetEdit,
    GatewayLoss,
    NodeOutage,
    Order,
    Rates,
    Relocation,
    Replan,
    RollingRestart,
    SchedulerLoss,
    Switch,
    UnitAdded,
    UnitRemoved,
)
from kvloom.lab.faults.faulty_wire import FaultyWire
from kvloom.lab.faults.gateway import FaultyGateway, FleetWire, SchedulerProcess
from kvloom.lab.faults.host import AT_ONCE, LATENCY, FaultyHost, FaultyLauncher
from kvloom.lab.faults.journal import ClientAnswer, Journal
from kvloom.lab.faults.laws import Broken, check_pool
from kvloom.lab.faults.nodes import MARGIN, FaultyNodes
from kvloom.lab.faults.recorded import told_as
from kvloom.lab.sim.fleet import forward_to_controller, start_controller
from kvloom.lab.sim.links import TimedLink
from kvloom.lab.sim.offload import OffloadingUnits
from kvloom.lab.sim.processes import ProcessTasks, Surroundings
from kvloom.lab.sim.recording import fleet_sample
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.router.program import Program, load_program
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError
from kvloom.types.verbs import Pin, Prefix, PrepRecv

_EDITED: Final = {
    RollingRestart: "rolling restarts",
    Replan: "units replanned",
    UnitAdded: "units added",
    UnitRemoved: "units removed",
}
"""The names under which edits that are taken are counted."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The classes that simulations are made of. Tests put in what breaks a law."""

    host: type[FaultyHost] = FaultyHost
    wire: type[FaultyWire] = FaultyWire


class FaultSimulation:
    """Breaks what the scenario says, when it says so, and decides nothing else."""

    def __init__(self, scenario: FaultScenario, clock: Clock, journal: Journal, parts: Parts) -> None:
        self.scenario = scenario
        self.crash: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """The error that an engine, a router or a call has failed of, if it is none of kvloom's own
        errors."""
        self.broken: list[Broken] = []
        """The broken laws that were seen during the run."""
        self.answers = [ClientAnswer(client) for client in scenario.clients]
        self.gateway: FaultyGateway | None = None
        self._clock = clock
        self._journal = journal
        self._parts = parts
        self._faults: list[FaultSource] = []
        self._calm = False  # Nothing goes wrong any more, at gateways that open later neither.
        specs = [unit.spec for unit in scenario.all_units]
        self.records = FleetJournal(clock)
        """The fleet's own journal, as the product writes it."""
        self._around = Surroundings(
            clock, OffloadingUnits(specs), self._crashed, LATENCY, _link, journal=self.records
        )
        joining = [fault.unit for fault in scenario.faults if isinstance(fault, UnitAdded)]
        self.hosts = {unit.spec.unit: self._host(unit) for unit in (*scenario.units, *joining)}
        self._around.hosts.update(self.hosts)
        self._launcher = self._make_launcher()
        self._launcher.told = self._tell
        self._store = _Store()
        self._timing = replace(AT_ONCE, lease=scenario.node_lease + MARGIN)
        self.controller = start_controller(
            self._launcher,
            scenario.units,
            scenario.rescheduling,
            clock,
            self._timing,
            on_nodes=bool(scenario.nodes),
            store=self._store,
            journal=self.records,
        )
        self._launcher.hear = self._hear
        self._controlling: asyncio.Task[None] | None = None
        self._controlled = asyncio.Event()
        """Set while there is a controller."""
        self._unsaid: list[tuple[str, Said]] = []  # What gateways have said while there was none.
        self._program = _load(scenario.program)
        self._up = asyncio.Event()
        self._opening: FaultyGateway | None = None  # The one that serves, or is about to.
        self._opens = 0.0  # When another gateway may.
        self._tasks = ProcessTasks(self._crashed)
        self._scheduler = self._make_scheduler()

    async def start(self) -> None:
        self._control()
        await self._up.wait()
        if self._scheduler is not None:
            self._scheduler.start()

    async def play(self, most: float) -> list[ClientAnswer]:
        """Lets all happen that is drawn, for `most` seconds. Returns the answers that are not over then."""
        clients = [self._tasks.spawn(self._ask(answer)) for answer in self.answers]
        faults = [
            self._tasks.spawn(self._befall(number, fault))
            for number, fault in enumerate(self.scenario.faults)
        ]
        await asyncio.wait(clients, timeout=most)
        if self._scheduler is not None:
            self._scheduler.kill()  # it has nothing to order about any more
        if faults:
            await asyncio.wait(faults, timeout=most)
        return [answer for answer in self.answers if answer.fate == "waits"]

    def sample(self, at: float, totals: tuple[ModelTotals, ...]) -> Sample:
        """Returns a sample of the fleet. While it has no gateway, every unit that has a process counts as
        up."""
        spec = self.controller.spec.units
        engines = {name: host.process.engine for name, host in self.hosts.items() if host.process}
        services: Mapping[str, str] = {name: "up" if name in engines else "down" for name in spec}
        if self.gateway is not None:
            services = self.gateway.router.services
        processes = self.controller.status.processes
        homes = {name: processes[name].node for name in spec if name in processes}
        units = {name: unit.engine for name, unit in spec.items()}
        return fleet_sample(at, totals, engines, services, units, homes)

    def calm(self) -> None:
        """Ends all faults of calls and jobs, and the fleet scheduler."""
        if self._scheduler is not None:
            self._scheduler.kill()
        self._calm = True
        for faults in self._faults:
            faults.calm()

    async def close(self) -> None:
        assert self.gateway is not None
        self._tasks.cancel()
        await self.gateway.close()
        for host in self.hosts.values():
            await host.stop()

    # -- who is there -----------------------------------------------------------------------------------

    def _host(self, unit: SimulatedUnit) -> FaultyHost:
        return self._parts.host(unit, self._around, self._fates(unit.spec.unit), self._journal)

    def _wire(self, host: FaultyHost) -> FaultyWire:
        faults = self._fates(f"to {host.name}")
        return self._parts.wire(host, self._clock, self.scenario.delay, faults, self._journal, self._crashed)

    def _make_scheduler(self) -> SchedulerProcess | None:
        given, clock, journal = self.scenario.rescheduling, self._clock, self._journal
        if given is None:
            return None
        faults = self._fates("of the fleet", self.scenario.fleet_rates)
        wire = FleetWire(lambda: self.gateway, clock, self.scenario.delay, faults, journal, self._crashed)
        return SchedulerProcess(given, wire, clock, journal, self._crashed)

    def _fates(self, of: str, rates: Rates | None = None) -> FaultSource:
        made = FaultSource(f"{self.scenario.seed}/{len(self._faults)}/{of}", rates or self.scenario.rates)
        self._faults.append(made)
        if self._calm:
            made.calm()
        return made

    def _make_launcher(self) -> FaultyLauncher:
        units, nodes = self.scenario.all_units, self.scenario.nodes
        shapes = {model: shape for unit in units for model, shape in unit.shapes.items()}
        given = (
            self.hosts,
            self._clock,
            ProcessTasks(self._crashed),
            self._journal,
            shapes,
            self._open_gateway,
        )
        if not nodes:
            return FaultyLauncher(*given)
        launcher = FaultyNodes(nodes, self.scenario.node_lease, *given)
        self._around.plane.apart = launcher.apart
        return launcher

    def _control(self) -> None:
        """Lets the controller work, and tells it of the nodes and of what gateways have to say."""
        self._controlling = self._tasks.spawn(self.controller.run())
        self._controlled.set()
        if isinstance(self._launcher, FaultyNodes):
            self._launcher.resume()
        unsaid, self._unsaid = self._unsaid, []
        for name, said in unsaid:
            forward_to_controller(self.controller, name, said)

    def _hear(self, report: Report | NodeReport) -> None:
        """Passes on what the controller hears of, if there is one."""
        passed = self._launcher.passed(report) if isinstance(self._launcher, FaultyNodes) else report
        if passed is not None and self._controlled.is_set():
            self.controller.hear(passed)

    def _say(self, name: str, said: Said) -> None:
        if self._controlled.is_set():
            forward_to_controller(self.controller, name, said)
        else:
            self._unsaid.append((name, said))

    async def _open_gateway(self, name: str, snapshot: Snapshot) -> None:
        """Opens a gateway once the last one has been gone for as long as its loss says."""
        await self._clock.sleep(max(0.0, self._opens - self._clock.now()))
        await self._controlled.wait()
        wires = {name: self._wire(host) for name, host in self.hosts.items()}
        self._opening = gateway = FaultyGateway(
            wires,
            self._program,
            self._clock,
            self._journal,
            self._crashed,
            self.controller.snapshot,
            lambda said: self._say(name, said),
            partial(self.records.add, name),
        )
        await gateway.start()
        self.gateway = gateway
        self._up.set()

    def _tell(self, news: News) -> None:
        if self._opening is not None:
            self._opening.heed(news)

    async def _ask(self, answer: ClientAnswer) -> None:
        await self._clock.sleep(answer.client.at)
        await self._up.wait()
        assert self.gateway is not None
        await asyncio.wait([self.gateway.spawn(self.gateway.answer(answer))])

    # -- what befalls them ------------------------------------------------------------------------------

    async def _befall(self, number: int, fault: Fault) -> None:
        await self._clock.sleep(fault.at)
        for host in self.hosts.values():
            self.broken.extend(check_pool(host))
        for component, told in told_as(fault):
            self.records.add(component, told)
        match fault:
            case Death():
                await self._die(fault)
            case GatewayLoss():
                await self._lose_gateway(fault)
            case SchedulerLoss():
                await self._lose_scheduler(fault)
            case ControllerLoss():
                await self._lose_controller(fault)
            case NodeOutage():
                await self._cut(fault)
            case Relocation():
                await self._relocate(fault)
            case Switch():
                self._program = _load(fault)
                self._journal("program", "", fault.program, dict(fault.options))
                self._journal.count("programs switched")
                if self.gateway is not None:
                    self.gateway.router.set_program(self._program)
            case RollingRestart() | Replan() | UnitAdded() | UnitRemoved():
                await self._controlled.wait()
                self._edit(fault)
            case Order():
                with suppress(KvloomError):
                    await self._order(f"order-{number}", fault)

    async def _die(self, death: Death) -> None:
        host = self.hosts[death.unit]
        if host.process is not None:
            self._journal.count("engines stopped" if death.gently else "engines killed")
        if death.gently:
            await host.stop()
        else:
            host.kill()
        status = self.controller.status.processes.get(death.unit, ABSENT)
        if status.phase in ("ready", "draining") and not host.process:
            self._launcher.lose(death.unit, death.down)

    async def _lose_gateway(self, loss: GatewayLoss) -> None:
        gateway, self.gateway = self.gateway, None
        if gateway is not None:
            self._up.clear()
            self._opening = None
            self._opens = self._clock.now() + loss.down
            self._tasks.spawn(gateway.lose())
            self._launcher.lose(gateway_name(1), 0.0)

    async def _lose_scheduler(self, loss: SchedulerLoss) -> None:
        if self._scheduler is not None:
            self._journal.count("schedulers lost")
            self._scheduler.kill()
            await self._clock.sleep(loss.down)
            self._scheduler.start()

    async def _lose_controller(self, loss: ControllerLoss) -> None:
        if not self._controlled.is_set():
            return
        self._journal("fleet", "", "controller dies")
        self._journal.count("controllers lost")
        assert self._controlling is not None
        self._controlling.cancel()
        self._controlled.clear()
        if isinstance(self._launcher, FaultyNodes):
            self._launcher.abandon()
        await self._clock.sleep(loss.down)
        self._journal("fleet", "", "controller starts")
        self.controller = Controller(
            FleetSpec(),
            self._launcher,
            self._clock,
            store=self._store,
            timing=self._timing,
            journal=self.records,
        )
        self._control()

    async def _cut(self, outage: NodeOutage) -> None:
        assert isinstance(self._launcher, FaultyNodes)
        nodes = [name for name in outage.nodes if self._launcher.cut(name, off=outage.off)]
        await self._clock.sleep(outage.seconds)
        for name in nodes:
            self._launcher.heal(name)

    async def _relocate(self, order: Relocation) -> None:
        asked = [
            answer.client.body.request for answer in self.answers if answer.tokens and answer.over is None
        ]
        if self.gateway is not None and asked:
            request = asked[int(order.which * len(asked))]
            names = list(self.hosts)
            first = names.index(order.unit)
            units = [*names[first:], *names[:first]]
            await asyncio.wait([self.gateway.spawn(self.gateway.move(request, units))])

    def _edit(self, fault: FleetEdit) -> None:
        """Edits the fleet's specification; what is refused changes nothing."""
        told: tuple[str, ...]
        match fault:
            case RollingRestart():
                rolling = Rolling(
                    left=tuple(self.controller.spec.units), seconds=fault.seconds, budget=fault.budget
                )
                edit, told = Edit(rolling=rolling), ("fleet", "is restarted, at once", str(fault.budget))
            case Replan(unit=unit):
                name = unit.spec.unit
                edit = Edit(units={name: UnitEdit(engine=unit.spec, seconds=fault.seconds)})
                told = (name, "is to serve", *unit.shapes)
            case UnitAdded(unit=unit):
                name = unit.spec.unit
                edit = Edit(units={name: UnitEdit(engine=unit.spec, add=True)})
                told = (name, "is added, with", *unit.shapes)
            case UnitRemoved(unit=name):
                edit = Edit(units={name: UnitEdit(remove=True, seconds=fault.seconds)})
                told = (name, "is removed")
        refused = self.controller.edit(edit).refused
        self._journal("edit", *told, "but that is refused" if refused else "")
        self._journal.count("edits refused" if refused else _EDITED[type(fault)])

    async def _order(self, name: str, order: Order) -> None:
        gateway = self.gateway
        if gateway is None:
            return
        self._journal.count("orders")
        self._journal("order", order.unit, order.what, order.model, f"for {order.seconds} s")
        wire, model, prompt = gateway.wires[order.unit], order.model, order.prompt
        match order.what:
            case "pin":
                await wire.pin(Pin(model=model, request=name, prompt=prompt, lease=order.seconds))
            case "evict":
                await wire.evict(Prefix(model=model, prompt=prompt))
            case "reserve":
                await wire.prep_recv(PrepRecv(model=model, request=name, prompt=prompt))
            case "drain":
                await self._controlled.wait()
                self.controller.edit(Edit(units={order.unit: UnitEdit(drained=True)}))
                await self._clock.sleep(order.seconds)
                await self._controlled.wait()
                self.controller.edit(Edit(units={order.unit: UnitEdit(drained=False)}))

    def _crashed(self, error: BaseException) -> None:
        if not self.crash.done():
            self.crash.set_result(error)


class _Store:
    """Satisfies `SpecStore`, and outlives controllers."""

    def __init__(self) -> None:
        self._kept: tuple[FleetSpec, int] | None = None

    def load(self) -> tuple[FleetSpec, int] | None:
        return self._kept

    def save(self, spec: FleetSpec, life: int) -> None:
        self._kept = spec, life


def _load(switch: Switch) -> Program:
    return load_program(switch.program, switch.options)


def _link(unit: SimulatedUnit) -> TimedLink:
    return TimedLink(unit.bandwidth, LATENCY)
