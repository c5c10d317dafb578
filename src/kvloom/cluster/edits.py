"""Edits of a fleet's specification. Each names the fields that it changes, so that two at once merge."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from kvloom.cluster.state import GATEWAY, SCHEDULER, FleetSpec, NodeSpec, Rolling, UnitSpec, is_drained
from kvloom.types.errors import BadRequest, Conflict
from kvloom.types.service import GroupSpec, RevertedProgram
from kvloom.types.spec import AdapterSpec, EngineSpec, ProgramSpec

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")  # It becomes part of a path.
_TAKEN: Final = (GATEWAY, SCHEDULER)


class AdapterEdit(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter that comes to a unit that serves its base, or goes."""

    base: str
    adapter: AdapterSpec
    remove: bool = False


class UnitEdit(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An edit of one unit. A field that is left out stays as it is."""

    engine: EngineSpec | UnsetType = UNSET
    """Another specification, with which the unit starts anew."""
    adapters: tuple[AdapterEdit, ...] = ()
    """Adapters that come and go. The unit does not start anew."""
    add: bool = False
    """Whether the unit must not be there yet."""
    wanted: bool | UnsetType = UNSET
    drained: bool | UnsetType = UNSET
    seconds: float | UnsetType | None = UNSET
    restart: bool = False
    """Whether it is to have a new process."""
    remove: bool = False
    """Whether it is to be removed, once its process has ended."""
    node: str | UnsetType = UNSET
    """Another node that it is bound to, and on which it starts anew; empty for none."""


class NodeEdit(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An edit of one node. A field that is left out stays as it is."""

    drained: bool | UnsetType = UNSET
    seconds: float | UnsetType | None = UNSET


class Edit(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="edit"):
    """An edit of a fleet's specification. A field that is left out stays as it is."""

    number: int = 0
    """The answer names the edit by it."""
    base: int | None = None
    """The revision that it was made for; the answer tells what others have changed since."""
    units: dict[str, UnitEdit] = {}
    nodes: dict[str, NodeEdit] = {}
    groups: dict[str, GroupSpec] | UnsetType = UNSET
    program: ProgramSpec | UnsetType | None = UNSET
    gateway: bool = False
    """Whether another gateway is to take the present one's place."""
    gateways: tuple[str, ...] | UnsetType = UNSET
    """The nodes that are to have a gateway each; empty for one gateway, at the controller's host."""
    scheduler: bool = False
    """Whether the fleet scheduler is to have a new process, or its first one."""
    rolling: Rolling | UnsetType | None = UNSET


def edited(spec: FleetSpec, edit: Edit) -> tuple[FleetSpec, tuple[str, ...]]:
    """Returns the specification with the edit, and the fields that somebody else had changed since its base:
    the last one wins. Raises Conflict for a unit's name that is taken, for a unit or node that is not there,
    for a second rolling restart, and if no gateway would be left; BadRequest for what is no name. Then
    nothing is changed."""
    revision, overrode = spec.revision + 1, list[str]()
    units = dict(spec.units) if edit.units else spec.units
    for name, one in edit.units.items():
        known = units.get(name)
        unit = _edited_unit(name, known, one)
        fields = () if known is None else _different(known, unit)
        if known is not None:
            overrode += [f"{name}.{field}" for field in _since(fields, known.changed, edit.base)]
        units[name] = replace(unit, changed=unit.changed | dict.fromkeys(fields, revision))
    nodes = dict(spec.nodes) if edit.nodes else spec.nodes
    for name, change in edit.nodes.items():
        if name not in nodes:
            raise Conflict(f"there is no node {name[:80]!r}; the nodes: {', '.join(nodes) or 'none'}")
        nodes[name], fields = _edited_node(nodes[name], change, revision)
        overrode += [f"{name}.{field}" for field in _since(fields, spec.nodes[name].changed, edit.base)]
    if isinstance(edit.rolling, Rolling) and spec.rolling is not None:
        raise Conflict(f"a rolling restart is under way, at {at(spec.rolling)}; ask again once it is over")
    given: dict[str, Any] = {
        field: value
        for field in ("groups", "program", "rolling", "gateways")
        if (value := getattr(edit, field)) is not UNSET
    }
    if edit.gateway:
        given["gateway"] = spec.gateway + 1
    if edit.scheduler:
        given["scheduler"] = spec.scheduler + 1
    made = replace(spec, units=units, nodes=nodes, **given)
    _check_gateways(spec, made)
    fields = tuple(field for field in given if getattr(made, field) != getattr(spec, field))
    if "program" in fields:
        made = replace(made, reverted=None)
    overrode += _since(fields, spec.changed, edit.base)
    changed = spec.changed | dict.fromkeys(fields, revision)
    return replace(made, revision=revision, changed=changed), tuple(overrode)


def _edited_unit(name: str, known: UnitSpec | None, edit: UnitEdit) -> UnitSpec:
    if known is not None and edit.add:
        raise Conflict(f"there is a unit {name} already; another name is right")
    if known is None:
        if edit.engine is UNSET:
            raise Conflict(f"there is no unit {name}")
        if name in _TAKEN or not _NAME.fullmatch(name):
            raise BadRequest(
                f"unit: {name[:80]!r} is no name for a unit; another one of letters, digits and .-_ is right",
                param="unit",
            )
        unit = UnitSpec(engine=edit.engine)
    else:
        unit = known
    if edit.engine is not UNSET and edit.engine != unit.engine:
        unit = replace(unit, engine=edit.engine, generation=unit.generation + 1, edition=unit.generation + 1)
    elif edit.restart or (edit.node is not UNSET and edit.node != unit.node):
        unit = replace(unit, generation=unit.generation + 1)
    for change in edit.adapters:
        unit = replace(unit, engine=_with_adapter(name, unit.engine, change))
    given: dict[str, Any] = {
        field: value
        for field in ("wanted", "drained", "seconds", "node")
        if (value := getattr(edit, field)) is not UNSET
    }
    if edit.wanted is True:
        given["removed"] = False
    if edit.remove:
        given |= {"wanted": False, "removed": True}
    return replace(unit, **given)


def _with_adapter(unit: str, engine: EngineSpec, edit: AdapterEdit) -> EngineSpec:
    """Raises Conflict for a name that is taken, and for a base that is not there."""
    adapter, models = edit.adapter, list(engine.models)
    at = next((i for i, model in enumerate(models) if model.name == edit.base), None)
    if at is None and not edit.remove:
        raise Conflict(f"{unit} does not serve {edit.base} any more")
    if at is None or (not edit.remove and adapter in models[at].adapters):
        return engine
    if not edit.remove and adapter.name in engine.served:
        raise Conflict(f"there is a model {adapter.name} on {unit} already; another name is right")
    kept = tuple(one for one in models[at].adapters if one.name != adapter.name)
    models[at] = replace(models[at], adapters=kept if edit.remove else (*kept, adapter))
    return replace(engine, models=tuple(models))


def adapter_edits(before: EngineSpec, wanted: EngineSpec) -> tuple[AdapterEdit, ...] | None:
    """Returns the adapters that come and go between two specifications, those that go first; None if
    something else differs, or an adapter takes the place of another one of its name."""
    if _bare(before) != _bare(wanted):
        return None
    both = [(had, has) for had, has in zip(before.models, wanted.models, strict=True)]
    gone = [
        AdapterEdit(base=had.name, adapter=one, remove=True)
        for had, has in both
        for one in had.adapters
        if one not in has.adapters
    ]
    come = [
        AdapterEdit(base=has.name, adapter=one)
        for had, has in both
        for one in has.adapters
        if one not in had.adapters
    ]
    again = {one.adapter.name for one in gone} & {one.adapter.name for one in come}
    return None if again else (*gone, *come)


def _bare(engine: EngineSpec) -> EngineSpec:
    return replace(engine, models=tuple(replace(model, adapters=()) for model in engine.models))


def _edited_node(node: NodeSpec, edit: NodeEdit, revision: int) -> tuple[NodeSpec, tuple[str, ...]]:
    """Returns the node with the edit, and the fields that differ."""
    given: dict[str, Any] = {
        field: value for field in ("drained", "seconds") if (value := getattr(edit, field)) is not UNSET
    }
    fields = tuple(field for field, value in given.items() if getattr(node, field) != value)
    return replace(node, **given, changed=node.changed | dict.fromkeys(fields, revision)), fields


def _check_gateways(before: FleetSpec, spec: FleetSpec) -> None:
    """Raises Conflict if each node that is to have a gateway is drained, and that was not so before."""
    if spec.gateways and not _open(spec) and (_open(before) or before.gateways != spec.gateways):
        raise Conflict(
            f"no gateway would be left, as {', '.join(spec.gateways)} would be drained; a gateway on another "
            "node is right"
        )


def _open(spec: FleetSpec) -> list[str]:
    """Returns the nodes that are to have a gateway now."""
    return [node for node in spec.gateways if not is_drained(node, spec)]


def _different(before: UnitSpec, unit: UnitSpec) -> tuple[str, ...]:
    fields = ("engine", "wanted", "generation", "drained", "seconds", "removed", "node")
    return tuple(field for field in fields if getattr(before, field) != getattr(unit, field))


def _since(fields: Iterable[str], changed: Mapping[str, int], base: int | None) -> list[str]:
    return [] if base is None else [field for field in fields if changed.get(field, 0) > base]


def at(rolling: Rolling) -> str:
    """Returns the component that a rolling restart is at."""
    return next(iter((*rolling.active, *rolling.left)), "its end")


def restarting(spec: FleetSpec, unit: str, seconds: float | None) -> FleetSpec:
    """Returns the specification with which a unit gets a new process. seconds: how long what runs there is
    waited for; None for as long as it takes."""
    known = spec.units[unit]
    anew = replace(known, generation=known.generation + 1, seconds=seconds)
    return replace(spec, units=spec.units | {unit: anew})


def with_turn(spec: FleetSpec, component: str) -> FleetSpec:
    """Returns the specification with which a component's turn in the rolling restart begins."""
    rolling = spec.rolling
    assert rolling is not None
    left = tuple(one for one in rolling.left if one != component)
    spec = replace(spec, rolling=replace(rolling, left=left, active=(*rolling.active, component)))
    match component:
        case "gateway":
            return replace(spec, gateway=spec.gateway + 1)
        case "scheduler":
            return replace(spec, scheduler=spec.scheduler + 1)
        case _:
            return restarting(spec, component, rolling.seconds)


def without_turn(spec: FleetSpec, component: str) -> FleetSpec:
    """Returns the specification with which the rolling restart is over for a component, or for all."""
    rolling = spec.rolling
    assert rolling is not None
    left = tuple(one for one in rolling.left if one != component)
    active = tuple(one for one in rolling.active if one != component)
    return replace(spec, rolling=replace(rolling, left=left, active=active) if left or active else None)


def reverted(spec: FleetSpec, problem: str, *, beside: bool) -> FleetSpec:
    """Returns the specification with the last program that has passed its probation. problem: what became of
    the gateway that ran the present one. beside: whether there are gateways with that program, which are to
    be replaced."""
    made, _ = edited(spec, Edit(program=spec.proven, gateway=beside))
    return replace(made, reverted=RevertedProgram(spec.program, problem))
