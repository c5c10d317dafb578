"""A unit that finds out how it reaches another one: `python -m tests.hosts.paths_peer NAME ADDRESS`.

It prints its endpoint and a ticket for each block that others may send. Then it takes endpoints and tickets
of others, a line each, sends them its first block until it knows the way, and prints what that is.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
import numpy as np
from msgspec import Struct

from kvloom.kv.arena import Arena
from kvloom.transfer.paths import Paths, open_paths
from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket
from kvloom.types.load import LinkLoad
from kvloom.types.transfer import BlockCopies
from tests.processes import DEADLINE

BLOCK = 16384
SENDS = 200
FORM = KVForm(layers=1, kv_heads=1, head_dim=64, dtype="float32", block_bytes=BLOCK, tokens_per_block=32)


class Offered(Struct):
    """Room at a unit."""

    endpoint: Endpoint
    tickets: list[Ticket]


def main(name: str, host: str) -> None:
    arena = Arena(SENDS, BLOCK)
    paths = open_paths(name, "auto", arena, "the fleet's", host)
    rooms = [_room(number) for number in range(SENDS)]
    offered = Offered(paths.endpoint, [paths.open(0, 0, room) for room in rooms])
    print(msgspec.json.encode(offered).decode(), flush=True)
    for line in sys.stdin:
        link = asyncio.run(_send(paths, msgspec.json.decode(line, type=Offered)))
        print(msgspec.json.encode(link).decode(), flush=True)
    paths.close_all()


def _room(number: int) -> bytes:
    return KVAddress.compress(np.array([number], np.int32))


async def _send(paths: Paths, to: Offered) -> LinkLoad:
    """Sends until the way is known, and once more by it."""
    none, one, all_ = (np.array([value], np.int32) for value in (0, 1, 32))
    for number, ticket in enumerate(to.tickets):
        known = paths.meter.links.get(to.endpoint.unit)
        address = KVAddress(model="m", form=FORM, begin=0, end=32, blocks=_room(number), ticket=ticket)
        transfer = paths.claim(to.endpoint, address, 0, 0, 32)
        transfer.put(BlockCopies(none, one * number, none, all_))
        async with asyncio.timeout(DEADLINE):
            await transfer.arrived()
        if known is not None:
            return known
            while to.endpoint.unit not in paths.meter.links:  # noqa: ASYNC110 -- a thread measures it
                await asyncio.sleep(0.01)
    raise AssertionError("the way is known after the first of them")


if __name__ == "__main__":
    main(*sys.argv[1:])
