"""The settings of each model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from kvloom.config.fields import ConfigSection, Count, Surroundings, no_bool
from kvloom.types.spec import Dtype

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
