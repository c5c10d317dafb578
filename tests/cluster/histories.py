"""Fleets whose processes a test starts, answers for and ends, and what must hold of them all the while."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvloom.cluster.controller import Controller
from kvloom.cluster.edits import Edit, UnitEdit
from kvloom.cluster.launcher import (
    Answered,
    Change,
    Counted,
    Ended,
    FoundProcess,
    Missed,
    News,
    Snapshot,
    UnitSeen,
)
from kvloom.cluster.reconcile import Timing
from kvloom.cluster.state import (
    ABSENT,
    ComponentStatus,
    FleetSpec,
    Phase,
    Rolling,
    UnitSpec,
    is_counted,
    is_gateway,
)
from kvloom.types.spec import EngineSpec, ModelSpec, ProgramSpec

TIMING = Timing(first=0.5, most=4.0)


def engine(name: str, *models: str) -> EngineSpec:
    return EngineSpec(
        unit=name,
        models=tuple(ModelSpec(name=model, path=f"/{model}") for model in models or ("m",)),
        kv_bytes=1 << 20,
        block_bytes=256,
        policy="fcfs",
        max_running=1,
        max_waiting=1,
        chunk_tokens=1,
        threads=1,
    )


class Killed(Exception):
    """The controller's process has ended where it stood."""


class StillClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody waits here")


class Memory:
    """Satisfies `Store`."""

    def __init__(self) -> None:
        self.kept: tuple[FleetSpec, int] | None = None

    def load(self) -> tuple[FleetSpec, int] | None:
        return self.kept

    def save(self, spec: FleetSpec, life: int) -> None:
        self.kept = spec, life


@dataclass
class One:
    """A process."""

    generation: int
    phase: Phase = "starting"
    node: str = ""
    deaf: bool = False
    """It does not end when it is told to."""
    units: dict[str, UnitSpec] = field(default_factory=dict)
    processes: dict[str, ComponentStatus] = field(default_factory=dict)
    seq: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    """Of a gateway: requests in flight, by unit."""

    def heed(self, news: News) -> None:
        if isinstance(news, Snapshot):
            self.units, self.processes = dict(news.spec.units), dict(news.status.processes)
            self.seq = news.seq
        elif isinstance(news, Change):
            assert news.seq > self.seq
            self.seq = news.seq
            for name, unit in news.units.items():
                if unit is None:
                    del self.units[name]
                else:
                    self.units[name] = unit
            for name, process in news.processes.items():
                if process is None:
                    self.processes.pop(name, None)
                else:
                    self.processes[name] = process

    def counted(self) -> Counted:
        withdrawn = [
            name
            for name in self.units.keys() | self.processes.keys()
            if is_counted(self.units.get(name), self.processes.get(name, ABSENT))
        ]
        return Counted(self.seq, {name: self.calls.get(name, 0) for name in withdrawn})


class ModelledHost:
    """Satisfies `Launcher`; it outlives its controllers. fuse: calls until the controller is killed, before
    or after the last of them has an effect."""

    def __init__(self, draw: random.Random) -> None:
        self.there: dict[str, One] = {}
        self.fuse: int | None = None
        self._draw = draw

    def start(self, component: str, generation: int, engine: EngineSpec | None, node: str = "") -> None:
        late = self._burn()
        assert component not in self.there, f"{component} has two processes"
        self.there[component] = One(generation, node=node, deaf=self._draw.random() < 0.1)
        self._end(late)

    def stop(self, component: str) -> None:
        late = self._burn()
        if component in self.there:
            self.there[component].phase = "ending"
        self._end(late)

    def kill(self, component: str) -> None:
        late = self._burn()
        if component in self.there:
            self.there[component].deaf = False
            self.there[component].phase = "ending"
        self._end(late)

    def discard(self, node: str, component: str) -> None:
        """Does nothing: there are no other nodes."""

    def retire(self, component: str) -> None:
        late = self._burn()
        if component in self.there:
            self.there[component].phase = "retiring"
        self._end(late)

    def tell(self, component: str, news: News) -> None:
        if component in self.there:
            self.there[component].heed(news)

    def forget(self, component: str) -> None:
        assert component not in self.there, f"{component} is forgotten, but has a process"

    def running(self) -> Sequence[FoundProcess]:
        return [FoundProcess(name, one.generation, one.phase) for name, one in self.there.items()]

    def _burn(self) -> bool:
        if self.fuse is None:
            return False
        self.fuse -= 1
        if self.fuse > 0:
            return False
        self.fuse = None
        if self._draw.random() < 0.5:
            raise Killed
        return True

    def _end(self, now: bool) -> None:
        if now:
            raise Killed


class History:
    """One fleet, and what befalls it by its seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.clock, self.store, self.host = StillClock(), Memory(), ModelledHost(self.draw)
        self.drained: dict[str, One] = {}  # The process that was drained last, of each unit.
        self.lives = 0
        units = {f"u{i}": UnitSpec(engine=engine(f"u{i}")) for i in range(self.draw.randint(1, 5))}
        self.first = FleetSpec(units=units, scheduler=self.draw.randint(0, 1), drain=3.0)
        self.begin()

    def begin(self) -> None:
        """Starts a controller, the first one or one after another."""
        self.lives += 1
        self.drained.clear()
        self.controller = Controller(
            self.first, self.host, self.clock, store=self.store, timing=TIMING, watch=self.watch
        )
        self.step()

    def watch(self, name: str, before: ComponentStatus, process: ComponentStatus) -> None:
        if process.phase == "draining":
            one = self.host.there.get(name)
            assert one is None or self.drained.get(name) is not one, f"{name} is drained twice"
            if one is not None:
                self.drained[name] = one
        elif before.phase == "draining" and process.phase == "ready":
            self.drained.pop(name, None)  # It was called back: another drain is another order's.

    def step(self) -> float | None:
        due = None
        try:
            due = self.controller.step()
        except Killed:
            self.begin()
        rolling = self.controller.spec.rolling
        if rolling is not None:
            out = [name for name in rolling.active if name in self.controller.spec.units]
            assert len(out) <= rolling.budget, f"{out} are out of service at once"
        return due

    def run(self, events: int) -> None:
        for _ in range(events):
            self.happen()
            self.step()
        self.calm()

    def happen(self) -> None:
        draw, host = self.draw, self.host
        kind = draw.random()
        if kind < 0.1:
            self.clock.time += draw.choice((0.1, 1.0, 10.0))
        elif kind < 0.6:
            if host.there:
                self.befall(draw.choice(list(host.there)))
        elif kind < 0.65:
            host.fuse = draw.randint(1, 4)
        elif kind < 0.68:
            self.begin()
        else:
            answer = self.controller.edit(self.drawn_edit())
            assert answer.refused is None or answer.refused.code in ("conflict", "invalid_request")

    def befall(self, name: str) -> None:
        draw, one = self.draw, self.host.there[name]
        kind = draw.random()
        match one.phase:
            case "starting" if kind < 0.7:
                self.answer(name)
            case "starting" if kind < 0.8:
                self.end(name)
            case "ready" if kind < 0.15:
                self.end(name)
            case "ready" if kind < 0.25:
                self.controller.hear(Missed(name, 3))
            case "ready" if is_gateway(name):
                one.calls = {unit: draw.choice((0, 0, 1, 2)) for unit in one.units}
                self.controller.count(name, one.counted())
            case "ready":
                self.controller.hear(UnitSeen(name, one.generation, "" if kind < 0.95 else "it differs"))
            case "ending" | "retiring" if not one.deaf:
                self.end(name)

    def answer(self, name: str) -> None:
        self.host.there[name].phase = "ready"
        self.controller.hear(Answered(name))

    def end(self, name: str) -> None:
        del self.host.there[name]
        self.controller.hear(Ended(name, "ended with exit code 3"))

    def drawn_edit(self) -> Edit:
        draw, spec = self.draw, self.controller.spec
        name = draw.choice([*spec.units, "new"])
        model = draw.choice(("m", "n"))
        one = draw.choice(
            (
                UnitEdit(wanted=False, seconds=draw.choice((None, 0.0, 2.0))),
                UnitEdit(wanted=True),
                UnitEdit(restart=True, seconds=draw.choice((None, 0.0, 2.0)), drained=False),
                UnitEdit(drained=True),
                UnitEdit(drained=False),
                UnitEdit(engine=engine(name, model), seconds=1.0),
                UnitEdit(engine=engine(name), add=True),
                UnitEdit(remove=True, seconds=0.0),
            )
        )
        kind = draw.random()
        if kind < 0.1:
            return Edit(gateway=True)
        if kind < 0.15:
            return Edit(scheduler=True)
        if kind < 0.3:
            left = (*spec.units, *(["scheduler"] if spec.scheduler else []), "gateway")
            return Edit(rolling=Rolling(left=left, seconds=1.0, budget=draw.randint(1, 3)))
        if kind < 0.4:
            return Edit(program=ProgramSpec(draw.choice(("a", "b", "c"))))
        return Edit(base=spec.revision, units={name: one})

    def calm(self) -> None:
        """Nothing goes wrong any more, and what cannot be started is specified anew."""
        self.host.fuse = None
        for _ in range(400):
            failed = [
                name
                for name, one in self.controller.status.processes.items()
                if one.phase == "failed" and name in self.controller.spec.units
            ]
            if failed:
                self.controller.edit(Edit(units={name: UnitEdit(restart=True) for name in failed}))
            spec, status = self.controller.spec, self.controller.status
            gateways = [one for name, one in status.processes.items() if is_gateway(name)]
            if any(one.phase == "failed" and one.generation == spec.gateway for one in gateways):
                self.controller.edit(Edit(gateway=True))
            for name, one in list(self.host.there.items()):
                one.deaf = False
                match one.phase:
                    case "starting":
                        if not is_gateway(name) or self.controller.status.processes.get(name, ABSENT).begun:
                            self.answer(name)
                    case "ending" | "retiring":
                        self.end(name)
                    case _ if is_gateway(name):
                        one.calls = {}
                        self.controller.count(name, one.counted())
                    case _:
                        self.controller.hear(UnitSeen(name, one.generation))
            due = self.step()
            if self.reached():
                return
            if due is not None:
                self.clock.time = max(self.clock.time, due)
        told = {name: (one.phase, one.generation) for name, one in self.controller.status.processes.items()}
        raise AssertionError(f"it is never reached: {told}, {self.controller.spec.rolling}")

    def reached(self) -> bool:
        spec, status = self.controller.spec, self.controller.status
        wanted = {name: unit.generation for name, unit in spec.units.items() if unit.wanted}
        wanted[f"gateway/{spec.gateway}"] = spec.gateway
        if spec.scheduler:
            wanted["scheduler"] = spec.scheduler
        there = {name: one.generation for name, one in self.host.there.items()}
        told = {name: one.phase for name, one in status.processes.items() if one.phase != "absent"}
        kept = [unit for unit in spec.units.values() if unit.removed]
        return (
            not kept
            and spec.rolling is None
            and there == wanted
            and told == dict.fromkeys(wanted, "ready")
            and all(one.phase == "ready" for one in self.host.there.values())
        )
