"""A router program for runs with faults, beside those that are shipped: it pins what it asks for."""

from __future__ import annotations

from kvloom.router import Call, Fleet, Frames


async def pinning(call: Call, fleet: Fleet) -> Frames:
    replica = fleet.turn()
    async for frame in call.start_generate(replica):
        if frame:
            await call.pin(replica)
        yield frame
