"""A program and its options as they are typed after `kvloom program set`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from kvloom.config_fields import parse_program
from kvloom.types.errors import ConfigError
from kvloom.types.spec import ProgramSpec


def read_options(name: str, texts: Sequence[str]) -> ProgramSpec:
    """A program's name and its options, KEY=VALUE each; a value that is no JSON is a text. Raises
    ConfigError."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals) or key == "name":
            raise ConfigError(f"--option {text}: KEY=VALUE is right, as `ratio=0.2`")
        if key in settings:
            raise ConfigError(f"--option {key}: given twice")
        settings[key] = _value(value)
    try:
        return parse_program({"name": name, **settings})
    except ValueError as error:
        raise ConfigError(f"program: {error}") from error


def show(program: ProgramSpec) -> str:
    """As it would be typed after `kvloom program set`."""
    options = ["--option " + shlex.quote(f"{key}={_text(value)}") for key, value in program.options.items()]
    return " ".join([program.name, *options])


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(value: object) -> str:
    return value if isinstance(value, str) and _value(value) == value else json.dumps(value)
