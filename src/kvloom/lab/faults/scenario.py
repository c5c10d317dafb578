"""Draws a run with faults from its seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, get_args

from kvloom.engine.freeness import Thresholds
from kvloom.lab.faults.faults import (
    KEEPING,
    VOCAB,
    Client,
    Death,
    Fault,
    FaultScenario,
    GatewayLoss,
    Order,
    Rates,
    Relocation,
    SchedulerLoss,
    Switch,
)
from kvloom.lab.faults.more_draws import (
    PUBLISHED,
    with_edits,
    with_guides,
    with_nodes,
    with_published_policies,
    with_sleep,
    with_stop_strings,
    with_weaving,
)
from kvloom.lab.sim.fleet import ReschedulingSettings
from kvloom.lab.sim.linear_cost import LinearCost
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.plan.cost.shapes import ModelShape
from kvloom.types.request import SamplingParams, StartGenerate
from kvloom.types.service import GroupSpec, Scale
from kvloom.types.spec import EngineSpec, ModelSpec, Option, Policy

LONGEST: Final = 4.0  # seconds in which clients come


LEASES: Final = (1.0, 2.0, 4.0)  # seconds
LONG_LEASE: Final = 120.0  # if all is given back without it
BANDS: Final = (  # pools are small
    Thresholds(0.0, 0.0),
    Thresholds(10.0, 20.0),
    Thresholds(60.0, 60.0),
    Thresholds(1e3, 1e3, floor=0.0),  # all that fits moves to a unit that is idle
)
POLICIES: Final = tuple(policy for policy in get_args(Policy) if policy not in PUBLISHED)
"""The policies that are drawn for each unit by itself; `with_published_policies` draws the others."""
PROGRAMS: Final[Mapping[str, Mapping[str, tuple[Option, ...]]]] = {
    "data_parallel": {},
    "least_loaded": {},
    "freest": {},
    "infaas": {},
    "disaggregate": {"prefill": (1, 2)},
    "cache_aware_disaggregate": {"prefill": (1, 2), "slack": (0, 64, 2048)},
    "balanced": {"prefill": (1, 2), "ratio": (0.0, 0.3, 0.9), "most": (0.5, 1.0)},
    "cache_aware": {"slack": (0, 64, 2048)},
    "migrate_context": {"slack": (0, 16, 256)},
}
STAYING: Final = ("data_parallel", "least_loaded", "freest", "infaas", "cache_aware")  # they move no K and V


class DrawnScenario:
    """Draws all of one seed's scenario but what `more_draws` adds."""

    def __init__(self, seed: int) -> None:
        """Draws the models, and how wide all else is drawn."""
        self.seed = seed
        self._random = draw = random.Random(seed)
        self.shapes = {name: self._shape() for name in ("ash", "birch", "cedar")[: draw.randint(1, 3)]}
        self.lasting = self._odds(0.35)  # answers are long
        self.contexts = {
            name: draw.choice((80, 100) if self.lasting else (24, 48, 80)) for name in self.shapes
        }
        self.prefixes = [self._tokens(draw.randint(3, 60)) for _ in range(draw.randint(1, 3))]
        self.span = draw.choice((0.02, 0.3, 1.0, LONGEST))
        self.hasty = self._odds(0.3)  # many hang up, and links are slow
        self.cramped = self._odds(0.4)  # prompts are long, and pools hold one or two
        self.calm = self._odds(0.2)  # nobody dies, and no call is lost
        self.served = 0.9  # of the models, by each unit
        self.odd = 0.05  # of the units, those with blocks of their own size
        self.delays: Sequence[float] = (0.0001, 0.0003, 0.02)
        self.scheduled = 0.7  # of the fleets of several units
        self.rooms: Sequence[float] = (1.0, 1.0, 1.2, 1.6, 2.1) if self.cramped else (0.6, 1.0, 1.4, 3.0, 8.0)
        self.paces: Sequence[float] = (1e-3, 3e-3) if self.lasting else (1e-5, 1e-4, 1e-3)
        self.links: Sequence[float] = (3e3, 1e4) if self.hasty else (1e4, 1e5, 1e6, 1e9)
        self.crowd = (4, 8 if self.lasting else 16)  # clients
        self.answers: Sequence[int] = (5, 30, 40) if self.lasting else (1, 2, 5, 12)

    def _odds(self, of: float) -> bool:
        return self._random.random() < of

    def _count(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def _moment(self) -> float:
        """Returns the seconds of a job, of a few, or of a lease."""
        return self._random.choice((0.002, 0.02, 0.2, 2.0)) * self._random.uniform(0.5, 2.0)

    def _shape(self) -> ModelShape:
        draw = self._random
        return ModelShape(
            layers=draw.randint(1, 3),
            hidden=16,
            heads=2,
            kv_heads=draw.randint(1, 2),
            head_dim=draw.choice((4, 8)),
            ffn=16,
            vocab=VOCAB,
        )

    def prompt(self, length: int) -> list[int]:
        """Returns a prompt of at most `length` tokens, which mostly begins as others do."""
        draw = self._random
        length = draw.randint(max(1, length // 2) if self.cramped else 1, max(1, length))
        begin = draw.choice(self.prefixes)[: draw.randint(0, length)] if self._odds(0.8) else []
        return [*begin, *self._tokens(length - len(begin))]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCAB) for _ in range(count)]

    def draw(self) -> FaultScenario:
        units = self._units()
        served = [name for name in self.shapes if any(name in unit.shapes for unit in units)]
        clients = sorted(
            (self._client(i, served) for i in range(self._count(*self.crowd))),
            key=lambda one: one.at,
        )
        faults = sorted([*self._faults(units), *self._relocations(units, clients)], key=lambda one: one.at)
        return FaultScenario(
            seed=self.seed,
            units=units,
            contexts=self.contexts,
            program=self._switch(0.0),
            clients=tuple(clients),
            faults=tuple(faults),
            rates=self._rates(),
            delay=self._random.choice(self.delays),
            rescheduling=self._rescheduling(units) if len(units) > 1 and self._odds(self.scheduled) else None,
        )

    # -- who serves -------------------------------------------------------------------------------------

    def _units(self) -> tuple[SimulatedUnit, ...]:
        draw, count = self._random, self._random.choice((1, 2, 2, 3, 3, 4))
        block, lease = draw.choice((32, 64, 128)), LONG_LEASE if self.calm else draw.choice(LEASES)
        return tuple(
            self._unit(f"unit-{i}", draw.choice((32, 64, 128)) if self._odds(self.odd) else block, lease)
            for i in range(count)
        )

    def _unit(self, name: str, block: int, lease: float) -> SimulatedUnit:
        draw = self._random
        models = [model for model in self.shapes if self._odds(self.served)] or [next(iter(self.shapes))]
        shapes = {model: self.shapes[model] for model in models}
        longest = max(shape.geometry(block).blocks(self.contexts[model]) for model, shape in shapes.items())
        least = 2 * max(shape.geometry(block).blocks_per_page for shape in shapes.values())
        blocks = max(least, int(longest * draw.choice(self.rooms)))
        spec = EngineSpec(
            models=tuple(self._model(model) for model in models),
            kv_bytes=blocks * block,
            block_bytes=block,
            policy=draw.choice(POLICIES),
            max_running=draw.choice((1, 2, 4, 16)),
            max_waiting=draw.choice((2, 8, 64, 64)),
            chunk_tokens=draw.choice((4, 16, 64)),
            threads=1,
            unit=name,
            lease=lease,
            quotas="fixed" if self._odds(0.1) else "adaptive",
            overload=draw.choice((0.0, 0.0, 0.5)),
        )
        cost, bandwidth = LinearCost(draw.choice(self.paces)), draw.choice(self.links)
        return SimulatedUnit(spec, shapes, draw.choice((1, 2, 4)), cost, bandwidth=bandwidth, max_steps=1)

    def _model(self, name: str) -> ModelSpec:
        draw, planned = self._random, self._odds(0.2)
        return ModelSpec(
            name=name,
            path="",
            rate=draw.choice((0.1, 1.0)),
            max_context=self.contexts[name],
            prefill_share=draw.choice((0.3, 0.7, 1.0)) if planned else None,
            decode_share=draw.choice((0.3, 0.7)) if planned else None,
        )

    def _switch(self, at: float) -> Switch:
        moving = [name for name in PROGRAMS if name not in STAYING]
        program = self._random.choice(moving if self._odds(0.75) else STAYING)
        options = {
            name: self._random.choice(values) for name, values in PROGRAMS[program].items() if self._odds(0.6)
        }
        return Switch(at, program, options)

    def _rescheduling(self, units: Sequence[SimulatedUnit]) -> ReschedulingSettings:
        draw = self._random
        return ReschedulingSettings(draw.choice((0.05, 0.2, 0.5)), draw.choice(BANDS))

    # -- who asks ---------------------------------------------------------------------------------------

    def _client(self, number: int, served: Sequence[str]) -> Client:
        draw = self._random
        model = draw.choice(served)
        prompt = self.prompt(self.contexts[model] - draw.randint(*((40, 60) if self.lasting else (1, 12))))
        body = StartGenerate(
            model=model,
            request=f"ask-{number}",
            prompt=prompt,
            sampling=self._sampling(),
            n=draw.choice((1, 1, 1, 2, 3)),
            priority=draw.choice((0, 0, 0, 1, -1)),
            interval=draw.choice((1, 1, 4)),
            tenant=f"tenant-{number % 3}",
        )
        aborts = self._moment() if self._odds(0.1) else None
        return Client(
            at=draw.uniform(0.0, self.span),
            body=body,
            leaves=self._moment() if self._odds(0.5 if self.hasty else 0.1) else None,
            aborts=aborts,
            choice=draw.randrange(body.n) if aborts is not None and self._odds(0.5) else None,
            pause=0.05 if self._odds(0.05) else 0.0,
        )

    def _sampling(self) -> SamplingParams:
        draw, more = self._random, dict[str, Any]()
        if self._odds(0.4):
            more["temperature"] = 1.0
        if self._odds(0.3):
            more["stop_token_ids"] = tuple(range(0, VOCAB, 9))
        if self._odds(0.05):
            more["prompt_logprobs"] = 0
        return SamplingParams(max_tokens=draw.choice(self.answers), seed=draw.randrange(2**32), **more)

    # -- what goes wrong --------------------------------------------------------------------------------

    def _faults(self, units: Sequence[SimulatedUnit]) -> list[Fault]:
        draw, faults = self._random, list[Fault]()
        if self._odds(0.5) and not self.calm:
            faults += [self._death(draw.choice(units)) for _ in range(self._count(1, 3))]
        if self._odds(0.25) and not self.calm:
            faults += [GatewayLoss(self._when(), self._moment()) for _ in range(self._count(1, 2))]
        if self._odds(0.25):
            faults += [SchedulerLoss(self._when(), self._moment()) for _ in range(self._count(1, 2))]
        if self._odds(0.3):
            faults += [self._switch(self._when()) for _ in range(self._count(1, 3))]
        if self._odds(0.3):
            faults += [self._order(draw.choice(units)) for _ in range(self._count(1, 5))]
        return faults

    def _death(self, unit: SimulatedUnit) -> Death:
        return Death(self._when(), unit.spec.unit, self._moment(), gently=self._odds(0.2))

    def _relocations(self, units: Sequence[SimulatedUnit], clients: Sequence[Client]) -> list[Fault]:
        """Returns orders at moments when somebody is likely to be answered."""
        draw = self._random
        if len(units) == 1 or self._odds(0.5):
            return []
        return [
            Relocation(
                draw.choice(clients).at + draw.uniform(0.0, 1.0) ** 2,
                draw.random(),
                draw.choice(units).spec.unit,
            )
            for _ in range(self._count(8, 24))
        ]

    def _order(self, unit: SimulatedUnit) -> Order:
        draw = self._random
        model = draw.choice(list(unit.shapes))
        return Order(
            self._when(),
            unit.spec.unit,
            draw.choice(("evict", "drain") if self.calm else ("evict", "drain", *KEEPING, "pin")),
            model,
            self.prompt(self.contexts[model]),
            draw.randint(1, 5),
        )

    def _rates(self) -> Rates:
        """Returns rates of a few kinds of faults; none for some scenarios."""
        draw = self._random
        if self.calm or self._odds(0.25):
            return Rates()
        kinds = ("late", "slow", "lost", "unanswered", "again", "cut", "jobs")
        chosen = draw.sample(kinds, self._count(1, 3))
        return Rates(**{kind: draw.choice((0.02, 0.1, 0.3)) for kind in chosen})

    def _when(self) -> float:
        return self._random.uniform(0.0, 1.2 * self.span)


SHARE: Final = 0.19  # of the scenarios
CROWDED: Final = 0.4  # of these: prompts wait for room, while other units have some
EDGES: Final = (200.0, 1e3, 1e3, 1e3)  # decode steps: units with less give, those with more take


class Restless(DrawnScenario):
    """A scenario with long answers, pools with room for most, and a scheduler that looks often and acts on
    each difference. Units come and go, and are drained."""

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
        """Returns three or four units."""
        units = super()._units()
        while len(units) < 3:
            units = super()._units()
        return tuple(replace(unit, start=self._random.choice((0.01, 0.1))) for unit in units)

    def _rescheduling(self, units: Sequence[SimulatedUnit]) -> ReschedulingSettings:
        draw = self._random
        edge = draw.choice(EDGES)
        given = ReschedulingSettings(draw.choice((0.025, 0.05)), Thresholds(edge, edge, floor=0.0))
        if self._odds(0.6):
            return given
        low = draw.choice((100.0, 200.0, 400.0))
        names = tuple(unit.spec.unit for unit in units)
        least = self._count(1, 2)
        scale = Scale(least, len(names), low, 1.5 * low, draw.choice((0.0, 0.05)))
        return replace(given, groups={"all": GroupSpec(names, scale)}, away=frozenset(names[least:]))

    def _switch(self, at: float) -> Switch:
        """Draws now and then a program that sends all to one unit, from which they are to move."""
        return Switch(at, "cache_aware", {"slack": 2048}) if self._odds(0.4) else super()._switch(at)

    def draw(self) -> FaultScenario:
        """A scheduler whose calls go astray moves nothing: calls go astray in other scenarios. If units come
        and go, a gateway may be lost meanwhile."""
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


def draw_scenario(seed: int) -> FaultScenario:
    kind = random.Random(f"kind of {seed}")
    drawn = (Restless if kind.random() < SHARE else DrawnScenario)(seed).draw()
    played = with_published_policies(drawn)
    return with_nodes(with_sleep(with_weaving(with_edits(with_guides(with_stop_strings(played))))))
