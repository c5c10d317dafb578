"""A plan as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from kvloom.plan.explain import Shortfall, gigabytes, more_devices
from kvloom.plan.plan import Plan, PlannedUnit
from kvloom.types.numbers import show_number

_FEW = 10


def plan_table(plan: Plan) -> Table:
    """A row for each model on each unit."""
    table = Table(title=plan.made_by, title_justify="left")
    for head in ("unit", "node", "devices", "model"):
        table.add_column(head)
    for head in ("requests/s", "could be", "prefill", "decode", "quota", "KV pool"):
        table.add_column(head, justify="right")
    for unit in plan.units:
        for row in _rows(unit):
            table.add_row(*row)
        table.add_section()
    return table


def _rows(unit: PlannedUnit) -> Iterator[list[str]]:
    where = [unit.name, unit.node, f"{unit.gpus} × {unit.device}"]
    pool = gigabytes(unit.kv_bytes)
    for model in unit.models:
        yield [
            *where,
            model.name,
            show_number(model.rate),
            show_number(model.throughput),
            f"{model.prefill_share:.0%}",
            f"{model.decode_share:.0%}",
            f"{model.quota:.1%}",
            pool,
        ]
        where, pool = ["", "", ""], ""


def summary(plan: Plan, devices: Mapping[str, int], missing: Sequence[Shortfall]) -> Iterator[str]:
    """What is answered, on how many of the devices there are, and why not more."""
    used: dict[str, int] = {}
    for unit in plan.units:
        used[unit.device] = used.get(unit.device, 0) + unit.gpus
    wanted = sum(model.rate for unit in plan.units for model in unit.models)
    where = ", ".join(f"{used.get(device, 0)} of {count} {device}" for device, count in devices.items())
    yield f"{show_number(plan.throughput)} of {show_number(wanted)} requests/s are answered, on {where}"
    for shortfall in missing[:_FEW]:
        yield shortfall.text
    if len(missing) > _FEW:
        yield f"… and {len(missing) - _FEW} more"
    more = more_devices(missing)
    if more:
        yield f"about {' and '.join(f'{n} more {device}' for device, n in more.items())} would answer all"
