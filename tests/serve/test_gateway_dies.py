"""A gateway that is killed, and the engine that it leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvloom.cluster.launcher import Snapshot
from kvloom.cluster.state import ComponentStatus, FleetSpec, FleetStatus, UnitSpec
from kvloom.router.client import HttpEngineClient
from kvloom.serve.local import ENGINE_MODULE, GATEWAY_MODULE
from kvloom.serve.processes.child import ChildProcess
from kvloom.serve.processes.messages import EngineOrder, GatewayOrder, Order, Ready
from kvloom.types.load import UnitLoad
from kvloom.types.request import SamplingParams, StartGenerate
from kvloom.types.spec import EngineSpec, ModelSpec, ProgramSpec
from tests.checkpoints import make_checkpoint

SECRET = "s"
MOST = 50_000  # tokens: what a request would make over minutes


def engine_order(folder: Path) -> EngineOrder:
    path = make_checkpoint(folder / "llama", "llama", max_position_embeddings=2 * MOST)
    spec = EngineSpec(
        models=(ModelSpec(name="llama", path=str(path)),),
        kv_bytes=64 << 20,
        block_bytes=16 << 10,
        policy="adbs",
        max_running=8,
        max_waiting=8,
        chunk_tokens=512,
        threads=1,
    )
    return EngineOrder(spec=spec, socket=str(folder / "unit-0.sock"), secret=SECRET)


def fleet_of(engine: EngineOrder) -> Snapshot:
    """The one unit serves."""
    spec = FleetSpec(units={"unit-0": UnitSpec(engine=engine.spec)})
    processes = {"unit-0": ComponentStatus(phase="ready", generation=1, endpoint=engine.socket)}
    return Snapshot(seq=1, spec=spec, status=FleetStatus(processes=processes))


def gateway_order(engine: EngineOrder, listener: socket.socket) -> GatewayOrder:
    return GatewayOrder(
        secret=SECRET,
        listeners=(listener.fileno(),),
        api_keys={},
        max_body=1 << 20,
        max_connections=64,
        program=ProgramSpec("data_parallel"),
        folder=str(Path(engine.socket).parent),
        sockets=str(Path(engine.socket).parent),
    )


@asynccontextmanager
async def ready(component: ChildProcess, *orders: Order) -> AsyncIterator[None]:
    """From its report on, and until it has ended."""
    async with asyncio.TaskGroup() as group:
        group.create_task(heard(component))
        try:
            await component.order(*orders)
            said = [report async for report in until_ready(component)]
            assert said, "it ended before it was ready"
            yield
        finally:
            component.terminate()
            await component.ended()


async def until_ready(component: ChildProcess) -> AsyncIterator[Ready]:
    async for report in component.reports():
        if isinstance(report, Ready):
            yield report
            return


async def heard(component: ChildProcess) -> None:
    async for line in component.logs():
        print(component.name, line)


Connected = tuple[asyncio.StreamReader, asyncio.StreamWriter]  # a writer nobody holds hangs up


async def asked(address: tuple[str, int], *, stream: bool) -> Connected:
    """A request on its way; of a stream the first event is here."""
    ask = {
        "model": "llama",
        "prompt": [1, 2, 3],
        "max_tokens": MOST,
        "ignore_eos": True,
        "stream": stream,
        "n": 2,
    }
    body = json.dumps(ask).encode()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    if stream:
        await reader.readuntil(b"data: ")
    return reader, writer


def cached(load: UnitLoad) -> int:
    return sum(model.cached_blocks for model in load.models.values())


async def when(client: HttpEngineClient, *, free: bool) -> UnitLoad:
    """The load once all blocks are free, or two requests of two choices run."""
    while True:
        load = await client.load()
        running = load.models["llama"].running
        if load.free_blocks + cached(load) == load.total_blocks if free else running == 4:
            return load


def test_the_requests_of_a_killed_gateway_give_their_blocks_back(tmp_path: Path) -> None:
    async def play() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        order = engine_order(tmp_path)
        engine = await ChildProcess.start("unit-0", ENGINE_MODULE)
        gateway = await ChildProcess.start("gateway", GATEWAY_MODULE, [listener.fileno()])
        async with (
            asyncio.timeout(120),
            ready(engine, order),
            ready(gateway, gateway_order(order, listener), fleet_of(order)),
            HttpEngineClient(f"unix://{order.socket}", secret=SECRET) as client,
        ):
            clients = [await asked(listener.getsockname(), stream=stream) for stream in (True, False)]
            await when(client, free=False)
            os.kill(gateway.pid, signal.SIGKILL)
            assert "was killed by SIGKILL" in await gateway.ended()
            after = await when(client, free=True)
            assert after.models["llama"].output_tokens_total < 2 * MOST  # what one of them would have come to
            for reader, writer in clients:
                assert b"[DONE]" not in await reader.read()
                writer.close()
            assert await made(client) == 5
        listener.close()

    asyncio.run(play())


async def made(client: HttpEngineClient) -> int:
    """Tokens of a request that is served now."""
    body = StartGenerate(
        model="llama", request="after", prompt=[1, 2], sampling=SamplingParams(max_tokens=5, seed=0)
    )
    return sum([len(frame) async for frame in client.start_generate(body)]) - 1
