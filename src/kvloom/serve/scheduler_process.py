"""The process of the fleet scheduler: `python -m kvloom.serve.scheduler_process FD NAME`.

It keeps nothing: gateways may come and go, and so may this process. Never imports torch, nor what serves.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import msgspec

from kvloom.cluster.scheduler import EveryGateway, FleetScheduler
from kvloom.engine.freeness import Thresholds
from kvloom.serve.processes.messages import Ready, SchedulerOrder
from kvloom.serve.processes.parent import Parent, run_child
from kvloom.types.clock import WallClock, together
from kvloom.types.errors import Unavailable
from kvloom.types.service import FleetState, Pairs, Steps

ANSWER_SECONDS: Final = 10.0  # more than the gateway itself waits for a unit


class FleetClient:
    """Satisfies `FleetControl`. Whoever listens at the socket by now answers. It keeps nothing between
    calls."""

    def __init__(self, path: str, *, secret: str) -> None:
        """path: that of a Unix socket, at which no stranger can call, so that none can be in the way."""
        self._path = path
        self._head = f"host: gateway\r\nauthorization: Bearer {secret}\r\nconnection: close\r\n"

    async def state(self) -> FleetState:
        answer = await self._call("GET", "/admin/fleet")
        try:
            return msgspec.json.decode(answer, type=FleetState)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"the gateway's answer cannot be read: {error}") from error

    async def pair(self, pairs: Pairs) -> None:
        await self._call("POST", "/admin/pairs", msgspec.json.encode(pairs))

    async def scale(self, steps: Steps) -> None:
        await self._call("POST", "/admin/scale", msgspec.json.encode(steps))

    async def _call(self, method: str, path: str, body: bytes = b"") -> bytes:
        about = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
        asked = f"{method} {path} HTTP/1.1\r\n{self._head}{about}\r\n".encode() + body
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                head, answer = await self._answered(asked)
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError) as error:
            reason = str(error) or f"no answer in {ANSWER_SECONDS:g} s"
            raise Unavailable(f"the gateway cannot be reached: {reason}") from error
        if not head.startswith(b"HTTP/1.1 200 "):
            raise Unavailable(f"the gateway refuses {path}: {answer[:300].decode(errors='replace')}")
        return answer

    async def _answered(self, asked: bytes) -> tuple[bytes, bytes]:
        """Returns head and body. Raises EOFError if they are not whole."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            writer.write(asked)
            head = await reader.readuntil(b"\r\n\r\n")
            return head, await reader.readexactly(_length(head))
        finally:
            writer.close()


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length" and value.strip().isdigit():
            return int(value)
    raise EOFError("an answer of unknown length")


def main(parent: Parent) -> None:
    order = parent.next_order(SchedulerOrder)
    parent.watch(Path(order.sockets))
    asyncio.run(serve(parent, order))  # until SIGTERM, which may end it anywhere


async def serve(parent: Parent, order: SchedulerOrder) -> None:
    async with together() as tasks:
        tasks.create_task(parent.beat())
        parent.report(Ready())
        await schedule(order)


async def schedule(order: SchedulerOrder) -> None:
    spec, client = order.spec, FleetClient(order.gateway, secret=order.secret)
    scheduler = FleetScheduler(
        EveryGateway(lambda: [client]),
        WallClock(),
        period=spec.period,
        thresholds=Thresholds(spec.out, spec.into),
    )
    await scheduler.run()


if __name__ == "__main__":
    run_child(main)
