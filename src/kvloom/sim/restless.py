"""Fleets in which requests move again and again, among the other ordeals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvloom.core.replicas import GroupSpec, Scale
from kvloom.fleet.thresholds import Thresholds
from kvloom.sim.faults import Fault, GatewayLoss, Ordeal, Rates, Switch
from kvloom.sim.ordeal import Lot
from kvloom.sim.rescheduling import Rescheduling
from kvloom.sim.unit import SimulatedUnit

SHARE: Final = 0.19  # of the ordeals
CROWDED: Final = 0.4  # of these: prompts wait for room, where others have some
EDGES: Final = (200.0, 1e3, 1e3, 1e3)  # decode steps: units with less give, those with more take


class Restless(Lot):
    """Long answers, pools with room for most, and a scheduler that looks often and acts on each difference.
    Units come and go, and are drained."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        draw = self._random
        self.contexts = {name: draw.choice((120, 160)) for name in self.shapes}
        self.span = draw.choice((0.1, 0.3, 1.0))
        self.lasting, self.cramped, self.hasty = True, False, False
        self.served = self.scheduled = 1.0
        self.odd = 0.0
        self.delays = (0.0001, 0.0003)
        self.rooms = (2.0, 4.0, 6.0)
        self.paces = (1e-3, 3e-3)
        self.links = (1e6, 1e9)
        self.crowd = (3, 5)
        self.answers = (50, 70)
        if random.Random(f"crowd of {seed}").random() < CROWDED:
            self.rooms, self.crowd = (1.0, 1.3, 2.0), (6, 12)

    def _units(self) -> tuple[SimulatedUnit, ...]:
        """Three or four."""
        units = super()._units()
        while len(units) < 3:
            units = super()._units()
        return tuple(replace(unit, start=self._random.choice((0.01, 0.1))) for unit in units)

    def _rescheduling(self, units: Sequence[SimulatedUnit]) -> Rescheduling:
        draw = self._random
        edge = draw.choice(EDGES)
        given = Rescheduling(draw.choice((0.025, 0.05)), Thresholds(edge, edge, floor=0.0))
        if self._odds(0.6):
            return given
        low = draw.choice((100.0, 200.0, 400.0))
        names = tuple(unit.spec.unit for unit in units)
        least = self._count(1, 2)
        scale = Scale(least, len(names), low, 1.5 * low, draw.choice((0.0, 0.05)))
        return replace(given, groups={"all": GroupSpec(names, scale)}, away=frozenset(names[least:]))

    def _switch(self, at: float) -> Switch:
        """Now and then one that sends all to one unit, from which they are to move."""
        return Switch(at, "cache_aware", {"slack": 2048}) if self._odds(0.4) else super()._switch(at)

    def draw(self) -> Ordeal:
        """A scheduler whose calls go astray moves nothing: they do so elsewhere. Where units come and go a
        gateway may be lost meanwhile."""
        drawn = replace(super().draw(), fleet_rates=Rates())
        scaled = drawn.rescheduling is not None and drawn.rescheduling.groups
        if not scaled or self.calm or self._odds(0.6):
            return drawn
        faults = sorted([*drawn.faults, GatewayLoss(self._when(), 0.02)], key=lambda one: one.at)
        return replace(drawn, faults=tuple(faults))

    def _rates(self) -> Rates:
        return Rates() if self._odds(0.4) else super()._rates()

    def _faults(self, units: Sequence[SimulatedUnit]) -> list[Fault]:
        drained = [self._order(self._random.choice(units)) for _ in range(self._count(0, 1))]
        drains = [replace(order, what="drain", seconds=1) for order in drained]
        return [*super()._faults(units), *drains]


def draw_ordeal(seed: int) -> Ordeal:
    kind = random.Random(f"kind of {seed}")
    return (Restless if kind.random() < SHARE else Lot)(seed).draw()
