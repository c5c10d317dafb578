"""An engine process without a device: the real engine, verbs and server over a null executor.

python -m benchmarks.null_engine --socket PATH --secret S --period 0.01. Prints `ready` once it answers.
"""

from __future__ import annotations

import argparse
import asyncio
import signal

import uvloop

from benchmarks.null_executor import NullExecutor, NullTransport, null_spec
from kvloom.api.verbs import create_verbs
from kvloom.engine.engine import Engine
from kvloom.serve.server import Server
from kvloom.types.clock import WallClock

SHAPES = {"m": "B"}
BLOCKS = 1 << 18


async def serve(socket: str, secret: str, period: float) -> None:
    """Until SIGTERM."""
    executor = NullExecutor(SHAPES, blocks=BLOCKS, compute=1, period=period)
    engine = Engine(executor, NullTransport(), null_spec(SHAPES, blocks=BLOCKS), WallClock())
    server = Server(
        create_verbs(engine, secret=secret),
        unix=socket,
        grace=1,
        ready=lambda: print("ready", flush=True),
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.end)
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        await server.serve()
        await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--period", type=float, default=0.0, help="seconds a job takes")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.socket, options.secret, options.period))


if __name__ == "__main__":
    main()
