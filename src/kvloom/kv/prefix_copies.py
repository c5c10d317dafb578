"""How many copies of a prefix a fleet keeps, by its use: a pure function of what the router knows. It is a
global policy beside the engines' own evictions (Microserving, section 3.5)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

MOST_STEPS: Final = 4  # that are taken at a time
LEAST_USES: Final = 4.0  # of a prefix, before it is copied
COLD: Final = 0.5  # uses, below which a prefix needs one copy only: none in two windows


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """A prefix that several requests begin with."""

    prefix: bytes
    """Its name."""
    tokens: int
    uses: float
    """Requests of late that began with it."""
    holders: frozenset[str]
    """The units that hold all of it."""
    copied: frozenset[str] = frozenset()
    """The units to which this policy has had it copied."""


@dataclass(frozen=True, slots=True)
class CopyView:
    """Holds what the router knows of one model's prefixes. Units that are not named in `loads` are not up."""

    prefixes: tuple[PrefixUse, ...]
    requests: float
    """All requests of the model of late."""
    loads: Mapping[str, int]
    """Tokens that each unit has to compute."""
    most: int
    """The most copies that a prefix may have."""


@dataclass(frozen=True, slots=True)
class CopyPrefix:
    """Lets `source` send the prefix to `target`."""

    prefix: bytes
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class EvictPrefix:
    """Lets `unit` drop the prefix."""

    prefix: bytes
    unit: str


def copies_wanted(use: PrefixUse, view: CopyView) -> int:
    """Returns the number of copies that the fleet is to keep of a prefix. A prefix whose part of the requests
    is what n units of all answer has n copies; one that few ask for has one."""
    if use.uses < LEAST_USES or not view.requests:
        return 1
    part = min(1.0, use.uses / view.requests)
    return max(1, min(view.most, len(view.loads), math.ceil(part * len(view.loads))))


def plan_copies(view: CopyView) -> list[CopyPrefix | EvictPrefix]:
    """Returns the next steps to the copies that are wanted: of what saves most tokens first, from the holder
    that has least to do to the unit that has. Of what is cold, surplus copies go that were made so; what
    units have computed themselves is left to their own evictions, which know whether they need the room."""
    worth: Sequence[PrefixUse] = sorted(view.prefixes, key=lambda use: (-use.uses * use.tokens, use.prefix))
    steps = [step for use in worth for step in _steps(use, view)]
    return steps[:MOST_STEPS]


def _steps(use: PrefixUse, view: CopyView) -> Iterator[CopyPrefix | EvictPrefix]:
    def load(unit: str) -> tuple[int, str]:
        return view.loads[unit], unit

    holders = sorted(use.holders & view.loads.keys(), key=load)
    others = sorted(view.loads.keys() - use.holders, key=load)
    wanted = copies_wanted(use, view)
    if holders:
        for target in others[: max(0, wanted - len(holders))]:
            yield CopyPrefix(use.prefix, holders[0], target)
    if use.uses < COLD:
        surplus = [unit for unit in reversed(holders) if unit in use.copied][: max(0, len(holders) - wanted)]
        for unit in surplus:
            yield EvictPrefix(use.prefix, unit)
