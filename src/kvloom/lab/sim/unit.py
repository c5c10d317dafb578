"""A unit of the virtual world: its engine's specification, and devices that are known by their cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import structs

from kvloom.config.config import Config
from kvloom.lab.sim.content import Content
from kvloom.lab.sim.cpu import EngineCpu
from kvloom.lab.sim.executor import ModelledExecutor, ModelledWeights
from kvloom.lab.sim.links import Link, TimedLink
from kvloom.plan.cluster import CPU, Abilities
from kvloom.plan.cost.cpu import CpuCosts
from kvloom.plan.cost.devices import PCIE4, find_device
from kvloom.plan.cost.loading import MAPPED, load_bandwidth, start_seconds
from kvloom.plan.cost.measured import ProfiledCostModel
from kvloom.plan.cost.profile import Profile
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import ModelShape, read_context
from kvloom.plan.cost.work import CostModel, Work
from kvloom.plan.plan import PlacementPlan, PlannedUnit
from kvloom.types.errors import ConfigError
from kvloom.types.request import ModelCard
from kvloom.types.spec import (
    DEFAULT_POLICY,
    EngineSpec,
    ModelSpec,
    Policy,
    default_chunk,
    shared_bytes,
    unit_abilities,
)

CONTEXT = 8192  # tokens, of a model of which neither spec nor checkpoint says it
DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}  # by the bytes of a number

LATENCY: Final = 20e-6  # seconds from one unit's memory to another's


@dataclass(frozen=True, slots=True)
class SimulatedUnit:
    """An engine's specification, and its devices."""

    spec: EngineSpec
    shapes: Mapping[str, ModelShape]
    """The shapes of the specification's models."""
    compute: int
    """The units that its devices are shared out in."""
    cost: CostModel
    bandwidth: float = PCIE4
    """Bytes a second of its way out."""
    engine_gap: Callable[[Work], float] | None = None
    """Returns the seconds of the engine's own work for a job."""
    max_steps: int = 4096
    """Decode steps that may be one job."""
    host_bandwidth: float = MAPPED
    """Bytes a second at which weights that have slept come from the host's memory."""
    start: float = 0.0
    """Seconds until a process that is started while the fleet serves can answer."""
    content: Content | None = None
    """What its pages hold; None for nothing."""

    def most_blocks(self, model: str) -> int:
        """Returns the blocks that K and V of a model may have at most."""
        block = self.spec.block_bytes
        weights = -(-self.shapes[model].weight_bytes // block) if self.spec.sleep_dir else 0
        return self.spec.kv_bytes // block - weights


def timed_link(unit: SimulatedUnit) -> Link:
    return TimedLink(unit.bandwidth, LATENCY)


def modelled_executor(
    unit: SimulatedUnit, content: Content | None = None, cpu: EngineCpu | None = None
) -> ModelledExecutor:
    """Returns the unit's devices. content: what their pages hold; None for nothing. cpu: the engine's loop;
    None if its own work is a part of each job."""
    spec = unit.spec
    contexts = {model.name: _context(model) for model in spec.models}
    return ModelledExecutor(
        {name: simulated_card(name, shape, contexts[name]) for name, shape in unit.shapes.items()},
        {name: shape.geometry(spec.block_bytes) for name, shape in unit.shapes.items()},
        blocks=spec.kv_bytes // spec.block_bytes,
        compute=unit.compute,
        cost=unit.cost,
        content=content,
        engine_gap=None if cpu else unit.engine_gap,
        max_steps=1 if cpu else unit.max_steps,
        cpu=cpu,
        weights=_weights(unit) if spec.sleep_dir else None,
        acceptance={model.name: model.acceptance for model in spec.models if model.speculation != "none"},
    )


def _context(model: ModelSpec) -> int:
    """Returns the tokens of a model's longest sequence, by its checkpoint if that is here."""
    own = read_context(Path(model.path)) if model.path and Path(model.path).is_dir() else None
    return min(own or model.max_context or CONTEXT, model.max_context or own or CONTEXT)


def _weights(unit: SimulatedUnit) -> ModelledWeights:
    sizes = {name: shape.weight_bytes for name, shape in unit.shapes.items()}
    return ModelledWeights(sizes, unit.spec.block_bytes, unit.host_bandwidth)


def simulated_card(name: str, shape: ModelShape, context: int) -> ModelCard:
    """Returns the card of a model of which only the shape is known."""
    return ModelCard(
        name=name,
        path="",
        context_length=context,
        vocab_size=shape.vocab,
        tokenizer="{}",
        chat_template=None,
        special_tokens={},
        eos_token_ids=(),
        bos_token_id=None,
        add_bos=False,
        architecture="",
        parameters=shape.parameters,
        dtype=DTYPES[shape.itemsize],
        kv_dtype=shape.kv_dtype,
    )


BLOCK_BYTES: Final = 16 << 10
PARTS: Final = 10  # that a GPU's compute is shared out in, as MuxServe does
OVERLOAD: Final = 0.2  # by which shares that run together may exceed the whole; MuxServe's
MAX_RUNNING: Final = 256
MAX_WAITING: Final = 1 << 20  # nobody is turned away


SLEEPING: Final = "simulated"  # the `sleep_dir` of units whose weights sleep; nothing is written to it


def planned_units(
    plan: PlacementPlan,
    policy: Policy = DEFAULT_POLICY,
    profile: Profile | None = None,
    abilities: Abilities = unit_abilities,
) -> list[SimulatedUnit]:
    """Returns the plan's units: GPUs by their sheets, cores by what `profile` says. abilities: what units of
    GPUs can do. Raises ConfigError for a device that is not known or was not measured."""
    units = [_planned(unit, policy, profile, abilities) for unit in plan.units]
    cores = Counter[str]()
    for unit in plan.units:
        cores[unit.node] += unit.gpus if unit.device == CPU else 0
    for node, count in cores.items():
        if profile is not None and count > profile.cores:
            raise ConfigError(
                f"--profile: was measured on {profile.cores} cores, and {node or 'the plan'} has units of "
                f"{count}; one of a machine like it is right"
            )
    return units


def _planned(
    unit: PlannedUnit, policy: Policy, profile: Profile | None, abilities: Abilities
) -> SimulatedUnit:
    unit.check_pool(BLOCK_BYTES)
    spec = EngineSpec(
        models=tuple(
            model.share_of(ModelSpec(name=model.name, path=model.path or "")) for model in unit.models
        ),
        kv_bytes=unit.memory or unit.kv_bytes,
        block_bytes=BLOCK_BYTES,
        policy=policy,
        max_running=MAX_RUNNING,
        max_waiting=MAX_WAITING,
        chunk_tokens=default_chunk(unit.device),
        threads=unit.gpus if unit.device == CPU else PARTS,
        unit=unit.name,
        overload=0.0 if unit.device == CPU else OVERLOAD,
        device=unit.place,
        tensor_parallel=unit.tensor_parallel,
        sleep_dir=SLEEPING if unit.memory else "",
    )
    if unit.device == CPU:
        if profile is None:
            raise ConfigError(
                f"--profile: is missing; {unit.name} is on device {CPU}, for which what `kvloom profile` "
                "wrote is right"
            )
        return _measured(spec, profile)
    shapes = {model.name: model.shape for model in unit.models}
    device, parts = (
        find_device(unit.device),
        PARTS if abilities(unit.device, unit.tensor_parallel).shares else 1,
    )
    cost, start = Roofline(device, unit.gpus, shapes), start_seconds(shapes.values())
    loads = load_bandwidth(device, unit.gpus)
    return SimulatedUnit(
        _budgeted(spec), shapes, parts, cost, bandwidth=device.host, host_bandwidth=loads, start=start
    )


def measured_units(config: Config, profile: Profile) -> list[SimulatedUnit]:
    """Returns the config's units on the machine that was measured. Raises ConfigError if a model of the
    config was not measured, and for ranks."""
    return [_measured(spec, profile) for spec in config.engines]


def cpu_costs_from(profile: Profile) -> CpuCosts | None:
    """Returns what the machine does besides jobs; None if that was not measured."""
    return CpuCosts(profile) if profile.overheads else None


def _measured(spec: EngineSpec, profile: Profile) -> SimulatedUnit:
    if spec.tensor_parallel > 1:
        raise ConfigError(
            f"{spec.unit}: tensor_parallel {spec.tensor_parallel}: a profile has no ranks, so they cannot be "
            "simulated; 1 is right"
        )
    missing = [model.name for model in spec.models if model.name not in profile.shapes]
    if missing:
        raise ConfigError(
            f"the profile has no {', '.join(missing)}, but {', '.join(profile.shapes)}; `kvloom profile` "
            "with the same config measures all"
        )
    shapes = {model.name: profile.shapes[model.name] for model in spec.models}
    cost = ProfiledCostModel(profile, spec.threads)
    start = start_seconds(shapes.values())
    return SimulatedUnit(_budgeted(spec), shapes, spec.threads, cost, engine_gap=cost.engine_gap, start=start)


def _budgeted(spec: EngineSpec) -> EngineSpec:
    """Returns the unit without what stays free of its budget, if weights and pool have one."""
    return structs.replace(spec, kv_bytes=shared_bytes(spec.kv_bytes)) if spec.sleep_dir else spec
