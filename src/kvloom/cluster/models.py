"""Finds the edits by which models come and go while a fleet serves, and by which it follows another config;
and tells the state of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from kvloom.cluster.edits import UnitEdit, adapter_edits
from kvloom.cluster.placement import rooms
from kvloom.cluster.state import ALIVE, FleetSpec, FleetStatus, UnitSpec, is_drained, program_name
from kvloom.types.errors import BadRequest, Conflict, UnknownModel
from kvloom.types.numbers import show_size
from kvloom.types.service import GroupSpec, NodeState, Scale, Service
from kvloom.types.spec import EngineSpec, ModelSpec, ProgramSpec

_SIZES: Final = ("kv_bytes", "block_bytes", "memory", "cache_size")  # fields of a unit that are bytes


class ModelState(Struct, frozen=True, kw_only=True):
    """A model of the fleet, with the state of each unit that is to serve it."""

    name: str
    path: str
    units: dict[str, Service]


class AddModel(Struct, frozen=True, kw_only=True):
    """Asks for another model to be served."""

    model: ModelSpec
    unit: str | None = None
    """The unit that is to serve it; None for the one whose models have the most room."""


class Wanted(Struct, frozen=True, kw_only=True):
    """The fleet that a config describes."""

    engines: tuple[EngineSpec, ...]
    first: tuple[str, ...]
    """The units that have a process from the beginning."""
    groups: dict[str, GroupSpec] = {}
    program: ProgramSpec | None = None


class Apply(Struct, frozen=True, kw_only=True):
    """Asks for the fleet to become what a config describes."""

    wanted: Wanted
    really: bool = False
    """Whether it is done; else the answer only tells what would change."""


class Applied(Struct, frozen=True, kw_only=True):
    """The answer to `Apply`: what has changed, or would change."""

    changes: tuple[str, ...]
    """One line for each change."""
    problems: tuple[str, ...] = ()
    """Units that could not be started as they are specified now, and why."""
    overrode: tuple[str, ...] = ()
    """Fields that somebody else has changed at the same time; the last one won."""


class Differences(Struct, frozen=True, kw_only=True):
    """The edits that a fleet needs, in their order: units that come, those that start anew, and the rest."""

    added: dict[str, UnitEdit]
    adapted: dict[str, UnitEdit]
    """Units whose adapters alone differ, which do not start anew."""
    otherwise: dict[str, UnitEdit]
    removed: dict[str, UnitEdit]
    groups: dict[str, GroupSpec] | UnsetType = UNSET
    program: ProgramSpec | UnsetType | None = UNSET
    lines: tuple[str, ...] = ()
    """The edits in words."""


def units_to_serve(spec: FleetSpec, asked: AddModel) -> tuple[str, ...]:
    """Returns the units that are to serve the model as well: one, or all replicas of it. Raises Conflict for
    a name that is taken and for a unit that cannot serve another model, and BadRequest for a unit that is not
    there."""
    model = asked.model
    for name, unit in _kept(spec):
        for other in unit.engine.models:
            alike = _files(other) == _files(model)
            taken = other.name == model.name and (not alike or name == asked.unit)
            if taken or (other.name == model.name and asked.unit is None):
                raise Conflict(
                    f"there is a model {model.name} already, {_files(other)} on {name}; another name is right"
                )
    chosen = _roomiest(spec) if asked.unit is None else asked.unit
    if chosen not in dict(_kept(spec)):
        units = ", ".join(name for name, _ in _kept(spec)) or "none"
        raise BadRequest(f"unit: there is no unit {chosen}; the units: {units}", param="unit")
    found = _replicas(spec, chosen)
    for name in found:
        if (weave := spec.units[name].engine.weave) is not None:
            lenders = " or ".join(weave.colds)
            raise Conflict(f"{name} borrows from {lenders}, for one model; another unit is right")
    return found


def _files(model: ModelSpec) -> str:
    """Names the files that a model is read from, and the digest that they must have."""
    revision = f"@{model.revision}" if model.revision else ""
    return f"{model.path}{revision}" + (f" with the sha256 {model.sha256}" if model.sha256 else "")


def units_that_serve(spec: FleetSpec, model: str) -> list[str]:
    """Returns the units that are to serve the model. Raises UnknownModel."""
    found = [name for name, unit in _kept(spec) if model in [one.name for one in unit.engine.models]]
    if not found:
        served = {one.name for _, unit in _kept(spec) for one in unit.engine.models}
        raise UnknownModel.named(model, sorted(served))
    return found


def refuse_drafting(spec: FleetSpec, model: str) -> None:
    """Raises Conflict if the model drafts for another one, which would not load without it."""
    for name, unit in _kept(spec):
        for other in unit.engine.models:
            if other.draft == model:
                raise Conflict(
                    f"{model} drafts for {other.name} on {name}; to remove {other.name} first is right"
                )


def without_units(groups: Mapping[str, GroupSpec], gone: Iterable[str]) -> dict[str, GroupSpec]:
    """Returns the groups without these units; one that would be empty is left out."""
    some = set(gone)
    kept = {
        name: replace(group, units=tuple(unit for unit in group.units if unit not in some))
        for name, group in groups.items()
    }
    return {name: group for name, group in kept.items() if group.units}


def differences(spec: FleetSpec, wanted: Wanted, seconds: float) -> Differences:
    """Returns the edits with which the fleet becomes as it is wanted. seconds: the time that requests have to
    end at a unit that changes or goes. A unit that differs only in whether it has a process now is left as it
    is: that is decided by the fleet scheduler, and by those who run the fleet."""
    there, lines = dict(_kept(spec)), list[str]()
    engines = {engine.unit: engine for engine in wanted.engines}
    added, otherwise, removed = dict[str, UnitEdit](), dict[str, UnitEdit](), dict[str, UnitEdit]()
    adapted = dict[str, UnitEdit]()
    for name, engine in engines.items():
        unit = there.get(name)
        if unit is None:
            added[name] = UnitEdit(engine=engine, add=name not in spec.units, wanted=name in wanted.first)
            lines.append(f"{name} is added, with {_models(engine)}")
        elif changes := adapter_edits(unit.engine, engine):
            adapted[name] = UnitEdit(adapters=changes)
            said = [f"{'unloads' if one.remove else 'loads'} {one.adapter.name}" for one in changes]
            lines.append(f"{name} {', '.join(said)}")
        elif unit.engine != engine and changes is None:
            otherwise[name] = UnitEdit(engine=engine, seconds=seconds)
            lines.append(f"{name} starts anew: {_changes(unit.engine, engine)}")
    for name, unit in there.items():
        if name not in engines:
            removed[name] = UnitEdit(remove=True, seconds=seconds, drained=False)
            lines.append(f"{name} is removed, with {_models(unit.engine)}")
    groups: dict[str, GroupSpec] | UnsetType = UNSET
    if wanted.groups != spec.groups:
        groups = wanted.groups
        lines.append(f"units that come and go: {_groups(spec.groups)} → {_groups(wanted.groups)}")
    program: ProgramSpec | UnsetType | None = UNSET
    if wanted.program is not None and wanted.program != spec.program:
        program = wanted.program
        lines.append(f"program: {_program(spec.program)} → {_program(wanted.program)}")
    return Differences(
        added=added,
        adapted=adapted,
        otherwise=otherwise,
        removed=removed,
        groups=groups,
        program=program,
        lines=tuple(lines),
    )


def _kept(spec: FleetSpec) -> Iterable[tuple[str, UnitSpec]]:
    return ((name, unit) for name, unit in spec.units.items() if not unit.removed)


def _roomiest(spec: FleetSpec) -> str:
    """Returns the unit with the most bytes of its pool for each of its models, the new one counted."""
    units = [(name, unit.engine) for name, unit in _kept(spec) if unit.engine.weave is None]
    if not units:
        raise Conflict("no unit can serve another model; `kvloom config apply` or `kvloom replan` adds units")
    return max(units, key=lambda one: one[1].kv_bytes / (len(one[1].models) + 1))[0]


def _replicas(spec: FleetSpec, unit: str) -> tuple[str, ...]:
    """Returns the units that come and go together with this one, as replicas of one another."""
    found = next((group.units for group in spec.groups.values() if unit in group.units), (unit,))
    return tuple(name for name in found if name in spec.units and not spec.units[name].removed)


def _models(engine: EngineSpec) -> str:
    return ", ".join(name for model in engine.models for name in model.names)


def _changes(before: EngineSpec, engine: EngineSpec) -> str:
    """Returns the fields that differ, in words."""
    said = []
    for field in EngineSpec.__struct_fields__:
        old, new = getattr(before, field), getattr(engine, field)
        if field == "models" and old != new:
            said.append(f"models {_models(before)} → {_models(engine)}")
        elif old != new:
            shown = [show_size(value) if field in _SIZES else str(value) for value in (old, new)]
            said.append(f"{field} {' → '.join(shown if shown[0] != shown[1] else [str(old), str(new)])}")
    return ", ".join(said)


def _groups(groups: Mapping[str, GroupSpec]) -> str:
    """Names the units that come and go, and how many of each group there are."""
    return "; ".join(map(_group, groups.values())) or "none"


def _group(group: GroupSpec) -> str:
    scale, usual = group.scale, Scale(group.scale.least, group.scale.most)
    bounds = {name: getattr(scale, name) for name in ("low", "high", "seconds", "idle")}
    told = "".join(f", {name} {at:g}" for name, at in bounds.items() if at != getattr(usual, name))
    return f"{', '.join(group.units)} ({scale.least} to {scale.most}{told})"


def _program(program: ProgramSpec | None) -> str:
    """Returns a program's name, with its options."""
    options = "" if program is None else ", ".join(f"{key} {value}" for key, value in program.options.items())
    return f"{program_name(program)} ({options})" if options else program_name(program)


def node_states(spec: FleetSpec, status: FleetStatus) -> list[NodeState]:
    """Returns the state of each node that has joined, by name."""
    left = rooms(spec, status)
    there: dict[str, list[str]] = {name: [] for name in status.nodes}
    waiting: dict[str, list[str]] = {name: [] for name in status.nodes}
    for name, process in status.processes.items():
        if process.node in there:
            if process.phase in ALIVE:
                there[process.node].append(name)
            elif process.lack:
                waiting[process.node].append(f"{name} {process.lack}")
    found = []
    for name, node in sorted(status.nodes.items()):
        drained = node.phase == "there" and is_drained(name, spec)
        here = (*there[name], *node.stale)
        found.append(
            NodeState(
                name=name,
                state=("draining" if here else "drained") if drained else node.phase,
                address=node.address,
                cores=node.cores,
                memory=node.memory,
                left=left[name].memory,
                gpus=node.gpus,
                components=tuple(sorted(here)),
                problem="; ".join([node.problem] if node.problem else waiting[name]),
            )
        )
    return found
