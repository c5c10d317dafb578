"""How the fleet scheduler reaches a gateway, and what it makes of one that it does not reach."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvloom.api.auth import Keys
from kvloom.serve.processes.gateways import FleetClient
from kvloom.serve.server import ClientConnection, HttpServer
from kvloom.types.errors import Unavailable
from kvloom.types.service import Pair, Pairs, Steps
from tests.api.fleet import Administered, administered
from tests.processes import DEADLINE

PAIRS = Pairs(pairs=(Pair("unit-0", "unit-1"),), seconds=1.5)


@asynccontextmanager
async def gateway(path: Path) -> AsyncIterator[Administered]:
    """At a socket of that path. API keys are set, and no admin key."""
    fleet = administered(keys=Keys({"asker": None}, secret="fleet"))
    ready = asyncio.Event()
    server = HttpServer(fleet.app, connection=ClientConnection, unix=str(path), grace=1, ready=ready.set)
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as group:
        group.create_task(server.serve())
        await ready.wait()
        yield fleet
        server.end()


def test_it_asks_and_tells_with_the_fleets_secret(tmp_path: Path) -> None:
    path = tmp_path / "gateway"

    async def test() -> None:
        async with gateway(path) as fleet:
            client = FleetClient(str(path), secret="fleet")
            assert (await client.state()).loads["unit-0"].free_blocks == 8
            await client.pair(PAIRS)
            await client.scale(Steps(start=("unit-2",)))
            assert fleet.paired == [PAIRS]
            with pytest.raises(Unavailable, match=r"the gateway refuses /admin/fleet: .*admin key"):
                await FleetClient(str(path), secret="asker").state()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (None, "cannot be reached"),
        (b"", "cannot be reached"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", "cannot be reached"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "an answer of unknown length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "cannot be read"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\nno", "refuses /admin/fleet: no"),
    ],
)
def test_a_gateway_that_does_not_answer_well(tmp_path: Path, said: bytes | None, why: str) -> None:
    """It is none, hangs up, or says what is no answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said or b"")
        writer.close()

    async def test() -> None:
        path = tmp_path / "gateway"
        server = await asyncio.start_unix_server(answer, path)
        client = FleetClient(str(path), secret="s")
        if said is None:
            server.close()
        with pytest.raises(Unavailable, match=re.escape(why)) as error:
            await client.state()
        assert "\n" not in error.value.message
        server.close()

    asyncio.run(test())
