"""What the fleet scheduler and a gateway say to each other about requests that are to move."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvloom.core.load import UnitLoad
from kvloom.core.replicas import Group


class Pair(Struct, frozen=True, order=True):
    """Two units: requests are to move from the one to the other."""

    source: str
    destination: str


class Pairs(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """These pairs stand for `seconds` from now, unless others are told, and none beside them. floor: freeness
    that a destination keeps, in decode steps: what would leave it with less does not move there."""

    pairs: tuple[Pair, ...]
    seconds: Annotated[float, Meta(gt=0)]
    floor: float = 0.0


class FleetState(Struct, frozen=True, kw_only=True):
    """loads: of the units that answer, by name; one that takes no requests drains. waiting: requests that
    nobody can answer yet, by model. groups: units that come and go."""

    loads: dict[str, UnitLoad]
    waiting: dict[str, int] = {}
    groups: dict[str, Group] = {}
