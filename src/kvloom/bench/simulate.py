"""`kvloom simulate` from its options to its files."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvloom.bench.serve import INTERRUPTED, SERVER_ERROR, WIDTH, check_outputs, show
from kvloom.config_file import load_config
from kvloom.config_rescheduling import ReschedulingConfig
from kvloom.lab.sim.fleet import Rescheduling, rescheduling
from kvloom.lab.sim.run import check_models, scaled, simulate
from kvloom.lab.sim.unit import SimulatedUnit, measured_hosting, measured_units, planned_units
from kvloom.lab.workload.make import faster, open_workload
from kvloom.lab.workload.page import page
from kvloom.lab.workload.request import Prompts, RequestResult, WorkloadRequest
from kvloom.lab.workload.results import Results, write_text
from kvloom.lab.workload.summary import Summary, Traffic
from kvloom.lab.workload.traces import Workload
from kvloom.machine import Machine
from kvloom.plan.cost.measured import Hosting
from kvloom.plan.cost.profile import read_profile
from kvloom.plan.plan import read_plan
from kvloom.router.program import load_program
from kvloom.types.errors import ConfigError
from kvloom.types.service import PATIENCE
from kvloom.types.spec import ProgramSpec


def simulate_command(options: argparse.Namespace) -> int:
    """Its exit code. Raises ConfigError."""
    for flag, scales in (("--rate-scale", [options.rate_scale]), ("--slo-scale", options.slo_scale)):
        for scale in scales:
            if not (0 < scale < math.inf):
                raise ConfigError(f"{flag} {scale:g}: more than 0 is right")
    check_outputs(options.json, options.html)
    sys.path.append(str(options.fleet.absolute().parent))  # where a program of one's own is looked for
    fleet = _fleet(options)
    workload = open_workload(options.workload)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    try:
        results = _run(options, fleet, workload, console)
    except KeyboardInterrupt:
        print("kvloom: interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    show(results, console)
    if options.json is not None:
        results.save(options.json)
    if options.html is not None:
        write_text(options.html, page(results))
    answered = results.total.requests > results.total.errors
    return 0 if answered else SERVER_ERROR


@dataclass(frozen=True, slots=True)
class _Fleet:
    """What there is to serve with. hosting: what the machine does besides jobs, where that was measured."""

    units: list[SimulatedUnit]
    program: ProgramSpec
    hosting: Hosting | None = None
    rescheduling: Rescheduling | None = None
    patience: float = PATIENCE


def _fleet(options: argparse.Namespace) -> _Fleet:
    path: Path = options.fleet
    fleet = _planned(options, path) if path.suffix.lower() == ".json" else _configured(options, path)
    if options.policy:
        policy = options.policy
        units = [replace(u, spec=msgspec.structs.replace(u.spec, policy=policy)) for u in fleet.units]
        fleet = replace(fleet, units=units)
    return replace(fleet, program=ProgramSpec(options.program)) if options.program else fleet


def _planned(options: argparse.Namespace, path: Path) -> _Fleet:
    """Its requests move as they do where `kvloom serve` is given a plan."""
    for option, given in (("--client-here", options.client_here), ("--profile", options.profile)):
        if given:
            raise ConfigError(f"{option}: a plan's devices are not here; a config and its profile are right")
    units = planned_units(read_plan(path), options.policy or "adbs")
    scheduler = ReschedulingConfig().scheduler([unit.spec for unit in units], {})
    moving = rescheduling(scheduler) if scheduler else None
    return _Fleet(units, ProgramSpec("least_loaded"), rescheduling=moving)


def _configured(options: argparse.Namespace, path: Path) -> _Fleet:
    config = load_config(path, {}, {}, Machine.here())
    if options.profile is None:
        raise ConfigError(f"{path}: --profile FILE is needed too, which `kvloom profile` writes")
    profile = read_profile(options.profile)
    away = frozenset(spec.unit for spec in config.engines) - frozenset(config.first)
    scheduler = config.scheduler
    return _Fleet(
        measured_units(config, profile),
        config.program,
        measured_hosting(profile),
        rescheduling(scheduler, config.groups, away) if scheduler else None,
        config.patience,
    )


def _run(options: argparse.Namespace, fleet: _Fleet, workload: Workload, console: Console) -> Results:
    def asks() -> Iterator[WorkloadRequest]:
        found = workload.requests()
        return found if options.rate_scale == 1.0 else faster(found, options.rate_scale)

    traffic = Traffic(asks())
    units = fleet.units
    check_models(traffic.models, units)
    vocab = min(shape.vocab for unit in units for shape in unit.shapes.values())
    prompts = Prompts(min(vocab, workload.header.vocab), workload.header.seed)
    objectives = {f"≤ {scale:g}×": scaled(units, scale) for scale in options.slo_scale}
    columns = TextColumn("simulating"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    quiet = not console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=quiet) as progress:
        step = progress.add_task("", total=traffic.total.requests)

        def tell(_: RequestResult) -> None:
            progress.advance(step)

        return simulate(
            units,
            load_program(fleet.program.name, fleet.program.options),
            asks(),
            prompts,
            Summary(objectives),
            title=f"{workload.header.name} on {options.fleet.name}, simulated",
            seed=options.seed,
            tell=tell,
            hosting=fleet.hosting,
            client_here=options.client_here,
            rescheduling=fleet.rescheduling,
            patience=fleet.patience,
        )
