"""`kvloom simulate`: what a fleet would do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvloom.cli.app import Whole, check_outputs, interruptible
from kvloom.cli.bench import (
    HtmlFile,
    JsonFile,
    RateScale,
    SloScales,
    WorkloadFile,
    check_scales,
    write_results,
)
from kvloom.cli.tables import console_for
from kvloom.config.file import load_config, named_nodes, read_yaml
from kvloom.config.machine import Machine
from kvloom.config.units import ReschedulingConfig, refuse_moves
from kvloom.journal.file import JournalFile
from kvloom.journal.records import Record
from kvloom.lab.faults import chaos as faults
from kvloom.lab.sim import run
from kvloom.lab.sim.fleet import ReschedulingSettings
from kvloom.lab.sim.recording import Recording
from kvloom.lab.sim.run import check_models, scaled
from kvloom.lab.sim.unit import SimulatedUnit, cpu_costs_from, measured_units, planned_units
from kvloom.lab.workload.make import faster, is_spec, open_workload
from kvloom.lab.workload.request import Prompts, RequestResult, WorkloadRequest
from kvloom.lab.workload.summary import Summary, Traffic
from kvloom.page.assembly import recorded_page
from kvloom.plan.cluster import CPU
from kvloom.plan.cost.cpu import CpuCosts
from kvloom.plan.cost.profile import read_profile
from kvloom.plan.plan import read_plan
from kvloom.router.program import load_program
from kvloom.types.errors import ConfigError
from kvloom.types.service import PATIENCE
from kvloom.types.spec import DEFAULT_POLICY, Policy, ProgramSpec

JournalFlag = Annotated[
    Path | None, Parameter(metavar="FILE", help="write what happens, and why, as lines of JSON")
]

PageFile = Annotated[
    Path | None, Parameter(metavar="FILE", help="write a page that plays the run, to be opened in a browser")
]

_RIGHT = "the path of a plan or of a config"

app = App(name="simulate")


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The units that there are to serve with."""

    units: list[SimulatedUnit]
    program: ProgramSpec
    cpu_costs: CpuCosts | None = None
    """The measured work of the machine besides jobs; None if it was not measured."""
    rescheduling: ReschedulingSettings | None = None
    patience: float = PATIENCE
    homes: Mapping[str, str] = field(default_factory=dict)
    """The machine of each unit, if there are several."""


@app.default
def simulate(
    fleet: Annotated[Path, Parameter(help="plan.json or config.yaml")],
    /,
    *,
    workload: WorkloadFile,
    profile: Annotated[Path | None, Parameter(help="of a config's machine, or of a plan's cores")] = None,
    client_here: Annotated[
        bool, Parameter(help="who asks, as `kvloom bench serve` does, shares the measured machine")
    ] = False,
    rate_scale: RateScale = 1.0,
    program: Annotated[
        str | None, Parameter(metavar="P", help="router program (the config's, or least_loaded)")
    ] = None,
    policy: Annotated[Policy | None, Parameter(help="batching (the config's, or slack)")] = None,
    slo_scale: SloScales = (),
    seed: Annotated[
        Whole | None, Parameter(metavar="N", help="draw the order of what happens at one moment from N")
    ] = None,
    json: JsonFile = None,
    html: HtmlFile = None,
    journal: JournalFlag = None,
    page: PageFile = None,
) -> int:
    """Play a workload to a fleet in virtual time.

    The fleet is kvloom's own engines, batching policies, pool and router programs, over devices that take as
    long as a cost model says. FLEET is a plan (`kvloom plan`), whose GPUs are known by their sheets and
    whose cores by what `kvloom profile` has measured, or a config, for the machine that was measured."""
    check_scales(rate_scale, slo_scale)
    check_outputs(json, html, page, journal, inputs=(fleet, workload, profile))
    recording = None if page is None else Recording()
    sys.path.append(str(fleet.absolute().parent))  # where a program of one's own is looked for
    if fleet.suffix.lower() == ".json":
        found = _planned(fleet, policy, profile, client_here)
    else:
        found = _configured(fleet, profile, policy, client_here)
    if program:
        found = replace(found, program=ProgramSpec(program))
    try:
        for unit in found.units:
            refuse_moves(unit.spec.unit, unit.spec, found.program.name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    asked = open_workload(workload)
    title = f"{asked.header.name} on {fleet.name}, simulated"
    console = console_for()
    for line in _only_simulated(found.units):
        console.print(line, style="yellow", soft_wrap=True, highlight=False, markup=False)

    def asks() -> Iterator[WorkloadRequest]:
        return asked.requests() if rate_scale == 1.0 else faster(asked.requests(), rate_scale)

    with _kept_in(journal) as keep:
        with interruptible("nothing was written"):
            traffic, units = Traffic(asks()), found.units
            check_models(traffic.models, units)
            vocab = min(shape.vocab for unit in units for shape in unit.shapes.values())
            columns = TextColumn("simulating"), BarColumn(), TextColumn("{task.completed}/{task.total}")
            quiet = not console.is_terminal
            with Progress(*columns, TimeElapsedColumn(), console=console, disable=quiet) as progress:
                step = progress.add_task("", total=traffic.total.requests)

                def tell(_: RequestResult) -> None:
                    progress.advance(step)

                results = run.simulate(
                    units,
                    load_program(found.program.name, found.program.options),
                    asks(),
                    Prompts(min(vocab, asked.header.vocab), asked.header.seed),
                    Summary({f"≤ {scale:g}×": scaled(units, scale) for scale in slo_scale}),
                    title=title,
                    seed=seed,
                    tell=tell,
                    cpu_costs=found.cpu_costs,
                    client_here=client_here,
                    rescheduling=found.rescheduling,
                    patience=found.patience,
                    homes=found.homes,
                    keep=keep,
                    recording=recording,
                )
        _write_page(page, title, recording)
        return write_results(results, console, json, html)


@contextmanager
def _kept_in(path: Path | None) -> Iterator[Callable[[Sequence[Record]], None]]:
    """Gives what writes records to a file, which is emptied. If the file cannot be written, the run goes on,
    and ConfigError is raised after it."""
    if path is None:
        yield lambda _: None
        return
    file, problems = JournalFile(path, most=None), list[OSError]()

    def write(records: Sequence[Record]) -> None:
        try:
            if not problems:
                file.write(records)
        except OSError as error:
            problems.append(error)

    try:
        file.begin()
    except OSError as error:
        problems.append(error)
    else:
        yield write
    for problem in problems:
        why = problem.strerror or problem
        raise ConfigError(f"--journal: {path}: {why}; a file that can be written is right") from problem


def _write_page(path: Path | None, title: str, recording: Recording | None) -> None:
    """Writes the page of a run, if one is wanted. Raises ConfigError."""
    if path is None or recording is None:
        return
    try:
        path.write_bytes(recorded_page(title, recording.samples, recording.records))
    except OSError as error:
        raise ConfigError(f"--page: {path}: {error.strerror}; a file that can be written is right") from error


def _only_simulated(units: Sequence[SimulatedUnit]) -> Iterator[str]:
    """Says what real units of such a kind cannot do."""
    asleep = [unit.spec.unit for unit in units if unit.spec.sleep_dir and not unit.spec.abilities.sleeps]
    if asleep:
        yield (
            f"in simulation only: the weights of {', '.join(asleep)} sleep (memory); those of GPUs cannot "
            "yet, and `kvloom serve` refuses such a plan"
        )


def _planned(path: Path, policy: Policy | None, profile: Path | None, client_here: bool) -> _Fleet:
    """Returns the fleet of a plan, whose requests move as they do if `kvloom serve` is given the plan. Raises
    ConfigError."""
    plan = read_plan(path, _RIGHT)
    on_cores = [unit.device == CPU for unit in plan.units]
    if profile is not None and not any(on_cores):
        raise ConfigError("--profile: a plan's GPUs are known by their sheets; a plan for cores is right")
    measured = None if profile is None else read_profile(profile)
    try:
        units = planned_units(plan, policy or DEFAULT_POLICY, measured)
    except ConfigError as error:
        raise error if error.message.startswith("--") else ConfigError(f"{path}: {error.message}") from error
    one_machine = all(on_cores) and len({unit.node for unit in plan.units}) == 1
    cpu_costs = cpu_costs_from(measured) if measured and one_machine else None
    if client_here and cpu_costs is None:
        raise ConfigError(
            "--client-here: the plan's machine was not measured; a plan for the cores of one machine, or a "
            "config, and a profile with its own work are right"
        )
    scheduler = ReschedulingConfig().scheduler([unit.spec for unit in units], {})
    moving = ReschedulingSettings.of(scheduler) if scheduler else None
    homes = {unit.name: unit.node for unit in plan.units if unit.node}
    return _Fleet(units, ProgramSpec("least_loaded"), cpu_costs, moving, homes=homes)


def _configured(path: Path, profile: Path | None, policy: Policy | None, client_here: bool) -> _Fleet:
    """Returns the fleet of a config, on the machine that a profile has measured, or on several like it, if
    the config names nodes. Raises ConfigError."""
    settings = read_yaml(path, _RIGHT)
    if is_spec(settings):
        raise ConfigError(f"{path}: is a workload; {_RIGHT} is right")
    if "nodes" in settings and "models" in settings and "units" not in settings:
        raise ConfigError(
            f"{path}: describes a cluster; `kvloom plan {path} -o plan.json` makes a plan, which is right"
        )
    here, nodes = Machine.here(), named_nodes(settings)
    several = [replace(here, name=node) for node in nodes]
    machine = Machine.together(several) if several[1:] else next(iter(several), here)
    config = load_config(path, {}, {}, machine)
    if profile is None:
        raise ConfigError(f"{path}: --profile FILE is needed too, which `kvloom profile` writes")
    measured = read_profile(profile)
    units = measured_units(config, measured)
    if policy:
        units = [replace(one, spec=msgspec.structs.replace(one.spec, policy=policy)) for one in units]
    cpu_costs = cpu_costs_from(measured) if len(several) <= 1 else None
    if client_here and several[1:]:
        raise ConfigError("--client-here: the config has several nodes; one machine is right")
    return _Fleet(
        units,
        config.program,
        cpu_costs,
        ReschedulingSettings.of_config(config),
        config.patience,
        config.nodes,
    )


chaos = App(name="chaos")


@chaos.default
def run_faults(
    *,
    seeds: Annotated[Whole, Parameter(help="runs")] = 100,
    first: Annotated[Whole, Parameter(help="the first run's seed")] = 0,
    jobs: Annotated[Whole, Parameter(help="runs at a time")] = 1,
    replay: Annotated[
        Whole | None, Parameter(help="tell one run event by event, whether it fails or not")
    ] = None,
    journal: JournalFlag = None,
    page: PageFile = None,
) -> int:
    """Run kvloom's own engines and router in virtual time while things go wrong.

    Engines die, gateways are lost, calls are lost, late or doubled, streams break, links are slow, jobs fail,
    clients hang up, pools are tiny. Each seed is one run, after which the laws are checked: no block is lost,
    no token is another, no stream is silently short, nothing leaks, nobody waits for ever. The first that
    breaks one is replayed event by event. --journal and --page have that of a replayed run."""
    check_outputs(page, journal)

    def keep(verdict: faults.Verdict) -> None:
        with _kept_in(journal) as write:
            write(verdict.records)
        _write_page(page, f"seed {verdict.seed} of kvloom chaos", verdict.recording)

    return faults.chaos(seeds=seeds, first=first, jobs=jobs, replay=replay, keep=keep)
