"""Units of the virtual world: out of a plan for devices that are known by their sheets, or out of a config
for a machine that was measured."""

from __future__ import annotations

from typing import Final

from kvloom.config import Config
from kvloom.core.errors import ConfigError
from kvloom.core.spec import EngineSpec, ModelSpec, Policy
from kvloom.cost.devices import find_device
from kvloom.cost.hosting import Hosting
from kvloom.cost.measured import Measured
from kvloom.cost.profile import Profile
from kvloom.cost.roofline import Roofline
from kvloom.plan.plan import Plan, PlannedUnit
from kvloom.sim.unit import SimulatedUnit, start_seconds

BLOCK_BYTES: Final = 16 << 10
PARTS: Final = 10  # that a GPU's compute is shared out in, as MuxServe does
OVERLOAD: Final = 0.2  # by which shares that run together may exceed the whole; MuxServe's
CHUNK_TOKENS: Final = 2048  # of a prefill job; MuxServe's most
MAX_RUNNING: Final = 256
MAX_WAITING: Final = 1 << 20  # nobody is turned away


def planned_units(plan: Plan, policy: Policy = "adbs") -> list[SimulatedUnit]:
    """Raises ConfigError for a device that is not known."""
    return [_planned(unit, policy) for unit in plan.units]


def _planned(unit: PlannedUnit, policy: Policy) -> SimulatedUnit:
    shapes = {model.name: model.shape for model in unit.models}
    unit.check_pool(BLOCK_BYTES)
    spec = EngineSpec(
        models=tuple(
            ModelSpec(
                name=model.name,
                path=model.path or "",
                rate=max(model.rate, 1e-9),
                prefill_share=model.prefill_share,
                decode_share=model.decode_share,
                quota=model.quota,
            )
            for model in unit.models
        ),
        kv_bytes=unit.kv_bytes,
        block_bytes=BLOCK_BYTES,
        policy=policy,
        max_running=MAX_RUNNING,
        max_waiting=MAX_WAITING,
        chunk_tokens=CHUNK_TOKENS,
        threads=PARTS,
        unit=unit.name,
        overload=OVERLOAD,
    )
    device = find_device(unit.device)
    cost, start = Roofline(device, unit.gpus, shapes), start_seconds(shapes.values())
    return SimulatedUnit(spec, shapes, PARTS, cost, bandwidth=device.host, start=start)


def measured_units(config: Config, profile: Profile) -> list[SimulatedUnit]:
    """Raises ConfigError where a model of the config was not measured, and for ranks."""
    return [_measured(spec, profile) for spec in config.engines]


def measured_hosting(profile: Profile) -> Hosting | None:
    """What the machine does besides jobs; None where that was not measured."""
    return Hosting(profile) if profile.hosted else None


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
    cost = Measured(profile, spec.threads)
    start = start_seconds(shapes.values())
    return SimulatedUnit(spec, shapes, spec.threads, cost, overhead=cost.between, start=start)
