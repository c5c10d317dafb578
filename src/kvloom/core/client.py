"""How anyone calls an engine: over HTTP in the real world, directly in the simulated one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from kvloom.core.load import UnitLoad
from kvloom.core.request import Event, ModelCard, StartGenerate


class EngineClient(Protocol):
    """Every method raises KvloomError: the engine's own, or Unavailable where it cannot be reached."""

    async def models(self) -> list[ModelCard]:
        """The models the engine serves."""

    def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        """Frames of events, until each choice has had its EndEvent. Closing the generator early aborts the
        request and gives its blocks back within one job. Errors of admission are raised on the first
        step, before any event."""

    async def abort(self, request: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, wherever it stands; unknown or ended ones are fine."""

    async def load(self) -> UnitLoad: ...
