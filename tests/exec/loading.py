"""Loading one checkpoint, and the one line that refuses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvloom.exec.cpu.executor import CPU
from kvloom.exec.loader import LoadedModel, load_model
from kvloom.types.errors import ConfigError
from kvloom.types.spec import ModelSpec

BLOCK = 2048


def load(path: Path | str, **changes: Any) -> LoadedModel:
    return load_model(ModelSpec(name="mine", path=str(path), **changes), BLOCK, CPU)


def refusal(path: Path | str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, **changes)
    message = caught.value.message
    assert message.startswith("models.mine: ")
    assert "\n" not in message
    assert len(message) < 600
    return message


def reconfigure(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
