"""A controller's side of keepers, of which no process is wanted."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from kvloom.serve.local import LocalLauncher, Role
from kvloom.serve.nodes.launcher import NodesLauncher
from kvloom.serve.processes.messages import GatewaySpec
from kvloom.types.clock import WallClock
from kvloom.types.spec import EngineSpec, ProgramSpec

_GATEWAY = GatewaySpec(
    host="127.0.0.1",
    port=0,
    api_keys={},
    max_body=1024,
    max_connections=1,
    program=ProgramSpec("data_parallel"),
    folder="",
)


def idle_launcher(
    context: ssl.SSLContext,
    tasks: asyncio.TaskGroup,
    told: list[tuple[str, str]],
    heard: Callable[[], None] = lambda: None,
    *,
    lease: float,
) -> NodesLauncher:
    """Returns a launcher of which nothing is asked. told: takes the lines that it logs; heard: called if it
    reports anything."""
    clock = WallClock()
    return NodesLauncher(
        LocalLauncher(_no_role, tasks, clock, hear=lambda *_: None, log=lambda *_: None),
        context,
        tasks,
        clock,
        hear=lambda *_: heard(),
        hear_node=lambda _: heard(),
        log=lambda name, line: told.append((name, line)),
        lease=lease,
        gateway=_GATEWAY,
    )


def _no_role(component: str, _: EngineSpec | None) -> Role:
    raise AssertionError(f"{component} is to start, and nothing was asked for")
