"""Draws what a scenario has besides: published policies, edits of the fleet's specification, stop
strings, guides, weaving, machines and what befalls them.

Each has random numbers of its own, so that the rest of a seed's scenario is the same without it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace as with_fields
from typing import Final

from msgspec.structs import replace

from kvloom.lab.faults.faults import (
    Client,
    ControllerLoss,
    Fault,
    FaultScenario,
    FleetEdit,
    NodeOutage,
    Replan,
    RollingRestart,
    UnitAdded,
    UnitRemoved,
)
from kvloom.lab.faults.guides import GUIDES
from kvloom.lab.sim.linear_cost import LinearCost, LinearOperatorCost
from kvloom.lab.sim.nodes import SimulatedNode
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.plan.cost.shapes import ModelShape
from kvloom.types.spec import ModelSpec, Policy, WeaveSpec

PUBLISHED: Final[tuple[Policy, ...]] = ("vllm-2023", "adbs-2024")


def with_published_policies(scenario: FaultScenario) -> FaultScenario:
    """Returns the scenario with batching as it was published elsewhere at some of its units."""
    draw = random.Random(f"published policies of {scenario.seed}")
    if draw.random() < 0.75:
        return scenario
    units = (
        unit
        if draw.random() < 0.3
        else with_fields(unit, spec=replace(unit.spec, policy=draw.choice(PUBLISHED)))
        for unit in scenario.units
    )
    return with_fields(scenario, units=tuple(units))


def with_stop_strings(scenario: FaultScenario) -> FaultScenario:
    """Returns the scenario with stop strings for some of its clients."""
    draw = random.Random(f"stop strings of {scenario.seed}")
    if draw.random() < 0.6:
        return scenario
    clients = (
        client
        if draw.random() < 0.5
        else with_fields(client, stop="".join(draw.choices("abcd", k=draw.choice((1, 2, 3)))))
        for client in scenario.clients
    )
    return with_fields(scenario, clients=tuple(clients))


def with_guides(scenario: FaultScenario) -> FaultScenario:
    """Returns the scenario with guides and a least number of tokens for some of its clients."""
    draw = random.Random(f"guides of {scenario.seed}")
    if draw.random() < 0.6:
        return scenario

    def guided(client: Client) -> Client:
        sampling = client.body.sampling
        if draw.random() < 0.4:
            sampling = replace(sampling, guide=draw.choice(GUIDES))
        if draw.random() < 0.2:
            sampling = replace(sampling, min_tokens=draw.choice((2, 10)))
        return with_fields(client, body=replace(client.body, sampling=sampling))

    return with_fields(scenario, clients=tuple(guided(client) for client in scenario.clients))


class FleetEditDraws:
    """Draws edits one after the other, each for the fleet as those before it have made it."""

    def __init__(self, scenario: FaultScenario) -> None:
        self._random = random.Random(f"edits of {scenario.seed}")
        self._span = 1.2 * max((client.at for client in scenario.clients), default=0.0) + 0.05
        self._units = {unit.spec.unit: unit for unit in scenario.units}
        self._scaled = scenario.rescheduling is not None and bool(scenario.rescheduling.groups)
        self._models: dict[str, ModelSpec] = {}
        self._shapes = {name: shape for unit in scenario.units for name, shape in unit.shapes.items()}
        for unit in scenario.units:
            self._models |= {model.name: model for model in unit.spec.models}
        self._added = 0

    def draw(self) -> list[Fault]:
        """Returns no edits for most scenarios."""
        draw = self._random
        if draw.random() < 0.7:
            return []
        moments = sorted(draw.uniform(0.0, self._span) for _ in range(draw.randint(1, 4)))
        return [self._edit(at) for at in moments]

    def _edit(self, at: float) -> FleetEdit:
        """Draws a unit that is added or removed. Units that come and go by themselves are neither."""
        draw = self._random
        kinds = [self._rolling, self._replan, self._replan]
        if not self._scaled:
            kinds.append(self._add)
            if len(self._units) > 1:
                kinds.append(self._remove)
        return draw.choice(kinds)(at)

    def _rolling(self, at: float) -> FleetEdit:
        return RollingRestart(at, self._seconds(), self._random.choice((1, 1, 2)))

    def _replan(self, at: float) -> FleetEdit:
        """Adds a model to a unit or removes one, or changes the size of the unit's pool. Units that come and
        go by themselves keep their models, because each stands in for the others."""
        draw = self._random
        unit = draw.choice(list(self._units.values()))
        name, models = draw.choice(list(self._models)), unit.spec.models
        if self._scaled:
            pass
        elif name not in unit.shapes:
            models = (*models, self._models[name])
        elif len(models) > 1:
            models = tuple(model for model in models if model.name != name)
        shapes = {model.name: self._shapes[model.name] for model in models}
        block = unit.spec.block_bytes
        least = 2 * max(shape.geometry(block).blocks_per_page for shape in shapes.values())
        blocks = max(least, int(unit.spec.kv_bytes // block * draw.choice((1.0, 1.0, 1.5, 0.7))))
        spec = replace(unit.spec, models=models, kv_bytes=blocks * block)
        made = with_fields(unit, spec=spec, shapes=shapes)
        self._units[spec.unit] = made
        return Replan(at, made, self._seconds())

    def _add(self, at: float) -> FleetEdit:
        """Draws a new unit, which is as another one is, under a name of its own."""
        like: SimulatedUnit = self._random.choice(list(self._units.values()))
        name = f"new-{self._added}"
        self._added += 1
        made = with_fields(like, spec=replace(like.spec, unit=name), start=self._random.choice((0.01, 0.3)))
        self._units[name] = made
        return UnitAdded(at, made)

    def _remove(self, at: float) -> FleetEdit:
        name = self._random.choice(list(self._units))
        del self._units[name]
        return UnitRemoved(at, name, self._seconds())

    def _seconds(self) -> float | None:
        return self._random.choice((None, None, 0.0, 0.02, 0.5))


def with_edits(scenario: FaultScenario) -> FaultScenario:
    """Returns the scenario with edits of its fleet's specification among its faults."""
    edits = FleetEditDraws(scenario).draw()
    return with_fields(scenario, faults=_in_order(scenario, edits))


def with_sleep(scenario: FaultScenario) -> FaultScenario:
    """Returns the scenario with units whose weights sleep, and share one budget with the pool, for some. The
    budget holds what the pool was to have, and the weights of the largest model at least."""
    draw = random.Random(f"sleep of {scenario.seed}")
    if draw.random() < 0.6 or any(unit.spec.weave for unit in scenario.units):
        return scenario
    room, bandwidth = draw.choice((1.0, 1.0, 1.7, 4.0)), draw.choice((1e4, 1e6))

    def sleeping(unit: SimulatedUnit) -> SimulatedUnit:
        block = unit.spec.block_bytes
        largest = max(-(-shape.weight_bytes // block) for shape in unit.shapes.values())
        spec = replace(
            unit.spec, kv_bytes=unit.spec.kv_bytes + int(room * largest + 1) * block, sleep_dir="/nowhere"
        )
        return with_fields(unit, spec=spec, host_bandwidth=bandwidth)

    def edited(fault: Fault) -> Fault:
        return (
            with_fields(fault, unit=sleeping(fault.unit)) if isinstance(fault, Replan | UnitAdded) else fault
        )

    return with_fields(
        scenario,
        units=tuple(map(sleeping, scenario.units)),
        faults=tuple(map(edited, scenario.faults)),
    )


_LONGEST_LEASE: Final = 10.0  # seconds; if leases are longer, nothing may be left to them


def with_nodes(scenario: FaultScenario) -> FaultScenario:
    """Returns the scenario on several machines, some of which are cut off or lose their power, for some; and
    with controllers that die, for some on one machine too."""
    draw = random.Random(f"nodes of {scenario.seed}")
    span = 1.2 * max((client.at for client in scenario.clients), default=0.0) + 0.05
    several = draw.random() < 0.25 and not any(unit.spec.weave for unit in scenario.units)
    calm = any(unit.spec.lease > _LONGEST_LEASE for unit in scenario.all_units)
    faults: list[Fault] = []
    lease = draw.choice((0.4, 1.0, 3.0))
    if draw.random() < (0.4 if several else 0.15):
        for _ in range(draw.randint(1, 2)):
            part = draw.choice((0.05, 0.5, 1.5))
            down = lease * (0.5 if calm and several else part)
            faults.append(ControllerLoss(draw.uniform(0.0, span), down))
    if not several:
        return with_fields(scenario, faults=_in_order(scenario, faults))
    room = sum(unit.spec.kv_bytes for unit in scenario.all_units)
    racks = {f"node-{i}": f"rack-{i // 2}" for i in range(draw.randint(2, 4))}
    nodes = tuple(SimulatedNode(name, memory=room, cores=4, rack=rack) for name, rack in racks.items())
    for _ in range(0 if calm else draw.choice((0, 1, 1, 2, 3))):
        hit = draw.choice(nodes)
        rack = [node.name for node in nodes if node.rack == hit.rack]
        faults.append(
            NodeOutage(
                draw.uniform(0.0, span),
                tuple(rack) if draw.random() < 0.3 else (hit.name,),
                lease * draw.choice((0.1, 0.6, 0.95, 1.2, 3.0)),
                off=draw.random() < 0.4,
            )
        )
    return with_fields(scenario, nodes=nodes, node_lease=lease, faults=_in_order(scenario, faults))


def _in_order(scenario: FaultScenario, faults: list[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted([*scenario.faults, *faults], key=lambda one: one.at))


def with_weaving(scenario: FaultScenario) -> FaultScenario:
    """Returns the scenario with one unit that offloads attention to another one, for some. The fleet's units
    stay what they are in these."""
    draw = random.Random(f"weaving of {scenario.seed}")
    edited = any(isinstance(fault, Replan | UnitAdded | UnitRemoved) for fault in scenario.faults)
    if edited or len(scenario.units) < 2 or draw.random() < 0.6:
        return scenario
    hot, cold = draw.sample(scenario.units, 2)
    model = draw.choice(list(hot.shapes))
    away = scenario.rescheduling.away if scenario.rescheduling is not None else frozenset[str]()
    here = (unit for unit in scenario.units if unit is not hot and unit.spec.unit not in away)
    others = {name for unit in here for name in unit.shapes}  # a gateway must have heard of each model
    if hot.spec.block_bytes != cold.spec.block_bytes or not set(hot.shapes) <= {model, *others}:
        return scenario
    weave = WeaveSpec(
        cold.spec.unit,
        draw.choice((0.3, 1.0, 1.0, "auto")),
        draw.choice((0.2, 0.5)),
        control=draw.choice(("operators", "iterations")),
    )
    models = tuple(one for one in hot.spec.models if one.name == model)
    shapes = {name: shape for unit in scenario.units for name, shape in unit.shapes.items()}
    made = {
        hot.spec.unit: with_fields(
            hot, spec=replace(hot.spec, models=models, weave=weave), shapes={model: shapes[model]}
        ),
        cold.spec.unit: cold,
    }
    units = tuple(made.get(unit.spec.unit, unit) for unit in scenario.units)
    return with_fields(
        scenario, units=tuple(_operated(unit, shapes) if unit.spec.unit in made else unit for unit in units)
    )


def _operated(unit: SimulatedUnit, shapes: Mapping[str, ModelShape]) -> SimulatedUnit:
    """Returns the unit with a device whose operators are known."""
    assert isinstance(unit.cost, LinearCost)
    return with_fields(unit, cost=LinearOperatorCost(unit.cost.pace, shapes))
