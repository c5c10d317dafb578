"""`kvloom plan`: which models go together on which devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as but
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from cyclopts import App, Parameter
from msgspec.structs import replace
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvloom.cli.app import check_outputs, interruptible
from kvloom.cli.cluster import require_ray
from kvloom.cli.tables import console_for
from kvloom.config.fields import (
    ConfigSection,
    NoNull,
    Size,
    Some,
    explain,
    nearest,
    no_bool,
    parse_size,
    show_size,
)
from kvloom.config.file import read_yaml
from kvloom.config.machine import Machine
from kvloom.config.models import SloConfig, resolve_model
from kvloom.lab.workload.make import open_workload
from kvloom.lab.workload.results import write_text
from kvloom.lab.workload.summary import Traffic
from kvloom.lab.workload.traces import NAMELESS
from kvloom.plan.board import BoardPlacement
from kvloom.plan.cluster import CPU, Demand, DeviceCosts, Nodes, node_names
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.profile import Profile, read_profile
from kvloom.plan.cost.shapes import ModelShape, find_shape, read_shape
from kvloom.plan.drawing import draw_plan
from kvloom.plan.estimate import Estimator
from kvloom.plan.explain import Shortfall, gigabytes, more_devices, shortfalls
from kvloom.plan.plan import CPU_ITEMSIZE, PROCESS_BYTES, PlacementPlan, PlannedUnit, write_plan
from kvloom.plan.planner import memory_greedy, plan_placement, spatial, write_down, write_spatial
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import KVDtype
from kvloom.types.numbers import show_number

MOST_DEVICES: Final = 4096

_Count = Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=MOST_DEVICES)]
_Rate = Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1e9, allow_inf_nan=False)]
_Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[^\x00-\x20]+$")]
_Tokens = Annotated[float, BeforeValidator(no_bool), Field(ge=1, le=1e9)]


class NodesConfig(ConfigSection):
    """`count` machines with `gpus` devices each."""

    device: str
    gpus: _Count
    count: _Count = 1
    names: Annotated[Annotated[tuple[_Name, ...], Some] | None, NoNull] = None
    """The name of each machine, of which there are as many as names."""
    memory: Size | None = None
    """Bytes of one device, or of a machine for its cores; None stands for what the device's sheet says."""

    @model_validator(mode="after")
    def _as_many_as_names(self) -> Self:
        if self.names is not None and "count" in self.model_fields_set and self.count != len(self.names):
            raise ValueError(
                f"count: {self.count} machines, but {len(self.names)} names; a name for each, or no "
                "`count`, is right"
            )
        return self

    @property
    def machines(self) -> int:
        return self.count if self.names is None else len(self.names)


class DemandConfig(ConfigSection):
    """The demand for a model."""

    shape: str | None = None
    """The name of a well-known shape; None stands for the profile's, or the checkpoint's at `path`."""
    path: str | None = None
    kv_dtype: KVDtype = "auto"
    """The number format of K and V; `auto` stands for the profile's, or that of the weights."""
    rate: _Rate | None = None
    prompt: _Tokens | None = None
    output: _Tokens | None = None
    slo: SloConfig | None = None
    """The objective that the plan is to tell; None for the usual one. Only `--memory` plans by it."""


class ClusterConfig(ConfigSection):
    """The whole file."""

    nodes: Annotated[Annotated[tuple[NodesConfig, ...], Some] | None, NoNull] = None
    """The machines; None for those of a cluster that runs."""
    models: Annotated[dict[str, DemandConfig], Field(min_length=1, max_length=1024)]

    @model_validator(mode="after")
    def _not_too_many(self) -> ClusterConfig:
        devices = sum(nodes.gpus * nodes.machines for nodes in self.nodes or ())
        if devices > MOST_DEVICES:
            raise ValueError(f"nodes: {devices} devices; {MOST_DEVICES} at most are right")
        return self


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster and the file that it comes from, from whose folder paths count."""

    file: Path
    config: ClusterConfig
    nodes: tuple[Nodes, ...]


def read_cluster(file: Path, machines: Sequence[Machine] | None = None) -> Cluster:
    """Reads a cluster's file. machines: those of a cluster that runs; None if the file says which there are.
    Raises ConfigError."""
    settings = read_yaml(file)
    try:
        config = ClusterConfig.model_validate(settings)
        nodes = _machines(config, machines)
        twice = [name for name, times in Counter(node_names(nodes)).items() if times > 1]
        if twice:
            raise ConfigError(f"nodes: {twice[0]!r} names two machines; a name of its own for each is right")
    except ValidationError as error:
        raise ConfigError(f"{file}: {explain(error, ClusterConfig, {})}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}") from error
    return Cluster(file, config, nodes)


def _machines(config: ClusterConfig, machines: Sequence[Machine] | None) -> tuple[Nodes, ...]:
    if machines is None:
        if config.nodes is None:
            raise ConfigError("nodes: is missing; machines, or --cluster of one that runs, is right")
        return tuple(_nodes(f"nodes.{n}", one) for n, one in enumerate(config.nodes))
    if config.nodes is not None:
        raise ConfigError("nodes: a cluster that runs says itself what it has; without --cluster it is right")
    for one in machines:
        if one.gpus:
            raise ConfigError(
                f"--cluster: {one.name} has {one.gpus} GPUs, and does not say of which kind; `nodes` with "
                f"`device`, `gpus` and `names: [{one.name}, ...]`, without --cluster, is right"
            )
    return tuple(Nodes(CPU, one.memory // one.cores, one.cores, 1, (one.name,)) for one in machines)


def _nodes(key: str, config: NodesConfig) -> Nodes:
    names = config.names or ()
    if config.device.lower() == CPU:
        if config.memory is None:
            raise ConfigError(
                f"{key}.memory: is missing; what a machine has for models, as `64GiB`, is right"
            )
        return Nodes(CPU, config.memory // config.gpus, config.gpus, config.machines, names)
    try:
        device = find_device(config.device)
    except ConfigError as error:
        raise ConfigError(f"{key}.device: {error.message}, and {CPU}") from error
    memory = device.memory if config.memory is None else config.memory
    return Nodes(device.name, memory, config.gpus, config.machines, names)


def _budgeted(nodes: Nodes, memory: str) -> Nodes:
    """Returns nodes whose weights sleep, with so much for weights and pools of each. Raises ConfigError."""
    try:
        size = parse_size(memory)
    except ValueError as error:
        raise ConfigError(f"--memory: {error}") from error
    if not nodes.mesh(nodes.gpus).abilities.sleeps:
        raise ConfigError(
            f"--memory: weights sleep on units of one rank on {CPU}, not on {nodes.device}; nodes of device "
            f"{CPU}, or no --memory, are right"
        )
    there = nodes.memory * nodes.gpus
    most = there - PROCESS_BYTES
    if size < nodes.gpus:
        raise ConfigError(f"--memory: {show_size(size)}; a size such as 8GiB is right")
    if size > most:
        raise ConfigError(
            f"--memory: {show_size(size)} of a machine that has {show_size(there)}, of which an engine's "
            f"process takes {show_size(PROCESS_BYTES)} besides; at most {show_size(max(0, most))} is right"
        )
    return but(nodes, budget=size // nodes.gpus)


def read_demands(cluster: Cluster, traffic: Traffic | None, profile: Profile | None) -> list[Demand]:
    """Returns what is asked of each model, by past traffic if there is some, else by the file. Raises
    ConfigError."""
    demands = []
    try:
        seen = None if traffic is None else _seen(traffic, [*cluster.config.models])
        for name, model in cluster.config.models.items():
            shape, path = _model(f"models.{name}", name, model, cluster, profile)
            if model.kv_dtype != "auto":
                shape = replace(shape, kv_dtype=model.kv_dtype)
            rate, prompt, output = _wanted(name, model) if seen is None else seen(name, model)
            slo = model.slo.slo if model.slo else None
            demands.append(Demand(name, shape, rate, prompt, output, path, slo))
    except ConfigError as error:
        raise ConfigError(f"{cluster.file}: {error.message}") from error
    return demands


Wanted = tuple[float, float, float]
"""The requests a second, and the mean tokens of prompts and outputs."""


def _seen(traffic: Traffic, names: Sequence[str]) -> Callable[[str, DemandConfig], Wanted]:
    """Returns a function that says what the traffic asked of a model. Raises ConfigError if the traffic says
    nothing of these models."""
    found = dict(traffic.models)
    if len(names) == 1 and found.keys() == {NAMELESS}:  # of a trace without names
        found = {names[0]: found[NAMELESS]}
    for name in found:
        if name not in names:
            raise ConfigError(f"models: the workload asks for {name!r}; {nearest(name, names)}")
    if not traffic.seconds:
        raise ConfigError("the workload's requests all come at once; some seconds of traffic are right")

    def wanted(name: str, model: DemandConfig) -> Wanted:
        if name in found:
            return traffic.rate(found[name]), found[name].prompt.mean, found[name].output.mean
        total = traffic.total
        return 0.0, model.prompt or total.prompt.mean, model.output or total.output.mean

    return wanted


def _wanted(name: str, model: DemandConfig) -> Wanted:
    """Returns what the file says of a model. Raises ConfigError."""
    if model.rate is not None and model.prompt is not None and model.output is not None:
        return model.rate, model.prompt, model.output
    key = next(key for key in ("rate", "prompt", "output") if getattr(model, key) is None)
    raise ConfigError(f"models.{name}.{key}: is missing; a number, or traffic by --workload, is right")


def _model(
    key: str, name: str, model: DemandConfig, cluster: Cluster, profile: Profile | None
) -> tuple[ModelShape, str | None]:
    """Returns a model's shape, and its checkpoint if it has one. Raises ConfigError."""
    folder = cluster.file.parent.absolute()
    try:
        path = None if model.path is None else resolve_model(model.path, folder)
    except ValueError as error:
        raise ConfigError(f"{key}.path: {error}") from error
    try:
        if model.shape is not None:
            return find_shape(model.shape), path
        if profile is not None and name in profile.shapes:
            return profile.shapes[name], path
        if path is not None and Path(path).is_dir():
            on_cpu = all(nodes.device == CPU for nodes in cluster.nodes)
            return read_shape(Path(path), CPU_ITEMSIZE if on_cpu else None), path
    except ConfigError as error:
        raise ConfigError(f"{key}: {error.message}") from error
    if path is not None and Path(path).is_file():
        raise ConfigError(
            f"{key}.path: {path}: a GGUF file has several number formats, and a shape has one; the name "
            "of a shape beside it (`shape`) is right"
        )
    raise ConfigError(
        f"{key}.shape: is missing; a shape's name, or a checkpoint's directory as path, is right"
    )


EXAMPLE: Final = """\
CLUSTER.yaml:
  nodes:
    - {device: A100-80, gpus: 8, count: 4}    # A100-40, A10, L40S, H100, H200
    - {device: cpu, gpus: 16, memory: 64GiB, names: [front]}  # its cores; needs --profile
  models:    # with requests a second, and mean tokens
    chat: {shape: llama-7b, rate: 20, prompt: 161, output: 338}
    code: {path: /models/coder, rate: 2, prompt: 800, output: 250}

With --workload the rates and lengths are those of past traffic. With --cluster the
file has no nodes: they are those of the Ray cluster, by their addresses, as
`kvloom serve --cluster` knows them, with what they have free now."""
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
        read = but(read, nodes=tuple(_budgeted(nodes, memory) for nodes in read.nodes))
    measured = None if profile is None else read_profile(profile)
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise ConfigError(f"--output: {output} is no file in a folder; a path that can be written is right")
    check_outputs(html)
    console = console_for(width=140)
    with interruptible("no plan is written"):
        traffic = None if workload is None else Traffic(open_workload(workload).requests())
        demands = read_demands(read, traffic, measured)
        costs = DeviceCosts(read.nodes, demands, measured)
        with _estimator(console, demands, costs) as estimator:
            plan, placement = _planned(estimator, read.nodes, baseline)
        missing = shortfalls(estimator, placement)
    console.print(plan_table(plan))
    devices = Counter[str]()
    for nodes in read.nodes:
        devices[nodes.device] += nodes.total
    lines = list(summary(plan, devices, missing))
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
def _estimator(console: Console, demands: Sequence[Demand], costs: DeviceCosts) -> Iterator[Estimator]:
    """Gives an estimator whose work is seen on the screen."""
    columns = SpinnerColumn(), TextColumn("{task.completed:,.0f} units estimated"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield Estimator(demands, costs, lambda count: progress.update(task, completed=count))


def plan_table(plan: PlacementPlan) -> Table:
    """Returns a plan as a table, with a row for each model on each unit."""
    table = Table(title=plan.made_by, title_justify="left")
    for head in ("unit", "node", "devices", "GPUs", "model"):
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
    pool = gigabytes(unit.kv_bytes) + (f" of {gigabytes(unit.memory)}" if unit.memory else "")
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
