"""A process of engines without a device: real engines, verbs and servers over null executors.

python -m benchmarks.null_engine --folder F --secret S --period 0.01. Its sockets are F/unit-0.sock and so on.
Prints `ready` once all answer.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop

from benchmarks.null_executor import NullExecutor, NullTransport, null_spec
from kvloom.api.verbs import create_verbs
from kvloom.engine.engine import Engine
from kvloom.serve.server import HttpServer
from kvloom.types.clock import WallClock

BLOCKS = 1 << 18


@dataclass(frozen=True, slots=True)
class Shape:
    """What the process serves."""

    units: int = 1
    models: int = 1
    """Models of each unit; all units have the same."""
    context: int | None = None
    """Tokens of the longest sequence; None for the checkpoint's."""

    @property
    def names(self) -> list[str]:
        """The models, `m` first."""
        return ["m", *(f"m{i}" for i in range(1, self.models))]

    @property
    def sockets(self) -> dict[str, str]:
        """The sockets' file names, by unit."""
        return {f"unit-{i}": f"unit-{i}.sock" for i in range(self.units)}


async def serve(folder: Path, secret: str, period: float, shape: Shape) -> None:
    """Serves until SIGTERM."""
    waiting = set(shape.sockets)
    shapes = dict.fromkeys(shape.names, "B")
    pairs = []
    for unit, socket in shape.sockets.items():
        executor = NullExecutor(shapes, blocks=BLOCKS, compute=1, period=period, context=shape.context)
        engine = Engine(executor, NullTransport(), null_spec(shapes, blocks=BLOCKS), WallClock())
        verbs = create_verbs(engine, secret=secret)
        ready = partial(_answers, unit, waiting)
        pairs.append((engine, HttpServer(verbs, unix=str(folder / socket), grace=1, ready=ready)))

    def end() -> None:
        for _, server in pairs:
            server.end()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    async with asyncio.TaskGroup() as group:
        for engine, server in pairs:
            group.create_task(engine.run())
            group.create_task(_until_ended(engine, server))


def _answers(unit: str, waiting: set[str]) -> None:
    waiting.remove(unit)
    if not waiting:
        print("ready", flush=True)


async def _until_ended(engine: Engine, server: HttpServer) -> None:
    await server.serve()
    engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--period", type=float, default=0.0, help="seconds a job takes")
    parser.add_argument("--units", type=int, default=1)
    parser.add_argument("--models", type=int, default=1, help="of each unit")
    parser.add_argument("--context", type=int, help="tokens of the longest sequence")
    options = parser.parse_args()
    shape = Shape(options.units, options.models, options.context)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.folder, options.secret, options.period, shape))


if __name__ == "__main__":
    main()
