"""Plans as JSON files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from kvloom.core.errors import ConfigError
from kvloom.plan.plan import PLAN_VERSION, Plan


class _Head(Struct):
    """What tells a plan from other JSON."""

    version: int
    made_by: str
    units: msgspec.Raw


def is_plan(file: Path) -> bool:
    """Whether the file looks like a plan, of whichever version and however wrong otherwise."""
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        msgspec.json.decode(file.read_bytes(), type=_Head)
        return True
    return False


def read_plan(file: Path) -> Plan:
    """Raises ConfigError with what is wrong and where."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; the path of a plan is right") from error
    try:
        version = msgspec.json.decode(text, type=_Head).version
        if version != PLAN_VERSION:
            raise ConfigError(
                f"{file}: a plan of version {version}; this kvloom reads version {PLAN_VERSION}"
            )
        plan = msgspec.json.decode(text, type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: no plan ({error}); what `kvloom plan -o` writes is right") from error
    names = [unit.name for unit in plan.units]
    if not names or len(set(names)) < len(names) or any(not unit.models for unit in plan.units):
        raise ConfigError(f"{file}: units with names of their own, and with models, are right")
    for unit in plan.units:
        models = [model.name for model in unit.models]
        if len(set(models)) < len(models):
            raise ConfigError(f"{file}: {unit.name} has two models of one name ({', '.join(models)})")
    return plan


def write_plan(file: Path, plan: Plan) -> None:
    """Raises ConfigError where it cannot be written."""
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; a path that can be written is right") from error
