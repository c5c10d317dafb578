"""`kvloom plan`: which models go together on which devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace as but
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvloom.cli.app import check_outputs, interruptible
from kvloom.cli.cluster import require_ray
from kvloom.cli.plan.cluster_file import budgeted, read_cluster, read_demands
from kvloom.cli.plan.traffic import AtOption, read_hours, read_seen, told
from kvloom.cli.tables import console_for
from kvloom.config.machine import Machine
from kvloom.lab.workload.make import open_workload
from kvloom.lab.workload.results import write_text
from kvloom.lab.workload.summary import Traffic
from kvloom.plan.board import BoardPlacement
from kvloom.plan.cluster import CPU, Demand, DeviceCosts, Nodes
from kvloom.plan.cost.profile import read_profile
from kvloom.plan.drawing import draw_plan
from kvloom.plan.estimate import Estimator
from kvloom.plan.explain import Shortfall, cost_errors, more_devices, shortfalls
from kvloom.plan.plan import PlacementPlan, PlannedUnit, write_plan
from kvloom.plan.planner import memory_greedy, plan_placement, spatial, write_down, write_spatial
from kvloom.plan.traffic import SeenTraffic
from kvloom.types.errors import ConfigError
from kvloom.types.numbers import show_number, show_size

EXAMPLE: Final = """\
CLUSTER.yaml:
  nodes:
    - {device: A100-80, gpus: 8, count: 4}    # A100-40, A10, L40S, H100, H200
    - {device: cpu, gpus: 16, memory: 64GiB, names: [front]}  # its cores; needs --profile
  models:    # with requests a second, and mean tokens
    chat: {shape: llama-7b, rate: 20, prompt: 161, output: 338}
    code: {path: /models/coder, rate: 2, prompt: 800, output: 250}

With --workload the rates and lengths are those of past traffic, with --from-traffic
those that gateways have counted. With --cluster the file has no nodes: they are those
of the Ray cluster, by their addresses, as `kvloom serve --cluster` knows them, with
what they have free now."""
_FEW: Final = 10

app = App(name="plan", help_epilogue=EXAMPLE)


@app.default
def plan_command(
    file: Annotated[Path, Parameter(name="CLUSTER", help="see below")],
    /,
    *,
    workload: Annotated[
        Path | None, Parameter(help="past traffic: a workload, a spec of one, or a trace")
    ] = None,
    from_traffic: Annotated[
        str | None,
        Parameter(
            metavar="FILE|URL",
            help="past traffic: a gateway's log, or what `kvloom traffic --json` printed, or the server",
        ),
    ] = None,
    at: AtOption = "peak",
    admin_key_file: Annotated[
        Path | None, Parameter(help="a file with an admin key of that server ($KVLOOM_ADMIN_KEY is one)")
    ] = None,
    profile: Annotated[Path | None, Parameter(help="what `kvloom profile` measured, for device cpu")] = None,
    baseline: Annotated[
        Literal["spatial", "memory"] | None,
        Parameter(help="instead: a mesh for each model, or placement by free memory"),
    ] = None,
    cluster: Annotated[
        str | None, Parameter(metavar="auto|HOST:PORT", help="the Ray cluster that it is for (the file's)")
    ] = None,
    memory: Annotated[
        str | None,
        Parameter(
            metavar="SIZE", help="of each machine, for the pools and weights that sleep and wake: 8GiB"
        ),
    ] = None,
    output: Annotated[Path | None, Parameter(alias="-o", help="the file to write")] = None,
    html: Annotated[Path | None, Parameter(help="draw which models are on which devices")] = None,
) -> None:
    """Find out which models go together on which devices.

    They go together so that they answer as many requests as possible, and the table tells what each is
    expected to answer (MuxServe). With --memory models may be larger together than that: their weights
    sleep and wake, and the table tells how often they are awake. `kvloom serve` takes the plan that it writes
    if that is for this machine's devices, `kvloom serve --cluster` one that names the cluster's nodes, and
    `kvloom simulate` any."""
    read = read_cluster(file, None if cluster is None else _running(cluster))
    if memory is not None:
        read = but(read, nodes=tuple(budgeted(nodes, memory) for nodes in read.nodes))
    if workload is not None and from_traffic is not None:
        raise ConfigError("--workload, --from-traffic: both are past traffic; one of both is right")
    measured = None if profile is None else read_profile(profile)
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise ConfigError(f"--output: {output} is no file in a folder; a path that can be written is right")
    check_outputs(html)
    console = console_for(width=140)
    with interruptible("no plan is written"):
        traffic: Traffic | SeenTraffic | None = None
        if workload is not None:
            traffic = Traffic(open_workload(workload).requests())
        elif from_traffic is not None:
            traffic = read_seen(read_hours(from_traffic, admin_key_file), [*read.config.models], at)
        demands = read_demands(read, traffic, measured)
        costs = DeviceCosts(read.nodes, demands, measured)
        with estimator_shown(console, demands, costs) as estimator:
            plan, placement = _planned(estimator, read.nodes, baseline)
        missing = shortfalls(estimator, placement)
    console.print(plan_table(plan))
    devices = Counter[str]()
    for nodes in read.nodes:
        devices[nodes.device] += nodes.total
    seen = told(traffic) if isinstance(traffic, SeenTraffic) else ()
    lines = [*seen, *summary(plan, devices, missing), *cost_errors(devices, measured)]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    if html is not None:
        write_text(html, draw_plan(plan, lines))
    if output is not None:
        write_plan(output, plan)


def _running(cluster: str) -> list[Machine]:
    """Returns the machines of a Ray cluster. Raises ConfigError."""
    require_ray()
    from kvloom.serve.nodes import ray_nodes  # noqa: PLC0415 -- only such plans need Ray

    with ray_nodes.connected(cluster):
        return ray_nodes.machines()


def _planned(
    estimator: Estimator, nodes: Sequence[Nodes], baseline: str | None
) -> tuple[PlacementPlan, BoardPlacement]:
    if baseline == "spatial":
        placement = spatial(estimator, nodes)
        return write_spatial(estimator, nodes, placement), placement
    if baseline == "memory":
        placement = memory_greedy(estimator, nodes)
        return write_down(estimator, nodes, placement, "kvloom plan --baseline memory"), placement
    placement = plan_placement(estimator, nodes)
    return write_down(estimator, nodes, placement, "kvloom plan"), placement


@contextmanager
def estimator_shown(console: Console, demands: Sequence[Demand], costs: DeviceCosts) -> Iterator[Estimator]:
    """Gives an estimator whose work is seen on the screen."""
    columns = SpinnerColumn(), TextColumn("{task.completed:,.0f} units estimated"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield Estimator(demands, costs, lambda count: progress.update(task, completed=count))


def plan_table(plan: PlacementPlan) -> Table:
    """Returns a plan as a table, with a row for each model on each unit."""
    told = "could be: requests/s that could be answered at most; prefill, decode: shares of the compute"
    table = Table(title=plan.made_by, title_justify="left", caption=told, caption_justify="left")
    for head in ("unit", "node", "devices", "numbers", "model"):
        table.add_column(head)
    for head in ("requests/s", "could be", "prefill", "decode", "quota", "KV pool"):
        table.add_column(head, justify="right")
    sleeps = any(unit.memory for unit in plan.units)
    for head in ("awake", "cold wait") if sleeps else ():
        table.add_column(head, justify="right")
    for unit in plan.units:
        for row in _rows(unit):
            table.add_row(*row)
        table.add_section()
    return table


def _rows(unit: PlannedUnit) -> Iterator[list[str]]:
    last = unit.index + unit.gpus - 1
    numbers = "" if unit.device == CPU else f"{unit.index}" if unit.gpus == 1 else f"{unit.index}-{last}"
    where = [unit.name, unit.node or "any", f"{unit.gpus} × {unit.device}", numbers]
    pool = show_size(unit.kv_bytes) + (f" of {show_size(unit.memory)}" if unit.memory else "")
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
            *([f"{model.awake:.1%}", _shown(model.cold_wait)] if unit.memory else []),
        ]
        where, pool = [""] * len(where), ""


def _shown(seconds: float) -> str:
    return f"{show_number(seconds)} s" if seconds >= 1.0 else f"{show_number(1e3 * seconds)} ms"


def summary(plan: PlacementPlan, devices: Mapping[str, int], missing: Sequence[Shortfall]) -> Iterator[str]:
    """Says what is answered, on how many of the devices there are, and why not more."""
    used = Counter[str]()
    for unit in plan.units:
        used[unit.device] += unit.gpus
    wanted = sum(model.rate for unit in plan.units for model in unit.models)
    where = ", ".join(f"{used[device]} of {count} {device}" for device, count in devices.items())
    yield f"{show_number(plan.throughput)} of {show_number(wanted)} requests/s are answered, on {where}"
    asleep = [model for unit in plan.units if unit.memory for model in unit.models]
    cold = sum(model.rate * (1.0 - model.awake) for model in asleep)
    if cold:
        wait = sum(model.rate * (1.0 - model.awake) * model.cold_wait for model in asleep) / cold
        yield f"{cold / wanted:.1%} of the requests find their model asleep, and wait {_shown(wait)} for it"
    for shortfall in missing[:_FEW]:
        yield shortfall.text
    if len(missing) > _FEW:
        yield f"… and {len(missing) - _FEW} more"
    more = more_devices(missing)
    if more:
        yield f"about {' and '.join(f'{n} more {device}' for device, n in more.items())} would answer all"
