"""The systems that Llumnix's figures compare: which engine runs, who dispatches by what, and what moves.

The published ones are as the paper and its code have them. Each instance tells its load after every step, and
both INFaaS++ and Llumnix dispatch by what it told last. *By count* they know what they have sent to it since,
too. kvloom's own run kvloom's engine, under a gateway that asks every half second and counts what it has
sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from kvloom.cluster.policies.dispatch import Dispatch, infaas
from kvloom.engine.batching.baselines import WATERMARK
from kvloom.engine.freeness import Arrival, Thresholds, wanted
from kvloom.lab.reproduce.llumnix.setup import KVLOOM, PUBLISHED, EngineKind
from kvloom.lab.reproduce.llumnix.traffic import THRESHOLD, Traffic
from kvloom.lab.sim.fleet import ReschedulingSettings, SimulatedFleet
from kvloom.router import Call, Fleet, Frames, Replica
from kvloom.router.program import Program, load_program
from kvloom.types.load import UnitLoad

STEP: Final = 0.05  # seconds: about a decode step, and so between two reports of an instance
UPDATES: Final = 4  # reports of each instance between two pairings
BLOCK: Final = 16  # tokens: published thresholds are blocks a request, ours decode steps


def requests_at(load: UnitLoad) -> int:
    """Returns how many requests run and wait."""
    return sum(model.running + model.waiting for model in load.models.values())


def published_freeness(load: UnitLoad) -> float:
    """Returns the freeness of the paper's code, in decode steps: the blocks that are free above the
    watermark, less those that all waiting requests need, over the requests that run; those that wait are one
    more. What is missing is divided as well. ∞ if the instance is idle, −∞ if it drains."""
    running = sum(model.running for model in load.models.values())
    return _published(load, running + (requests_at(load) > running))


def dispatch_freeness(load: UnitLoad) -> float:
    """Returns the freeness of the code's dispatch, which counts every request that waits."""
    return _published(load, requests_at(load))


def _published(load: UnitLoad, requests: int) -> float:
    if load.draining:
        return float("-inf")
    left = load.total_blocks - int(WATERMARK * load.total_blocks) - wanted(load)
    tokens = max(model.token_blocks for model in load.models.values())
    return left / (requests * tokens) if requests else float("inf")


Unit = TypeVar("Unit")


def published_dispatch(
    loads: Mapping[Unit, UnitLoad], turns: Mapping[Unit, int], arrival: Arrival
) -> Unit | None:
    """Returns the instance with most freeness before the request comes, among equals by turns."""
    open_ = [unit for unit, load in loads.items() if not load.draining]
    return max(open_, key=lambda unit: (dispatch_freeness(loads[unit]), -turns[unit]), default=None)


class StepReports:
    """A router program that knows of each instance what it told after its last step; a report takes no
    time."""

    def __init__(self, choose: Dispatch[Replica], *, counts: bool) -> None:
        """`counts` tells whether it also knows what it has sent since."""
        self.ask: Callable[[str], UnitLoad | None] = lambda _: None
        """The function that returns what an instance would tell now, or None if it has no process."""
        self._choose = choose
        self._counts = counts
        self._told: dict[str, tuple[float, UnitLoad]] = {}

    async def generate(self, call: Call, fleet: Fleet) -> Frames:
        loads = {replica: load for replica in fleet.up if (load := self._load(replica.name))}
        chosen = self._choose(loads, {replica: replica.turn for replica in loads}, fleet.arrival)
        if self._counts and chosen is not None:
            at, _ = self._told[chosen.name]
            self._told[chosen.name] = at, fleet.arrival.placed(loads[chosen])
        replica = fleet.turn(None if chosen is None else [chosen])
        async for frame in call.start_generate(replica):
            yield frame

    def _load(self, name: str) -> UnitLoad | None:
        now = asyncio.get_running_loop().time()
        if name not in self._told or now - self._told[name][0] >= STEP:
            if (load := self.ask(name)) is None:
                return None
            self._told[name] = now, load
        return self._told[name][1]


@dataclass(frozen=True, slots=True)
class ByStep:
    """Dispatch by what instances told after their last steps; if it `counts`, also by what was sent since."""

    choose: Dispatch[Replica]
    counts: bool = False


def program_of(dispatch: Program | ByStep) -> tuple[Program, Callable[[SimulatedFleet], None]]:
    """Returns the router program, and what is to be told the fleet once that serves."""
    if isinstance(dispatch, Program):
        return dispatch, lambda _: None
    reports = StepReports(dispatch.choose, counts=dispatch.counts)

    def serves(fleet: SimulatedFleet) -> None:
        reports.ask = lambda name: one.load_now() if (one := fleet.engines.get(name)) else None

    return Program("by reports of each step", reports.generate, {}), serves


@dataclass(frozen=True, slots=True)
class System:
    """One of the systems that are compared. Its `rescheduling` is None if no request moves."""

    name: str
    engine: EngineKind
    dispatch: Program | ByStep
    rescheduling: ReschedulingSettings | None = None

    def of(self, traffic: Traffic) -> System:
        """Returns the system with the thresholds that the paper's runs have for a workload, if it is the
        paper's."""
        moves = self.rescheduling
        if moves is None or moves.measure is not published_freeness:
            return self
        return replace(self, rescheduling=replace(moves, thresholds=_published_thresholds(traffic.threshold)))


def _published_thresholds(blocks: float) -> Thresholds:
    """Returns one threshold for both sides, in blocks a request. A destination keeps nothing."""
    return Thresholds(BLOCK * blocks, BLOCK * blocks, floor=0.0)


AS_PUBLISHED: Final = ReschedulingSettings(
    UPDATES * STEP, _published_thresholds(THRESHOLD), usage=wanted, measure=published_freeness
)
ROUND_ROBIN: Final = System("round-robin", PUBLISHED, load_program("data_parallel", {}))
INFAAS: Final = System("INFaaS++", PUBLISHED, ByStep(infaas))
INFAAS_BY_COUNT: Final = System("INFaaS++ by count", PUBLISHED, ByStep(infaas, counts=True))
LLUMNIX: Final = System("Llumnix", PUBLISHED, ByStep(published_dispatch), AS_PUBLISHED)
LLUMNIX_BY_COUNT: Final = System(
    "Llumnix by count", PUBLISHED, ByStep(published_dispatch, counts=True), AS_PUBLISHED
)
OWN_INFAAS: Final = System("kvloom, infaas", KVLOOM, load_program("infaas", {}))
OWN: Final = System("kvloom", KVLOOM, load_program("freest", {}), ReschedulingSettings())
"""kvloom's Llumnix as it is shipped: its engine, gateway and fleet scheduler."""
