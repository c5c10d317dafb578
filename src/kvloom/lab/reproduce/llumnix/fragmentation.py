"""Memory that is free but of no use (section 6.3, figure 12). It is what the first requests that wait would
take of what all instances leave together, if that were in one piece."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from kvloom.lab.reproduce.llumnix.point import play_point, units_of
from kvloom.lab.reproduce.llumnix.setup import INSTANCES, SIZES
from kvloom.lab.reproduce.llumnix.systems import INFAAS, LLUMNIX, OWN, System
from kvloom.lab.reproduce.llumnix.traffic import MEDIUM, Traffic, chosen_rates, chosen_traffic
from kvloom.lab.reproduce.report import Claim, Grid, Options, Report, Scale, Tell, cells
from kvloom.lab.reproduce.setup import TellPart, play_all, tell_each
from kvloom.types.load import UnitLoad

SYSTEMS: Final = (INFAAS, LLUMNIX, OWN)
RATE: Final = 7.5  # requests a second of M-M
_PARTS: Final = 8  # of the time, whose means are shown


def queue_heads(loads: Iterable[UnitLoad]) -> list[int]:
    """Returns the blocks that the first waiting request of each instance wants, the smallest first."""
    return sorted(model.head_blocks for load in loads for model in load.models.values() if model.waiting)


def fragmented(loads: Sequence[UnitLoad]) -> float:
    """Returns the part of all memory that is fragmented: the blocks of those first waiting requests, the
    smaller ones before the larger, that find room in what all instances leave together and have none where
    they are."""
    room = sum(_left(load) for load in loads)
    held = max((need for need in accumulate(queue_heads(loads)) if need <= room), default=0)
    return held / sum(load.total_blocks for load in loads)


def _left(load: UnitLoad) -> int:
    """Returns the blocks that nobody holds, those of what is only cached among them."""
    return load.total_blocks - sum(model.used_blocks for model in load.models.values())


@dataclass(frozen=True, slots=True)
class Fragmented:
    """The fragmentation under one system. `parts` are parts of all memory, second by second until the last
    request came."""

    traffic: Traffic
    rate: float
    system: System
    parts: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.parts) / len(self.parts)


def figure_12(scale: Scale, tell: Tell, options: Options | None = None) -> Report:
    """Looks at all instances once a second while requests come."""
    options = options or Options()
    plan = [
        (traffic, rate, system)
        for traffic in chosen_traffic(options, (MEDIUM,))
        for rate in chosen_rates(options, traffic, (RATE,) if traffic is MEDIUM else traffic.rates[-1:])
        for system in SYSTEMS
    ]
    instances, count = SIZES[scale]
    count = options.requests or count

    def play(run: tuple[Traffic, float, System], part: TellPart) -> Fragmented:
        traffic, rate, system = run
        asked = list(traffic.requests(rate * instances / INSTANCES, count))
        parts = list[float]()
        play_point(
            system.of(traffic),
            units_of(system, instances),
            asked,
            tell_each(part, count),
            lambda loads: parts.append(fragmented(loads)),
        )
        return Fragmented(*run, tuple(parts[: max(1, int(asked[-1].at))]))

    return report_12(
        play_all(plan, play, lambda run: f"{run[0].name}, {run[1]:g} req/s, {run[2].name}", tell)
    )


def report_12(found: Sequence[Fragmented]) -> Report:
    """Returns the report. `found` has all systems for each workload and rate."""
    sets = [found[at : at + len(SYSTEMS)] for at in range(0, len(found), len(SYSTEMS))]
    return Report(
        name="figure 12",
        title="memory that first waiting requests could use, were it in one piece",
        cells=tuple(
            cell
            for one in found
            for cell in cells(
                f"{one.traffic.name}, {one.rate:g} req/s, {one.system.name}",
                ("% of all memory, mean", None, 100 * one.mean),
                ("% at the most", None, 100 * max(one.parts)),
            )
        ),
        claims=tuple(
            Claim(
                said=f"{infaas.traffic.name}, {infaas.rate:g} req/s: less is fragmented under "
                f"{own.system.name} than under {infaas.system.name}",
                holds=own.mean < infaas.mean if infaas.mean else None,
                found=f"{own.mean:.2%} and {infaas.mean:.2%} in the mean",
            )
            for infaas, *others in sets
            for own in others
        ),
        grids=(
            Grid(
                title=f"ours, % of all memory, in {_PARTS} equal parts of the time",
                heads=("", "req/s", "system", *(f"{at + 1}" for at in range(_PARTS))),
                rows=tuple(map(_row, found)),
            ),
        ),
    )


def _row(one: Fragmented) -> tuple[str, ...]:
    edges = [round(at * len(one.parts) / _PARTS) for at in range(_PARTS + 1)]
    spans = [one.parts[low:high] or one.parts[-1:] for low, high in pairwise(edges)]
    means = [f"{100 * sum(span) / len(span):.2f}" for span in spans]
    return (one.traffic.name, f"{one.rate:g}", one.system.name, *means)
