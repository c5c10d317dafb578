"""Models and their adapters in the config: paths, number formats, objectives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from kvloom.config.fields import (
    ConfigSection,
    Count,
    ObjectiveSeconds,
    Revision,
    Sha256,
    Surroundings,
    no_bool,
)
from kvloom.types.errors import nearest
from kvloom.types.geometry import KVDtype
from kvloom.types.spec import (
    AdapterSpec,
    Dtype,
    Slo,
)

ADAPTER_CONFIG: Final = "adapter_config.json"
GGUF_SUFFIX: Final = ".gguf"  # of a model that is one file
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.:/@+-]{0,127}")


def check_name(name: str) -> None:
    """Raises ValueError if a model cannot have this name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:140]!r} is no name; letters, digits and .:/@+-_ are right, 128 at most")


class SloConfig(ConfigSection):
    """A model's service-level objective: the time to a request's first token, and the mean time between two
    tokens after it."""

    ttft: ObjectiveSeconds = Slo().ttft
    tpot: ObjectiveSeconds = Slo().tpot

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft, self.tpot)


class ModelConfig(ConfigSection):
    """A model, whose short form is just the path, or an adapter of one."""

    base: Annotated[str, Field(min_length=1)] | None = None
    """The model that an adapter is for."""
    adapter: str | None = None
    """The folder of a LoRA adapter, as PEFT saves it."""
    path: str
    """A checkpoint directory, a GGUF file, or a hub id."""
    revision: Revision = None
    sha256: Sha256 = None
    dtype: Dtype = "auto"
    kv_dtype: KVDtype = "auto"
    speculation: Annotated[str, Field(min_length=1)] = "none"
    """The drafter of tokens that decode steps verify: `none`, `ngram`, or a smaller model of the same
    units."""
    acceptance: Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1)] = 0.0
    """The probability that a drafted token is right, which plans and simulations are to assume."""
    rate: Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=1e9)] = 1.0
    max_context: Count | None = None
    slo: SloConfig = SloConfig()

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, dict) and not value.keys().isdisjoint(("base", "adapter")):
            return {"path": "", **value}
        return {"path": value} if isinstance(value, str) else value

    @field_validator("path")
    @classmethod
    def _exists(cls, value: str, info: ValidationInfo) -> str:
        if not value and any(info.data.get(key) is not None for key in ("base", "adapter")):
            return value
        return resolve_model(value, Surroundings.of(info).folder)

    @field_validator("adapter")
    @classmethod
    def _is_adapter(cls, value: str, info: ValidationInfo) -> str:
        return resolve_adapter(value, Surroundings.of(info).folder)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.base is None and self.adapter is None:
            return self
        beside = sorted(self.model_fields_set - {"base", "adapter", "" if self.path else "path"})
        if self.base is None or self.adapter is None or beside:
            said = f"{beside[0]} beside `adapter`" if beside else "one of `base` and `adapter`"
            raise ValueError(f"{said}; an adapter has both, and the rest is its base's")
        return self


def resolve_adapter(value: str, folder: Path) -> str:
    """Returns the folder of the adapter that `value` names, seen from `folder`. Raises ValueError."""
    path = folder / Path(value).expanduser()
    if "\0" in value or not (path / ADAPTER_CONFIG).is_file():
        raise ValueError(f"{path} holds no {ADAPTER_CONFIG}; the folder of a LoRA adapter is right")
    return str(path.resolve())


def adapters_of(models: Mapping[str, ModelConfig]) -> dict[str, tuple[AdapterSpec, ...]]:
    """Returns the adapters of each model that has any. Raises ValueError for a base that is none."""
    found: dict[str, list[AdapterSpec]] = {}
    wholes = [name for name, model in models.items() if model.adapter is None]
    for name, model in models.items():
        if model.adapter is None or model.base is None:
            continue
        if model.base not in wholes:
            known = nearest(model.base, wholes) if wholes else "a model that is no adapter is right"
            raise ValueError(f"models.{name}.base: no model {model.base!r}; {known}")
        found.setdefault(model.base, []).append(AdapterSpec(name, model.adapter))
    return {name: tuple(adapters) for name, adapters in found.items()}


def resolve_model(value: str, folder: Path) -> str:
    """Returns the checkpoint directory or the GGUF file that `value` names, seen from `folder`, or the hub id
    that it is. Raises ValueError."""
    if not value.strip() or "\0" in value:
        raise ValueError(f"{value!r} is no path and no hub id")
    path = folder / Path(value).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{path} holds no config.json; the directory of a Hugging Face checkpoint is right"
            )
        return str(path.resolve())
    gguf = path.suffix == GGUF_SUFFIX
    if gguf and path.is_file():
        return str(path.resolve())
    if gguf or value.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(value):
        kind = "is a file" if path.is_file() else "does not exist"
        raise ValueError(
            f"{path} {kind}; a checkpoint directory, a file *{GGUF_SUFFIX} or a hub id `org/name` is right"
        )
    return value
