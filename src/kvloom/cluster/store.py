"""A fleet's specification in a file, so that a controller that starts anew goes on with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from kvloom.cluster.state import FleetSpec
from kvloom.types.errors import ConfigError
from kvloom.types.files import replacing

VERSION: Final = 1
"""The version of the file's form."""


class Kept(Struct, frozen=True, kw_only=True):
    """The content of the file."""

    version: int
    life: int
    """The number of controllers that there have been."""
    spec: FleetSpec


class SpecStore(Protocol):
    """Keeps the specification for a controller."""

    def load(self) -> tuple[FleetSpec, int] | None:
        """Returns what was saved last, with the number of controllers that there have been; None if nothing
        was. Raises ConfigError if it cannot be used."""

    def save(self, spec: FleetSpec, life: int) -> None:
        """Keeps the specification as a whole, or leaves the one that was kept before."""


class SpecFile:
    """Satisfies `SpecStore` with a file, which is replaced each time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> tuple[FleetSpec, int] | None:
        try:
            said = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}; a file that can be read is right") from error
        try:
            version = msgspec.json.decode(said, type=_Version).version
            if version != VERSION:
                raise ConfigError(
                    f"{self._path}: a fleet of version {version}; version {VERSION} is right, or no such "
                    "file, with which the config is served"
                )
            kept = msgspec.json.decode(said, type=Kept)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{self._path}: cut short, or no fleet's file ({error}); one that a controller has written "
                "is right, or no such file, with which the config is served"
            ) from error
        return kept.spec, kept.life

    def save(self, spec: FleetSpec, life: int) -> None:
        with replacing(self._path) as file:
            file.write(msgspec.json.encode(Kept(version=VERSION, life=life, spec=spec)))
            file.flush()
            os.fsync(file.fileno())


class _Version(Struct, frozen=True):
    version: int
