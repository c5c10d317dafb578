"""Loads a config: a YAML file or a plan, with flags over it, or the demo fleet."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from msgspec import Struct
from msgspec.structs import asdict

from kvloom.config.config import Config, build_config, demo_settings
from kvloom.config.fields import told_unread
from kvloom.config.machine import Machine
from kvloom.config.models import resolve_model
from kvloom.plan.cluster import CPU
from kvloom.plan.plan import LEAST_RATE, PlannedUnit, is_plan, read_plan
from kvloom.types.errors import ConfigError

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CONFIGS: Final = (".yaml", ".yml", ".json")


class Settings(Struct, frozen=True, kw_only=True):
    """The settings of a fleet as they were told, before a machine makes a config of them."""

    values: dict[str, Any]
    folder: str
    """The folder from which relative paths count."""
    origin: dict[str, str]
    """The flags by which keys were set."""
    file: str = ""

    def config(self, machine: Machine) -> Config:
        """Returns the config on this machine. Raises ConfigError."""
        try:
            return build_config(self.values, Path(self.folder), machine, self.origin)
        except ConfigError as error:
            from_flag = error.message.startswith("--")
            told = error.message if not self.file or from_flag else f"{self.file}: {error.message}"
            raise ConfigError(told) from error


def read_settings(file: Path | None, flags: Mapping[str, Any], models: Mapping[str, str]) -> Settings:
    """Returns the settings in `file`, overridden by `flags`, with `models` (from --model) added. With neither
    file nor models they are the demo fleet's. Raises ConfigError."""
    if file is not None:
        settings = read_plan_settings(file) if is_plan(file) else read_yaml(file, right=_SERVED)
    else:
        settings = {} if models else demo_settings()
    settings |= flags
    if models:
        settings["models"] = _add_models(settings.get("models"), models)
    return Settings(
        values=settings,
        folder=str(file.parent.absolute() if file is not None else Path.cwd()),
        origin={key: "--" + key.replace("_", "-") for key in flags},
        file=str(file or ""),
    )


def load_config(
    file: Path | None, flags: Mapping[str, Any], models: Mapping[str, str], machine: Machine
) -> Config:
    """Returns the config of `read_settings` on this machine. Raises ConfigError."""
    return read_settings(file, flags, models).config(machine)


def _add_models(present: object, models: Mapping[str, str]) -> object:
    """Adds models that flags name, whose paths count from the working folder."""
    if present is not None and not isinstance(present, dict):
        return present
    added: dict[str, Any] = {}
    for name, value in models.items():
        try:
            added[name] = resolve_model(value, Path.cwd())
        except ValueError as error:
            raise ConfigError(f"--model {name}: {error}") from error
    return {**(present or {}), **added}


def parse_models(texts: Sequence[str]) -> dict[str, str]:
    """Reads NAME=PATH_OR_HUB_ID, each name once. Raises ConfigError."""
    models: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"--model {text}: NAME=PATH_OR_HUB_ID is right, as `chat=Qwen/Qwen3-0.6B`")
        if name in models:
            raise ConfigError(f"--model {name}: given twice; each model needs a name of its own")
        models[name] = path
    return models


def model_named(what: Path) -> dict[str, str]:
    """Returns the model that stands in a config's place, by its name: a checkpoint's folder, a GGUF file, or
    an id on the hub, which is its name, too. It is empty if `what` is a config, there or not."""
    if what.is_dir():
        return {what.resolve().name: str(what.absolute())}
    if what.suffix == ".gguf":
        return {what.stem: str(what.absolute())}
    if not what.exists() and _HUB_ID.fullmatch(str(what)) and what.suffix not in _CONFIGS:
        return {str(what): str(what)}
    return {}


_SERVED: Final = "the path of a YAML file, a model's folder, a GGUF file or a model's id on the hub"


def read_yaml(file: Path, right: str = "the path of a YAML file") -> dict[str, Any]:
    """Returns the mapping in `file`. right: what there could be instead of no file. Raises ConfigError with
    the line of what is wrong."""
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise ConfigError(told_unread(file, error, right)) from error
    except UnicodeDecodeError as error:
        instead = "the model's folder" if file.suffix == ".safetensors" else "a YAML file"
        raise ConfigError(f"{file}: not UTF-8 text at byte {error.start}; {instead} is right") from error
    try:
        value = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = " ".join(f"{error.context or ''} {error.problem or ''}".split())
        raise ConfigError(f"{file}: line {line}: {problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
    except ValueError as error:  # a date or a number that cannot be
        raise ConfigError(f"{file}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: is nested too deeply") from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{file}: a mapping of keys to values is right, as `port: 8000`")
    return value


def named_nodes(settings: Mapping[str, Any]) -> list[str]:
    """Returns the nodes that units are bound to, in a config that has yet to be checked."""
    units = settings.get("units")
    some = [unit.get("node") for unit in units if isinstance(unit, dict)] if isinstance(units, list) else []
    return list(dict.fromkeys(node for node in some if isinstance(node, str)))


class _Loader(yaml.SafeLoader):
    """Refuses a key that is set twice, of which YAML would silently take the second."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"`{key.value}` is set twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_plan_settings(file: Path) -> dict[str, Any]:
    """Returns a plan as the settings of a config, whose units are the plan's. Raises ConfigError."""
    plan = read_plan(file)
    models: dict[str, dict[str, Any]] = {}
    drafted: dict[str, set[str]] = {}
    for unit in plan.units:
        try:
            unit.check_sleep()
        except ConfigError as error:
            raise ConfigError(f"{file}: {error.message}") from error
        for model in unit.models:
            if model.path is None:
                raise ConfigError(
                    f"{file}: {unit.name}: no path of {model.name!r}; plan with `path` for each model"
                )
            models[model.name] = {"path": model.path, "rate": max(model.rate, LEAST_RATE)}
            if model.slo:
                models[model.name]["slo"] = asdict(model.slo)
            drafted.setdefault(model.name, set()).add(model.speculation or "none")
            models[model.name]["acceptance"] = model.acceptance
    for name, ways in drafted.items():  # a config has one way for all units
        models[name]["speculation"] = min(ways) if len(ways) == 1 else "none"
    return {"models": models, "units": [_unit(unit) for unit in plan.units]}


def _unit(unit: PlannedUnit) -> dict[str, Any]:
    return {
        "models": [model.name for model in unit.models],
        "node": unit.node or None,
        "device": unit.place,
        "tensor_parallel": unit.tensor_parallel,
        **({"memory": unit.memory} if unit.memory else {"kv_memory": unit.kv_bytes}),
        "threads": unit.gpus if unit.device == CPU else "auto",
        "shares": {
            model.name: {
                "prefill": model.prefill_share,
                "decode": model.decode_share,
                "quota": model.quota,
            }
            for model in unit.models
        },
    }
