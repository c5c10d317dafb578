"""`kvloom plan`: which models go together on which devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvloom.cli.app import interruptible
from kvloom.cli.plan_inputs import read_cluster, read_demands
from kvloom.cli.tables import console_for
from kvloom.lab.workload.make import open_workload
from kvloom.lab.workload.summary import Traffic
from kvloom.plan.baselines import memory_greedy, spatial, write_spatial
from kvloom.plan.board import Placement
from kvloom.plan.cluster import Demand, DeviceCosts, Nodes
from kvloom.plan.cost.profile import read_profile
from kvloom.plan.estimate import Estimator
from kvloom.plan.explain import Shortfall, gigabytes, more_devices, shortfalls
from kvloom.plan.plan import Plan, PlannedUnit, write_plan
from kvloom.plan.planner import plan_placement, write_down
from kvloom.types.errors import ConfigError
from kvloom.types.numbers import show_number

EXAMPLE: Final = """\
CLUSTER.yaml:
  nodes:
    - {device: A100-80, gpus: 8, count: 4}    # A100-40, A10, L40S, H100, H200
    - {device: cpu, gpus: 16, memory: 64GiB}  # its cores; needs --profile
  models:    # with requests a second, and mean tokens
    chat: {shape: llama-7b, rate: 20, prompt: 161, output: 338}
    code: {path: /models/coder, rate: 2, prompt: 800, output: 250}

With --workload the rates and lengths are those of past traffic."""
_FEW: Final = 10

app = App(name="plan", help_epilogue=EXAMPLE)


@app.default
def plan_command(
    cluster: Annotated[Path, Parameter(help="see below")],
    /,
    *,
    workload: Annotated[
        Path | None, Parameter(help="past traffic: a workload, a spec of one, or a trace")
    ] = None,
    profile: Annotated[Path | None, Parameter(help="what `kvloom profile` measured, for device cpu")] = None,
    baseline: Annotated[
        Literal["spatial", "memory"] | None,
        Parameter(help="instead: a mesh for each model, or placement by free memory"),
    ] = None,
    output: Annotated[Path | None, Parameter(alias="-o", help="the file to write")] = None,
) -> None:
    """Find out which models go together on which devices.

    They go together so that they answer as many requests as possible, and the table tells what each is
    expected to answer (MuxServe). `kvloom simulate` takes the plan that it writes if that is for GPUs, and
    `kvloom serve` if it is for this machine's cores."""
    read = read_cluster(cluster)
    measured = None if profile is None else read_profile(profile)
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise ConfigError(f"--output: {output} is no file in a folder; a path that can be written is right")
    console = console_for(width=140)
    with interruptible("no plan is written"):
        traffic = None if workload is None else Traffic(open_workload(workload).requests())
        demands = read_demands(read, traffic, measured)
        costs = DeviceCosts(read.nodes, demands, measured)
        with _estimator(console, demands, costs) as estimator:
            plan, placement = _planned(estimator, read.nodes, baseline)
        missing = shortfalls(estimator, placement)
    console.print(plan_table(plan))
    for line in summary(plan, _devices(read.nodes), missing):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    if output is not None:
        write_plan(output, plan)


def _planned(estimator: Estimator, nodes: Sequence[Nodes], baseline: str | None) -> tuple[Plan, Placement]:
    if baseline == "spatial":
        placement = spatial(estimator, nodes)
        return write_spatial(estimator, nodes, placement), placement
    if baseline == "memory":
        placement = memory_greedy(estimator, nodes)
        return write_down(estimator, nodes, placement, "kvloom plan --baseline memory"), placement
    placement = plan_placement(estimator, nodes)
    return write_down(estimator, nodes, placement, "kvloom plan"), placement


def _devices(nodes: Sequence[Nodes]) -> dict[str, int]:
    devices: dict[str, int] = {}
    for one in nodes:
        devices[one.device] = devices.get(one.device, 0) + one.total
    return devices


@contextmanager
def _estimator(console: Console, demands: Sequence[Demand], costs: DeviceCosts) -> Iterator[Estimator]:
    """Gives an estimator whose work is seen on the screen."""
    columns = SpinnerColumn(), TextColumn("{task.completed:,.0f} units estimated"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield Estimator(demands, costs, lambda count: progress.update(task, completed=count))


def plan_table(plan: Plan) -> Table:
    """Returns a plan as a table, with a row for each model on each unit."""
    table = Table(title=plan.made_by, title_justify="left")
    for head in ("unit", "node", "devices", "model"):
        table.add_column(head)
    for head in ("requests/s", "could be", "prefill", "decode", "quota", "KV pool"):
        table.add_column(head, justify="right")
    for unit in plan.units:
        for row in _rows(unit):
            table.add_row(*row)
        table.add_section()
    return table


def _rows(unit: PlannedUnit) -> Iterator[list[str]]:
    where = [unit.name, unit.node, f"{unit.gpus} × {unit.device}"]
    pool = gigabytes(unit.kv_bytes)
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
        ]
        where, pool = ["", "", ""], ""


def summary(plan: Plan, devices: Mapping[str, int], missing: Sequence[Shortfall]) -> Iterator[str]:
    """Says what is answered, on how many of the devices there are, and why not more."""
    used: dict[str, int] = {}
    for unit in plan.units:
        used[unit.device] = used.get(unit.device, 0) + unit.gpus
    wanted = sum(model.rate for unit in plan.units for model in unit.models)
    where = ", ".join(f"{used.get(device, 0)} of {count} {device}" for device, count in devices.items())
    yield f"{show_number(plan.throughput)} of {show_number(wanted)} requests/s are answered, on {where}"
    for shortfall in missing[:_FEW]:
        yield shortfall.text
    if len(missing) > _FEW:
        yield f"… and {len(missing) - _FEW} more"
    more = more_devices(missing)
    if more:
        yield f"about {' and '.join(f'{n} more {device}' for device, n in more.items())} would answer all"
