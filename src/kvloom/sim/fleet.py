"""A fleet in virtual time: production engines and router over modelled devices, links and wires."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from kvloom.core.client import Generator
from kvloom.core.clock import Clock
from kvloom.core.request import ModelCard
from kvloom.core.spec import EngineSpec
from kvloom.cost.shape import ModelShape
from kvloom.cost.work import CostModel
from kvloom.engine.engine import Engine
from kvloom.router.program import Program
from kvloom.router.rescheduling import Rescheduler
from kvloom.router.router import Router
from kvloom.sim.clock import LoopClock
from kvloom.sim.executor import Content, ModelledExecutor
from kvloom.sim.hosting import HostedMachine, HostedUnit, HostedWire
from kvloom.sim.links import Link, ModelledPlane, TimedLink
from kvloom.sim.rescheduling import Rescheduling, rescheduled
from kvloom.sim.wire import ModelledWire

CONTEXT = 8192  # tokens, of a model whose spec sets none
DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}  # by the bytes of a number

PCIE4: Final = 32e9  # bytes a second, one way
LATENCY: Final = 20e-6  # seconds from one unit's memory to another's


@dataclass(frozen=True, slots=True)
class SimulatedUnit:
    """One engine to be. shapes: by model of the spec. compute: units that its devices are shared out in.
    bandwidth: of its way out, in bytes a second. overhead: seconds of the engine's own work before a job of
    so many sequences. stride: decode steps that may be one job."""

    spec: EngineSpec
    shapes: Mapping[str, ModelShape]
    compute: int
    cost: CostModel
    bandwidth: float = PCIE4
    overhead: Callable[[int], float] | None = None
    stride: int = 4096


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """server: what clients ask; the router, or the gateway that it works in. rescheduler: None where no
    fleet scheduler runs."""

    router: Router
    engines: Mapping[str, Engine]
    server: Generator
    rescheduler: Rescheduler | None = None


def timed_link(unit: SimulatedUnit) -> Link:
    return TimedLink(unit.bandwidth, LATENCY)


@asynccontextmanager
async def simulated(
    units: Sequence[SimulatedUnit],
    program: Program,
    *,
    delay: float = 0.0003,
    link: Callable[[SimulatedUnit], Link] = timed_link,
    machine: HostedMachine | None = None,
    rescheduling: Rescheduling | None = None,
) -> AsyncIterator[SimulatedFleet]:
    """The fleet while it runs, on a virtual loop. delay: of the wire, in seconds, one way. link: a unit's
    way out. machine: what all units run on, where its own work counts. rescheduling: of the fleet scheduler;
    None where there is none."""
    clock, plane = LoopClock(asyncio.get_running_loop()), ModelledPlane()
    engines: dict[str, Engine] = {}
    wires: dict[str, ModelledWire] = {}
    for unit in units:
        host = machine.unit(unit.overhead) if machine else None
        executor, name = modelled_executor(unit, host=host), unit.spec.unit
        transport = plane.join(name, executor.blocks, link(unit))
        engine = engines[name] = Engine(executor, transport, unit.spec, clock)
        wires[name] = _wire(engine, clock, delay, host)
    async with asyncio.TaskGroup() as group:
        for engine in engines.values():
            group.create_task(engine.run())
        try:
            async with Router(wires, program, clock) as router, AsyncExitStack() as stack:
                moving = rescheduling and rescheduled(router, clock, rescheduling)
                rescheduler = await stack.enter_async_context(moving) if moving else None
                server = machine.server(router) if machine else router
                yield SimulatedFleet(router, engines, server, rescheduler)
        finally:
            for engine in engines.values():
                await engine.stop()


def _wire(engine: Engine, clock: Clock, delay: float, host: HostedUnit | None) -> ModelledWire:
    return ModelledWire(engine, clock, delay) if host is None else HostedWire(engine, clock, delay, host.loop)


def modelled_executor(
    unit: SimulatedUnit, content: Content | None = None, host: HostedUnit | None = None
) -> ModelledExecutor:
    """The unit's devices. content: what their pages hold; nothing where it is left out. host: what sees to
    the engine's own work, step by step."""
    spec = unit.spec
    contexts = {model.name: model.max_context or CONTEXT for model in spec.models}
    return ModelledExecutor(
        {name: simulated_card(name, shape, contexts[name]) for name, shape in unit.shapes.items()},
        {name: shape.geometry(spec.block_bytes) for name, shape in unit.shapes.items()},
        blocks=spec.kv_bytes // spec.block_bytes,
        compute=unit.compute,
        cost=unit.cost,
        content=content,
        overhead=None if host else unit.overhead,
        stride=1 if host else unit.stride,
        host=host,
    )


def simulated_card(name: str, shape: ModelShape, context: int) -> ModelCard:
    """The card of a model of which only the shape is known."""
    return ModelCard(
        name=name,
        path="",
        context_length=context,
        vocab_size=shape.vocab,
        tokenizer="{}",
        chat_template=None,
        special_tokens={},
        eos_token_ids=(),
        bos_token_id=None,
        add_bos=False,
        architecture="",
        parameters=shape.parameters,
        dtype=DTYPES[shape.itemsize],
    )
