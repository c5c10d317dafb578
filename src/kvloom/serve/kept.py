"""What a gateway keeps for its successor."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from kvloom.serve.orders import Standing
from kvloom.types.spec import ProgramSpec


class Kept:
    """tell: hands the supervisor what stands, each time that it changes."""

    def __init__(self, standing: Standing, tell: Callable[[Standing], None]) -> None:
        self.standing = standing
        self._tell = tell

    def program(self, program: ProgramSpec) -> None:
        """This one is set from now on."""
        self.standing = replace(self.standing, program=program)
        self._tell(self.standing)

    def leaving(self, units: Mapping[str, float | None]) -> None:
        """These units are to lose their processes from now on, and have so many seconds for it. One that gets
        another process takes requests."""
        drained = self.standing.drained - units.keys()
        self.standing = replace(self.standing, leaving=dict(units), drained=drained)
        self._tell(self.standing)

    def drained(self, units: frozenset[str]) -> None:
        """These units are drained from now on."""
        self.standing = replace(self.standing, drained=units)
        self._tell(self.standing)
