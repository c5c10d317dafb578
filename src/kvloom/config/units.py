"""The models of a fleet and its engines: each one's share of the machine, who lends to whom, and how requests
move."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from kvloom.config.fields import (
    Auto,
    Budget,
    ConfigSection,
    Memory,
    Part,
    Period,
    Seconds,
    Some,
    Steps,
    Threads,
    no_bool,
)
from kvloom.config.models import ModelConfig
from kvloom.engine.freeness import Thresholds
from kvloom.plan.plan import checkpoint_bytes
from kvloom.router.programs import MOVING, PROGRAMS
from kvloom.types.errors import nearest
from kvloom.types.service import GroupSpec, Scale
from kvloom.types.spec import (
    AdapterSpec,
    Control,
    EngineSpec,
    ModelSpec,
    Policy,
    SchedulerSpec,
    Splitting,
    UnitAbilities,
    WeaveSpec,
)

MOST_ENGINES: Final = 64


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


def _device(value: Any) -> str:
    """Reads a unit's device, which may be one GPU by its number."""
    if isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:(0|[1-9]\d{0,3}))?", value):
        return value
    raise ValueError(
        f"{str(value)[:40]!r}; `auto`, `cpu`, `cuda` or a GPU by its number, as `cuda:1`, is right"
    )


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
    node: Annotated[str, Field(min_length=1)] | None = None
    device: Annotated[str, PlainValidator(_device)] | None = None
    kv_memory: Memory = "auto"
    memory: Budget | None = None
    threads: Threads = "auto"
    policy: Policy | None = None
    tensor_parallel: Annotated[int, BeforeValidator(no_bool), Field(ge=1)] = 1
    shares: dict[str, SharesConfig] | None = None

    @property
    def pool(self) -> int | Auto:
        """Returns the bytes of its pool, with its weights if they have one budget."""
        return self.kv_memory if self.memory is None else self.memory

    def spec(self, name: str, model: ModelConfig, adapters: tuple[AdapterSpec, ...]) -> ModelSpec:
        """Returns one of its models, with the settings and the adapters that the model has on all units."""
        shares = (self.shares or {}).get(name, SharesConfig())
        return ModelSpec(
            name=name,
            **model.model_dump(exclude={"slo", "base", "adapter"}),
            slo=model.slo.slo,
            adapters=adapters,
            prefill_share=shares.prefill,
            decode_share=shares.decode,
            quota=shares.quota,
            memory=checkpoint_bytes(model.path, model.dtype),
        )


@dataclass(frozen=True, slots=True)
class ConfiguredEngine:
    """One engine that there may be."""

    key: str
    """The place of its unit in the config."""
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


def check_abilities(specs: Sequence[EngineSpec], engines: Sequence[ConfiguredEngine], program: str) -> None:
    """Raises ValueError if the config wants of an engine, or the program of its unit, what a unit of its kind
    does not do."""
    lenders = {cold for spec in specs if spec.weave is not None for cold in spec.weave.colds}
    for spec, engine in zip(specs, engines, strict=True):
        refuse_moves(f"{engine.key}.tensor_parallel", spec, program)
        if engine.unit.memory is not None and engine.unit.kv_memory != "auto":
            raise ValueError(
                f"{engine.key}.memory: it is for weights and pool together, of which kv_memory is a part; "
                "one of both is right"
            )
        if spec.sleep_dir and not spec.abilities.sleeps:
            raise ValueError(
                f"memory: {engine.name} has {spec.tensor_parallel} ranks on {spec.device}, and weights sleep "
                "on units of one rank on `cpu`; kv_memory, the size of the pool alone, is right there"
            )
        if spec.sleep_dir and spec.transport in ("nixl", "auto"):
            raise ValueError(
                f"memory: {engine.name} may exchange K and V by NIXL, to which its pool must be known whole; "
                "transport: shm or tcp is right with memory"
            )
        if spec.sleep_dir and (spec.weave is not None or spec.unit in lenders):
            raise ValueError(
                f"memory: {engine.name} lends or borrows blocks, for which its pool must keep its size; "
                "kv_memory is right there"
            )
        for model in spec.models:
            if model.adapters and (
                not spec.abilities.adapts or spec.weave is not None or spec.unit in lenders
            ):
                raise ValueError(
                    f"models.{model.adapters[0].name}.adapter: {engine.key} has {spec.tensor_parallel} ranks "
                    f"on {spec.device}{', and weaves' if spec.abilities.adapts else ''}; adapters are served "
                    "by units of one rank on `cpu` that neither lend nor borrow"
                )
            if model.kv_dtype not in spec.abilities.kv_dtypes:
                raise ValueError(
                    f"models.{model.name}.kv_dtype: {model.kv_dtype}, but {engine.key} is on {spec.device}; "
                    f"{', '.join(spec.abilities.kv_dtypes)} are right there"
                )
            weaves = spec.weave is not None or spec.unit in lenders
            if model.kv_dtype == "float8_e4m3fn" and weaves:
                raise ValueError(
                    f"models.{model.name}.kv_dtype: {model.kv_dtype}, but {engine.key} is on {spec.device} "
                    "and weaves, where mailboxes have no FP8; `auto` is right there"
                )
        _check_speculation(engine.key, spec)
        for name, own in (engine.unit.shares or {}).items():
            for what, share in (("prefill", own.prefill), ("decode", own.decode)):
                if share is not None and share < 1.0 and not spec.abilities.shares:
                    raise ValueError(
                        f"{engine.key}.shares.{name}.{what}: {share:g}, but jobs of {spec.tensor_parallel} "
                        "GPUs take turns; 1, or nothing, is right"
                    )


def _check_speculation(key: str, spec: EngineSpec) -> None:
    """Raises ValueError if tokens are to be drafted on a unit whose kind verifies none, or by a model that is
    not there or not always in memory."""
    for model in spec.models:
        if model.speculation != "none" and not spec.abilities.speculates:
            raise ValueError(
                f"models.{model.name}.speculation: {model.speculation}, but {key} is on {spec.device}; "
                "`none` is right there"
            )
        if model.draft is not None and spec.sleep_dir:
            raise ValueError(
                f"memory: {model.draft} drafts for {model.name} on {key}, so that its weights must stay; "
                "kv_memory is right there"
            )
    if spec.draft_problem is not None:
        raise ValueError(f"{spec.draft_problem} ({key})")


def refuse_moves(key: str, spec: EngineSpec, program: str) -> None:
    """Raises ValueError if the program moves K and V of a unit that neither sends nor receives any."""
    if program in MOVING and not spec.abilities.moves:
        raise ValueError(
            f"{key}: {spec.tensor_parallel} ranks on GPUs, whose K and V are neither sent nor received, "
            f"under the program {program}, which moves them; "
            f"{', '.join(sorted(PROGRAMS.keys() - MOVING))} are right"
        )


def list_engines(
    units: Sequence[UnitConfig], models: Collection[str], adapters: Collection[str] = ()
) -> list[ConfiguredEngine]:
    """Returns every engine that there may be. adapters: names that are no models of units. Raises ValueError
    if units and models do not go together."""
    for i, unit in enumerate(units):
        for name in unit.models:
            if name in adapters:
                raise ValueError(
                    f"units.{i}.models: {name!r} is an adapter, which is served wherever its base is; "
                    "its base alone is right"
                )
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


def _share(value: Any) -> float | Auto:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{str(value)[:40]}; a number from 0 to 1, or `auto`, is right")
    return float(value)


class WeaveConfig(ConfigSection):
    """The unit `cold`, or the freest of several, lends `part` of its pool to the one model of `hot`, and
    attends over it; `share` of the hot unit's sequences are there. With `auto` it is such that decode steps
    of `cold` take at most `bound` longer. `control`, `split` and `waits` say how soon `cold` attends (Weaver,
    section 4): between which of its own doings it looks for tasks, whether it splits operators for that, and
    how much of a step of `hot` waiting may take."""

    hot: str
    cold: str | Annotated[tuple[str, ...], Field(min_length=1)]
    share: Annotated[float | Auto, PlainValidator(_share)] = 0.45
    part: Part = 0.3
    bound: Part = 0.15
    control: Control = "operators"
    split: Splitting = "auto"
    waits: Part = 0.05

    @property
    def colds(self) -> tuple[str, ...]:
        """Returns all units that may lend."""
        return (self.cold,) if isinstance(self.cold, str) else self.cold

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Returns the key and the unit of all that take part."""
        return (("hot", self.hot), *(("cold", cold) for cold in self.colds))

    def spec(self, devices: Mapping[str, str]) -> WeaveSpec:
        """Returns the relation as the engine of `hot` knows it. devices: of all units."""
        first, *others = self.colds
        rest = self.model_dump(exclude={"hot", "cold"})
        gpus = tuple(devices[cold] for cold in self.colds if devices[cold] != CPU)
        return WeaveSpec(cold=first, others=tuple(others), gpus=gpus, **rest)


class PairedUnit(NamedTuple):
    """The facts that matter of a unit that lends or borrows."""

    models: int
    device: str
    abilities: UnitAbilities


def weave_units(relations: Sequence[WeaveConfig], units: Mapping[str, PairedUnit]) -> dict[str, WeaveSpec]:
    """Returns the relations by their hot unit. Raises ValueError if one cannot be."""
    for i, one in enumerate(relations):
        for key, name in one.pairs():
            where = f"weave.{i}.{key}"
            if name not in units:
                raise ValueError(f"{where}: no unit {name!r}; {nearest(name, list(units))}")
            unit = units[name]
            if not unit.abilities.weaves:
                raise ValueError(f"{where}: {name}; a unit of one rank, with the transport shm, is right")
            if sum((key, name) == pair for other in relations for pair in other.pairs()) > 1:
                raise ValueError(f"{where}: {name} is {key} twice; one loan at a time is right")
        for cold in one.colds:
            _check_pair(f"weave.{i}.cold", one.hot, cold, units)
        if units[one.hot].models > 1:
            raise ValueError(
                f"weave.{i}.hot: {one.hot} has {units[one.hot].models} models; a unit of one is right"
            )
    return {one.hot: one.spec({name: unit.device for name, unit in units.items()}) for one in relations}


def _check_pair(where: str, hot: str, cold: str, units: Mapping[str, PairedUnit]) -> None:
    """Raises ValueError if `cold` cannot lend to `hot`."""
    if hot == cold:
        raise ValueError(f"{where}: {cold} would lend to itself; another unit is right")
    kinds = [units[name].device for name in (hot, cold)]
    if kinds[0] != kinds[1] and CPU in kinds:
        right = "two CPU units, or two GPU units, are right"
        raise ValueError(f"{where}: {cold} is on {kinds[1]}, {hot} on {kinds[0]}; {right}")


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
        models = [model.name for engine in engines if engine.abilities.moves for model in engine.models]
        if len(set(models)) == len(models) and not groups:
            return None
        return SchedulerSpec(self.period, self.out, self.into)


Rescheduling = Annotated[
    ReschedulingConfig | None, BeforeValidator(lambda value: None if value == "none" else value)
]
