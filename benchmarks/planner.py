"""How long the planner takes: MuxServe's 19 LLMs on 32 GPUs, and 100 LLMs on 1,000.

python -m benchmarks.planner [--gpus 32 1000]. CPU time of this process, so that neighbours on the machine do
not count. Rates fall by a power law, the smallest models being the most popular.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from kvloom.plan.cluster import Demand, Nodes
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import ModelShape, find_shape
from kvloom.plan.cost.work import CostModel
from kvloom.plan.plan import PlacementPlan
from kvloom.plan.planner import make_plan

DEVICE, NODE = "A100-80", 8  # devices of a node
PROMPT, OUTPUT = 161.0, 338.0  # tokens on average, of ShareGPT (MuxServe, section 4.1)
ALPHA = 0.9


@dataclass(frozen=True, slots=True)
class Size:
    """models: how many of each shape, the most popular first. top: requests a second of the first one. most:
    seconds that planning may take."""

    gpus: int
    models: Mapping[str, int]
    top: float
    most: float

    @property
    def demands(self) -> list[Demand]:
        shapes = [name for name, count in self.models.items() for _ in range(count)]
        return [
            Demand(f"m{i}", find_shape(shape), self.top * (i + 1) ** -ALPHA, PROMPT, OUTPUT)
            for i, shape in enumerate(shapes)
        ]

    @property
    def cluster(self) -> list[Nodes]:
        return [Nodes(DEVICE, find_device(DEVICE).memory, NODE, self.gpus // NODE)]


SIZES = {
    size.gpus: size
    for size in (
        Size(32, {"llama-7b": 12, "llama-13b": 4, "llama-30b": 2, "llama-65b": 1}, 20.0, 10.0),
        Size(1000, {"llama-7b": 64, "llama-13b": 20, "llama-30b": 10, "llama-65b": 6}, 400.0, 60.0),
    )
}


@dataclass(frozen=True, slots=True)
class Run:
    size: Size
    seconds: float
    plan: PlacementPlan


def costs(device: str, gpus: int, shapes: Mapping[str, ModelShape]) -> CostModel:
    return Roofline(find_device(device), gpus, shapes)


def place(size: Size) -> Run:
    began = time.process_time()
    plan = make_plan(size.cluster, size.demands, costs)
    return Run(size, time.process_time() - began, plan)


def measure(gpus: Sequence[int] = tuple(SIZES)) -> Report:
    machine = this_machine()
    runs = [place(SIZES[count]) for count in gpus]
    return Report(
        name="planner",
        title="Planning a cluster",
        columns=["", "CPU s", "units", "GPUs used", "asked req/s", "expected req/s"],
        rows=[_row(run) for run in runs],
        findings=[
            Finding(what=f"CPU, {_told(run.size)}", value=run.seconds, unit=" s", most=run.size.most)
            for run in runs
        ],
        machine=machine,
    )


def _told(size: Size) -> str:
    return f"{size.gpus:,} × {DEVICE}, {sum(size.models.values())} LLMs"


def _row(run: Run) -> list[Cell]:
    units = run.plan.units
    asked = sum(demand.rate for demand in run.size.demands)
    used = sum(unit.gpus for unit in units)
    return [_told(run.size), run.seconds, len(units), used, asked, run.plan.throughput]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", choices=sorted(SIZES), default=sorted(SIZES))
    publish(measure(parser.parse_args().gpus))


if __name__ == "__main__":
    main()
