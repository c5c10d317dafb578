"""`kvloom replan`: brings a fleet that serves to another plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter
from msgspec.structs import replace

from kvloom.cli.admin import HERE, ServerOptions
from kvloom.cli.app import CommandFailed, interruptible
from kvloom.cli.gateway import AdminClient, GatewayError
from kvloom.config.fields import show_size
from kvloom.plan.plan import read_plan
from kvloom.plan.repair import Repair, StartUnit, Unreachable, repair
from kvloom.plan.target import ReplanTarget, new_names, read_target
from kvloom.types.errors import ConfigError
from kvloom.types.service import Admit, Drain, Placement
from kvloom.types.spec import EngineSpec

_GOES_ON: Final = "`kvloom replan` again goes on from where this ended"

app = App(name="replan")


@dataclass(frozen=True, slots=True)
class ReplanStep:
    """One step on the way to the plan."""

    shown: str
    doing: str
    carry_out: Callable[[AdminClient], object]


@app.default
def replan_command(
    plan: Annotated[Path, Parameter(help="what `kvloom plan -o` wrote")],
    /,
    *,
    apply: Annotated[bool, Parameter(help="do it; left out, it is only shown")] = False,
    server: ServerOptions = HERE,
) -> None:
    """Bring a fleet that serves to another plan.

    It shows which units must be started and stopped so that the fleet becomes as the plan says, and with
    --apply does it, one step at a time, while the fleet serves: requests move on to the new units, or wait if
    there is no room for old and new beside each other."""
    replan(plan, server.gateway(), apply=apply)


def replan(file: Path, server: AdminClient, *, apply: bool) -> None:
    """Shows what is to be done, and does it if `apply` is set. Raises ConfigError before anything is changed,
    and CommandFailed if the server fails."""
    plan = read_plan(file)
    try:
        with interruptible(_GOES_ON):
            fleet = server.placement()
            target = read_target(file, plan, fleet)
            try:
                found = repair(target.now, target.units, fleet.memory)
            except Unreachable as error:
                raise ConfigError(f"{file}: {error}") from error
            states = {unit.name: unit.state for unit in server.units()}
            coming = [_await(name) for name in found.kept if states.get(name) != "up"]
            changes = [*coming, *_changes(target, found, fleet)]
            for name, unit in found.kept.items():
                print(f"keep   {_line(name, target.specs[unit])}")
            for change in changes:
                print(change.shown)
            if changes and not apply:
                print("nothing is changed yet; --apply does it")
                return
            for number, change in enumerate(changes, 1):
                print(f"{number}/{len(changes)} {change.doing} …", flush=True)
                change.carry_out(server)
            print("the fleet is as planned")
    except GatewayError as error:
        raise CommandFailed(f"{error}; {_GOES_ON}") from error


def _changes(target: ReplanTarget, found: Repair, fleet: Placement) -> Iterator[ReplanStep]:
    """Yields what is to be done. A unit that has stopped stays known to the end, so that requests for it wait
    rather than fail."""
    started = [step.unit for step in found.steps if isinstance(step, StartUnit)]
    away = [spec.unit for spec in fleet.away]
    names = dict(zip(started, new_names([*target.now, *away], len(started)), strict=True))
    for step in found.steps:
        if isinstance(step, StartUnit):
            yield _start(replace(target.specs[step.unit], unit=names[step.unit]))
        else:
            yield _stop(step.unit, step.waits)
            away.append(step.unit)
    for name in away:
        yield _order(f"forget {name}", f"forgetting {name}", name, "remove", Admit())


def _await(name: str) -> ReplanStep:
    """Returns the step that waits for a unit that is to stay and does not serve yet: no other may go before
    it does."""

    def carry_out(server: AdminClient) -> None:
        unit = server.order(name, "start", Admit())
        if unit.state != "up":
            why = f" ({unit.problem})" if unit.problem else ""
            raise GatewayError(f"{name}, which is to stay, is {unit.state}{why}; it has to be up")

    return ReplanStep(f"await  {name}", f"waiting for {name}", carry_out)


def _start(spec: EngineSpec) -> ReplanStep:
    return ReplanStep(
        f"start  {_line(spec.unit, spec)}", f"starting {spec.unit}", lambda server: server.add(spec)
    )


def _stop(name: str, waits: tuple[str, ...]) -> ReplanStep:
    """Returns the step that moves the unit's requests elsewhere and ends its process. The models in `waits`
    have no unit then."""
    gap = f"; there is no room for both, so requests for {', '.join(waits)} wait meanwhile" if waits else ""
    return _order(f"stop   {name}{gap}", f"stopping {name}", name, "stop", Drain())


def _order(shown: str, doing: str, unit: str, what: str, body: Drain | Admit) -> ReplanStep:
    return ReplanStep(shown, doing, lambda server: server.order(unit, what, body))


def _line(name: str, spec: EngineSpec) -> str:
    models = ", ".join(model.name for model in spec.models)
    cores = f"{spec.threads} core{'' if spec.threads == 1 else 's'}"
    return f"{name}: {models} ({show_size(spec.kv_bytes)} of K and V, {cores})"
