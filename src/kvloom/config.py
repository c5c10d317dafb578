"""What to serve and how: one frozen, validated config out of a YAML file and flags.

Everything wrong with it is a ConfigError of one line that names the key and says what would be right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvloom.config_errors import explain
from kvloom.core.errors import ConfigError
from kvloom.core.spec import Dtype, EngineSpec, ModelSpec, Policy
from kvloom.machine import Machine
from kvloom.sizes import parse_size, show_size

DEMO: Final = Path(__file__).parent / "demo"
DEMO_SETTINGS: Final = {"block_bytes": "4KiB", "kv_memory": "64MiB"}
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.:/@+-]{0,127}")


def _power_of_two(size: int) -> int:
    if size < 64 or size & (size - 1):
        raise ValueError(f"{size} bytes; a power of two and at least 64 is right, as `16KiB`")
    return size


def _no_bool(value: Any) -> Any:
    """`yes` is a bool to YAML and 1 to Python."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()!r}; a number is right")
    return value


Size = Annotated[int, BeforeValidator(parse_size)]
Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=1 << 20)]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a value is checked against. folder: where relative paths start."""

    folder: Path
    machine: Machine

    @staticmethod
    def of(info: ValidationInfo) -> Surroundings:
        assert isinstance(info.context, Surroundings)
        return info.context


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class ModelConfig(_Section):
    """A model: `path` is a checkpoint directory or a hub id. Short form: just the path."""

    path: str
    dtype: Dtype = "auto"
    rate: Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=1e9)] = 1.0
    max_context: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("path")
    @classmethod
    def _exists(cls, value: str, info: ValidationInfo) -> str:
        return resolve_model(value, Surroundings.of(info).folder)


class Config(_Section):
    """Resolved: `auto` has become a number and a relative path an absolute one."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=65535)] = 8000
    block_bytes: Annotated[Size, AfterValidator(_power_of_two)] = 16 << 10
    kv_memory: Size = Field(default="auto", validate_default=True)
    policy: Policy = "adbs"
    max_running: Count = 256
    max_waiting: Count = 1024
    chunk_tokens: Count = 512
    threads: Count = Field(default="auto", validate_default=True)
    api_key_file: Path | None = None
    max_body: Annotated[Size, Field(ge=1024, le=1 << 30)] = 8 << 20
    models: Annotated[dict[str, ModelConfig], Field(min_length=1)]

    @field_validator("kv_memory", mode="before")
    @classmethod
    def _fits(cls, value: Any, info: ValidationInfo) -> Any:
        machine = Surroundings.of(info).machine
        block: int = info.data.get("block_bytes", 0)
        if value == "auto":
            return max(machine.memory // 3, block)
        size = parse_size(value)
        if size < block:
            raise ValueError(
                f"{show_size(size)} is less than one block; at least {show_size(block)} is right"
            )
        if size > machine.memory:
            have = show_size(machine.memory)
            raise ValueError(
                f"{show_size(size)} is more than the {have} available here; less, or `auto`, is right"
            )
        return size

    @field_validator("threads", mode="before")
    @classmethod
    def _cores(cls, value: Any, info: ValidationInfo) -> Any:
        cores = Surroundings.of(info).machine.cores
        if value == "auto":
            return cores
        if isinstance(value, int) and value > cores:
            raise ValueError(f"{value} of {cores} cores; 1 to {cores}, or `auto`, is right")
        return value

    @field_validator("api_key_file")
    @classmethod
    def _readable(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is None:
            return None
        path = Surroundings.of(info).folder / value.expanduser()
        read_keys(path)
        return path

    @field_validator("models")
    @classmethod
    def _named(cls, value: dict[str, ModelConfig]) -> dict[str, ModelConfig]:
        for name in value:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{name[:140]!r} is no name; letters, digits and .:/@+-_ are right, 128 at most"
                )
        return value

    def api_keys(self) -> frozenset[str]:
        try:
            return frozenset() if self.api_key_file is None else read_keys(self.api_key_file)
        except ValueError as error:
            raise ConfigError(f"api_key_file: {error}") from error

    def engine(self) -> EngineSpec:
        return EngineSpec(
            models=tuple(ModelSpec(name=name, **model.model_dump()) for name, model in self.models.items()),
            kv_bytes=self.kv_memory,
            block_bytes=self.block_bytes,
            policy=self.policy,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            chunk_tokens=self.chunk_tokens,
            threads=self.threads,
        )


def resolve_model(value: str, folder: Path) -> str:
    """The checkpoint directory `value` names from `folder`, or the hub id that it is. Raises ValueError."""
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


def read_keys(path: Path) -> frozenset[str]:
    """One key a line; empty lines and those that start with # do not count. Raises ValueError."""
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; a text file with one key a line is right") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text; one key a line is right") from error
    keys = frozenset(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"{path} holds no key; one key a line is right")
    return keys


def build_config(
    settings: Mapping[str, Any], folder: Path, machine: Machine, origin: Mapping[str, str]
) -> Config:
    """`settings` as a Config. origin: how to name a key that was not set by the key itself (a flag)."""
    try:
        return Config.model_validate(dict(settings), context=Surroundings(folder, machine))
    except ValidationError as error:
        raise ConfigError(explain(error, Config, origin)) from error


def demo_settings() -> dict[str, Any]:
    """The fleet that this package ships."""
    names = sorted(path.parent.name for path in DEMO.glob("*/config.json"))
    if not names:
        raise ConfigError("the demo fleet is not in this installation; --model NAME=PATH_OR_HUB_ID is right")
    return DEMO_SETTINGS | {"models": {name: str(DEMO / name) for name in names}}
