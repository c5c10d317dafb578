"""What to plan for: a cluster's file, past traffic, measured costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from kvloom.config_errors import explain, nearest
from kvloom.config_fields import Section, Size, Some, no_bool
from kvloom.config_file import read_yaml
from kvloom.config_models import resolve_model
from kvloom.plan.cluster import CPU, Nodes
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.measured import Measured
from kvloom.plan.cost.profile import Profile
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import ModelShape, find_shape, read_shape
from kvloom.plan.cost.work import CostModel
from kvloom.plan.plan import Demand
from kvloom.types.errors import ConfigError

MOST_DEVICES: Final = 4096
_CPU_ITEMSIZE: Final = 4  # kvloom computes in float32 on a CPU

_Count = Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=MOST_DEVICES)]
_Rate = Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1e9, allow_inf_nan=False)]
_Tokens = Annotated[float, BeforeValidator(no_bool), Field(ge=1, le=1e9)]


class NodesConfig(Section):
    """`count` machines with `gpus` devices each. memory: bytes of one device, and of a machine for its cores;
    what the device's sheet says where it is left out."""

    device: str
    gpus: _Count
    count: _Count = 1
    memory: Size | None = None


class DemandConfig(Section):
    """A model. shape: a well-known one's name, else the checkpoint's at `path`, else the profile's."""

    shape: str | None = None
    path: str | None = None
    rate: _Rate | None = None
    prompt: _Tokens | None = None
    output: _Tokens | None = None


class ClusterConfig(Section):
    """The file. nodes: of each kind; models: by name."""

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
    """The file with its folder, from which paths count."""

    file: Path
    config: ClusterConfig
    nodes: tuple[Nodes, ...]


def read_cluster(file: Path) -> Cluster:
    """Raises ConfigError."""
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


Wanted = tuple[float, float, float]
"""Requests a second, and mean tokens of prompts and outputs."""


@dataclass(frozen=True, slots=True)
class PastTraffic:
    """What was asked."""

    seconds: float
    """From the start to the last arrival."""
    models: Mapping[str, Wanted]
    prompt: float
    """The mean tokens of all prompts."""
    output: float
    """The mean tokens of all outputs."""
    nameless: bool = False
    """Whether the requests named no model. Then `models` has one entry, under any name."""


def read_demands(cluster: Cluster, traffic: PastTraffic | None, profile: Profile | None) -> list[Demand]:
    """The models' demands, with the traffic's rates and lengths where there is some. Raises ConfigError."""
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


def _seen(traffic: PastTraffic, names: Sequence[str]) -> Callable[[str, DemandConfig], Wanted]:
    """What was seen of a model. Raises ConfigError where that says nothing of these models."""
    found = dict(traffic.models)
    if len(names) == 1 and traffic.nameless:
        found = {names[0]: next(iter(found.values()))}
    for name in found:
        if name not in names:
            raise ConfigError(f"models: the workload asks for {name!r}; {nearest(name, names)}")
    if not traffic.seconds:
        raise ConfigError("the workload's requests all come at once; some seconds of traffic are right")

    def wanted(name: str, model: DemandConfig) -> Wanted:
        if name in found:
            return found[name]
        return 0.0, model.prompt or traffic.prompt, model.output or traffic.output

    return wanted


def _wanted(name: str, model: DemandConfig) -> Wanted:
    """What the file says of a model. Raises ConfigError."""
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
    """Its shape, and its checkpoint where there is one."""
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


class DeviceCosts:
    """Costs by a device's sheet, and for cores by a profile."""

    def __init__(self, nodes: Sequence[Nodes], demands: Sequence[Demand], profile: Profile | None) -> None:
        """Raises ConfigError where cores are to be used whose costs were not measured."""
        self._profile = profile
        if all(one.device != CPU for one in nodes):
            return
        if profile is None:
            raise ConfigError("--profile: is missing; for device cpu what `kvloom profile` wrote is right")
        for demand in demands:
            if demand.name not in profile.shapes:
                raise ConfigError(
                    f"--profile: model {demand.name!r} was not measured; {', '.join(profile.shapes)} were"
                )
        largest = max(one.gpus for one in nodes if one.device == CPU)
        if largest > profile.cores:
            raise ConfigError(
                f"--profile: was measured on {profile.cores} cores, nodes have {largest}; one of a machine "
                "like them is right"
            )

    def __call__(self, device: str, gpus: int, shapes: Mapping[str, ModelShape]) -> CostModel:
        if device == CPU:
            assert self._profile is not None
            return Measured(self._profile, gpus)
        return Roofline(find_device(device), gpus, shapes)
