"""`kvloom replan`: what is to be done so that a fleet which serves becomes as a plan says, and doing it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from kvloom.admin.gateway import Gateway, ServerError
from kvloom.plan.plan import read_plan
from kvloom.plan.repair import Repair, Start, Step, Unreachable, repair
from kvloom.planning.target import Target, new_names, read_target
from kvloom.sizes import show_size
from kvloom.types.errors import ConfigError
from kvloom.types.service import Placement
from kvloom.types.spec import EngineSpec

SERVER_ERROR: Final = 1
INTERRUPTED: Final = 130


def replan(file: Path, server: Gateway, *, apply: bool) -> int:
    """Its exit code. Raises ConfigError before anything is changed."""
    plan = read_plan(file)
    try:
        fleet = server.placement()
        target = read_target(file, plan, fleet)
        try:
            found = repair(target.now, target.units, fleet.memory)
        except Unreachable as error:
            raise ConfigError(f"{file}: {error}") from error
        states = {unit.name: unit.state for unit in server.units()}
        coming = [Await(name) for name in found.kept if states.get(name) != "up"]
        changes = [*coming, *_changes(target, found, fleet)]
        for name in found.kept:
            print(f"keep   {_line(name, target.specs[found.kept[name]])}")
        for change in changes:
            print(change)
        if not apply:
            return _end("nothing is changed yet; --apply does it" if changes else "the fleet is as planned")
        for number, change in enumerate(changes, 1):
            print(f"{number}/{len(changes)} {change.doing} …", flush=True)
            change.carry_out(server)
        return _end("the fleet is as planned")
    except ServerError as error:
        print(f"kvloom: {error}; `kvloom replan` again goes on from where this ended", file=sys.stderr)
        return SERVER_ERROR
    except KeyboardInterrupt:
        print("kvloom: interrupted; `kvloom replan` again goes on from where this ended", file=sys.stderr)
        return INTERRUPTED


def _end(line: str) -> int:
    print(line)
    return 0


class Await:
    """A unit that stays does not serve yet: nobody else may go before it does."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.doing = f"waiting for {name}"

    def __str__(self) -> str:
        return f"await  {self._name}"

    def carry_out(self, server: Gateway) -> None:
        unit = server.start(self._name)
        if unit.state != "up":
            why = f" ({unit.problem})" if unit.problem else ""
            raise ServerError(f"{self._name}, which is to stay, is {unit.state}{why}; it has to be up")


class Begin:
    """A unit is started."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self.doing = f"starting {spec.unit}"

    def __str__(self) -> str:
        return f"start  {_line(self._spec.unit, self._spec)}"

    def carry_out(self, server: Gateway) -> None:
        server.add(self._spec)


class End:
    """A unit's requests go elsewhere, and its process ends. waits: models that have no unit then."""

    def __init__(self, name: str, waits: tuple[str, ...]) -> None:
        self._name = name
        self._waits = waits
        self.doing = f"stopping {name}"

    def __str__(self) -> str:
        waits = ", ".join(self._waits)
        gap = f"; there is no room for both, so requests for {waits} wait meanwhile" if waits else ""
        return f"stop   {self._name}{gap}"

    def carry_out(self, server: Gateway) -> None:
        server.stop(self._name, None)


class Forget:
    """A unit that has no process, and is not to have one any more."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.doing = f"forgetting {name}"

    def __str__(self) -> str:
        return f"forget {self._name}"

    def carry_out(self, server: Gateway) -> None:
        server.remove(self._name)


Change = Await | Begin | End | Forget


def _changes(target: Target, found: Repair, fleet: Placement) -> Iterator[Change]:
    """What has stopped stays known to the end, so that requests for it wait rather than fail."""
    started = [step.unit for step in found.steps if isinstance(step, Start)]
    away = [spec.unit for spec in fleet.away]
    names = dict(zip(started, new_names([*target.now, *away], len(started)), strict=True))
    for step in found.steps:
        yield _change(step, target, names)
    yield from map(Forget, away)
    yield from (Forget(step.unit) for step in found.steps if not isinstance(step, Start))


def _change(step: Step, target: Target, names: dict[int, str]) -> Change:
    if isinstance(step, Start):
        return Begin(replace(target.specs[step.unit], unit=names[step.unit]))
    return End(step.unit, step.waits)


def _line(name: str, spec: EngineSpec) -> str:
    models = ", ".join(model.name for model in spec.models)
    cores = f"{spec.threads} core{'' if spec.threads == 1 else 's'}"
    return f"{name}: {models} ({show_size(spec.kv_bytes)} of K and V, {cores})"
