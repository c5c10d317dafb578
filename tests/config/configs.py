"""Configs that are loaded from a file beside a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvloom.config.config import Config
from kvloom.config.file import load_config
from kvloom.config.machine import Machine
from kvloom.types.errors import ConfigError

MACHINE = Machine(cores=4, memory=3 << 30)
AB = "models: {a: ./model, b: ./other}\n"


def load(
    folder: Path, text: str, flags: dict[str, Any] | None = None, machine: Machine = MACHINE, **models: str
) -> Config:
    file = folder / "fleet.yaml"
    file.write_text(text)
    return load_config(file, flags or {}, models, machine)


def refused(folder: Path, text: str, flags: dict[str, Any] | None = None, machine: Machine = MACHINE) -> str:
    """Returns why the config is refused, which is one line."""
    with pytest.raises(ConfigError) as error:
        load(folder, text, flags, machine)
    assert "\n" not in error.value.message
    return error.value.message
