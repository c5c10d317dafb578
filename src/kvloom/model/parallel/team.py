"""The ranks of a unit, as each of them sees the others while they load."""

from __future__ import annotations

from typing import Protocol

from kvloom.model.parallel.group import Group


class Team(Protocol):
    @property
    def group(self) -> Group: ...

    def meet(self) -> None:
        """Wait until all ranks are here, however long they load. Raises Unavailable where one has ended,
        ConfigError where one cannot use what it was given."""
