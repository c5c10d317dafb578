"""`kvloom plan` from its options to a table and a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvloom.lab.workload.make import open_workload
from kvloom.lab.workload.summary import Traffic
from kvloom.lab.workload.traces import NAMELESS
from kvloom.plan.baselines import memory_greedy, spatial, write_spatial
from kvloom.plan.board import Placement
from kvloom.plan.cluster import Nodes
from kvloom.plan.cost.profile import read_profile
from kvloom.plan.estimate import Estimator
from kvloom.plan.explain import shortfalls
from kvloom.plan.plan import Demand, Plan, write_plan
from kvloom.plan.planner import plan_placement, write_down
from kvloom.planning.inputs import DeviceCosts, PastTraffic, read_cluster, read_demands
from kvloom.planning.table import plan_table, summary
from kvloom.types.errors import ConfigError

INTERRUPTED: Final = 130
WIDTH: Final = 140  # of a table that goes to no terminal


def conduct(
    file: Path, workload: Path | None, profile: Path | None, baseline: str | None, output: Path | None
) -> int:
    """Its exit code. Raises ConfigError."""
    cluster = read_cluster(file)
    measured = None if profile is None else read_profile(profile)
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise ConfigError(f"--output: {output} is no file in a folder; a path that can be written is right")
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    try:
        traffic = None if workload is None else _past(workload)
        demands = read_demands(cluster, traffic, measured)
        costs = DeviceCosts(cluster.nodes, demands, measured)
        with _estimator(console, demands, costs) as estimator:
            plan, placement = _planned(estimator, cluster.nodes, baseline)
        missing = shortfalls(estimator, placement)
    except KeyboardInterrupt:
        print("kvloom: interrupted; no plan is written", file=sys.stderr)
        return INTERRUPTED
    console.print(plan_table(plan))
    for line in summary(plan, _devices(cluster.nodes), missing):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    if output is not None:
        write_plan(output, plan)
    return 0


def _past(workload: Path) -> PastTraffic:
    """Returns what the workload asks for. Raises ConfigError."""
    traffic = Traffic(open_workload(workload).requests())
    total = traffic.total
    return PastTraffic(
        seconds=traffic.seconds,
        models={
            name: (traffic.rate(model), model.prompt.mean, model.output.mean)
            for name, model in traffic.models.items()
        },
        prompt=total.prompt.mean,
        output=total.output.mean,
        nameless=traffic.models.keys() == {NAMELESS},
    )


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
    """An estimator whose work is seen on the screen."""
    columns = SpinnerColumn(), TextColumn("{task.completed:,.0f} units estimated"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield Estimator(demands, costs, lambda count: progress.update(task, completed=count))
