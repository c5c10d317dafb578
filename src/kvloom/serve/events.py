"""What a supervised process tells its supervisor of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.serve.orders import Asked

if TYPE_CHECKING:
    from kvloom.serve.supervised import Supervised


@dataclass(frozen=True, slots=True)
class Doing:
    process: Supervised
    text: str


@dataclass(frozen=True, slots=True)
class Answers:
    """renewed: it is the one that `restart` has asked for. again: another one has answered before it."""

    process: Supervised
    renewed: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True)
class Asks:
    """It wants something of the supervisor."""

    process: Supervised
    report: Asked


@dataclass(frozen=True, slots=True)
class Lost:
    """It has died, `how`, and starts again in `pause` seconds. renewed: it was the one that `restart` has
    asked for, and never answered."""

    process: Supervised
    how: str
    pause: float
    renewed: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """It died before it ever answered, and is not started again. refused: it could not use its order."""

    process: Supervised
    how: str
    refused: bool


Event = Doing | Answers | Asks | Lost | Failed
