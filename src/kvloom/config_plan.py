"""A plan as the settings of a config: its units become the config's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kvloom.plan.cluster import CPU
from kvloom.plan.plan import PlannedUnit, read_plan
from kvloom.types.errors import ConfigError

_LEAST_RATE: Final = 1e-6  # a model that nobody asks for is served all the same


def read_plan_settings(file: Path) -> dict[str, Any]:
    """What `Config` takes. A unit's devices are cores of this machine. Raises ConfigError."""
    plan = read_plan(file)
    nodes = {unit.node for unit in plan.units}
    if len(nodes) > 1:
        raise ConfigError(f"{file}: units on {len(nodes)} nodes; a plan for this machine alone is right")
    models: dict[str, dict[str, Any]] = {}
    for unit in plan.units:
        if unit.device != CPU:
            raise ConfigError(
                f"{file}: {unit.name} is planned for {unit.gpus} × {unit.device}; "
                f"a plan for device {CPU} is right"
            )
        for model in unit.models:
            if model.path is None:
                raise ConfigError(
                    f"{file}: {unit.name}: no path of {model.name!r}; plan with `path` for each model"
                )
            models[model.name] = {"path": model.path, "rate": max(model.rate, _LEAST_RATE)}
    return {"models": models, "units": [_unit(unit) for unit in plan.units]}


def _unit(unit: PlannedUnit) -> dict[str, Any]:
    return {
        "models": [model.name for model in unit.models],
        "kv_memory": unit.kv_bytes,
        "threads": unit.gpus,
        "shares": {
            model.name: {
                "prefill": model.prefill_share,
                "decode": model.decode_share,
                "quota": model.quota,
            }
            for model in unit.models
        },
    }
