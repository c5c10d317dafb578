"""A workload played to a fleet in virtual time, and its results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from kvloom.core.errors import ConfigError
from kvloom.core.service import PATIENCE
from kvloom.cost.hosting import Hosting
from kvloom.cost.work import Work
from kvloom.router.program import Program
from kvloom.sim.clock import LoopClock
from kvloom.sim.fleet import SimulatedFleet, simulated
from kvloom.sim.hosting import HostedMachine
from kvloom.sim.loop import run_virtual
from kvloom.sim.play import FEW_FRAMES, MOVING_FRAMES, Prompts, play
from kvloom.sim.rescheduling import Rescheduling
from kvloom.sim.unit import SimulatedUnit
from kvloom.workload.ask import Ask, Outcome
from kvloom.workload.objectives import Scaled
from kvloom.workload.results import Results, Upheaval
from kvloom.workload.summary import Summary


def simulate(
    units: Sequence[SimulatedUnit],
    program: Program,
    asks: Iterable[Ask],
    prompts: Prompts,
    summary: Summary,
    *,
    title: str,
    seed: int | None = None,
    tell: Callable[[Outcome], None] = lambda _: None,
    hosting: Hosting | None = None,
    client_here: bool = False,
    rescheduling: Rescheduling | None = None,
    patience: float = PATIENCE,
) -> Results:
    """Add all outcomes to `summary`, telling each. seed: of the order of what happens at one moment. hosting:
    the work besides jobs of the one machine that all units are on; client_here: the asking too. rescheduling:
    of the fleet scheduler; None where there is none. patience: the router's."""

    def add(outcome: Outcome) -> None:
        summary.add(outcome)
        tell(outcome)

    async def main() -> Upheaval:
        clock = LoopClock(asyncio.get_running_loop())
        machine = HostedMachine(hosting, client_here=client_here) if hosting else None
        frames = MOVING_FRAMES if rescheduling else FEW_FRAMES
        async with simulated(
            units, program, machine=machine, rescheduling=rescheduling, patience=patience
        ) as fleet:
            await play(fleet.server, asks, prompts, clock, add, interval=frames)
            return await upheaval(fleet)

    upheaved = run_virtual(main(), seed=seed)
    return replace(summary.results("simulation", title), upheaval=upheaved)


async def upheaval(fleet: SimulatedFleet) -> Upheaval:
    """So far."""
    mover, census = fleet.rescheduler, fleet.processes.census
    return Upheaval(
        preempted=await fleet.processes.preemptions(),
        moved=mover.moved if mover else None,
        stayed=mover.stayed if mover else None,
        units=census.mean,
        least=census.least,
        most=census.most,
    )


def scaled(units: Sequence[SimulatedUnit], scale: float) -> Scaled:
    """Within `scale` times what a request takes alone on the best of the units that serve its model."""

    def alone(ask: Ask) -> float:
        return min(_alone(unit, ask) for unit in units if ask.model in unit.shapes)

    return Scaled(scale, alone)


def _alone(unit: SimulatedUnit, ask: Ask) -> float:
    """One prefill and the decode steps, as MuxServe adds them up (section 4.2)."""
    prefill = unit.cost.seconds(Work.prefill(ask.model, 1.0, [ask.prompt]))
    step = unit.cost.seconds(Work.decode(ask.model, 1.0, [ask.prompt + ask.output // 2]))
    return prefill + (ask.output - 1) * step


def check_models(asked: Iterable[str], units: Sequence[SimulatedUnit]) -> None:
    """Raises ConfigError for a model that no unit serves."""
    served = {name for unit in units for name in unit.shapes}
    for name in asked:
        if name not in served:
            raise ConfigError(
                f"the workload asks for {name}, which no unit serves; {', '.join(sorted(served))} are served"
            )
