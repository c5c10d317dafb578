"""The file of a cluster: its machines, its models, and what is asked of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as but
from pathlib import Path
from typing import Annotated, Final, Self

from msgspec.structs import replace
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from kvloom.config.fields import ConfigSection, NoNull, Size, Some, explain, no_bool, parse_size
from kvloom.config.file import read_yaml
from kvloom.config.machine import Machine
from kvloom.config.models import SloConfig, resolve_model
from kvloom.lab.workload.summary import Traffic
from kvloom.lab.workload.traces import NAMELESS
from kvloom.plan.cluster import CPU, Demand, Nodes, node_names
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.profile import Profile
from kvloom.plan.cost.shapes import ModelShape, find_shape, read_shape
from kvloom.plan.plan import CPU_ITEMSIZE, FLEET_BYTES, PROCESS_BYTES
from kvloom.plan.traffic import SeenTraffic
from kvloom.types.errors import ConfigError, nearest
from kvloom.types.geometry import KVDtype
from kvloom.types.numbers import show_size
from kvloom.types.spec import BY_NAME

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
    speculation: Annotated[str, Field(min_length=1)] = "none"
    """The drafter of tokens on cores: `none`, `ngram`, or another model, if that is on the same unit."""
    acceptance: Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1)] = 0.0
    """The probability that a drafted token is right if those before it are."""
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
    """Reads a cluster's file. `machines` are those of a cluster that runs; None if the file says which there
    are. Raises ConfigError."""
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
    return tuple(cpu_nodes(one.memory, one.cores, 1, (one.name,)) for one in machines)


def cpu_nodes(memory: int, cores: int, count: int = 1, names: tuple[str, ...] = ()) -> Nodes:
    """Returns machines whose cores are planned. `memory` is the bytes of each, of which the fleet's processes
    beside units take their part."""
    return Nodes(CPU, max(0, memory - FLEET_BYTES) // cores, cores, count, names)


def _nodes(key: str, config: NodesConfig) -> Nodes:
    names = config.names or ()
    if config.device.lower() == CPU:
        if config.memory is None:
            raise ConfigError(
                f"{key}.memory: is missing; what a machine has for models, as `64GiB`, is right"
            )
        return cpu_nodes(config.memory, config.gpus, config.machines, names)
    try:
        device = find_device(config.device)
    except ConfigError as error:
        raise ConfigError(f"{key}.device: {error.message}, and {CPU}") from error
    memory = device.memory if config.memory is None else config.memory
    return Nodes(device.name, memory, config.gpus, config.machines, names)


def budgeted(nodes: Nodes, memory: str) -> Nodes:
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
        whole, processes = show_size(there + FLEET_BYTES), show_size(PROCESS_BYTES + FLEET_BYTES)
        raise ConfigError(
            f"--memory: {show_size(size)} of a machine that has {whole}, of which an engine's process and "
            f"the fleet's other ones take {processes} besides; at most {show_size(max(0, most))} is right"
        )
    return but(nodes, budget=size // nodes.gpus)


def read_demands(
    cluster: Cluster, traffic: Traffic | SeenTraffic | None, profile: Profile | None
) -> list[Demand]:
    """Returns what is asked of each model, by past traffic if there is some, else by the file. `traffic` is
    that of a workload, or of a gateway's log. Raises ConfigError."""
    demands = []
    try:
        seen = _seen(traffic, [*cluster.config.models]) if isinstance(traffic, Traffic) else None
        if isinstance(traffic, SeenTraffic):
            seen = _logged(traffic)
        for name, model in cluster.config.models.items():
            shape, path = _model(f"models.{name}", name, model, cluster, profile)
            if model.kv_dtype != "auto":
                shape = replace(shape, kv_dtype=model.kv_dtype)
            rate, prompt, output = _wanted(name, model) if seen is None else seen(name, model)
            slo = model.slo.slo if model.slo else None
            demand = Demand(name, shape, rate, prompt, output, path, slo, model.speculation, model.acceptance)
            if demand.draft == name or demand.draft not in (None, *cluster.config.models):
                others = [other for other in (*BY_NAME, *cluster.config.models) if other != name]
                raise ConfigError(
                    f"models.{name}.speculation: {model.speculation!r}; {', '.join(others)} are right"
                )
            demands.append(demand)
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


def _logged(traffic: SeenTraffic) -> Callable[[str, DemandConfig], Wanted]:
    """Returns a function that says what a gateway was asked for a model."""

    def wanted(name: str, model: DemandConfig) -> Wanted:
        if one := traffic.models.get(name):
            return one.rate, one.prompt, one.output
        return 0.0, model.prompt or traffic.mean.prompt, model.output or traffic.mean.output

    return wanted


def _wanted(name: str, model: DemandConfig) -> Wanted:
    """Returns what the file says of a model. Raises ConfigError."""
    if model.rate is not None and model.prompt is not None and model.output is not None:
        return model.rate, model.prompt, model.output
    key = next(key for key in ("rate", "prompt", "output") if getattr(model, key) is None)
    raise ConfigError(
        f"models.{name}.{key}: is missing; a number, or traffic by --workload or --from-traffic, is right"
    )


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
