"""Data that others published beside their papers. They are no part of kvloom, and are read where they lie."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from kvloom.types.errors import ConfigError

FOLDER: Final = "KVLOOM_DATA"  # the variable that names the folder of the files
T = TypeVar("T")


def read_published(name: str, kind: type[T], what: str) -> T | None:
    """Returns the JSON of a file; None if the variable is not set. `what` names the file's contents for the
    reader. Raises ConfigError."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    path = Path(folder, name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {FOLDER} names a folder with {name}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not {what}: {error}") from error
