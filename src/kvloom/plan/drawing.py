"""Draws a plan: which models are on which devices, what they have there, and what they are to answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvloom.page.report import Bar, Card, Part, report_page
from kvloom.plan.cluster import CPU
from kvloom.plan.plan import PlacementPlan, PlannedModel, PlannedUnit
from kvloom.types.numbers import show_number, show_size

_SHADES: Final = "weights are dark, K and V pale"


def draw_plan(plan: PlacementPlan, lines: Sequence[str]) -> str:
    """Returns a page. `lines` are said of the plan as a whole."""
    names = sorted({model.name for unit in plan.units for model in unit.models})
    colours = {name: at for at, name in enumerate(names)}
    largest = max(map(_bytes, plan.units), default=0.0)
    busiest = max((model.rate for unit in plan.units for model in unit.models), default=0.0)
    nodes = dict.fromkeys(unit.node for unit in plan.units)
    cards = (
        Card(
            _place(unit),
            f"Memory: {_SHADES}. Below, the requests a second that are answered of those that come.",
            [[_memory(unit, colours, largest)], list(_answered(unit, colours, busiest))],
        )
        for node in nodes
        for unit in plan.units
        if unit.node == node
    )
    return report_page(plan.made_by, " · ".join(lines), cards)


def _place(unit: PlannedUnit) -> str:
    devices = f"{unit.gpus} × {unit.device}"
    if unit.device != CPU:
        last = unit.index + unit.gpus - 1
        devices += f", GPU {unit.index}" if unit.gpus == 1 else f", GPUs {unit.index} to {last}"
    return f"{unit.name} on {unit.node or 'any machine'}: {devices}"


def _bytes(unit: PlannedUnit) -> float:
    """Returns what a unit's models and its pool have. What has one budget with the pool sleeps and wakes in
    it."""
    return unit.memory or unit.kv_bytes + sum(model.shape.weight_bytes for model in unit.models)


def _memory(unit: PlannedUnit, colours: dict[str, int], largest: float) -> Bar:
    parts = []
    for model in unit.models:
        pool = model.quota * unit.kv_bytes
        told = f"{model.name}: {show_size(int(pool))} of K and V"
        if not unit.memory:
            size = model.shape.weight_bytes
            parts.append(Part(size, colours[model.name], said=f"{model.name}: {show_size(size)} of weights"))
        parts.append(Part(pool, colours[model.name], pale=True, said=told))
    told = f"{show_size(int(_bytes(unit)))}, of which {show_size(unit.kv_bytes)} are the pool"
    return Bar("memory", parts, told, largest)


def _answered(unit: PlannedUnit, colours: dict[str, int], busiest: float) -> Iterator[Bar]:
    for model in unit.models:
        colour, answered = colours[model.name], min(model.throughput, model.rate)
        parts = [
            Part(answered, colour, said="answered"),
            Part(model.rate - answered, colour, pale=True, said="too many"),
        ]
        yield Bar(model.name, parts, _told(model, answered, sleeps=bool(unit.memory)), busiest, colour)


def _told(model: PlannedModel, answered: float, *, sleeps: bool) -> str:
    told = f"{show_number(answered)} of {show_number(model.rate)}/s, {model.decode_share:.0%} of the compute"
    return told + (f", awake {model.awake:.0%}" if sleeps else "")
