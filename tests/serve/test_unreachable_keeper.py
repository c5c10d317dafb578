"""What is told of a host that has a keeper which the controller cannot reach."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from kvloom.serve.processes.identity import FleetIdentity, calling_context
from tests.hosts.launchers import idle_launcher


def test_it_is_said_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"  # where nobody listens from now on
    told: list[tuple[str, str]] = []

    async def play() -> None:
        context = calling_context(FleetIdentity.make().keep(tmp_path))
        async with asyncio.TaskGroup() as tasks:
            nodes = idle_launcher(context, tasks, told, lease=1.0)
            nodes.join("10.0.0.9", address)
            await nodes.answered()
            nodes.leave("10.0.0.9")

    asyncio.run(play())
    [(name, line)] = told
    assert name == "10.0.0.9"
    assert line.startswith(f"nothing can start there: {address} cannot be reached: ")
