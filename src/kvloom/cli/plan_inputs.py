"""What `kvloom plan` plans for: a cluster's file, and past traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from kvloom.config.fields import Section, Size, Some, explain, nearest, no_bool
from kvloom.config.file import read_yaml
from kvloom.config.models import resolve_model
from kvloom.lab.workload.summary import Traffic
from kvloom.lab.workload.traces import NAMELESS
from kvloom.plan.cluster import CPU, Demand, Nodes
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.profile import Profile
from kvloom.plan.cost.shapes import ModelShape, find_shape, read_shape
from kvloom.types.errors import ConfigError

MOST_DEVICES: Final = 4096
_CPU_ITEMSIZE: Final = 4  # kvloom computes in float32 on a CPU

_Count = Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=MOST_DEVICES)]
_Rate = Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1e9, allow_inf_nan=False)]
_Tokens = Annotated[float, BeforeValidator(no_bool), Field(ge=1, le=1e9)]


class NodesConfig(Section):
    """`count` machines with `gpus` devices each."""

    device: str
    gpus: _Count
    count: _Count = 1
    memory: Size | None = None
    """Bytes of one device, or of a machine for its cores; None stands for what the device's sheet says."""


class DemandConfig(Section):
    """What is asked of a model."""

    shape: str | None = None
    """The name of a well-known shape; None stands for the profile's, or the checkpoint's at `path`."""
    path: str | None = None
    rate: _Rate | None = None
    prompt: _Tokens | None = None
    output: _Tokens | None = None


class ClusterConfig(Section):
    """The whole file."""

    nodes: Annotated[tuple[NodesConfig, ...], Some]
    models: Annotated[dict[str, DemandConfig], Field(min_length=1, max_length=1024)]

    @model_validator(mode="after")
    def _not_too_many(self) -> ClusterConfig:
        devices = sum(nodes.gpus * nodes.count for nodes in self.nodes)
        if devices > MOST_DEVICES:
            raise ValueError(f"nodes: {devices} devices; {MOST_DEVICES} at most are right")
        return self


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster and the file that it comes from, from whose folder paths count."""

    file: Path
    config: ClusterConfig
    nodes: tuple[Nodes, ...]


def read_cluster(file: Path) -> Cluster:
    """Reads a cluster's file. Raises ConfigError."""
    settings = read_yaml(file)
    try:
        config = ClusterConfig.model_validate(settings)
        nodes = tuple(_nodes(f"nodes.{n}", one) for n, one in enumerate(config.nodes))
    except ValidationError as error:
        raise ConfigError(f"{file}: {explain(error, ClusterConfig, {})}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}") from error
    return Cluster(file, config, nodes)


def _nodes(key: str, config: NodesConfig) -> Nodes:
    if config.device.lower() == CPU:
        if config.memory is None:
            raise ConfigError(
                f"{key}.memory: is missing; what a machine has for models, as `64GiB`, is right"
            )
        return Nodes(CPU, config.memory // config.gpus, config.gpus, config.count)
    try:
        device = find_device(config.device)
    except ConfigError as error:
        raise ConfigError(f"{key}.device: {error.message}, and {CPU}") from error
    memory = device.memory if config.memory is None else config.memory
    return Nodes(device.name, memory, config.gpus, config.count)


def read_demands(cluster: Cluster, traffic: Traffic | None, profile: Profile | None) -> list[Demand]:
    """Returns what is asked of each model, by past traffic if there is some, else by the file. Raises
    ConfigError."""
    demands = []
    try:
        seen = None if traffic is None else _seen(traffic, [*cluster.config.models])
        for name, model in cluster.config.models.items():
            shape, path = _model(f"models.{name}", name, model, cluster, profile)
            rate, prompt, output = _wanted(name, model) if seen is None else seen(name, model)
            demands.append(Demand(name, shape, rate, prompt, output, path))
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
    for key in ("rate", "prompt", "output"):
        if getattr(model, key) is None:
            raise ConfigError(
                f"models.{name}.{key}: is missing; a number, or traffic by --workload, is right"
            )
    assert model.rate is not None
    assert model.prompt is not None
    assert model.output is not None
    return model.rate, model.prompt, model.output


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
            return read_shape(Path(path), _CPU_ITEMSIZE if on_cpu else None), path
    except ConfigError as error:
        raise ConfigError(f"{key}: {error.message}") from error
    raise ConfigError(
        f"{key}.shape: is missing; a shape's name, or a checkpoint's directory as path, is right"
    )
