"""What a paper found in one experiment, and what is found here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from msgspec import Struct

Scale = Literal["small", "full"]
Tell = Callable[[str, float], None]  # what is done now, and the part of the experiment done already

AGREES: Final = 0.10  # by which the larger of two numbers may exceed the smaller
NEAR: Final = 0.25


def part_of(tell: Tell, at: int, of: int) -> Tell:
    """To tell of the `at`-th of so many parts, counted from 0."""
    return lambda what, part: tell(what, (at + part) / of)


class Cell(Struct, frozen=True, kw_only=True):
    """One number, and where it stands. paper: None where the paper tells none."""

    row: str
    column: str
    paper: float | None
    ours: float

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return self.ours / self.paper if self.paper else None

    @property
    def verdict(self) -> str:
        ratio = self.ratio
        if ratio is None:
            return ""
        off = (max(ratio, 1 / ratio) if ratio > 0 else float("inf")) - 1
        return "agrees" if off <= AGREES else "near" if off <= NEAR else "differs"


class Claim(Struct, frozen=True, kw_only=True):
    """What the paper says of its figure. found: what is found here, in a few words."""

    said: str
    holds: bool
    found: str

    @property
    def verdict(self) -> str:
        return "holds" if self.holds else "fails"


class Grid(Struct, frozen=True, kw_only=True):
    """Numbers of ours that are drawn in the paper, and not told: as text, a row each."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Report(Struct, frozen=True, kw_only=True):
    """Of one figure or table. name: `figure 10`."""

    name: str
    title: str
    cells: tuple[Cell, ...] = ()
    claims: tuple[Claim, ...] = ()
    grids: tuple[Grid, ...] = ()


@dataclass(frozen=True, slots=True)
class Experiment:
    """name: of its figure (`10`) or table (`table-3`). run: raises ConfigError."""

    name: str
    run: Callable[[Scale, Tell], Report]
