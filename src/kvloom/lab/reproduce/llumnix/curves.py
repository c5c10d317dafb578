"""The published curves of figure 11, which are read where they lie."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from kvloom.types.errors import ConfigError

FOLDER: Final = "KVLOOM_DATA"  # the variable that names where the file is
NAME: Final = "llumnix_fig11.json"


class Curves(Struct, frozen=True):
    """Curves of (requests a second, value), by workload, measure and system."""

    figures: dict[str, dict[str, dict[str, list[tuple[float, float]]]]] = {}

    def at(self, traffic: str, measure: str, system: str, rate: float) -> float | None:
        """Returns None if nothing was published, or the file is not here."""
        curve = self.figures.get(traffic, {}).get(measure, {}).get(system, [])
        return next((value for at, value in curve if abs(at - rate) < 1e-6), None)


def read_curves() -> Curves:
    """Empty where the variable is not set. Raises ConfigError."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return Curves()
    path = Path(folder, NAME)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Curves)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {FOLDER} names a folder with {NAME}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not the curves of figure 11: {error}") from error
