"""The placements that were published with MuxServe's figure 7, replayed: what each LLM had on 32 A100, beside
what it has here on the same mesh with the same shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from msgspec import Struct, field

from kvloom.lab.reproduce.muxserve.end_to_end import CHAT_SPATIAL, chat
from kvloom.lab.reproduce.muxserve.points import ModelTimes, Point, play_point, play_units
from kvloom.lab.reproduce.muxserve.setup import DEVICE, Load, Served, cluster
from kvloom.lab.reproduce.muxserve.systems import (
    KVLOOM,
    MUXSERVE,
    TEMPORAL,
    AsPublished,
    System,
    units_of,
)
from kvloom.lab.reproduce.published import FOLDER, read_published
from kvloom.lab.reproduce.report import Cell, Claim, Grid, Report, Scale, Tell, duration, part_of
from kvloom.plan.cluster import DeviceCosts
from kvloom.plan.plan import PlacementPlan, PlannedModel, PlannedUnit
from kvloom.types.errors import ConfigError

PUBLISHED_RUNS: Final = "muxserve_chatlmsys.json"
RATES: Final = (3.0, 9.5)
"""The requests a second and model of two of the four loads that were published: a low one and a high one."""
RUNS: Final[Mapping[float, str]] = {3.0: "500", 4.8: "800", 9.5: "1600", 11.9: "2000"}
_SMALL: Final = 16  # parts of the time that the small scale plays one of
_NEAR: Final = 1.25


class Mesh(Struct, frozen=True):
    gpus: int
    index: int


class MeasuredModel(Struct, frozen=True):
    """The published results of one LLM. Times are in seconds, and `mps` has the percent of prefill and
    decode."""

    model: str
    mps: tuple[int, int]
    mesh: Mesh
    throughput: float
    ttft: float = field(name="first_token_latency")
    tpot: float = field(name="output_per_token_latency")
    batch: float = field(name="decoding_avg_batches")


class _Run(Struct, frozen=True):
    systems: dict[str, dict[str, MeasuredModel]]


class _Runs(Struct, frozen=True):
    runs: dict[str, _Run]

    def __post_init__(self) -> None:
        if lacking := [run for run in RUNS.values() if run not in self.runs]:
            raise ValueError(f"no run {lacking[0]!r}")


Published = Mapping[str, Mapping[str, MeasuredModel]]
"""The published results, by system, then by LLM."""
SYSTEMS: Final[Mapping[str, System]] = {
    "flexsm": MUXSERVE,
    "spatial": CHAT_SPATIAL,
    "temporal": TEMPORAL,
}


def published_runs() -> Mapping[float, Published]:
    """Returns what was published, by average rate. Raises ConfigError if the file is not at hand."""
    found = read_published(PUBLISHED_RUNS, _Runs, "what was published of figure 7")
    if found is None:
        needed = f"a folder with {PUBLISHED_RUNS}, which is not part of kvloom, is right"
        raise ConfigError(f"{FOLDER} is not set; {needed}")
    return {rate: found.runs[run].systems for rate, run in RUNS.items()}


def published_plan(load: Load, published: Mapping[str, MeasuredModel]) -> PlacementPlan:
    """Returns the placement as a plan: meshes and shares are the published ones, and pools as large as those
    configurations made them."""
    by_number = {int(name.removeprefix("llm-")): one for name, one in published.items()}
    units: dict[int, list[tuple[Served, MeasuredModel]]] = {}
    for model in load.models:
        one = by_number[int(model.name.split("-")[0])]
        units.setdefault(one.mesh.index, []).append((model, one))
    return PlacementPlan(
        units=tuple(_unit(index, units[index]) for index in sorted(units)),
        throughput=0.0,
        made_by="published",
    )


def _unit(index: int, members: Sequence[tuple[Served, MeasuredModel]]) -> PlannedUnit:
    gpus = members[0][1].mesh.gpus
    nodes = cluster(8)
    demands = [model.demand for model, _ in members]
    estimator = AsPublished(demands, DeviceCosts(nodes, demands, None))
    pool = estimator.pool(nodes[0].mesh(gpus), [estimator.item(n, 1) for n in range(len(members))])
    return PlannedUnit(
        name=f"unit-{index}",
        node="",
        device=DEVICE,
        gpus=gpus,
        tensor_parallel=gpus,
        kv_bytes=pool,
        models=tuple(
            PlannedModel(
                name=model.name,
                path=None,
                shape=demand.shape,
                rate=model.rate,
                prompt=demand.prompt,
                output=demand.output,
                prefill_share=max(one.mps) / 100,
                decode_share=min(one.mps) / 100,
                quota=1 / len(members),
                throughput=0.0,
            )
            for (model, one), demand in zip(members, demands, strict=True)
        ),
    )


def replayed(scale: Scale, tell: Tell) -> Report:
    """Plays the published placements under the load that was measured. The small scale needs no file: it has
    kvloom's own plan alone, and a part of the load. Raises ConfigError."""
    published = published_runs() if scale == "full" else {}
    rates = RATES if published else RATES[-1:]
    told: list[Cell] = []
    pairs: list[Pair] = []
    rows: list[tuple[str, ...]] = []
    for n, average in enumerate(rates):
        load = chat(average)
        if not published:
            load = replace(load, seconds=load.seconds / _SMALL)
        found = play_placements(load, published.get(average, {}), part_of(tell, n, len(rates)))
        for name, point in found.items():
            theirs = published.get(average, {}).get(_KEYS.get(name, ""), {})
            told += _cells(f"{average:g} req/s a model, {name}", load, theirs, point)
            if theirs:
                pairs += _pairs(name, load, theirs, point)
                rows += _rows(f"{average:g}, {name}", load, theirs, point)
    grid = Grid(
        title="Each LLM: found here, and over what was measured",
        heads=("req/s a model, system", "LLM", "GPUs", "req/s", "TTFT", "TPOT", "decode batch"),
        rows=tuple(rows),
    )
    return Report(
        name="figure 7, replayed",
        title="the published placements, LLM by LLM",
        cells=tuple(told),
        claims=tuple(_claims(pairs)),
        grids=(grid,) if rows else (),
    )


_KEYS: Final[Mapping[str, str]] = {system.name: key for key, system in SYSTEMS.items()}


def play_placements(load: Load, published: Published, tell: Tell) -> dict[str, Point]:
    """Returns what each system has with the placement that was published of it, and kvloom with its own."""
    found: dict[str, Point] = {}
    for n, (key, theirs) in enumerate(published.items()):
        system, part = SYSTEMS[key], part_of(tell, n, len(published) + 1)
        units = units_of(system, load.models, published_plan(load, theirs))
        found[system.name] = play_units(units, load, _naming(part, system.name))
    own = _naming(part_of(tell, len(published), len(published) + 1), KVLOOM.name)
    return found | {KVLOOM.name: play_point(KVLOOM, load, own)}


def _naming(tell: Tell, what: str) -> Callable[[float], None]:
    return lambda part: tell(what, part)


def _cells(row: str, load: Load, theirs: Mapping[str, MeasuredModel], point: Point) -> list[Cell]:
    """Returns the cell of the throughput, weighted with rates."""
    whole = sum(model.rate for model in load.models)
    paper = (
        sum(model.rate * _of(theirs, model).throughput for model in load.models) / whole if theirs else None
    )
    ours = point.weighted(load.models)
    return [Cell(row=row, column="req/s weighted with rates", paper=paper, ours=ours)]


Pair = tuple[str, str, float, float]
"""A system, a measure, what was published of it and what was found."""


def _pairs(system: str, load: Load, theirs: Mapping[str, MeasuredModel], point: Point) -> list[Pair]:
    found: list[Pair] = []
    for model in load.models:
        one, times = _of(theirs, model), point.times[model.name]
        found += [
            (system, "throughput", one.throughput, point.throughput[model.name]),
            (system, "TTFT", one.ttft, times.ttft),
            (system, "TPOT", one.tpot, times.tpot),
            (system, "decode batch", one.batch, times.batch),
        ]
    return found


def _claims(pairs: Sequence[Pair]) -> list[Claim]:
    """Tells for each system and measure how many LLMs are within a quarter, and the median ratio."""
    found = []
    for key in dict.fromkeys((system, measure) for system, measure, *_ in pairs):
        ratios = [
            ours / paper for system, measure, paper, ours in pairs if (system, measure) == key and paper
        ]
        near = sum(1 / _NEAR <= ratio <= _NEAR for ratio in ratios)
        found.append(
            Claim(
                said=f"(measured) {key[1]} of each LLM under {key[0]}, four fifths within a quarter",
                holds=near >= 0.8 * len(ratios),
                found=f"{near} of {len(ratios)}; ours are {median(ratios):.2f} times theirs in the median",
            )
        )
    return found


def _rows(row: str, load: Load, theirs: Mapping[str, MeasuredModel], point: Point) -> list[tuple[str, ...]]:
    return [
        (
            row,
            model.name,
            str(_of(theirs, model).mesh.gpus),
            *_beside(_of(theirs, model), point.throughput[model.name], point.times[model.name]),
        )
        for model in load.models
    ]


def _beside(one: MeasuredModel, throughput: float, times: ModelTimes) -> tuple[str, ...]:
    """Returns what was found of an LLM, each with how many times the measured it is."""
    return (
        f"{throughput:.2f}, {throughput / one.throughput:.2f}×",
        f"{duration(times.ttft)}, {times.ttft / one.ttft:.2f}×",
        f"{duration(times.tpot)}, {times.tpot / one.tpot:.2f}×",
        f"{times.batch:.0f}, {times.batch / one.batch:.2f}×",
    )


def _of(theirs: Mapping[str, MeasuredModel], model: Served) -> MeasuredModel:
    return theirs[f"llm-{model.name.split('-')[0]}"]
