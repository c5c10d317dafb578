"""The models of a fleet and its engines: each one's share of the machine, who lends to whom, and how requests
move."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvloom.config.fields import (
    Auto,
    ConfigSection,
    Count,
    Memory,
    Part,
    Period,
    Revision,
    Seconds,
    Sha256,
    Some,
    Steps,
    Surroundings,
    Threads,
    nearest,
    no_bool,
    show_size,
)
from kvloom.config.machine import Machine
from kvloom.engine.freeness import Thresholds
from kvloom.router.programs import MOVING, PROGRAMS
from kvloom.types.service import GroupSpec, Scale
from kvloom.types.spec import (
    Control,
    Dtype,
    EngineSpec,
    ModelSpec,
    Policy,
    SchedulerSpec,
    Splitting,
    TransportName,
    WeaveSpec,
)

MOST_ENGINES: Final = 64
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.:/@+-]{0,127}")


def check_name(name: str) -> None:
    """Raises ValueError if a model cannot have this name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:140]!r} is no name; letters, digits and .:/@+-_ are right, 128 at most")


class ModelConfig(ConfigSection):
    """A model. Its short form is just the path."""

    path: str
    """A checkpoint directory, or a hub id."""
    revision: Revision = None
    sha256: Sha256 = None
    dtype: Dtype = "auto"
    rate: Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=1e9)] = 1.0
    max_context: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("path")
    @classmethod
    def _exists(cls, value: str, info: ValidationInfo) -> str:
        return resolve_model(value, Surroundings.of(info).folder)


def resolve_model(value: str, folder: Path) -> str:
    """Returns the checkpoint directory that `value` names, seen from `folder`, or the hub id that it is.
    Raises ValueError."""
    if not value.strip() or "\0" in value:
        raise ValueError(f"{value!r} is no path and no hub id")
    path = folder / Path(value).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{path} holds no config.json; the directory of a Hugging Face checkpoint is right"
            )
        return str(path.resolve())
    if value.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(value):
        kind = "is a file" if path.is_file() else "does not exist"
        raise ValueError(f"{path} {kind}; a checkpoint directory or a hub id `org/name` is right")
    return value


class ReplicasConfig(ConfigSection):
    """A number of engines between `least` and `most`, by mean freeness in decode steps: see `Scale`. The
    short form is a number."""

    least: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=MOST_ENGINES)] = 1
    most: Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=MOST_ENGINES)]
    low: Steps = 160.0
    high: Steps = 960.0
    seconds: Seconds = 10.0
    idle: Seconds = 60.0

    @model_validator(mode="after")
    def _a_range(self) -> Self:
        Scale(**self.model_dump())
        return self

    @property
    def scale(self) -> Scale | None:
        """Returns the rules by which the number changes; None if it never does."""
        return None if self.least == self.most else Scale(**self.model_dump())

    @property
    def first(self) -> int:
        """Returns the number that a fleet begins with: at least one, by which it is known what its models
        need."""
        return max(1, self.least)


def _number(value: Any) -> Any:
    """Reads the short form: a number is the least and the most."""
    if isinstance(value, bool):
        return no_bool(value)
    if not isinstance(value, int):
        return value
    if not 1 <= value <= MOST_ENGINES:
        right = "1 or more" if value < 1 else f"{MOST_ENGINES} or less"
        raise ValueError(f"{value}; {right} is right")
    return {"least": value, "most": value}


Replicas = Annotated[ReplicasConfig, BeforeValidator(_number)]


CPU: Final = "cpu"
CUDA: Final = "cuda"
Device = Literal["auto", "cpu", "cuda"]


class SharesConfig(ConfigSection):
    """A model's share of its unit: parts of the compute for a prefill job and for a decode job, and a part of
    the pool's blocks to begin with."""

    prefill: Part | None = None
    decode: Part | None = None
    quota: Part | None = None


class UnitConfig(ConfigSection):
    """Models that share an engine, and how many such engines there are. The fleet's own keys say what is left
    out."""

    models: Annotated[tuple[str, ...], Some]
    replicas: Replicas = Field(default=1, validate_default=True)
    kv_memory: Memory = "auto"
    threads: Threads = "auto"
    policy: Policy | None = None
    device: Device | None = None
    tensor_parallel: Annotated[int, BeforeValidator(no_bool), Field(ge=1)] = 1
    shares: dict[str, SharesConfig] | None = None

    def spec(self, name: str, settings: Mapping[str, Any]) -> ModelSpec:
        """Returns one of its models, with the settings that the model has on all units."""
        shares = (self.shares or {}).get(name, SharesConfig())
        return ModelSpec(
            name=name,
            **settings,
            prefill_share=shares.prefill,
            decode_share=shares.decode,
            quota=shares.quota,
        )


@dataclass(frozen=True, slots=True)
class ConfiguredEngine:
    """One engine that there may be."""

    key: str
    """Where its unit stands in the config."""
    name: str
    unit: UnitConfig
    number: int = 0
    """Its number among its unit's engines."""


def groups(engines: Sequence[ConfiguredEngine]) -> dict[str, GroupSpec]:
    """Returns the groups whose number of engines changes, by key."""
    return {
        engine.key: GroupSpec(tuple(one.name for one in engines if one.key == engine.key), scale)
        for engine in engines
        if (scale := engine.unit.replicas.scale)
    }


def first(engines: Sequence[ConfiguredEngine]) -> tuple[str, ...]:
    """Names the engines that a fleet begins with."""
    return tuple(engine.name for engine in engines if engine.number < engine.unit.replicas.first)


def check_ranks(engines: Sequence[ConfiguredEngine], cores: Sequence[int], program: str) -> None:
    """Raises ValueError if an engine has fewer cores than ranks, or the program wants of it what ranks do not
    do."""
    for engine, own in zip(engines, cores, strict=True):
        ranks, key = engine.unit.tensor_parallel, f"{engine.key}.tensor_parallel"
        if ranks > own:
            raise ValueError(
                f"{key}: {ranks} ranks, but {engine.name} has {own} core{'' if own == 1 else 's'}; "
                f"{f'1 to {own}' if own > 1 else '1'} is right"
            )
        refuse_moved_ranks(key, ranks, program)


def refuse_moved_ranks(key: str, ranks: int, program: str) -> None:
    """Raises ValueError if the program moves K and V of a unit with ranks."""
    if ranks > 1 and program in MOVING:
        raise ValueError(
            f"{key}: {ranks} ranks, whose K and V are neither sent nor received, under the program "
            f"{program}, which moves them; {', '.join(sorted(PROGRAMS.keys() - MOVING))} are right"
        )


def list_engines(units: Sequence[UnitConfig], models: Collection[str]) -> list[ConfiguredEngine]:
    """Returns every engine that there may be. Raises ValueError if units and models do not go together."""
    for i, unit in enumerate(units):
        for name in unit.models:
            if name not in models:
                raise ValueError(f"units.{i}.models: no model {name!r}; {nearest(name, list(models))}")
        if len(set(unit.models)) < len(unit.models):
            raise ValueError(f"units.{i}.models: a model stands there twice; `replicas` makes more of a unit")
        for name in unit.shares or ():
            if name not in unit.models:
                raise ValueError(f"units.{i}.shares: {name!r}; {nearest(name, unit.models)}")
    for name in models:
        if not any(name in unit.models for unit in units):
            raise ValueError(f"units: {name!r} is on none of them; each model needs at least one")
    keys = [(f"units.{i}", unit, n) for i, unit in enumerate(units) for n in range(unit.replicas.most)]
    if len(keys) > MOST_ENGINES:
        raise ValueError(f"units: {len(keys)} engines; {MOST_ENGINES} or less is right")
    return [ConfiguredEngine(key, f"unit-{number}", unit, n) for number, (key, unit, n) in enumerate(keys)]


def share_devices(engines: Sequence[ConfiguredEngine], fleets: Device, machine: Machine) -> list[str]:
    """Returns `cpu` or `cuda:N` for each engine; GPUs go round. In an engine with ranks the first one has GPU
    N, and the others have the GPUs after it. Raises ValueError if there are fewer GPUs than ranks."""
    found: list[str] = []
    free, count = 0, max(1, machine.gpus)
    for engine in engines:
        ranks, wanted = engine.unit.tensor_parallel, engine.unit.device or fleets
        if wanted == CPU or (wanted == "auto" and not machine.gpus):
            found.append(CPU)
            continue
        if ranks > max(1, machine.gpus):
            raise ValueError(
                f"{engine.key}.tensor_parallel: {ranks} ranks for the {machine.gpus} GPUs here; "
                "one GPU for each, or `device: cpu`, is right"
            )
        first = free if free + ranks <= count else 0
        found.append(f"{CUDA}:{first}")
        free = (first + ranks) % count
    return found


def _gpus(engine: ConfiguredEngine, device: str) -> set[int]:
    """Returns the GPUs of all its ranks."""
    if device == CPU:
        return set()
    first = int(device.partition(":")[2])
    return set(range(first, first + engine.unit.tensor_parallel))


def share_pools(
    engines: Sequence[ConfiguredEngine],
    devices: Sequence[str],
    total: int | Auto,
    block: int,
    machine: Machine,
) -> list[int]:
    """Returns the bytes of each engine's pool, by `share_memory`. If `total` is open, a GPU's pool has its
    own size, or 0 for what the weights leave. Raises ValueError."""
    pairs = list(zip(engines, devices, strict=True))
    hosted = [engine for engine, device in pairs if device == CPU or total != "auto"]
    pools = iter(share_memory(hosted, total, block, machine) if hosted else [])
    found: list[int] = []
    for engine, device in pairs:
        own = engine.unit.kv_memory
        if device == CPU or total != "auto":
            found.append(next(pools))
        elif own != "auto" and own < block:
            raise ValueError(
                f"{engine.key}.kv_memory: {show_size(own)} is less than one block; "
                f"at least {show_size(block)} is right"
            )
        elif own == "auto" and sum(bool(_gpus(*pair) & _gpus(engine, device)) for pair in pairs) > 1:
            raise ValueError(
                f"{engine.key}.kv_memory: several engines on {device} cannot each have what is left; "
                "a size for each is right"
            )
        else:
            found.append(0 if own == "auto" else own)
    return found


def share_memory(
    engines: Sequence[ConfiguredEngine], total: int | Auto, block: int, machine: Machine
) -> list[int]:
    """Returns the bytes of each engine's pool: its own size, or an equal share of what the others leave of
    `total`. Raises ValueError."""
    fixed = [engine.unit.kv_memory for engine in engines if engine.unit.kv_memory != "auto"]
    most, whose = (machine.memory, "available here") if total == "auto" else (total, "of `kv_memory`")
    if sum(fixed) > most:
        raise ValueError(
            f"units: {show_size(sum(fixed))} of kv_memory for all engines is more than the "
            f"{show_size(most)} {whose}; less is right"
        )
    left = (most - sum(fixed)) // 3 if total == "auto" else most - sum(fixed)
    takers = len(engines) - len(fixed)
    share = left // takers if takers else 0
    if total == "auto":
        share = max(share, block)
    for engine in engines:
        own = engine.unit.kv_memory
        got, key = (share, "kv_memory") if own == "auto" else (own, f"{engine.key}.kv_memory")
        if got < block:
            what = f"{show_size(got)} for {engine.name}" if takers > 1 or fixed else show_size(got)
            raise ValueError(f"{key}: {what} is less than one block; at least {show_size(block)} is right")
    return [share if engine.unit.kv_memory == "auto" else engine.unit.kv_memory for engine in engines]


def share_threads(engines: Sequence[ConfiguredEngine], total: int | Auto, machine: Machine) -> list[int]:
    """Returns the cores of each engine: its own number, or an equal share of what the others leave of
    `total`, and one at least. Raises ValueError."""
    cores = machine.cores if total == "auto" else total
    fixed = [engine.unit.threads for engine in engines if engine.unit.threads != "auto"]
    if sum(fixed) > cores and max(fixed) > 1:
        whose = "cores here" if total == "auto" else "of `threads`"
        raise ValueError(
            f"units: {sum(fixed)} threads for all engines are more than the {cores} {whose}; less is right"
        )
    takers = len(engines) - len(fixed)
    left = max(0, cores - sum(fixed))
    shares = iter([max(1, left // takers + (i < left % takers)) for i in range(takers)])
    return [next(shares) if engine.unit.threads == "auto" else engine.unit.threads for engine in engines]


def _share(value: Any) -> float | Auto:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{str(value)[:40]}; a number from 0 to 1, or `auto`, is right")
    return float(value)


class WeaveConfig(ConfigSection):
    """The unit `cold` lends `part` of its pool to the one model of `hot`, and attends over it; `share` of the
    hot unit's sequences are there. With `auto` it is such that decode steps of `cold` take at most `bound`
    longer. `control`, `split` and `waits` say how soon `cold` attends (Weaver, section 4): between which of
    its own doings it looks for tasks, whether it splits operators for that, and how much of a step of `hot`
    waiting may take."""

    hot: str
    cold: str
    share: Annotated[float | Auto, PlainValidator(_share)] = 0.45
    part: Part = 0.3
    bound: Part = 0.15
    control: Control = "operators"
    split: Splitting = "auto"
    waits: Part = 0.05


class PairedUnit(NamedTuple):
    """The facts that matter of a unit that lends or borrows."""

    models: int
    device: str
    ranks: int


def weave_units(
    relations: Sequence[WeaveConfig], units: Mapping[str, PairedUnit], transport: TransportName
) -> dict[str, WeaveSpec]:
    """Returns the relations by their hot unit. Raises ValueError if one cannot be."""
    for i, one in enumerate(relations):
        for key, name in (("hot", one.hot), ("cold", one.cold)):
            where = f"weave.{i}.{key}"
            if name not in units:
                raise ValueError(f"{where}: no unit {name!r}; {nearest(name, list(units))}")
            unit = units[name]
            if unit.ranks > 1 or transport != "shm":
                raise ValueError(f"{where}: {name}; a unit of one rank, with the transport shm, is right")
            if sum(getattr(other, key) == name for other in relations) > 1:
                raise ValueError(f"{where}: {name} is {key} twice; one loan at a time is right")
        if one.hot == one.cold:
            raise ValueError(f"weave.{i}.cold: {one.cold} would lend to itself; another unit is right")
        kinds = [units[name].device for name in (one.hot, one.cold)]
        if kinds[0] != kinds[1]:
            right = "two units of one GPU are right (units go round the GPUs in their order)"
            if CPU in kinds:
                right = "two CPU units, or two GPU units, are right"
            raise ValueError(f"weave.{i}.cold: {one.cold} is on {kinds[1]}, {one.hot} on {kinds[0]}; {right}")
        if units[one.hot].models > 1:
            raise ValueError(
                f"weave.{i}.hot: {one.hot} has {units[one.hot].models} models; a unit of one is right"
            )
    return {one.hot: WeaveSpec(**one.model_dump(exclude={"hot"})) for one in relations}


class ReschedulingConfig(ConfigSection):
    """The fleet scheduler's period in seconds, and its thresholds of freeness in decode steps."""

    period: Period = SchedulerSpec().period
    out: Steps = SchedulerSpec().out
    into: Steps = SchedulerSpec().into

    @model_validator(mode="after")
    def _apart(self) -> Self:
        Thresholds(self.out, self.into)
        return self

    def scheduler(
        self, engines: Iterable[EngineSpec], groups: Mapping[str, GroupSpec]
    ) -> SchedulerSpec | None:
        """Returns None if no model is on two units that send and receive K and V, so that nothing can move,
        and no unit comes or goes."""
        models = [model.name for engine in engines if engine.tensor_parallel == 1 for model in engine.models]
        if len(set(models)) == len(models) and not groups:
            return None
        return SchedulerSpec(self.period, self.out, self.into)


Rescheduling = Annotated[
    ReschedulingConfig | None, BeforeValidator(lambda value: None if value == "none" else value)
]
