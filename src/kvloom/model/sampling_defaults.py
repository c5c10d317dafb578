"""How a checkpoint wants to be sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from transformers.utils import cached_file

from kvloom.core.errors import ConfigError
from kvloom.core.request import SamplingDefaults

_FILE = "generation_config.json"


def read_sampling_defaults(path: str) -> SamplingDefaults:
    """What its generation_config.json itself says; transformers' class would add defaults of its own."""
    file = cached_file(path, _FILE, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return SamplingDefaults()
    try:
        said = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"its {_FILE} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise ConfigError(f"its {_FILE} is no object")
    names = SamplingDefaults.__struct_fields__
    wishes: dict[str, Any] = {name: said[name] for name in names if said.get(name) is not None}
    if said.get("do_sample") is False:
        wishes["temperature"] = 0.0
    try:
        return msgspec.convert(wishes, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"its {_FILE}: {error}") from error
