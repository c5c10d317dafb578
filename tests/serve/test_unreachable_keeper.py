"""What is told of a host that has a keeper which the controller cannot reach."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from kvloom.serve.local import LocalLauncher, Role
from kvloom.serve.nodes.launcher import NodesLauncher
from kvloom.serve.processes.identity import FleetIdentity, calling_context
from kvloom.serve.processes.messages import GatewaySpec
from kvloom.types.clock import WallClock
from kvloom.types.spec import EngineSpec, ProgramSpec

GATEWAY = GatewaySpec(
    host="127.0.0.1",
    port=0,
    api_keys={},
    max_body=1024,
    max_connections=1,
    program=ProgramSpec("data_parallel"),
    folder="",
)


def no_role(component: str, engine: EngineSpec | None) -> Role:
    raise AssertionError(f"{component} is to start, and nothing was")


def test_it_is_said_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"  # where nobody listens from now on
    told: list[tuple[str, str]] = []

    async def play() -> None:
        clock = WallClock()
        async with asyncio.TaskGroup() as tasks:
            nodes = NodesLauncher(
                LocalLauncher(no_role, tasks, clock, hear=lambda *_: None, log=lambda *_: None),
                calling_context(FleetIdentity.make().keep(tmp_path)),
                tasks,
                clock,
                hear=lambda *_: None,
                hear_node=lambda _: None,
                log=lambda name, line: told.append((name, line)),
                lease=1.0,
                gateway=GATEWAY,
            )
            nodes.join("10.0.0.9", address)
            await nodes.answered()
            nodes.leave("10.0.0.9")

    asyncio.run(play())
    [(name, line)] = told
    assert name == "10.0.0.9"
    assert line.startswith(f"nothing can start there: {address} cannot be reached: ")
