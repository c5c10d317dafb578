"""A fleet's engines: those that may be, and those that have a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvloom.serve.supervised import Role, Supervised
from kvloom.types.spec import EngineSpec


class Engines:
    """specs: of all that may be, by unit. running: those that have a process, or are about to."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        first: Sequence[str],
        role: Callable[[EngineSpec], Role],
        supervise: Callable[[Role], Supervised],
    ) -> None:
        self.specs = {spec.unit: spec for spec in specs}
        self._role = role
        self._supervise = supervise
        self.running = {name: supervise(role(self.specs[name])) for name in first}
        self._ending: dict[str, Supervised] = {}

    @property
    def every(self) -> list[Supervised]:
        """All that have a process, those too that are to lose it."""
        return [*self.running.values(), *self._ending.values()]

    @property
    def away(self) -> frozenset[str]:
        return frozenset(self.specs.keys() - self.running.keys())

    async def start(self, spec: EngineSpec) -> None:
        """Give a unit that has none a process; keep it alive until it is stopped, or cannot be started."""
        process = self.running[spec.unit] = self._supervise(self._role(spec))
        ending = self._ending.get(spec.unit)
        if ending is not None:
            await ending.ended()
        await process.run()
        if self.running.get(spec.unit) is process:
            del self.running[spec.unit]

    async def stop(self, unit: str) -> None:
        """Until its process has ended, if it has one."""
        process = self.running.pop(unit, None)
        if process is not None:
            self._ending[unit] = process
            process.end()
        if (ending := self._ending.get(unit)) is not None:
            await ending.ended()
            if self._ending.get(unit) is ending:
                del self._ending[unit]

    def forget(self, unit: str) -> None:
        """One that has no process is not to get one any more."""
        if unit not in self.running:
            self.specs.pop(unit, None)
