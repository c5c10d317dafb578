"""`kvloom replan`: brings a fleet that serves to another plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import replace as but
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter
from msgspec.structs import replace

from kvloom.cli.admin import HERE, ServerOptions
from kvloom.cli.app import CommandFailed, interruptible
from kvloom.cli.gateway import AdminClient, GatewayError
from kvloom.cli.plan.app import estimator_shown, plan_table, summary
from kvloom.cli.plan.cluster_file import cpu_nodes
from kvloom.cli.plan.traffic import AtOption, read_seen, scarcity, told
from kvloom.cli.tables import console_for
from kvloom.plan.cluster import CPU, Demand, DeviceCosts
from kvloom.plan.cost.profile import Profile, read_profile
from kvloom.plan.explain import cost_errors, shortfalls
from kvloom.plan.plan import (
    FLEET_BYTES,
    PROCESS_BYTES,
    USABLE,
    PlacementPlan,
    host_bytes,
    read_plan,
    write_plan,
)
from kvloom.plan.planner import plan_placement, write_down
from kvloom.plan.repair import Repair, StartUnit, Unreachable, repair
from kvloom.plan.target import ReplanTarget, check_fleet, fewer_units, new_names, read_target
from kvloom.plan.traffic import At
from kvloom.types.errors import ConfigError
from kvloom.types.numbers import show_count, show_size
from kvloom.types.service import Admit, Drain, Placement
from kvloom.types.spec import EngineSpec

_GOES_ON: Final = "`kvloom replan` again goes on from where this ended"
_FROM_TRAFFIC: Final = Path("--from-traffic")  # in errors, in the place of a plan's file

app = App(name="replan")


@dataclass(frozen=True, slots=True)
class ReplanStep:
    """One step on the way to the plan."""

    shown: str
    doing: str
    carry_out: Callable[[AdminClient], object]


@app.default
def replan_command(
    plan: Annotated[Path | None, Parameter(help="what `kvloom plan -o` wrote")] = None,
    /,
    *,
    from_traffic: Annotated[
        bool, Parameter(negative=(), help="instead: make the plan from the server's traffic, with --profile")
    ] = False,
    at: AtOption = "peak",
    profile: Annotated[
        Path | None, Parameter(help="what `kvloom profile` measured with the fleet's models")
    ] = None,
    output: Annotated[Path | None, Parameter(alias="-o", help="write the plan that is made")] = None,
    apply: Annotated[bool, Parameter(help="do it; left out, it is only shown")] = False,
    server: ServerOptions = HERE,
) -> None:
    """Bring a fleet that serves to another plan.

    It shows which units must be started and stopped so that the fleet becomes as the plan says, and with
    --apply does it, one step at a time, while the fleet serves: requests move on to the new units, or wait if
    there is no room for old and new beside each other.

    With --from-traffic the plan is made for what the fleet was asked, on the cores that it has and in the
    memory that it takes. --apply then needs traffic of an hour, and 100 requests."""
    if from_traffic == (plan is not None):
        raise ConfigError("replan: a plan, or --from-traffic for one that is made now, is right")
    gateway = server.gateway()
    if plan is not None:
        replan(plan, gateway, apply=apply)
        return
    if profile is None:
        raise ConfigError("--profile: is missing; what `kvloom profile` wrote is right with --from-traffic")
    measured = read_profile(profile)
    try:
        made = plan_by_traffic(gateway, measured, at, apply=apply)
    except GatewayError as error:
        raise CommandFailed(str(error)) from error
    if output is not None:
        write_plan(output, made)
    bring_to(made, _FROM_TRAFFIC, gateway, apply=apply)


def plan_by_traffic(server: AdminClient, profile: Profile, at: At, *, apply: bool) -> PlacementPlan:
    """Makes a plan for the fleet's models by its traffic, and prints it. apply: whether the fleet is to be
    brought to it at once. Raises GatewayError, and ConfigError if no plan can be made, or none to apply."""
    fleet = server.placement()
    check_fleet(_FROM_TRAFFIC, fleet)
    units = (*fleet.units, *fleet.away)
    models = {model.name: model for unit in units for model in unit.models}
    seen = read_seen(server.traffic(), [*models], at)
    if apply and seen.is_scarce:
        raise ConfigError(
            f"--apply: {scarcity(seen)}; `kvloom replan --from-traffic -o plan.json` shows what a plan by it "
            "is, and `kvloom replan plan.json --apply` does it all the same"
        )
    missing = models.keys() - profile.shapes.keys()
    if missing:
        raise ConfigError(
            f"--profile: {', '.join(sorted(missing))}: not measured; a profile of all that is served is right"
        )
    demands = []
    for name, model in models.items():
        asked = seen.models.get(name) or but(seen.mean, rate=0.0)
        demands.append(
            Demand(
                *(name, profile.shapes[name], asked.rate, asked.prompt, asked.output, model.path, model.slo),
                speculation=model.speculation,
                acceptance=model.acceptance,
            )
        )
    nodes = (cpu_nodes(_memory(fleet, profile), fleet.cores),)
    console = console_for(width=140)
    costs = DeviceCosts(nodes, demands, profile)
    with interruptible("no plan is made"), estimator_shown(console, demands, costs) as estimator:
        placement = plan_placement(estimator, nodes)
        plan = _with_pools(write_down(estimator, nodes, placement, "kvloom replan --from-traffic"), fleet)
        missed = shortfalls(estimator, placement)
    console.print(plan_table(plan))
    used = {CPU: fleet.cores}
    for line in (*told(seen), *summary(plan, used, missed), *cost_errors(used, profile)):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    return plan


def _memory(fleet: Placement, profile: Profile) -> int:
    """Returns the bytes that the fleet's units take now, with a process for each core, as there may be that
    many units, but no more than there are. So pools hardly become larger than they were meant to be."""
    taken = sum(
        unit.kv_bytes + sum(host_bytes(profile.shapes[model.name]) for model in unit.models)
        for unit in (*fleet.units, *fleet.away)
    )
    return min(fleet.memory, int((taken + fleet.cores * PROCESS_BYTES) / USABLE) + FLEET_BYTES + 1)


def _with_pools(plan: PlacementPlan, fleet: Placement) -> PlacementPlan:
    """Returns the plan with pools that are together at least as large as the fleet's are now. A plan on fewer
    cores has only their part of the memory."""
    now = sum(unit.kv_bytes for unit in (*fleet.units, *fleet.away))
    larger = max(1.0, now / sum(unit.kv_bytes for unit in plan.units))
    units = (replace(unit, kv_bytes=int(unit.kv_bytes * larger)) for unit in plan.units)
    return replace(plan, units=tuple(units))


def replan(file: Path, server: AdminClient, *, apply: bool) -> None:
    """Shows what is to be done for a plan, and does it if `apply` is set. Raises as `bring_to` does."""
    bring_to(read_plan(file), file, server, apply=apply)


def bring_to(plan: PlacementPlan, file: Path, server: AdminClient, *, apply: bool) -> None:
    """Shows what is to be done, and does it if `apply` is set. `file` is the plan's, which errors name.
    Raises ConfigError before anything is changed, and CommandFailed if the server fails."""
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
            for line in fewer_units(target):
                print(line)
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
    return f"{name}: {models} ({show_size(spec.kv_bytes)} of K and V, {show_count(spec.threads, 'core')})"
