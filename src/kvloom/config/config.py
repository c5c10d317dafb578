"""The config tells what to serve and how: one frozen, validated config out of a YAML file and flags.

Each error in it is a ConfigError of one line, which names the key and says what would be right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvloom.cluster.reconcile import TIMING
from kvloom.config.fields import (
    BlockSize,
    Budget,
    ConfigSection,
    Count,
    LoadSeconds,
    Memory,
    NodeLease,
    NoNull,
    Origins,
    Priorities,
    Program,
    Proxies,
    Seconds,
    Size,
    Some,
    Surroundings,
    Threads,
    Timeout,
    Watchdog,
    check_collector,
    explain,
    no_bool,
    read_api_keys,
    read_keys,
)
from kvloom.config.keys import read_key_file
from kvloom.config.machine import Machine
from kvloom.config.models import ModelConfig, adapters_of, check_name
from kvloom.config.sharing import (
    check_gateways,
    check_nodes,
    check_ranks,
    share_devices,
    share_pools,
    share_threads,
)
from kvloom.config.tls import NodeTlsConfig, TlsConfig
from kvloom.config.units import (
    ConfiguredEngine,
    Device,
    PairedUnit,
    Rescheduling,
    ReschedulingConfig,
    UnitConfig,
    WeaveConfig,
    check_abilities,
    first,
    groups,
    list_engines,
    weave_units,
)
from kvloom.plan.plan import PROCESS_BYTES
from kvloom.router.programs import name_problem
from kvloom.types.errors import ConfigError
from kvloom.types.numbers import show_size
from kvloom.types.service import PATIENCE, GroupSpec
from kvloom.types.spec import (
    DEFAULT_POLICY,
    VECTOR_TOKENS,
    AdapterSpec,
    EngineSpec,
    Policy,
    ProgramSpec,
    SchedulerSpec,
    TransportName,
    WeaveSpec,
    default_chunk,
    unit_abilities,
)

DEMO: Final = Path(__file__).resolve().parents[1] / "demo"
DEMO_SETTINGS: Final = {"block_bytes": "4KiB", "kv_memory": "64MiB"}
KEPT_FROM_START: Final = (
    *("host", "port", "tls", "proxies", "allow_origins"),
    *("api_key_file", "admin_key_file", "keys", "share_prefixes", "audit_file", "journal", "traffic", "otlp"),
    *("access_log", "log_level", "log_format"),
    *("max_body", "max_connections", "request_timeout"),
    *("drain", "patience", "load_timeout", "watchdog", "node_lease", "node_tls", "gateways", "rescheduling"),
)
"""Keys that are none of units, models and program. A fleet that serves keeps what it was started with."""
Keys = TypeVar("Keys")
_READ: Final[Mapping[str, Callable[[Path], object]]] = {
    "api_key_file": read_api_keys,
    "admin_key_file": read_keys,
    "keys": read_key_file,
}


class Config(ConfigSection):
    """The whole config, resolved: relative paths are absolute, and `engines` have numbers for `auto`."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=65535)] = 8000
    block_bytes: BlockSize = 16 << 10
    kv_memory: Memory = "auto"
    memory: Budget | None = None
    sleep_dir: Path = Path("/var/tmp")
    policy: Policy = DEFAULT_POLICY
    max_running: Count = 256
    max_waiting: Count = 1024
    chunk_tokens: Annotated[Count | None, NoNull] = None
    threads: Threads = "auto"
    device: Device = "cpu"
    transport: TransportName = "auto"
    transport_host: str = "127.0.0.1"
    priorities: Priorities = Field(default={}, validate_default=True)
    rescheduling: Rescheduling = ReschedulingConfig()
    lease: Seconds = Field(default="30s", validate_default=True)
    program: Program = Field(default="data_parallel", validate_default=True)
    drain: Seconds = Field(default="60s", validate_default=True)
    patience: Seconds = Field(default=f"{PATIENCE:g}s", validate_default=True)
    load_timeout: LoadSeconds = Field(default=f"{TIMING.load:g}s", validate_default=True)
    node_lease: NodeLease = Field(default="30s", validate_default=True)
    node_tls: Annotated[NodeTlsConfig | None, NoNull] = None
    gateways: Annotated[Annotated[tuple[str, ...], Some] | None, NoNull] = None
    watchdog: Watchdog = Field(default="30s", validate_default=True)
    api_key_file: Path | None = None
    admin_key_file: Path | None = None
    keys: Path | None = None
    share_prefixes: Literal["auto", "all", "key"] = "auto"
    audit_file: Path | None = None
    journal: Path | None = None
    traffic: Path | None = None
    otlp: str | None = None
    access_log: bool = False
    log_level: Literal["info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    cache_dir: Path | None = None
    cache_size: Annotated[Size, Field(ge=1 << 20)] = 10 << 30
    tls: Annotated[TlsConfig | None, NoNull] = None
    proxies: Proxies = Field(default=[], validate_default=True)
    allow_origins: Origins = Field(default=[], validate_default=True)
    request_timeout: Timeout = None
    max_body: Annotated[Size, Field(ge=1024, le=1 << 30)] = 8 << 20
    max_connections: Count = 4096
    models: Annotated[dict[str, ModelConfig], Field(min_length=1)]
    units: Annotated[Annotated[tuple[UnitConfig, ...], Some] | None, NoNull] = None
    weave: Annotated[Annotated[tuple[WeaveConfig, ...], Some] | None, NoNull] = None

    _folder: Path = PrivateAttr()
    _machine: Machine = PrivateAttr()
    _nodes: dict[str, str] = PrivateAttr()
    _engines: tuple[EngineSpec, ...] = PrivateAttr()
    _groups: dict[str, GroupSpec] = PrivateAttr()
    _first: tuple[str, ...] = PrivateAttr()
    _adapters: dict[str, tuple[AdapterSpec, ...]] = PrivateAttr()

    @field_validator("kv_memory")
    @classmethod
    def _holds_a_block(cls, value: Memory, info: ValidationInfo) -> Memory:
        block: int = info.data.get("block_bytes", 0)
        if value != "auto" and value < block:
            raise ValueError(
                f"{show_size(value)} is less than one block; at least {show_size(block)} is right"
            )
        return value

    @field_validator("memory")
    @classmethod
    def _alone(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("kv_memory", "auto") != "auto":
            raise ValueError(
                "it is for weights and pool together, of which kv_memory is a part; one of both is right"
            )
        return value

    @field_validator("sleep_dir")
    @classmethod
    def _can_hold(cls, value: Path, info: ValidationInfo) -> Path:
        path = Surroundings.of(info).folder / value.expanduser()
        if not os.access(path, os.W_OK) or not path.is_dir():
            raise ValueError(f"{path}; a folder in which this user may write, on a disk, is right")
        return path

    @field_validator("transport_host")
    @classmethod
    def _reached(cls, value: str) -> str:
        try:
            found = ip_address(value)
        except ValueError:
            found = None
        if found is None or found.is_unspecified or found.is_multicast:
            raise ValueError(f"{value!r}; the IP address at which peers reach this host is right")
        return value

    @field_validator("program")
    @classmethod
    def _known_program(cls, value: ProgramSpec) -> ProgramSpec:
        if problem := name_problem(value.name):
            raise ValueError(problem)
        return value

    @field_validator("api_key_file", "admin_key_file", "keys")
    @classmethod
    def _readable(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is None:
            return None
        path = Surroundings.of(info).folder / value.expanduser()
        _READ[str(info.field_name)](path)
        return path

    @field_validator("audit_file", "journal", "traffic")
    @classmethod
    def _in_a_folder(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        path = None if value is None else Surroundings.of(info).folder / value.expanduser()
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"{path}; a file in a folder that is there is right")
        return path

    @field_validator("otlp")
    @classmethod
    def _collector(cls, value: str | None) -> str | None:
        return None if value is None else check_collector(value)

    @field_validator("cache_dir")
    @classmethod
    def _a_folder(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        path = None if value is None else Surroundings.of(info).folder / value.expanduser()
        if path is not None and not next(one for one in (path, *path.parents) if one.exists()).is_dir():
            raise ValueError(f"{path}; a folder, or a place for one, is right")
        return path

    @field_validator("models")
    @classmethod
    def _named(cls, value: dict[str, ModelConfig]) -> dict[str, ModelConfig]:
        for name in value:
            check_name(name)
        return value

    def api_keys(self) -> Mapping[str, int | None]:
        """Returns each key with the most urgent priority that its requests may have; None stands for any."""
        return _keys("api_key_file", self.api_key_file, read_api_keys, {})

    def admin_keys(self) -> frozenset[str]:
        return _keys("admin_key_file", self.admin_key_file, read_keys, frozenset())

    @model_validator(mode="after")
    def _share_out(self, info: ValidationInfo) -> Self:
        here = Surroundings.of(info)
        self._folder, self._machine = here.folder, here.machine
        self._adapters = adapters_of(self.models)
        adapters = {one.name for some in self._adapters.values() for one in some}
        wholes = [name for name in self.models if name not in adapters]
        if not wholes:
            raise ValueError("models: adapters alone; a model that is their base is needed")
        engines = list_engines(self.units or (UnitConfig(models=tuple(wholes)),), wholes, adapters)
        check_nodes(engines, here.machine)
        check_gateways(self.gateways, self.port, here.machine)
        self._nodes = {engine.name: engine.unit.node for engine in engines if engine.unit.node is not None}
        devices = share_devices(engines, self.device, here.machine)
        if self.transport == "tcp" and any(device != "cpu" for device in devices):
            raise ValueError("transport: tcp carries K and V of CPU units; nixl or shm is right for GPUs")
        if self.transport == "shm" and len(here.machine.nodes) > 1:
            raise ValueError(
                f"transport: shm reaches units of one host, and the cluster has {len(here.machine.nodes)}; "
                "auto, or one that reaches all, is right"
            )
        total = self.kv_memory if self.memory is None else self.memory
        key = "kv_memory" if self.memory is None else "memory"
        pools = share_pools(engines, devices, total, self.block_bytes, here.machine, key)
        cores = share_threads(engines, self.threads, here.machine)
        check_ranks(engines, cores)
        self._groups, self._first = groups(engines), first(engines)
        if self._groups and not self.rescheduling:
            raise ValueError(
                f"{next(iter(self._groups))}.replicas: a range, which needs rescheduling, and it is none; "
                "a number, or `rescheduling`, is right"
            )
        woven = weave_units(
            self.weave or (),
            {
                engine.name: PairedUnit(
                    len(engine.unit.models),
                    device,
                    unit_abilities(device, engine.unit.tensor_parallel, self._transport()),
                )
                for engine, device in zip(engines, devices, strict=True)
            },
        )
        self._engines = tuple(
            self._spec(engine, pool, threads, device, woven.get(engine.name))
            for engine, pool, threads, device in zip(engines, pools, cores, devices, strict=True)
        )
        check_abilities(self._engines, engines, self.program.name)
        self._check_cache()
        return self

    def _check_cache(self) -> None:
        if self.cache_dir is None and "cache_size" in self.model_fields_set:
            raise ValueError("cache_size: there is no cache_dir; a folder for it, or no size, is right")
        if self.cache_dir is not None and not any(spec.abilities.keeps for spec in self._engines):
            raise ValueError("cache_dir: all units are on GPUs, which keep nothing in files; none is right")

    def _transport(self) -> TransportName:
        """Returns the transport of a unit. Units of a cluster may be on two hosts, which share no memory, so
        that each finds out how it reaches the others; on one machine there is nothing to find out."""
        return "shm" if self.transport == "auto" and not self._machine.nodes else self.transport

    def _spec(
        self, engine: ConfiguredEngine, pool: int, threads: int, device: str, weave: WeaveSpec | None
    ) -> EngineSpec:
        unit = engine.unit
        return EngineSpec(
            unit=engine.name,
            models=tuple(
                unit.spec(name, self.models[name], self._adapters.get(name, ())) for name in unit.models
            ),
            kv_bytes=pool,
            block_bytes=self.block_bytes,
            policy=unit.policy or self.policy,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            chunk_tokens=self.chunk_tokens or default_chunk(device),
            vector_tokens=self.chunk_tokens or VECTOR_TOKENS,
            threads=threads,
            priorities=self.priorities,
            lease=self.lease,
            transport=self._transport(),
            transport_host=self.transport_host,
            tensor_parallel=unit.tensor_parallel,
            device=device,
            weave=weave,
            memory=PROCESS_BYTES * unit.tensor_parallel,
            sleep_dir=str(self.sleep_dir) if self._sleeps(unit) else "",
            cache_dir=None if self.cache_dir is None else str(self.cache_dir),
            cache_size=0 if self.cache_dir is None else self.cache_size,
        )

    def _sleeps(self, unit: UnitConfig) -> bool:
        """Returns whether the unit's weights and pool have one budget."""
        return unit.memory is not None or (self.memory is not None and unit.kv_memory == "auto")

    @property
    def folder(self) -> Path:
        """Returns the folder from which relative paths count, and in which an own router program is looked
        for."""
        return self._folder

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        """Returns one engine for each unit and each replica that there may be."""
        return self._engines

    @property
    def kept_from_start(self) -> list[str]:
        """Returns the keys that the config sets, and that only another start of the fleet applies."""
        return [key for key in KEPT_FROM_START if key in self.model_fields_set]

    @property
    def nodes(self) -> Mapping[str, str]:
        """Returns the nodes that units are bound to, by the unit's name."""
        return self._nodes

    @property
    def groups(self) -> Mapping[str, GroupSpec]:
        """Replicas whose number changes while serving, by the key of their unit."""
        return self._groups

    @property
    def first(self) -> tuple[str, ...]:
        """Returns the engines that a fleet begins with."""
        return self._first

    @property
    def machine(self) -> Machine:
        """Returns the machine as it was before anything of the fleet ran."""
        return self._machine

    @property
    def scheduler(self) -> SchedulerSpec | None:
        """Returns the fleet scheduler, or None if no request is to move, and no unit to come or to go."""
        return self.scheduler_for(self.engines)

    def scheduler_for(self, engines: Iterable[EngineSpec]) -> SchedulerSpec | None:
        """Returns the scheduler of a fleet that has become these engines."""
        return self.rescheduling.scheduler(engines, self.groups) if self.rescheduling else None


def _keys(key: str, file: Path | None, read: Callable[[Path], Keys], none: Keys) -> Keys:
    try:
        return none if file is None else read(file)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def build_config(
    settings: Mapping[str, Any], folder: Path, machine: Machine, origin: Mapping[str, str]
) -> Config:
    """Returns `settings` as a Config. `origin` names the flags by which keys were set. Raises ConfigError."""
    try:
        return Config.model_validate(dict(settings), context=Surroundings(folder, machine))
    except ValidationError as error:
        raise ConfigError(explain(error, Config, origin)) from error


def demo_settings() -> dict[str, Any]:
    """Returns the settings of the fleet that this package ships."""
    names = sorted(path.parent.name for path in DEMO.glob("*/config.json"))
    if not names:
        raise ConfigError("the demo fleet is not in this installation; --model NAME=PATH_OR_HUB_ID is right")
    return DEMO_SETTINGS | {"models": {name: str(DEMO / name) for name in names}}
