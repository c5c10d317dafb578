"""Which engines a fleet has: units times replicas, and what of the machine each gets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from kvloom.config_errors import nearest
from kvloom.config_fields import Auto, Memory, Part, Section, Some, Threads, no_bool
from kvloom.config_replicas import MOST_ENGINES, Replicas
from kvloom.machine import Machine
from kvloom.router.programs import MOVING, PROGRAMS
from kvloom.sizes import show_size
from kvloom.types.service import GroupSpec
from kvloom.types.spec import ModelSpec, Policy

CPU: Final = "cpu"
CUDA: Final = "cuda"
Device = Literal["auto", "cpu", "cuda"]


class SharesConfig(Section):
    """What a model may have of its unit beside the others: parts of the compute for a prefill job and for a
    decode job, and of the pool's blocks to begin with."""

    prefill: Part | None = None
    decode: Part | None = None
    quota: Part | None = None


class UnitConfig(Section):
    """Models that share an engine, and how many such engines there are. What is left out, the fleet's own
    keys say."""

    models: Annotated[tuple[str, ...], Some]
    replicas: Replicas = Field(default=1, validate_default=True)
    kv_memory: Memory = "auto"
    threads: Threads = "auto"
    policy: Policy | None = None
    device: Device | None = None
    tensor_parallel: Annotated[int, BeforeValidator(no_bool), Field(ge=1)] = 1
    shares: dict[str, SharesConfig] | None = None

    def spec(self, name: str, settings: Mapping[str, Any]) -> ModelSpec:
        """A model of it, with the settings that it has on all units."""
        shares = (self.shares or {}).get(name, SharesConfig())
        return ModelSpec(
            name=name,
            **settings,
            prefill_share=shares.prefill,
            decode_share=shares.decode,
            quota=shares.quota,
        )


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine that may be. key: where its unit stands in the config. number: among its unit's."""

    key: str
    name: str
    unit: UnitConfig
    number: int = 0


def groups(engines: Sequence[Engine]) -> dict[str, GroupSpec]:
    """Those whose number of engines changes, by key."""
    return {
        engine.key: GroupSpec(tuple(one.name for one in engines if one.key == engine.key), scale)
        for engine in engines
        if (scale := engine.unit.replicas.scale)
    }


def first(engines: Sequence[Engine]) -> tuple[str, ...]:
    """The engines that a fleet begins with."""
    return tuple(engine.name for engine in engines if engine.number < engine.unit.replicas.first)


def check_ranks(engines: Sequence[Engine], cores: Sequence[int], program: str) -> None:
    """Raises ValueError where an engine has fewer cores than ranks, or the program wants of it what ranks do
    not do."""
    for engine, own in zip(engines, cores, strict=True):
        ranks, key = engine.unit.tensor_parallel, f"{engine.key}.tensor_parallel"
        if ranks > own:
            raise ValueError(
                f"{key}: {ranks} ranks, but {engine.name} has {own} core{'' if own == 1 else 's'}; "
                f"{f'1 to {own}' if own > 1 else '1'} is right"
            )
        if ranks > 1 and program in MOVING:
            raise ValueError(
                f"{key}: {ranks} ranks, whose K and V are neither sent nor received, under the program "
                f"{program}, which moves them; {', '.join(sorted(PROGRAMS.keys() - MOVING))} are right"
            )


def list_engines(units: Sequence[UnitConfig], models: Collection[str]) -> list[Engine]:
    """Every engine that there may be. Raises ValueError where units and models do not go together."""
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
    return [Engine(key, f"unit-{number}", unit, n) for number, (key, unit, n) in enumerate(keys)]


def share_devices(engines: Sequence[Engine], fleets: Device, machine: Machine) -> list[str]:
    """`cpu` or `cuda:N` for each engine; GPUs go round. Of an engine with ranks N is the first one's, and the
    others have the GPUs after it. Raises ValueError where there are fewer GPUs than ranks."""
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


def _gpus(engine: Engine, device: str) -> set[int]:
    """Of all its ranks."""
    if device == CPU:
        return set()
    first = int(device.partition(":")[2])
    return set(range(first, first + engine.unit.tensor_parallel))


def share_pools(
    engines: Sequence[Engine], devices: Sequence[str], total: int | Auto, block: int, machine: Machine
) -> list[int]:
    """Bytes of each engine's pool, by `share_memory`; where `total` is open, a GPU's pool is its own
    size, or 0 for what the weights leave. Raises ValueError."""
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


def share_memory(engines: Sequence[Engine], total: int | Auto, block: int, machine: Machine) -> list[int]:
    """Bytes of each engine's pool: its own size, or an equal share of what the others leave of `total`.
    Raises ValueError."""
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


def share_threads(engines: Sequence[Engine], total: int | Auto, machine: Machine) -> list[int]:
    """Cores of each engine: its own number, or an equal share of what the others leave of `total`, and one
    at least. Raises ValueError."""
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
