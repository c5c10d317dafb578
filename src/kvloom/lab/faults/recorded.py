"""The records by which a fleet's journal tells what befalls the fleet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvloom.cluster.state import gateway_name
from kvloom.journal.records import Fault as FaultRecord
from kvloom.journal.records import short
from kvloom.lab.faults.faults import (
    ControllerLoss,
    Death,
    Fault,
    GatewayLoss,
    NodeOutage,
    Order,
    Relocation,
    Replan,
    RollingRestart,
    SchedulerLoss,
    Switch,
    UnitAdded,
    UnitRemoved,
)

_LOSSES: Final = {
    GatewayLoss: (gateway_name(1), "gateway loss", "the gateway is killed with all its calls"),
    SchedulerLoss: ("scheduler", "scheduler loss", "the fleet scheduler is killed"),
    ControllerLoss: ("fleet", "controller loss", "the controller is killed"),
}


def told_as(fault: Fault) -> Iterator[tuple[str, FaultRecord]]:
    """Yields the records of a fault that begins now, each with the component to which it happens."""
    match fault:
        case Death(unit=unit, gently=gently, down=down):
            what = "is told to end" if gently else "is killed"
            yield unit, _record("death", f"the engine {what}", down)
        case GatewayLoss() | SchedulerLoss() | ControllerLoss():
            component, kind, reason = _LOSSES[type(fault)]
            yield component, _record(kind, reason, fault.down)
        case NodeOutage(nodes=nodes, seconds=seconds, off=off):
            why = "has no power" if off else "is cut off"
            for node in nodes:
                yield node, _record("node outage", f"the host {why}", seconds)
        case Relocation(unit=unit):
            yield unit, _record("relocation", "a request is ordered to come here")
        case Switch(program=program):
            yield "fleet", _record("switch", f"{program} is to run")
        case Order(unit=unit, what=what, model=model, seconds=seconds):
            yield unit, _record("order", f"{what}, of {model}", None if what == "evict" else float(seconds))
        case RollingRestart(budget=budget):
            yield "fleet", _record("rolling restart", f"all units restart, {budget} at once")
        case Replan(unit=unit):
            yield unit.spec.unit, _record("replan", f"it is to serve {', '.join(unit.shapes)}")
        case UnitAdded(unit=unit):
            yield unit.spec.unit, _record("unit added", f"with {', '.join(unit.shapes)}")
        case UnitRemoved(unit=unit):
            yield unit, _record("unit removed", "for good")


def _record(kind: str, reason: str, seconds: float | None = None) -> FaultRecord:
    return FaultRecord(kind=kind, reason=short(reason), seconds=seconds)
