"""The units that a fleet which serves should have by a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from kvloom.plan.cluster import CPU
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.plan import PROCESS_BYTES, PlacementPlan, PlannedUnit, host_bytes
from kvloom.plan.repair import Placed
from kvloom.types.errors import ConfigError
from kvloom.types.numbers import show_count
from kvloom.types.service import Placement
from kvloom.types.spec import EngineSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class ReplanTarget:
    """The units that there are, and those that should be. Both hold what tells units from each other."""

    now: dict[str, Placed]
    """The units that there are, by name."""
    units: tuple[Placed, ...]
    """The units that there should be."""
    specs: tuple[EngineSpec, ...]
    """The plan's units in full, whose names are still open."""


def read_target(file: Path, plan: PlacementPlan, fleet: Placement) -> ReplanTarget:
    """Returns what the fleet is and what it is to become. Raises ConfigError if it cannot become so."""
    check_fleet(file, fleet)
    _check_asleep(file, [unit.name for unit in plan.units if unit.memory])
    _check_devices(file, plan, fleet)
    every = (*fleet.units, *fleet.away)
    known = {model.name: model for unit in every for model in unit.models}
    shapes = {model.name: model.shape for unit in plan.units for model in unit.models}
    specs = tuple(_spec(file, unit, known, _like(unit, every)) for unit in plan.units)
    left_out = known.keys() - shapes.keys()
    if left_out:
        raise ConfigError(f"{file}: no unit for {', '.join(sorted(left_out))}, which is served")
    return ReplanTarget(
        now={spec.unit: _placed(spec, shapes) for spec in fleet.units},
        units=tuple(_placed(spec, shapes) for spec in specs),
        specs=specs,
    )


def check_fleet(file: Path, fleet: Placement) -> None:
    """Raises ConfigError if no plan is for such a fleet."""
    if fleet.scaled:
        raise ConfigError(
            f"{file}: {', '.join(fleet.scaled)} come and go by themselves (`replicas` is a range); a plan is "
            "for a fleet whose `replicas` are numbers"
        )
    every = (*fleet.units, *fleet.away)
    _check_asleep(file, [spec.unit for spec in every if spec.sleep_dir])
    woven = [spec.unit for spec in every if spec.weave]
    if woven:
        raise ConfigError(f"{file}: `weave` is set for {', '.join(woven)}; plans are for units that do not")
    _check_cpu(file, [spec.device for spec in fleet.units])


def _check_asleep(file: Path, asleep: Sequence[str]) -> None:
    if asleep:
        raise ConfigError(
            f"{file}: the weights of {', '.join(asleep)} sleep (memory); plans and fleets whose weights stay "
            "can be changed while they serve"
        )


def _check_cpu(file: Path, devices: Sequence[str]) -> None:
    for device in devices:
        if device != CPU:
            raise ConfigError(f"{file}: units on {device}; plan and fleet on device {CPU} are right")


def fewer_units(target: ReplanTarget) -> Iterator[str]:
    """Says of which models there will be fewer replicas than now."""
    before = Counter(name for unit in target.now.values() for name in unit.models)
    after = Counter(name for unit in target.units for name in unit.models)
    for name, count in before.items():
        if after[name] < count:
            yield f"{name} has {show_count(after[name], 'replica')} then, instead of {count}"


def _check_devices(file: Path, plan: PlacementPlan, fleet: Placement) -> None:
    nodes = {unit.node for unit in plan.units}
    if len(nodes) > 1:
        raise ConfigError(f"{file}: units on {len(nodes)} nodes; a plan for this fleet's machine is right")
    _check_cpu(file, [unit.device for unit in plan.units])
    cores = sum(unit.gpus for unit in plan.units)
    if cores > fleet.cores:
        raise ConfigError(f"{file}: a plan for {cores} cores; the fleet has {fleet.cores}")


def _like(planned: PlannedUnit, every: Sequence[EngineSpec]) -> EngineSpec:
    """Returns the first unit that has most of the planned one's models. The planned one takes over its
    policy, its lease and all else that a plan does not say."""
    names = {model.name for model in planned.models}
    return max(every, key=lambda spec: len(names.intersection(model.name for model in spec.models)))


def _spec(file: Path, unit: PlannedUnit, known: dict[str, ModelSpec], like: EngineSpec) -> EngineSpec:
    for model in unit.models:
        if model.name not in known:
            raise ConfigError(
                f"{file}: {unit.name}: {model.name!r} is not served; of the fleet are {', '.join(known)}"
            )
        if _are_unlike(model.path, known[model.name].path):
            raise ConfigError(
                f"{file}: {unit.name}: {model.name} is planned from {model.path}, and served from "
                f"{known[model.name].path}; a plan changes no checkpoint"
            )
    try:
        unit.check_pool(like.block_bytes)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}") from error
    made = replace(
        like,
        unit="",
        models=tuple(model.share_of(known[model.name]) for model in unit.models),
        kv_bytes=unit.kv_bytes,
        threads=unit.gpus,
        tensor_parallel=unit.tensor_parallel,
    )
    if made.draft_problem is not None:
        raise ConfigError(f"{file}: {unit.name}: {made.draft_problem}")
    return made


def _are_unlike(planned: str | None, served: str) -> bool:
    """Returns whether the paths differ for sure. Nobody knows to what a relative path is relative."""
    if planned is None or not (Path(planned).is_absolute() and Path(served).is_absolute()):
        return False
    return Path(planned).resolve() != Path(served).resolve()


def _placed(spec: EngineSpec, shapes: dict[str, ModelShape]) -> Placed:
    """Returns what tells the unit from others. Shares that differ by less than a tenth count as the same."""
    models = sorted(spec.models, key=lambda model: model.name)
    shares = [(model.prefill_share, model.decode_share, model.quota) for model in models]
    rounded = tuple(None if share is None else round(share, 1) for some in shares for share in some)
    return Placed(
        models=tuple(model.name for model in models),
        bytes=spec.kv_bytes + sum(host_bytes(shapes[model.name]) for model in models) + PROCESS_BYTES,
        form=(spec.kv_bytes, spec.threads, spec.tensor_parallel, rounded),
    )


def new_names(taken: Sequence[str], count: int) -> list[str]:
    """Returns the first names unit-N that nobody has."""
    names = (f"unit-{number}" for number in range(len(taken) + count))
    return [name for name in names if name not in taken][:count]
