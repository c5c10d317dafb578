"""A unit's place in a run with faults: an engine that dies with all it knows, and another one after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from kvloom.core.clock import Clock
from kvloom.engine.engine import Engine
from kvloom.sim.device import WatchedDevice
from kvloom.sim.executor import Content, ModelledExecutor
from kvloom.sim.faults import Mishaps
from kvloom.sim.fleet import SimulatedUnit, modelled_executor
from kvloom.sim.journal import Journal
from kvloom.sim.links import ModelledPlane, ModelledTransport, TimedLink
from kvloom.sim.witness import Witness

LATENCY: Final = 1e-4  # seconds from one unit's memory to another's


class Process:
    """One engine from its start to its end. over: done at that end, whatever its tasks still tidy up.
    crashed: called with what it fails of until then."""

    def __init__(
        self,
        engine: Engine,
        executor: ModelledExecutor,
        transport: ModelledTransport,
        crashed: Callable[[BaseException], None],
    ) -> None:
        self.engine = engine
        self.executor = executor
        self.transport = transport
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._crashed = crashed
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.running = self.serve(engine.run())

    def serve(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """The engine's loop, or a call to it. It ends with the process."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def end(self) -> None:
        self.over.set_result(None)
        self.executor.halt()
        for task in list(self._tasks):
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.over.done():
            self._crashed(error)


class Host:
    """process: None while there is none. witnesses: of all its engines. crashed: called with what an engine
    failed of."""

    def __init__(
        self,
        unit: SimulatedUnit,
        plane: ModelledPlane,
        clock: Clock,
        mishaps: Mishaps,
        journal: Journal,
        crashed: Callable[[BaseException], None],
    ) -> None:
        self.name = unit.spec.unit
        self.unit = unit
        self.process: Process | None = None
        self.witnesses: list[Witness] = []
        self._plane = plane
        self._clock = clock
        self._mishaps = mishaps
        self._journal = journal
        self._crashed = crashed

    def start(self) -> None:
        unit, spec = self.unit, self.unit.spec
        blocks = spec.kv_bytes // spec.block_bytes
        geometries = {name: shape.geometry(spec.block_bytes) for name, shape in unit.shapes.items()}
        witness = Witness(geometries, blocks, next(iter(unit.shapes.values())).vocab)
        self.witnesses.append(witness)
        executor = modelled_executor(unit, self._device(witness))
        link = TimedLink(unit.bandwidth, LATENCY)
        transport = self._plane.join(self.name, blocks, link, arena=witness.arena)
        engine = Engine(executor, transport, spec, self._clock)
        self.process = Process(engine, executor, transport, self._crashed)
        self._journal("engine", self.name, "starts,", blocks, "blocks")

    def _device(self, witness: Witness) -> Content:
        return WatchedDevice(self.name, witness, self._mishaps, self._journal)

    def kill(self) -> None:
        """Nothing of the process does anything any more. What its tasks still tidy up is their own."""
        gone = self.process
        if gone is not None:
            self._journal("engine", self.name, "dies")
            self._out(gone)

    async def stop(self) -> None:
        """As it ends when it is asked to: what it has ends with an error, and it takes no more."""
        gone = self.process
        if gone is not None:
            self._journal("engine", self.name, "stops")
            await gone.engine.stop()
            await asyncio.wait([gone.running])
            if self.process is gone:
                self._out(gone)

    def _out(self, gone: Process) -> None:
        self.process = None
        self._plane.kill(gone.transport)
        gone.end()
